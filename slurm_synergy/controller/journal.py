"""The round journal: one JSON object per line and round, rotated by size.

``journal.jsonl`` is the newest file, ``journal.1.jsonl`` the one before. A line holds ``version``,
``code`` (our release), ``round``, ``snapshot``, ``plan``, ``actions``, ``outcomes`` and ``took_s``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import slurm_synergy
from slurm_synergy.cluster import Action, Hold, Outcome, Renew, Resize, Start, Stop
from slurm_synergy.controller.codec import decode, encode
from slurm_synergy.core.model import Plan, Reason, Snapshot
from slurm_synergy.errors import LedgerError, ModelError

__all__ = ["JOURNAL_VERSION", "Journal", "decode_action", "encode_action"]

JOURNAL_VERSION = 1
_KINDS: Mapping[str, type[Action]] = {
    kind.__name__.lower(): kind for kind in (Hold, Renew, Resize, Stop, Start)
}
_MIB = 1024 * 1024


def encode_action(action: Action) -> dict[str, object]:
    """An action as JSON, with its ``kind`` as a word."""
    return {"kind": type(action).__name__.lower(), **encode(action)}


def decode_action(data: Mapping[str, object]) -> Action:
    """The action that ``encode_action`` wrote. Raises ModelError."""
    kind = _KINDS.get(str(data.get("kind")))
    if kind is None:
        raise ModelError(f"unknown kind of action: {data.get('kind')!r}")
    return decode(kind, {key: value for key, value in data.items() if key != "kind"})


class Journal:
    """Appends rounds to ``directory/journal.jsonl``; at most ``keep`` older files stay."""

    def __init__(self, directory: Path, *, max_mib: int, keep: int) -> None:
        self._path = directory / "journal.jsonl"
        self._max_bytes, self._keep = max_mib * _MIB, keep

    def append(
        self,
        snapshot: Snapshot,
        plan: Plan,
        actions: Sequence[Action],
        outcomes: Sequence[Outcome],
        took_s: Mapping[str, float],
    ) -> None:
        """Write one round as one line. Raises LedgerError when it cannot be written."""
        record = {
            "version": JOURNAL_VERSION,
            "code": getattr(slurm_synergy, "__version__", ""),
            "round": snapshot.round,
            "snapshot": encode(snapshot),
            "plan": encode(plan),
            "actions": [encode_action(action) for action in actions],
            "outcomes": [_outcome(outcome) for outcome in outcomes],
            "took_s": encode(took_s),
        }
        line = json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"
        try:
            self._rotate_if_full(len(line))
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "ab") as file:
                file.write(line.encode())
        except OSError as err:
            raise LedgerError(
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


def _outcome(outcome: Outcome) -> dict[str, object]:
    reason: Reason | None = outcome.reason
    return {
        "job_id": outcome.action.job_id,
        "kind": type(outcome.action).__name__.lower(),
        "done": outcome.done,
        "reason": encode(reason),
    }
