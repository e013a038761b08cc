"""What is told of an embedded cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Status"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What ``synergyctl devcluster status`` tells; ``to_json`` has the same keys."""

    state_dir: str
    up: bool
    slurm: str
    daemons: Mapping[str, bool]
    nodes: Mapping[str, str]
    task_plugin: str
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """A dictionary for ``json.dumps``."""
        return {
            "state_dir": self.state_dir,
            "up": self.up,
            "slurm": self.slurm,
            "daemons": dict(self.daemons),
            "nodes": dict(self.nodes),
            "task_plugin": self.task_plugin,
            "notes": list(self.notes),
        }
