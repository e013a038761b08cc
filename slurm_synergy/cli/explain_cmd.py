"""``synergyctl explain``: why a job waits, or why it got what it has. Slurm is not asked."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from slurm_synergy.cli.control import ask, find_target, local_settings, options, without_settings
from slurm_synergy.controller.explaining import explained
from slurm_synergy.controller.rounds import last_round
from slurm_synergy.core.wording import duration, printable
from slurm_synergy.errors import ConfigError, LedgerError, ModelError, NoControllerError

__all__ = ["explain"]


@click.command()
@click.argument("job")
@options
def explain(job: str, config: Path | None, as_json: bool) -> None:
    """Say why JOB waits or what it got and why, and what would change that.

    JOB is a job id, or 12_3 for a member of an array. Everybody may ask about every job; expected
    speeds and what would change them are for its owner and operators. With the controller stopped
    the answer comes from the last round in its journal, for those who may read that.
    """
    answer = _answer(job, config)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    for line in answer["text"]:
        click.echo(printable(line))
    age = duration(answer["round_age_s"])
    if answer["source"] == "journal":
        click.echo(
            f"(the controller does not answer: this is its round {answer['round']}, {age} ago)"
        )
    else:
        click.echo(f"(round {answer['round']}, {age} ago)")


def _answer(job: str, config: Path | None) -> Mapping[str, Any]:
    try:
        return {"source": "controller", **ask(find_target(config, os.environ), "explain", job=job)}
    except NoControllerError as err:
        return _from_journal(job, config, str(err))
    except ConfigError as err:
        # A stopped controller with a port of its own choice leaves no address behind.
        if err.key != "leases.listen":
            raise
        return _from_journal(job, config, str(err))


def _from_journal(job: str, config: Path | None, why: str) -> Mapping[str, Any]:
    directory = local_settings(config).state_dir
    try:
        record = last_round(directory)
        if record is None:
            raise LedgerError(f"there is no journal in {directory} either (state_dir)")
    except LedgerError as err:
        words = (why, str(err), without_settings(config))
        raise NoControllerError("; ".join(one for one in words if one)) from err
    try:
        found = explained(record, job, now_s=time.time(), may_see_all=lambda user: True)
    except ModelError as err:
        raise ModelError(f"{err} (from the journal in {directory}: {why})") from err
    return {"source": "journal", **found}
