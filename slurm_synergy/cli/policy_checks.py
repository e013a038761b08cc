"""The check of the policy for ``synergyctl check``: what it needs here, and what it misses."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from slurm_synergy.cli.control import Target, ask
from slurm_synergy.config import SchedulingSettings, Settings
from slurm_synergy.controller.policy_inputs import NEEDS_SCIPY
from slurm_synergy.errors import SynergyError
from slurm_synergy.slurm.findings import Finding, fail, ok, warn

__all__ = ["policy_findings"]

_RIVALS = frozenset({"gavel", "themis", "shockwave", "pollux"})


def policy_findings(
    settings: Settings,
    status: Callable[[Target], Mapping[str, Any]] = lambda to: ask(to, "status"),
    has_module: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None,
) -> Iterator[Finding]:
    """Whether the policy can decide here, and whether it knows of jobs what it needs.

    ``status`` asks the controller, of whose jobs the latter is; nothing is said of them while none
    runs. ``has_module`` tells whether a Python module is there.
    """
    scheduling = settings.scheduling
    policy = scheduling.policy
    if policy in NEEDS_SCIPY and not has_module("scipy"):
        yield fail(
            "policy",
            f"scheduling.policy = {policy!r}, and the Python module scipy is not installed",
            "no round could be decided: running jobs keep what they have, nothing is started",
            "pip install 'slurm-synergy[controller]' into the controller's environment, or choose "
            "another policy",
        )
        return
    yield _suits(scheduling)
    yield from _inputs(settings, status)


def _suits(scheduling: SchedulingSettings) -> Finding:
    policy = scheduling.policy
    quantum_s = getattr(getattr(scheduling, policy, None), "quantum_s", None)
    if quantum_s is not None and quantum_s <= scheduling.grace_s:
        return warn(
            "policy",
            f"scheduling.{policy}.quantum_s = {quantum_s:g}, scheduling.grace_s = "
            f"{scheduling.grace_s:g}",
            "a job may take as long to stop as what takes its place then runs",
            f"set scheduling.{policy}.quantum_s to several times grace_s",
        )
    if policy in _RIVALS:
        return ok("policy", f"{policy}, a rival to compare with (docs/admin-guide.md)")
    return ok("policy", policy)


def _inputs(settings: Settings, status: Callable[[Target], Mapping[str, Any]]) -> Iterator[Finding]:
    file, socket = settings.state_dir / "endpoint", settings.leases.munge.socket
    try:
        endpoint = file.read_text(encoding="utf-8").strip()
        told = status(Target(endpoint=endpoint, source=str(file), munge_socket=socket))
    except (OSError, SynergyError):
        return  # the finding 'endpoint' tells of it
    if told.get("policy") != settings.scheduling.policy:
        return  # not reloaded yet: these would be the other policy's
    for one in told.get("missing_inputs", ()):
        yield warn("policy_inputs", one["what"], one["assumed"], one["remedy"])
