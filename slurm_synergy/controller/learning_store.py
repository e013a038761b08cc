"""What was learned of elastic jobs, as the ledger keeps it, and how it reaches the round.

A row is about one job, or about all jobs with one profile key. It holds what was told and the
belief that follows; the belief is in memory too, since every round asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from sqlite3 import Connection, Row
from typing import Any

from slurm_synergy.cluster import Record
from slurm_synergy.controller.codec import encode
from slurm_synergy.controller.learning_points import Learned
from slurm_synergy.core.model import Profile
from slurm_synergy.core.scaling import Scaling

__all__ = ["LEARNED_TABLE", "Beliefs", "Lesson", "Subject"]

LEARNED_TABLE = """
CREATE TABLE IF NOT EXISTS learned (
    job_id INTEGER NOT NULL,                      -- 0: of all jobs with the key
    key TEXT NOT NULL,                            -- profile key; empty: the job has none
    owner_uid INTEGER NOT NULL,
    told_s REAL NOT NULL,                         -- when it was told last
    learned TEXT NOT NULL,                        -- JSON of Learned
    scaling TEXT,                                 -- JSON of Scaling, which follows from it
    PRIMARY KEY (job_id, key)
) WITHOUT ROWID;
"""
"""What the ledger needs for it, beside its own tables."""

# Users make up keys; who makes up more loses those that were not used for longest.
_MOST_KEYS_OF_A_USER = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What something was learned of: job ``job_id``, or all jobs with profile ``key`` (0)."""

    job_id: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What was learned of a subject, whose job's owner has ``owner_uid``; ``told_s`` is epoch."""

    subject: Subject
    owner_uid: int
    told_s: float
    learned: Learned
    scaling: Scaling | None = None


class Beliefs:
    """The table of lessons, and the profiles that follow. Its user holds a lock around each call.

    ``query`` and ``transaction`` are the ledger's; ``decode_as`` reads a value or raises its error.
    """

    def __init__(
        self,
        query: Callable[..., list[Row]],
        transaction: Callable[[], AbstractContextManager[Connection]],
        decode_as: Callable[[Any, str], Any],
    ) -> None:
        self._query, self._transaction, self._decoded = query, transaction, decode_as
        self._of_job: dict[int, tuple[str, Scaling]] = {}
        self._of_key: dict[str, Scaling] = {}
        self._records: dict[int, tuple[Record, Profile, Record]] = {}
        self._profiles: dict[Subject, tuple[Profile | None, Scaling, Profile]] = {}
        with transaction() as db:  # a job may have been forgotten while it was learned from
            db.execute(
                "DELETE FROM learned WHERE job_id != 0 AND job_id NOT IN (SELECT job_id FROM jobs)"
            )
        for row in query("SELECT job_id, key, scaling FROM learned WHERE scaling IS NOT NULL"):
            self._note(row["job_id"], row["key"], decode_as(Scaling, row["scaling"]))

    def lesson(self, subject: Subject) -> Lesson | None:
        """What is kept of a subject."""
        rows = self._query(
            "SELECT * FROM learned WHERE job_id = ? AND key = ?", subject.job_id, subject.key
        )
        if not rows:
            return None
        row = rows[0]
        return Lesson(
            subject=subject,
            owner_uid=row["owner_uid"],
            told_s=row["told_s"],
            learned=self._decoded(Learned, row["learned"]),
            scaling=self._decoded(Scaling, row["scaling"]) if row["scaling"] else None,
        )

    def save(self, lessons: Iterable[Lesson]) -> None:
        """Keep lessons, all or none; a job has one, under the key that it has now."""
        made = list(lessons)
        dropped: list[str] = []
        with self._transaction() as db:
            for one in made:
                dropped += _write(db, one)
        for one in made:
            if one.scaling is not None:
                self._note(one.subject.job_id, one.subject.key, one.scaling)
        for key in dropped:
            self._forget_key(key)

    def forget_job(self, db: Connection, job_id: int) -> None:
        """Drop what was learned of a job, within a transaction."""
        db.execute("DELETE FROM learned WHERE job_id = ?", (job_id,))
        key, _ = self._of_job.pop(job_id, ("", None))
        self._records.pop(job_id, None)
        self._profiles.pop(Subject(job_id=job_id, key=key), None)

    def forget_key(self, db: Connection, key: str) -> bool:
        """Drop what was learned of a key, within a transaction; False when nothing was.

        Its jobs keep what was learned of each of them.
        """
        self._forget_key(key)
        gone = db.execute("DELETE FROM learned WHERE job_id = 0 AND key = ?", (key,))
        return gone.rowcount > 0

    def profile(self, key: str, base: Profile | None) -> Profile | None:
        """``base`` with what was learned of jobs with that key."""
        scaling = self._of_key.get(key)
        if scaling is None:
            return base
        return self._combined(Subject(job_id=0, key=key), base, scaling)

    def applied(
        self, records: dict[int, Record], profile_of: Callable[[str], Profile | None]
    ) -> Mapping[int, Record]:
        """``records``, those of jobs of which something was learned with the belief about them.

        What has not changed is the very object of the call before.
        """
        for job_id, (key, scaling) in self._of_job.items():
            record = records.get(job_id)
            if record is None:
                continue
            subject = Subject(job_id=job_id, key=key)
            profile = self._combined(subject, profile_of(key) if key else None, scaling)
            known = self._records.get(job_id)
            if known is None or known[0] is not record or known[1] is not profile:
                known = (record, profile, replace(record, profile=profile))
                self._records[job_id] = known
            records[job_id] = known[2]
        return records

    def _combined(self, subject: Subject, base: Profile | None, scaling: Scaling) -> Profile:
        known = self._profiles.get(subject)
        if known is not None and known[0] is base and known[1] is scaling:
            return known[2]
        made = replace(base or Profile(key=subject.key), scaling=scaling)
        self._profiles[subject] = (base, scaling, made)
        return made

    def _forget_key(self, key: str) -> None:
        self._of_key.pop(key, None)
        self._profiles.pop(Subject(job_id=0, key=key), None)

    def _note(self, job_id: int, key: str, scaling: Scaling) -> None:
        if not job_id:
            if self._of_key.get(key) != scaling:
                self._of_key[key] = scaling
            return
        before = self._of_job.get(job_id)
        if before != (key, scaling):
            self._of_job[job_id] = (key, scaling)
            if before is not None and before[0] != key:
                self._profiles.pop(Subject(job_id=job_id, key=before[0]), None)


def _write(db: Connection, one: Lesson) -> list[str]:
    """Write a lesson; the keys that had to go for it."""
    job_id, key = one.subject.job_id, one.subject.key
    if job_id:
        db.execute("DELETE FROM learned WHERE job_id = ? AND key != ?", (job_id, key))
    db.execute(
        "INSERT OR REPLACE INTO learned VALUES (?, ?, ?, ?, ?, ?)",
        (
            *(job_id, key, one.owner_uid, one.told_s),
            json.dumps(encode(one.learned), allow_nan=False),
            None if one.scaling is None else json.dumps(encode(one.scaling), allow_nan=False),
        ),
    )
    if job_id:
        return []
    gone = db.execute(
        "DELETE FROM learned WHERE job_id = 0 AND owner_uid = ? AND key NOT IN (SELECT key FROM"
        " learned WHERE job_id = 0 AND owner_uid = ? ORDER BY told_s DESC LIMIT ?) RETURNING key",
        (one.owner_uid, one.owner_uid, _MOST_KEYS_OF_A_USER),
    )
    return [str(row["key"]) for row in gone.fetchall()]
