"""``slurm-synergyd`` that kills itself at one chosen point: SYNERGY_FAULT_AT = ``PLACE:WHAT``.

    intend:start    after the ledger has an intent of that kind, before anything is done
    applied:start   after an action of that kind was carried out, before it is committed
    call:release    after that call of the Slurm client returned
    lease:grant     after that call of the keeper of leases returned
    written:resizes after the leases of all resizes were written, before any task is told

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slurm_synergy.cluster import Action
from slurm_synergy.controller import daemon
from slurm_synergy.controller.leases import LeaseBook
from slurm_synergy.controller.ledger import Ledger
from slurm_synergy.core.model import Placement
from slurm_synergy.errors import LeaseError
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


def strike_within_resizes() -> None:
    """Strike when the ledger has the leases, and the keeper of leases has told nobody."""
    resize_all = LeaseBook.resize_all

    @functools.wraps(resize_all)
    def method(self: LeaseBook, placements: Sequence[Placement]) -> Mapping[int, LeaseError]:
        striking_after(Ledger, "save_leases", lambda self, stored: True)
        return resize_all(self, placements)

    LeaseBook.resize_all = method  # type: ignore[method-assign]


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
            striking_after(
                SlurmCluster,
                "resize_all",
                lambda self, resizes, statuses: any(map(is_kind, resizes)),
            )
        case "call":
            striking_after(CliSlurmClient, what, always)
        case "lease":
            striking_after(LeaseBook, what, always)
        case "written" if what == "resizes":
            strike_within_resizes()
        case _:
            raise SystemExit(f"SYNERGY_FAULT_AT = {point!r}: no such place")


if __name__ == "__main__":
    arm(os.environ["SYNERGY_FAULT_AT"])
    sys.exit(daemon.main())
