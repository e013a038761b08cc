"""``slurm-synergyd`` that kills itself at one chosen point: SYNERGY_FAULT_AT = ``PLACE:WHAT``.

    intend:start    after the ledger has an intent of that kind, before anything is done
    applied:start   after an action of that kind was carried out, before it is committed
    call:release    after that call of the Slurm client returned
    lease:grant     after that call of the keeper of leases returned

With SYNERGY_FAULT_RUNS (an argv as JSON) that command is run there instead, once; ``{job}`` in it
is the job of the call. Only tests run this; the product reads no such variables.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from slurm_synergy.cluster import Action
from slurm_synergy.controller import daemon
from slurm_synergy.controller.leases import LeaseBook
from slurm_synergy.controller.ledger import Ledger
from slurm_synergy.slurm.cli_client import CliSlurmClient
from slurm_synergy.slurm.cluster import SlurmCluster


def strike(job: object) -> None:
    """Break what is to be broken. SIGKILL leaves no chance to tidy up."""
    wanted = os.environ.get("SYNERGY_FAULT_RUNS")
    if wanted is None:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")
    if "SYNERGY_FAULT_DONE" not in os.environ:
        os.environ["SYNERGY_FAULT_DONE"] = "1"
        subprocess.run([word.format(job=job) for word in json.loads(wanted)], check=True)


def striking_after(owner: type, name: str, meant: Callable[..., bool]) -> None:
    """Strike after each call of ``owner.name`` that ``meant`` says yes to."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if meant(*args, **kwargs):
            strike(kwargs.get("job_id", args[1] if len(args) > 1 else None))
        return result

    setattr(owner, name, method)


def arm(point: str) -> None:
    """Set the fault point. An unknown one is an error, or a test would pass for nothing."""
    place, _, what = point.partition(":")

    def is_kind(action: Action) -> bool:
        return type(action).__name__.lower() == what

    def always(*args: Any, **kwargs: Any) -> bool:
        return True

    match place:
        case "intend":
            striking_after(
                Ledger, "intend", lambda self, number, actions: any(map(is_kind, actions))
            )
        case "applied":
            striking_after(SlurmCluster, "apply", lambda self, action, status: is_kind(action))
        case "call":
            striking_after(CliSlurmClient, what, always)
        case "lease":
            striking_after(LeaseBook, what, always)
        case _:
            raise SystemExit(f"SYNERGY_FAULT_AT = {point!r}: no such place")


if __name__ == "__main__":
    arm(os.environ["SYNERGY_FAULT_AT"])
    sys.exit(daemon.main())
