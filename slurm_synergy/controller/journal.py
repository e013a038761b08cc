"""The round journal: one JSON object per line and round, rotated by size.

``journal.jsonl`` is the newest file, ``journal.1.jsonl`` the one before. A line holds ``version``,
``code`` (our release), ``round``, ``snapshot``, ``plan``, ``actions``, ``outcomes``, ``took_s`` and
``free`` (what the cluster itself would have given a new job, by node).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from pathlib import Path

import slurm_synergy
from slurm_synergy.cluster import Action, Outcome
from slurm_synergy.controller.rounds import (
    JOURNAL_FILE,
    JOURNAL_VERSION,
    Became,
    Round,
    RoundTexts,
    decode_action,
    encode_action,
    last_round,
    round_in_parts,
)
from slurm_synergy.controller.state_files import open_private
from slurm_synergy.core.model import Plan, Snapshot
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import LedgerUnavailable

__all__ = ["JOURNAL_VERSION", "Journal", "decode_action", "encode_action"]

_MIB = 1024 * 1024


class Journal:
    """Appends rounds to ``directory/journal.jsonl``; at most ``keep`` older files stay."""

    def __init__(self, directory: Path, *, max_mib: int, keep: int) -> None:
        self._path = directory / JOURNAL_FILE
        self._max_bytes, self._keep = max_mib * _MIB, keep
        self._last: Round | None = None
        self._texts = RoundTexts()

    def last(self) -> Round | None:
        """The newest round, also of an earlier process. Raises LedgerError."""
        if self._last is None:
            self._last = last_round(self._path.parent)
        return self._last

    def action_text(self, action: Action) -> str:
        """The JSON of an action of the round that is appended next."""
        return self._texts.of_action(action)

    def append(
        self,
        snapshot: Snapshot,
        plan: Plan,
        actions: Sequence[Action],
        outcomes: Sequence[Outcome],
        took_s: Mapping[str, float],
        free: Mapping[str, Resources] | None = None,
    ) -> None:
        """Write one round as one line. Raises LedgerUnavailable when it cannot be written."""
        self._last = Round(
            snapshot=snapshot,
            plan=plan,
            actions=tuple(actions),
            outcomes=tuple(Became.of(outcome) for outcome in outcomes),
            took_s=dict(took_s),
            free=free,
            code=getattr(slurm_synergy, "__version__", ""),
        )
        parts = round_in_parts(self._last, self._texts)
        try:
            self._rotate_if_full(sum(map(len, parts)))
            fd = open_private(self._path, os.O_RDWR | os.O_APPEND)
            with os.fdopen(fd, "a+b", buffering=0) as file:
                _write_whole(file, (_break_before(fd), *parts))
        except OSError as err:
            raise LedgerUnavailable(
                f"cannot write the journal {self._path}: {err}; free some space or correct the "
                "permissions of the state directory"
            ) from err

    def _rotate_if_full(self, coming_bytes: int) -> None:
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return
        if size == 0 or size + coming_bytes <= self._max_bytes:
            return
        for number in range(self._keep - 1, 0, -1):
            older = self._numbered(number)
            if older.exists():
                older.replace(self._numbered(number + 1))
        self._path.replace(self._numbered(1))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"journal.{number}.jsonl")


def _break_before(fd: int) -> bytes:
    """A line break when the file ends in the middle of a line, as a crash or a person leaves it.

    The torn line alone is lost then, and not the round that is written behind it.
    """
    size = os.fstat(fd).st_size
    return b"\n" if size and os.pread(fd, 1, size - 1) != b"\n" else b""


def _write_whole(file: FileIO, parts: Iterable[bytes]) -> None:
    """Append the whole line or nothing: half a line would swallow the next one."""
    before = os.fstat(file.fileno()).st_size
    try:
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[file.write(left) :]
    except OSError:
        file.truncate(before)
        raise
