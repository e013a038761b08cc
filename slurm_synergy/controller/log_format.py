"""Lines of the log. What users wrote (hints, for one) is quoted in them, so it must not steer."""

from __future__ import annotations

import logging

from slurm_synergy.core.wording import printable

__all__ = ["PlainFormatter"]


class PlainFormatter(logging.Formatter):
    """Like its base, with control characters as escapes; tracebacks keep their lines."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text that is safe to show on a terminal."""
        return printable(super().format(record), keep="\n")
