"""How the ranks of one job step agree on one last training step, without talking to each other.

Rank 0 proposes a step ahead of all; every rank either accepts it (and will not pass it) or refuses
it because it is past it already. All accepted: committed, everybody stops there. Refused: a later
step is proposed on behalf of rank 0, which may be waiting at the refused one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["AHEAD_S", "StopAgreement"]

AHEAD_S = 2.5
"""How far ahead of the fastest rank a step is proposed, in seconds of training: time for the
proposal to reach every rank through its launcher."""


class StopAgreement:
    """The state of one agreement among ``ranks`` ranks; ``step`` 0 means that none is proposed."""

    __slots__ = ("_accepted", "_ranks", "committed", "step")

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._accepted: set[int] = set()
        self.step = 0
        self.committed = False

    def propose(self, step: int) -> None:
        """Rank 0's proposal. Only a later step than the one under discussion counts."""
        if not self.committed and step > self.step:
            self.step = step
            self._accepted.clear()

    def accept(self, rank: int, step: int) -> None:
        """``rank`` will not pass ``step``; about any other step than the proposed one: ignored."""
        if step and step == self.step:
            self._accepted.add(rank)

    def refuse(self, step: int, *, latest_step: int, step_s: float) -> None:
        """A rank is past ``step``: propose one that all can reach.

        ``latest_step`` is the furthest that any rank reported, ``step_s`` seconds per step (0:
        unknown).
        """
        if step and step == self.step and not self.committed:
            margin = max(2, math.ceil(AHEAD_S / step_s)) if step_s > 0 else 2
            # Doubling the distance ends the chase even when reported times are far off.
            self.propose(max(latest_step, step) + margin + max(0, latest_step - step))

    def settle(self, ended: Iterable[int]) -> None:
        """Commit when every rank has accepted or has ended, which keeps the promise as well."""
        if self.step and len(self._accepted.union(ended)) >= self._ranks:
            self.committed = True
