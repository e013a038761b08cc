"""What an embedded cluster leaves in its directory, so that any process can take it up or down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from slurm_synergy.devcluster.daemons import Daemons
from slurm_synergy.devcluster.processes import ProcessId
from slurm_synergy.devcluster.shapes import NodeShape
from slurm_synergy.errors import DevClusterError

__all__ = ["Record", "as_json"]

_NAME = "cluster.json"
_VERSION = 1


class Record:
    """The record of the cluster in ``state_dir``, once loaded; without one it is false.

    ``facts`` are what it says, ``daemons`` those that it names.
    """

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self.facts: dict[str, object] = {}
        self.daemons = Daemons(state_dir)

    def __bool__(self) -> bool:
        return bool(self.facts)

    def __getitem__(self, key: str) -> object:
        return self.facts[key]

    def get(self, key: str, other: object = None) -> object:
        """A fact, or ``other``."""
        return self.facts.get(key, other)

    @property
    def shapes(self) -> tuple[NodeShape, ...]:
        """The nodes."""
        shapes = self.facts["shapes"]
        assert isinstance(shapes, list)
        return tuple(NodeShape(**shape) for shape in shapes)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about the cluster."""
        notes = self.facts.get("notes")
        return tuple(str(note) for note in notes) if isinstance(notes, list) else ()

    def begin(self, shapes: tuple[NodeShape, ...], facts: Mapping[str, object]) -> None:
        """A new cluster, none of whose daemons runs yet."""
        written = [{name: getattr(shape, name) for name in NodeShape.__slots__} for shape in shapes]
        self.facts = {"version": _VERSION, **facts, "shapes": written}
        self.daemons = Daemons(self._state_dir)
        self.save()

    def save(self) -> None:
        """Write the facts, and the daemons as they are now."""
        self.facts["daemons"] = {
            name: {"pid": who.pid, "start_ticks": who.start_ticks}
            for name, who in self.daemons.known.items()
        }
        target = self._state_dir / _NAME
        fresh = target.with_suffix(".new")
        fresh.write_text(json.dumps(self.facts, indent=1), encoding="utf-8")
        fresh.replace(target)

    def load(self) -> None:
        """Read it again. Raises DevClusterError for one that cannot be understood."""
        path = self._state_dir / _NAME
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            self.facts, self.daemons = {}, Daemons(self._state_dir)
            return
        except (OSError, ValueError) as err:
            raise DevClusterError(f"{path}: cannot be read: {err}") from err
        if not isinstance(found, dict) or found.get("version") != _VERSION:
            raise DevClusterError(f"{path}: written by another version; remove it by hand")
        self.facts = found
        self.daemons = Daemons(
            self._state_dir,
            {name: ProcessId(**who) for name, who in found["daemons"].items()},
        )

    def remove(self) -> None:
        """There is no cluster any more."""
        (self._state_dir / _NAME).unlink(missing_ok=True)
        self.facts, self.daemons = {}, Daemons(self._state_dir)


def as_json(site: Mapping[str, object]) -> object:
    """Settings as they look after they were written and read."""
    return json.loads(json.dumps(site))
