"""The part of the ledger that remembers profiles, and what was learned of elastic jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from slurm_synergy.controller.codec import encode
from slurm_synergy.controller.learning_store import Beliefs, Lesson, Subject
from slurm_synergy.controller.ledger_file import LedgerFile
from slurm_synergy.controller.ledger_memory import ProfileMemory
from slurm_synergy.core.model import Profile
from slurm_synergy.profiler.evidence import Evidence, StoredProfile

__all__ = ["ProfileLedger"]


class ProfileLedger(LedgerFile):
    """``catalogue`` yields a built-in profile where none was measured."""

    def __init__(
        self, state_dir: Path, catalogue: Callable[[str], Profile | None] | None = None
    ) -> None:
        super().__init__(state_dir)
        self._catalogue = catalogue
        try:
            self._beliefs = Beliefs(self._query, self._transaction, self._decoded)
        except BaseException:
            self.close()
            raise
        self._profiles = ProfileMemory(
            self._profile_text, lambda text: self._decoded(Profile, text)
        )

    def profile(self, key: str) -> Profile | None:
        """The measured profile of that key, else the catalogue's, else None.

        With what was learned of elastic jobs that have the key.
        """
        with self._lock:
            found = self._profiles.profile(key, self._written())
            if found is None and self._catalogue:
                found = self._catalogue(key)
            return self._beliefs.profile(key, found)

    def set_profile_key(self, job_id: int, key: str) -> None:
        """Remember which profile is that of a known job that names none itself."""
        with self._transaction() as db:
            db.execute("UPDATE jobs SET profile_key = ? WHERE job_id = ?", (key, job_id))

    def save_profile(self, profile: Profile, evidence: Evidence | None = None) -> None:
        """Keep a measured profile under its key, with what it rests on."""
        kept = {**encode(profile), "evidence": encode(evidence)}
        with self._transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO profiles VALUES (?, ?)", (profile.key, json.dumps(kept))
            )

    def stored_profiles(self) -> tuple[StoredProfile, ...]:
        """All profiles that are kept, by key."""
        rows = self._query("SELECT profile FROM profiles ORDER BY key")
        return tuple(self._stored_profile(row["profile"]) for row in rows)

    def stored_profile(self, key: str) -> StoredProfile | None:
        """What is kept under ``key``; None when nothing is."""
        rows = self._query("SELECT profile FROM profiles WHERE key = ?", key)
        return self._stored_profile(rows[0]["profile"]) if rows else None

    def profiles_of(self, owner_uid: int) -> tuple[str, ...]:
        """Keys of the profiles that rest on jobs of that user, the oldest measurement first."""
        rows = self._query(
            "SELECT key FROM profiles WHERE json_extract(profile, '$.evidence.owner_uid') = ?"
            " ORDER BY json_extract(profile, '$.evidence.measured_s'), key",
            owner_uid,
        )
        return tuple(str(row["key"]) for row in rows)

    def forget_profile(self, key: str) -> bool:
        """Drop what is kept under ``key``; False when nothing was."""
        with self._transaction() as db:
            learned = self._beliefs.forget_key(db, key)
            measured = db.execute("DELETE FROM profiles WHERE key = ?", (key,)).rowcount > 0
            return measured or learned

    def lesson(self, subject: Subject) -> Lesson | None:
        """What was learned of an elastic job, or of all those with a profile key."""
        with self._lock:
            return self._beliefs.lesson(subject)

    def save_lessons(self, lessons: Sequence[Lesson]) -> None:
        """Keep what was learned, all of it or nothing; rounds from now on believe it."""
        with self._lock:
            self._beliefs.save(lessons)

    def profile_key(self, job_id: int) -> str:
        """Which profile is that of a job that names none itself; empty when not known."""
        rows = self._query("SELECT profile_key FROM jobs WHERE job_id = ?", job_id)
        return str(rows[0]["profile_key"]) if rows else ""

    def _stored_profile(self, text: str) -> StoredProfile:
        profile = self._decoded(Profile, text)
        evidence = json.loads(text).get("evidence")
        return StoredProfile(
            profile=profile,
            evidence=self._decoded(Evidence, json.dumps(evidence)) if evidence else None,
        )

    def _profile_text(self, key: str) -> str | None:
        rows = self._query("SELECT profile FROM profiles WHERE key = ?", key)
        return str(rows[0]["profile"]) if rows else None
