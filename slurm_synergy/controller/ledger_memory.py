"""Values made of rows of the ledger, kept for as long as the row stays the same.

A reading of 5,000 jobs decodes only what has changed; what has not is the very object of the
reading before, by which a round knows that nothing of a job has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from slurm_synergy.cluster import Record
from slurm_synergy.core.model import Lease, Profile, Reason

__all__ = ["RECORD_COLUMNS", "ProfileMemory", "RecordMemory", "held_until"]

RECORD_COLUMNS = (
    "job_id, lease, holds_since_s, stopping, done_samples, attained_gpu_s, profile_key, held_s"
)
"""What a record is made of, in the order in which ``RecordMemory`` takes it."""

_MOST_KEYS = 4096
_NONE_HELD: Mapping[str, float] = {}


class RecordMemory:
    """Records by job id. ``decode`` makes a value of a type from its text, or raises."""

    def __init__(self, decode: Callable[[Any, str], Any]) -> None:
        self._decode = decode
        self._known: dict[int, tuple[tuple[Any, ...], Record]] = {}
        self._found: dict[int, Record] = {}
        self._leased: set[int] = set()

    def take(self, rows: Iterable[tuple[Any, ...]], touched: Collection[int] | None = None) -> None:
        """The rows of ``RECORD_COLUMNS``; of the jobs ``touched`` if they are told, else of all."""
        gone = set(self._known if touched is None else touched)
        last, is_sorted = next(reversed(self._found), -1), True
        for row in rows:
            job_id = row[0]
            gone.discard(job_id)
            known = self._known.get(job_id)
            if known is not None and known[0] == row:
                continue
            record = self._made(row, known)
            if job_id not in self._found:
                is_sorted = is_sorted and job_id > last
                last = max(last, job_id)
            self._known[job_id], self._found[job_id] = (row, record), record
            if record.lease is None:
                self._leased.discard(job_id)
            else:
                self._leased.add(job_id)
        for job_id in gone & self._known.keys():
            del self._known[job_id], self._found[job_id]
            self._leased.discard(job_id)
        if not is_sorted:
            self._found = dict(sorted(self._found.items()))

    def records(self, now_s: float) -> dict[int, Record]:
        """By job id, ascending. Attained service includes the lease in force, up to now."""
        found = self._found.copy()
        for job_id in self._leased:
            row, record = self._known[job_id]
            found[job_id] = _now(record, row, now_s)
        return found

    def _made(self, row: tuple[Any, ...], known: tuple[tuple[Any, ...], Record] | None) -> Record:
        job_id, lease, _, stopping, done_samples, attained_gpu_s, profile_key, held_s = row
        if known is not None and known[0][1] == lease:
            held = known[1].lease
        else:
            held = self._decode(Lease, lease) if lease else None
        return Record(
            job_id=job_id,
            lease=held,
            stopping=self._decode(Reason, stopping) if stopping else None,
            done_samples=done_samples,
            attained_service_gpu_s=float(attained_gpu_s),
            profile_key=profile_key,
            held_s=_NONE_HELD if held_s == "{}" else self._decode(Mapping[str, float], held_s),
        )


def held_until(
    held_s: Mapping[str, float], lease: Lease, holds_since_s: float, now_s: float
) -> Mapping[str, float]:
    """Seconds by GPU type, with those of the lease in force since then."""
    kind = lease.placement.gpu_type
    return {**held_s, kind: held_s.get(kind, 0.0) + max(0.0, now_s - holds_since_s)}


def _now(record: Record, row: tuple[Any, ...], now_s: float) -> Record:
    holds_since_s = row[2]
    if record.lease is None or holds_since_s is None:
        return record
    lease, since_s = record.lease, float(holds_since_s)
    held_gpu_s = lease.placement.gpus * max(0.0, now_s - since_s)
    return replace(
        record,
        attained_service_gpu_s=record.attained_service_gpu_s + held_gpu_s,
        held_s=held_until(record.held_s, lease, since_s, now_s),
    )


class ProfileMemory:
    """Profiles by key, asked for again only after something was written.

    ``ask`` finds the text of a profile, None where none is kept; ``make`` reads it.
    """

    def __init__(self, ask: Callable[[str], str | None], make: Callable[[str], Profile]) -> None:
        self._ask, self._make = ask, make
        self._asked_at = -1
        self._fresh: set[str] = set()
        self._known: dict[str, tuple[str | None, Profile | None]] = {}

    def profile(self, key: str, written: int) -> Profile | None:
        """The profile of ``key``; ``written`` is a number that every write changes."""
        if written != self._asked_at:
            self._asked_at = written
            self._fresh.clear()
        if key not in self._fresh:
            self._look(key)
        return self._known[key][1]

    def _look(self, key: str) -> None:
        if len(self._known) >= _MOST_KEYS:  # users make up keys
            self._known.clear()
            self._fresh.clear()
        text, known = self._ask(key), self._known.get(key)
        if known is None or known[0] != text:
            self._known[key] = (text, None if text is None else self._make(text))
        self._fresh.add(key)
