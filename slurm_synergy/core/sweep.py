"""The best of the few answers of an assignment that are still open, job by job. Pure.

Any answer is worth the bound at some prices, less what each job loses there by not having its best,
less the price of what is left over. So most of what begins an answer can be no beginning of a good
one, and what may be left after some jobs is a handful of amounts, however large the rows are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import sub
from typing import Final

__all__ = ["Case", "swept"]

Case = tuple[float, int, float, Sequence[int]]
"""A choice of a job: what it loses by it at the prices, its number, its gain, what it takes."""

_State = tuple[float, float, tuple[int, ...]]
"""What was lost and gained so far, and the choices, those of the last job first."""

_States = Mapping[tuple[int, ...], _State]
"""By what is left of the rows."""

_MOST_STATES: Final = 3000


def swept(
    jobs: Sequence[Sequence[Case]], room: Sequence[int], most: float, prices: Sequence[float]
) -> list[int] | None:
    """A choice for each of ``jobs`` within ``room`` that gains most; None if too much is open.

    All that is lost, with the price of what is left over, is at most ``most``. None as well where
    no answer is as good as that. Of equal ones it is that with the smallest choice of the last job,
    then of the one before, and so on.
    """
    rest = [0] * len(room)
    # What the jobs after each could take at most.
    rests = [rest]
    for cases in reversed(jobs[1:]):
        rest = [
            one + max(needs) for one, *needs in zip(rest, *(case[3] for case in cases), strict=True)
        ]
        rests.append(rest)
    states: _States = {tuple(room): (0.0, 0.0, ())}
    for cases, after in zip(jobs, reversed(rests), strict=False):
        states = _next(states, sorted(cases), after, prices, most)
        if len(states) > _MOST_STATES:
            return None
    if not states:
        return None
    _, _, picked = min(states.values(), key=lambda state: (-state[1], state[2]))
    return list(reversed(picked))


def _next(
    states: _States,
    cases: Sequence[Case],
    rest: Sequence[int],
    prices: Sequence[float],
    most: float,
) -> _States:
    """The states with one job more, of which ``cases`` are the choices, by what they lose.

    ``rest`` is how much of each row the jobs that follow could take.
    """
    found: dict[tuple[int, ...], _State] = {}
    for room, (lost, gained, picked) in states.items():
        spare = most - lost
        for loss, choice, gain, need in cases:
            if loss > spare:
                break
            left = tuple(map(sub, room, need))
            if min(left) < 0:
                continue
            lacking = loss
            for free, could, price in zip(left, rest, prices, strict=True):
                if free > could:
                    lacking += (free - could) * price
            if lacking > spare:
                continue
            state = lost + loss, gained + gain, (choice, *picked)
            known = found.get(left)
            if known is None or (-state[1], state[2]) < (-known[1], known[2]):
                found[left] = state
    return found
