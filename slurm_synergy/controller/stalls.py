"""How much of its time a task spends waiting for data, over the last minute."""

from __future__ import annotations

from collections import deque

__all__ = ["WINDOW_S", "StallWindow"]

WINDOW_S = 60.0
"""How far back the share looks, in seconds; further where nothing was reported since."""

_POINTS = 30


class StallWindow:
    """From the sums that a task reports: the seconds in steps, and those of waiting for data.

    The share is exact for the steps of the window, however they were cut into reports, which a
    mean of recent steps is not. Not thread-safe.
    """

    __slots__ = ("_points",)

    def __init__(self) -> None:
        self._points: deque[tuple[float, float, float]] = deque()

    def note(self, now_s: float, stepped_s: float, waited_s: float) -> None:
        """Take in the sums as they are at ``now_s``; smaller ones are those of a new process."""
        points = self._points
        if points and (stepped_s < points[-1][1] or waited_s < points[-1][2]):
            points.clear()
        if len(points) >= 2 and now_s - points[-2][0] < WINDOW_S / _POINTS:
            points.pop()
        points.append((now_s, stepped_s, waited_s))
        while len(points) > 2 and points[1][0] <= now_s - WINDOW_S:
            points.popleft()

    @property
    def share(self) -> float | None:
        """Waiting over all of the time in 0..1; None where no step was reported."""
        if not self._points:
            return None
        first, last = self._points[0], self._points[-1]
        stepped_s, waited_s = last[1] - first[1], last[2] - first[2]
        took_s = stepped_s + waited_s
        return waited_s / took_s if took_s > 0 else None
