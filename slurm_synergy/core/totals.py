"""What many placements take of each node together, and how they differ from those before.

From one round to the next most placements stay the very same, so nothing about them is made anew:
what is new is added to the last sum, and what is gone is taken off it. Whoever keeps something for
each placement can go by the same differences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slurm_synergy.core.model import Placement, Snapshot
from slurm_synergy.core.room import Amounts
from slurm_synergy.core.sequences import changes
from slurm_synergy.core.snapshot import Stamp
from slurm_synergy.core.values import quick

__all__ = ["Totals", "Turn", "sums"]


@quick
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """Placements by the ids of their jobs, and how they differ from those of ``earlier``.

    ``new`` are those that were not there then, ``gone`` those that were and are not here: by
    identity, in no order. Do not keep ``by_job`` beyond the next turn.
    """

    stamp: Stamp
    earlier: Stamp
    by_job: Mapping[int, Placement]
    new: Sequence[Placement]
    gone: Sequence[Placement]

    def since(self, stamp: Stamp | None) -> tuple[Sequence[Placement], Sequence[Placement]] | None:
        """Who is new and who is gone since the turn of that stamp; None where it is not known."""
        if stamp is self.earlier:
            return self.new, self.gone
        return ((), ()) if stamp is self.stamp else None


class Totals:
    """The sum of the placements that were asked for last; kept with the nodes."""

    __slots__ = ("_asked", "_by_job", "_rows", "_same", "_turn")

    def __init__(self) -> None:
        self._asked: list[Placement] = []
        # A tuple of just these, if there was one.
        self._same: Sequence[Placement] = ()
        self._by_job: dict[int, Placement] = {}
        self._rows: dict[str, Amounts] = {}
        self._turn: Turn | None = None

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> Totals:
        """What there is for the nodes of ``snapshot``."""
        found = snapshot.of_nodes.get(cls)
        if not isinstance(found, cls):
            found = snapshot.of_nodes[cls] = cls()
        return found

    def by_node(self, placements: Sequence[Placement]) -> Mapping[str, Amounts]:
        """``sums`` of ``placements``, and maybe rows of zeroes.

        Do not change it, nor keep it beyond the next call.
        """
        if self._follow(placements):
            return self._rows
        return sums(placements)

    def turn(self, placements: Sequence[Placement]) -> Turn | None:
        """``placements`` against those that were asked for before; None if a job has two."""
        return self._turn if self._follow(placements) else None

    def _follow(self, placements: Sequence[Placement]) -> bool:
        """Go on from the last ones to these; whether it could be done."""
        if placements is self._same and placements:
            return True
        asked, before = list(placements), self._asked
        is_known = asked == before and self._turn is not None  # quick if they are the same objects
        if not is_known and not self._go_on(asked, before):
            self.__init__()  # type: ignore[misc]
            return False
        self._same = placements if isinstance(placements, tuple) else ()
        return True

    def _go_on(self, asked: list[Placement], before: list[Placement]) -> bool:
        """Take in ``asked``, after ``before``; whether each is of another job."""
        new, gone = changes(before, asked)
        by_job = self._by_job
        for one in gone:
            by_job.pop(one.job_id, None)
        by_job.update([(one.job_id, one) for one in new])
        if len(by_job) < len(asked):  # a placement or a job counts twice
            return False
        if len(new) + len(gone) >= len(asked):
            self._rows = sums(asked)
        else:
            _add(self._rows, new, 1)
            _add(self._rows, gone, -1)
        self._asked = asked
        if new or gone or self._turn is None:
            earlier = Stamp() if self._turn is None else self._turn.stamp
            self._turn = Turn(stamp=Stamp(), earlier=earlier, by_job=by_job, new=new, gone=gone)
        return True


def sums(placements: Iterable[Placement]) -> dict[str, Amounts]:
    """GPUs, cores and MiB by the names of the nodes on which ``placements`` have anything."""
    rows: dict[str, Amounts] = {}
    _add(rows, placements, 1)
    return rows


def _add(rows: dict[str, Amounts], placements: Iterable[Placement], sign: int) -> None:
    for placement in placements:
        for name, share in placement.shares:
            gpus, cpus, mem_mib = rows.get(name, (0, 0, 0))
            rows[name] = (
                gpus + sign * share.gpus,
                cpus + sign * share.cpus,
                mem_mib + sign * share.mem_mib,
            )
