"""Time that tests turn by hand."""

from __future__ import annotations


class ManualClock:
    """A clock that stands still until a test moves it."""

    def __init__(self, now_s: float = 1_000_000.0) -> None:
        self.value_s = now_s

    def now_s(self) -> float:
        return self.value_s

    def advance(self, seconds: float) -> None:
        self.value_s += seconds
