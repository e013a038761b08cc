"""The check of helpers on nodes for ``synergyctl check``: the running controller knows of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from slurm_synergy.cli.control import Target, ask
from slurm_synergy.config import Settings
from slurm_synergy.core.wording import counted
from slurm_synergy.errors import SynergyError
from slurm_synergy.slurm.findings import Finding, ok, warn

__all__ = ["helper_findings"]

_SHOWN = 8


def helper_findings(
    settings: Settings, status: Callable[[Target], Mapping[str, Any]] = lambda to: ask(to, "status")
) -> Iterator[Finding]:
    """Whether the helpers that ``pool.node_helpers`` promises are heard; ``status`` asks."""
    if not settings.pool.node_helpers:
        return
    file = settings.state_dir / "endpoint"
    try:
        endpoint = file.read_text(encoding="utf-8").strip()
        socket = settings.leases.munge.socket
        nodes = status(Target(endpoint=endpoint, source=str(file), munge_socket=socket))["nodes"]
    except (OSError, SynergyError) as err:
        yield warn(
            "node_helpers",
            f"pool.node_helpers: true, but no controller tells who is heard: {err}",
            "jobs on a node without a helper keep to the cores that Slurm gave them",
            "start the controller and the helpers, and check again",
        )
        return
    silent = [node["node"] for node in nodes if (node.get("helper") or {}).get("silent")]
    if not silent:
        yield ok("node_helpers", f"every node's helper is heard ({counted(len(nodes), 'node')})")
        return
    named = ", ".join(silent[:_SHOWN]) + (", …" if len(silent) > _SHOWN else "")
    yield warn(
        "node_helpers",
        f"no helper is heard on {len(silent)} of {counted(len(nodes), 'node')}: {named}",
        "jobs there keep to the cores that Slurm gave them, and are planned so",
        "start slurm-synergyd --node there, and see what it logs; without any helpers set "
        "pool.node_helpers: false",
    )
