"""Amounts in words for people. Pure."""

from __future__ import annotations

from slurm_synergy.core.resources import Resources

__all__ = [
    "NAME_WIDTH",
    "clipped",
    "counted",
    "duration",
    "gib",
    "percent",
    "printable",
    "share_in_words",
]

NAME_WIDTH = 32
"""Most characters of a job's name in a table: Slurm takes names of any length."""

_MIB_PER_GIB = 1024
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


def counted(count: int, noun: str, many: str = "") -> str:
    """``count`` of them in words: "1 job", "2 jobs"; ``many`` where an "s" is not the plural."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def percent(share: float | None) -> str:
    """A share of 1 in whole per cent; "-" where it is not known."""
    return "-" if share is None else f"{share:.0%}"


def gib(mem_mib: int) -> str:
    """MiB as GiB, without a unit: whole from 10 GiB on."""
    amount = mem_mib / _MIB_PER_GIB
    return f"{amount:.0f}" if amount >= 10 or amount == int(amount) else f"{amount:.1f}"


def printable(text: str, *, keep: str = "") -> str:
    r"""``text`` without what could steer a terminal or fake a line; ``keep`` stays as it is.

    Names and hints are any characters that a user likes. A line break becomes ``\n``, as written.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in keep else one.encode("unicode_escape").decode()
        for one in text
    )


def clipped(text: str, width: int = NAME_WIDTH) -> str:
    """``text`` as it is printed, in at most ``width`` characters, the last one then "…"."""
    text = printable(text)
    return text if len(text) <= width else f"{text[: width - 1]}…"


def duration(seconds: float) -> str:
    """A duration in the unit that suits it."""
    if seconds < _MINUTE_S:
        return f"{max(seconds, 0):.0f} s"
    if seconds < _HOUR_S:
        return f"{seconds / _MINUTE_S:.0f} min"
    if seconds < 2 * _DAY_S:
        return f"{seconds / _HOUR_S:.1f} h"
    return f"{seconds / _DAY_S:.1f} days"


def share_in_words(share: Resources, gpu_type: str = "") -> str:
    """``4 v100 GPUs, 12 cores and 240 GiB``."""
    kind = f" {gpu_type}" if gpu_type else ""
    return (
        f"{share.gpus}{kind} GPU{'s' if share.gpus != 1 else ''}, "
        f"{share.cpus} core{'s' if share.cpus != 1 else ''} and {gib(share.mem_mib)} GiB"
    )
