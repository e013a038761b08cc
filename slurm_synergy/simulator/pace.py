"""How fast a training advances when the worth of its samples changes from epoch to epoch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

__all__ = ["Pace"]


class Pace:
    """Progress over time with one batch size on one placement, linear within each epoch.

    ``ends`` are the amounts of progress at which epochs end, ascending; ``rates`` the progress per
    second within each. The last end is the end of the training.
    """

    __slots__ = ("_amounts", "_times_s", "mean_rate", "rates")

    def __init__(self, ends: Sequence[float], rates: Sequence[float]) -> None:
        amounts, times_s = [0.0], [0.0]
        for end, rate in zip(ends, rates, strict=True):
            times_s.append(times_s[-1] + (end - amounts[-1]) / rate)
            amounts.append(end)
        self._amounts, self._times_s = amounts, times_s
        self.rates = tuple(rates)
        self.mean_rate = amounts[-1] / times_s[-1]

    def after(self, done: float, span_s: float) -> float:
        """The progress ``span_s`` seconds after it was ``done``."""
        times_s, amounts = self._times_s, self._amounts
        when_s = self._time_s(done) + span_s
        at = bisect_right(times_s, when_s) - 1
        if at + 1 >= len(times_s):
            return amounts[-1]
        return amounts[at] + (when_s - times_s[at]) * self.rates[at]

    def left_s(self, done: float) -> float:
        """Seconds from there to the end of the training."""
        return max(self._times_s[-1] - self._time_s(done), 0.0)

    def _time_s(self, done: float) -> float:
        """Seconds from the beginning of the training."""
        amounts = self._amounts
        at = max(bisect_left(amounts, done) - 1, 0)
        if at + 1 >= len(amounts):
            return self._times_s[-1]
        return self._times_s[at] + (done - amounts[at]) / self.rates[at]
