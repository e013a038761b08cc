"""What a check found: a value. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Grade", "fail", "ok", "warn"]


class Grade(StrEnum):
    """How a finding turned out."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``check`` names it for scripts; what was ``seen``, what it ``means``, and the ``remedy``."""

    check: str
    grade: Grade
    seen: str
    means: str = ""
    remedy: str = ""


def ok(check: str, seen: str, means: str = "") -> Finding:
    """All is well."""
    return Finding(check=check, grade=Grade.OK, seen=seen, means=means)


def warn(check: str, seen: str, means: str, remedy: str) -> Finding:
    """It works, but not as well as it could."""
    return Finding(check=check, grade=Grade.WARN, seen=seen, means=means, remedy=remedy)


def fail(check: str, seen: str, means: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(check=check, grade=Grade.FAIL, seen=seen, means=means, remedy=remedy)
