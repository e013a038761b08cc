"""``synergyctl replay``: decide journalled rounds again with this release, and tell differences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from slurm_synergy.controller.codec import encode
from slurm_synergy.controller.replaying import Replayed, replay
from slurm_synergy.controller.rounds import Damage, Round, read_rounds
from slurm_synergy.errors import ConfigError
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES, policy_of_plan

__all__ = ["replay_command"]

_T = TypeVar("_T")


@click.command(name="replay")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--round", "number", type=int, default=None, help="Only this round.  [default: all]")
@click.option("--policy", default=None, metavar="NAME", help="Decide with another policy.")
@click.option("--mechanism", default=None, metavar="NAME", help="Place with another mechanism.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def replay_command(
    file: Path, number: int | None, policy: str | None, mechanism: str | None, as_json: bool
) -> None:
    """Decide the rounds in FILE, a journal, again and say where the outcome differs.

    The policy and mechanism of the record are used unless told otherwise. Exit status: 0 all is
    the same, 1 something differs or cannot be read, 2 wrong usage.
    """
    rounds, damages = [], []
    for item in read_rounds(file):
        if isinstance(item, Damage):
            damages.append(item)
        elif number is None or item.snapshot.round == number:
            rounds.append(_one(item, policy, mechanism))
    if number is not None and not rounds:
        # Damage is told as well: the round may be the one that cannot be read.
        _tell_damage(file, damages)
        raise ConfigError(
            f"{file} has no readable round {number}", remedy="leave out --round to see those it has"
        )
    if as_json:
        content = {"file": str(file), "rounds": rounds, "damaged": encode(damages)}
        click.echo(json.dumps(content, indent=2))
    else:
        for one in rounds:
            _tell(one)
        _tell_damage(file, damages)
        if not rounds and not damages:
            click.echo(f"{file}: no rounds")
    if damages or any(one["differences"] for one in rounds):
        raise SystemExit(1)


def _one(record: Round, policy: str | None, mechanism: str | None) -> dict[str, Any]:
    plan = record.plan
    asked = _named("policy", POLICIES, policy or plan.policy, asked=policy is not None)
    found = replay(
        record,
        policy_of_plan(plan) or asked if policy is None else asked,
        _named("mechanism", MECHANISMS, mechanism or plan.mechanism, asked=mechanism is not None),
    )
    return {
        "round": record.snapshot.round,
        "version": record.version,
        "code": record.code,
        "policy": policy or plan.policy,
        "mechanism": mechanism or plan.mechanism,
        "jobs": len(record.snapshot.jobs),
        "placed": _placed(found),
        "differences": list(found.differences),
        "actions_compared": found.actions_compared,
    }


def _placed(found: Replayed) -> int | None:
    return len(found.plan.placements) if found.plan else None


def _named(what: str, known: Mapping[str, _T], name: str, *, asked: bool) -> _T:
    if name in known:
        return known[name]
    raise ConfigError(
        f"there is no {what} {name!r}" + ("" if asked else " (it made that round) any more"),
        remedy=f"give --{what} with one of {', '.join(sorted(known))}",
    )


def _tell(one: Mapping[str, Any]) -> None:
    head = f"round {one['round']} ({one['policy']}, {one['mechanism']}; {one['jobs']} jobs)"
    compared = "" if one["actions_compared"] else " (its actions cannot be compared)"
    if not one["differences"]:
        click.echo(f"{head}: the same{compared}")
        return
    click.echo(f"{head}: differs{compared}")
    for text in one["differences"]:
        click.echo(f"  {text}")


def _tell_damage(file: Path, damages: list[Damage]) -> None:
    for damage in damages:
        click.echo(f"{file}: line {damage.line}: {damage.what}", err=True)
