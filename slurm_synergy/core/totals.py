"""What many placements take of each node together.

From one round to the next most placements stay the very same, so their sum is not made anew: what
is new is added to the last sum, and what is gone is taken off it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from slurm_synergy.core.model import Placement, Snapshot
from slurm_synergy.core.room import Amounts

__all__ = ["Totals"]


class Totals:
    """The sum of the placements that were asked for last; kept with the nodes."""

    __slots__ = ("_asked", "_of", "_rows")

    def __init__(self) -> None:
        self._asked: list[Placement] = []
        self._of: dict[int, Placement] = {}
        self._rows: dict[str, Amounts] = {}

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> Totals:
        """What there is for the nodes of ``snapshot``."""
        found = snapshot.of_nodes.get(cls)
        if not isinstance(found, cls):
            found = snapshot.of_nodes[cls] = cls()
        return found

    def by_node(self, placements: Sequence[Placement]) -> Mapping[str, Amounts]:
        """GPUs, cores and MiB by the names of the nodes on which ``placements`` have anything.

        Do not change it, nor keep it beyond the next call.
        """
        asked = list(placements)
        if asked == self._asked:  # quick where they are the same objects
            return self._rows
        now = dict(zip(map(id, asked), asked, strict=True))
        if len(now) < len(asked):  # one of them counts twice
            rows: dict[str, Amounts] = {}
            _add(rows, asked, 1)
            return rows
        new, gone = now.keys() - self._of.keys(), self._of.keys() - now.keys()
        if len(new) + len(gone) >= len(now):
            self._rows = {}
            _add(self._rows, asked, 1)
        else:
            _add(self._rows, [now[key] for key in new], 1)
            _add(self._rows, [self._of[key] for key in gone], -1)
        self._asked, self._of = asked, now
        return self._rows


def _add(rows: dict[str, Amounts], placements: Iterable[Placement], sign: int) -> None:
    for placement in placements:
        for name, share in placement.shares:
            gpus, cpus, mem_mib = rows.get(name, (0, 0, 0))
            rows[name] = (
                gpus + sign * share.gpus,
                cpus + sign * share.cpus,
                mem_mib + sign * share.mem_mib,
            )
