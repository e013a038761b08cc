"""Options of commands whose values are numbers."""

from __future__ import annotations

import math
from typing import Any

import click

__all__ = ["FiniteRange"]


class FiniteRange(click.FloatRange):
    """A range of floats without NaN, which click accepts in every range, and infinity."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number; a usage error for what is none or not within the range."""
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found
