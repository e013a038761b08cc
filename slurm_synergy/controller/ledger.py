"""The ledger: the scheduler's durable memory in one SQLite file (``Records`` of the seam).

It holds what Slurm does not know or forgets: leases, stops in progress, progress, attained
service, what the user originally asked for, intents that were not confirmed, measured profiles.
Slurm stays the truth about what runs. Every write is on disk when the call returns. A damaged file
is never repaired or deleted here: the error says what to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeVar

from slurm_synergy.cluster import Action, Clock, Outcome, Record
from slurm_synergy.controller.codec import decode, encode
from slurm_synergy.controller.journal import Journal, decode_action, encode_action
from slurm_synergy.controller.learning_store import LEARNED_TABLE, Beliefs, Lesson, Subject
from slurm_synergy.controller.ledger_memory import (
    RECORD_COLUMNS,
    ProfileMemory,
    RecordMemory,
)
from slurm_synergy.controller.rounds import Round
from slurm_synergy.controller.state_files import make_state_dir, open_private
from slurm_synergy.core.model import Lease, Plan, Profile, Reason, Snapshot
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import LedgerError, LedgerUnavailable, ModelError
from slurm_synergy.profiler.evidence import Evidence, StoredProfile

__all__ = ["SCHEMA_VERSION", "Ledger", "OpenIntent", "StoredLease", "holder_of"]

SCHEMA_VERSION = 3
"""``user_version`` of the file; a newer one is refused, an older one brought up to it."""

_T = TypeVar("_T")
_BUSY_TIMEOUT_S = 5.0
# What passes: the file is intact, and the next try may succeed.
_REMEDIES = {
    sqlite3.SQLITE_FULL: "free some space on its file system",
    sqlite3.SQLITE_READONLY: "correct the owner and mode of state_dir",
    sqlite3.SQLITE_BUSY: "another program has it open: end that program",
    sqlite3.SQLITE_LOCKED: "another program has it open: end that program",
}
# SQLite calls only ENOSPC "full"; a quota, or no room for its index in memory, comes as these.
_WRITE_FAILED = frozenset(
    {
        sqlite3.SQLITE_IOERR_WRITE,
        sqlite3.SQLITE_IOERR_TRUNCATE,
        sqlite3.SQLITE_IOERR_SHMOPEN,
        sqlite3.SQLITE_IOERR_SHMSIZE,
        sqlite3.SQLITE_IOERR_SHMMAP,
    }
)
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE jobs (
    job_id INTEGER PRIMARY KEY,
    generation INTEGER NOT NULL DEFAULT 0,        -- grows over all leases of the job
    lease TEXT,                                   -- JSON of Lease; NULL: holds nothing
    owner_uid INTEGER NOT NULL DEFAULT -1,
    incarnation INTEGER NOT NULL DEFAULT 0,       -- restart count that the lease is for
    wrapped INTEGER NOT NULL DEFAULT 1,           -- 0: Slurm chose its cores, not we
    holds_since_s REAL,                           -- service counts from here; NULL: holds nothing
    attained_gpu_s REAL NOT NULL DEFAULT 0,       -- service of ended leases
    stopping TEXT,                                -- JSON of Reason; NULL: no stop in progress
    stop_deadline_s REAL,
    finished TEXT NOT NULL DEFAULT '[]',          -- JSON: reports of ended tasks of the lease
    done_samples REAL NOT NULL DEFAULT 0,
    samples_per_s REAL NOT NULL DEFAULT 0,
    step INTEGER NOT NULL DEFAULT 0,
    request TEXT,                                 -- JSON: what the user originally asked for
    profile_key TEXT NOT NULL DEFAULT ''          -- of a job that names none itself
);
CREATE TABLE intents (
    round INTEGER NOT NULL, seq INTEGER NOT NULL, job_id INTEGER NOT NULL, action TEXT NOT NULL,
    PRIMARY KEY (round, seq)
) WITHOUT ROWID;
CREATE TABLE profiles (key TEXT PRIMARY KEY, profile TEXT NOT NULL) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLease:
    """A lease with what its keeper must not forget over a restart.

    ``wrapped`` tells whether the job runs under our wrapper, so that we choose its cores.
    ``stop_deadline_s`` (epoch) and ``stopping`` are set while a stop is in progress. ``finished``
    are the reports of tasks that ended, as JSON objects.
    """

    lease: Lease
    owner_uid: int
    incarnation: int
    wrapped: bool = True
    stopping: Reason | None = None
    stop_deadline_s: float | None = None
    finished: tuple[Mapping[str, object], ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenIntent:
    """An action that was about to be done when the controller died."""

    round_number: int
    action: Action


class Ledger:
    """Opens (or makes) ``state_dir`` and its ledger; thread-safe. Close it, or use ``with``.

    ``catalogue`` yields a built-in profile where none was measured. Raises LedgerError when the
    directory is in use by another daemon, or the file is damaged or from a newer release.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        clock: Clock,
        journal_max_mib: int = 64,
        journal_keep: int = 5,
        catalogue: Callable[[str], Profile | None] | None = None,
    ) -> None:
        self._clock, self._catalogue = clock, catalogue
        self._path = state_dir / "ledger.sqlite"
        self._lock = threading.RLock()
        self.error_count = 0
        """Uses of ledger and journal that failed, since this object was made."""
        self._lock_file = _lock_directory(state_dir)
        try:
            self._db = self._open()
            self._beliefs = self._open_beliefs()
        except BaseException:
            self._lock_file.close()
            raise
        self._journal = Journal(state_dir, max_mib=journal_max_mib, keep=journal_keep)
        self._records = RecordMemory(self._decoded)
        self._profiles = ProfileMemory(
            self._profile_text, lambda text: self._decoded(Profile, text)
        )

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and let another daemon have the directory; idempotent."""
        with self._lock:
            self._db.close()
            self._lock_file.close()

    # Records of the seam

    def read(self) -> Mapping[int, Record]:
        """Records by job id; attained service includes the lease in force, up to now."""
        now_s = self._clock.now_s()
        with self._lock:
            rows = map(tuple, self._query(f"SELECT {RECORD_COLUMNS} FROM jobs ORDER BY job_id"))
            return self._beliefs.applied(self._records.records(rows, now_s), self.profile)

    def draining(self) -> bool:
        """Whether an operator asked that nothing be started."""
        return self._meta("draining") == "1"

    def set_draining(self, draining: bool) -> None:
        """Remember, over restarts too, whether anything may be started."""
        with self._transaction() as db:
            _set_meta(db, "draining", "1" if draining else "0")

    def mode(self) -> str:
        """The mode that was last in force, as a word; empty when none ever was."""
        return self._meta("mode") or ""

    def set_mode(self, mode: str) -> None:
        """Remember, over restarts too, which mode is in force: what it did may need undoing."""
        if self.mode() != mode:
            with self._transaction() as db:
                _set_meta(db, "mode", mode)

    def reservation(self) -> str:
        """Which reservation is ours, as its keeper noted it; empty when none ever was."""
        return self._meta("reservation") or ""

    def set_reservation(self, mark: str) -> None:
        """Remember, over restarts too, which reservation is ours."""
        if self.reservation() != mark:
            with self._transaction() as db:
                _set_meta(db, "reservation", mark)

    def next_round(self) -> int:
        """A round number greater than all earlier ones, also after a restart."""
        with self._transaction() as db:
            row = db.execute("SELECT value FROM meta WHERE key = 'round'").fetchone()
            number = int(row["value"]) + 1 if row else 1
            _set_meta(db, "round", str(number))
        return number

    def intend(self, round_number: int, actions: Sequence[Action]) -> None:
        """Write what is about to be done, durably, before it is done."""
        rows = [
            (round_number, seq, action.job_id, json.dumps(encode_action(action)))
            for seq, action in enumerate(actions)
        ]
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO intents VALUES (?, ?, ?, ?)", rows)

    def commit(self, round_number: int, outcomes: Sequence[Outcome], snapshot: Snapshot) -> None:
        """Close the intents that have an outcome.

        What was granted, changed or ended is written by the keeper of leases at that moment.
        """
        with self._transaction() as db:
            db.executemany(
                "DELETE FROM intents WHERE round = ? AND job_id = ?",
                [(round_number, outcome.action.job_id) for outcome in outcomes],
            )

    def journal(
        self,
        snapshot: Snapshot,
        plan: Plan,
        actions: Sequence[Action],
        outcomes: Sequence[Outcome],
        took_s: Mapping[str, float],
        free: Mapping[str, Resources] | None = None,
    ) -> None:
        """Append the round to the journal. Raises LedgerError when it cannot be written."""
        with self._lock:
            try:
                self._journal.append(snapshot, plan, actions, outcomes, took_s, free)
            except LedgerError:
                self.error_count += 1
                raise

    def last_round(self) -> Round | None:
        """The newest round of the journal, also of an earlier process. Raises LedgerError."""
        with self._lock:
            return self._journal.last()

    def profile(self, key: str) -> Profile | None:
        """The measured profile of that key, else the catalogue's, else None.

        With what was learned of elastic jobs that have the key.
        """
        with self._lock:
            found = self._profiles.profile(key, self._written())
            if found is None and self._catalogue:
                found = self._catalogue(key)
            return self._beliefs.profile(key, found)

    # Recovery

    def open_intents(self) -> tuple[OpenIntent, ...]:
        """Intents without an outcome, oldest first: what a dead controller was doing."""
        rows = self._query("SELECT round, action FROM intents ORDER BY round, seq")
        try:
            return tuple(
                OpenIntent(
                    round_number=row["round"], action=decode_action(json.loads(row["action"]))
                )
                for row in rows
            )
        except (ModelError, json.JSONDecodeError) as err:
            raise self._failure(err) from err

    def forget_intents(self, up_to_round: int) -> None:
        """Drop open intents of that round and before: they were looked into."""
        with self._transaction() as db:
            db.execute("DELETE FROM intents WHERE round <= ?", (up_to_round,))

    # Leases, for their keeper

    def load_leases(self) -> tuple[StoredLease, ...]:
        """All leases in force, by job id."""
        rows = self._query("SELECT * FROM jobs WHERE lease IS NOT NULL ORDER BY job_id")
        return tuple(
            StoredLease(
                lease=self._decoded(Lease, row["lease"]),
                owner_uid=row["owner_uid"],
                incarnation=row["incarnation"],
                wrapped=bool(row["wrapped"]),
                stopping=self._decoded(Reason, row["stopping"]) if row["stopping"] else None,
                stop_deadline_s=row["stop_deadline_s"],
                finished=tuple(json.loads(row["finished"])),
            )
            for row in rows
        )

    def last_generation(self, job_id: int) -> int:
        """The newest generation that any lease of the job had; 0 for none."""
        rows = self._query("SELECT generation FROM jobs WHERE job_id = ?", job_id)
        return int(rows[0]["generation"]) if rows else 0

    def save_leases(self, stored: Iterable[StoredLease]) -> None:
        """Write leases, all or none. Service counts from the first write of a lease."""
        now_s = self._clock.now_s()
        rows = [_lease_row(item, now_s) for item in stored]
        with self._transaction() as db:
            db.executemany(
                "INSERT INTO jobs (job_id, generation, lease, owner_uid, incarnation,"
                " wrapped, holds_since_s, stopping, stop_deadline_s, finished)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (job_id) DO UPDATE SET"
                " generation = excluded.generation, lease = excluded.lease,"
                " owner_uid = excluded.owner_uid, incarnation = excluded.incarnation,"
                " wrapped = excluded.wrapped,"
                " holds_since_s = coalesce(holds_since_s, excluded.holds_since_s),"
                " stopping = excluded.stopping, stop_deadline_s = excluded.stop_deadline_s,"
                " finished = excluded.finished",
                rows,
            )

    def end_lease(self, job_id: int) -> None:
        """The job holds nothing any more: add up its service, forget lease and stop."""
        now_s = self._clock.now_s()
        with self._transaction() as db:
            row = db.execute("SELECT * FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
            if row is None:
                return
            db.execute(
                "UPDATE jobs SET attained_gpu_s = ?, lease = NULL, holds_since_s = NULL,"
                " stopping = NULL, stop_deadline_s = NULL, finished = '[]' WHERE job_id = ?",
                (self._attained_gpu_s(row, now_s), job_id),
            )

    def save_progress(
        self, job_id: int, *, done_samples: float, samples_per_s: float, step: int
    ) -> None:
        """Remember how far a known job is: samples and steps since it began."""
        with self._transaction() as db:
            db.execute(
                "UPDATE jobs SET done_samples = ?, samples_per_s = ?, step = ? WHERE job_id = ?",
                (done_samples, samples_per_s, step, job_id),
            )

    # Memory of jobs and profiles

    def remember_request(self, job_id: int, request: Mapping[str, object]) -> None:
        """Keep what the user originally asked for (JSON); the first word stands."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO jobs (job_id, request) VALUES (?, ?) ON CONFLICT (job_id) DO UPDATE"
                " SET request = coalesce(request, excluded.request)",
                (job_id, json.dumps(dict(request), allow_nan=False)),
            )

    def update_request(self, job_id: int, changes: Mapping[str, object]) -> None:
        """Put entries into what is remembered of a job; a job without memory gets none."""
        with self._transaction() as db:
            row = db.execute("SELECT request FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
            if row is None or row["request"] is None:
                return
            changed = {**json.loads(row["request"]), **changes}
            text = json.dumps(changed, allow_nan=False)
            db.execute("UPDATE jobs SET request = ? WHERE job_id = ?", (text, job_id))

    def request(self, job_id: int) -> Mapping[str, object] | None:
        """What the user originally asked for, or None when that was not remembered."""
        rows = self._query("SELECT request FROM jobs WHERE job_id = ?", job_id)
        if not rows or rows[0]["request"] is None:
            return None
        loaded: Mapping[str, object] = json.loads(rows[0]["request"])
        return loaded

    def forget_job(self, job_id: int) -> None:
        """Slurm does not know the job any more: drop all about it."""
        with self._transaction() as db:
            db.execute("DELETE FROM jobs WHERE job_id = ?", (job_id,))
            db.execute("DELETE FROM intents WHERE job_id = ?", (job_id,))
            self._beliefs.forget_job(db, job_id)

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

    # Elastic jobs

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

    def _open_beliefs(self) -> Beliefs:
        try:
            return Beliefs(self._query, self._transaction, self._decoded)
        except BaseException:
            self._db.close()
            raise

    def _stored_profile(self, text: str) -> StoredProfile:
        profile = self._decoded(Profile, text)
        evidence = json.loads(text).get("evidence")
        return StoredProfile(
            profile=profile,
            evidence=self._decoded(Evidence, json.dumps(evidence)) if evidence else None,
        )

    # Inside

    def _open(self) -> sqlite3.Connection:
        try:
            os.close(open_private(self._path, os.O_RDWR))
        except OSError as err:
            raise LedgerError(
                f"cannot open {self._path}: {err}; correct the owner and mode of state_dir"
            ) from err
        db = sqlite3.connect(
            self._path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        db.row_factory = sqlite3.Row
        try:
            # FULL: a lease that was granted must survive a power cut, or its job is adopted blind.
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            found = db.execute("PRAGMA quick_check").fetchone()[0]
            if found != "ok":
                raise sqlite3.DatabaseError(found)
            self._migrate(db)
        except sqlite3.Error as err:
            db.close()
            raise self._failure(err) from err
        except BaseException:
            db.close()
            raise
        return db

    def _migrate(self, db: sqlite3.Connection) -> None:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise LedgerError(
                f"{self._path} was written by a newer release (format {version}, this one reads "
                f"{SCHEMA_VERSION}); install that release again, or choose another state_dir"
            )
        if version == 0:
            db.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA} {LEARNED_TABLE}"
                f" PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )
        if version == 1:
            db.executescript(
                "BEGIN IMMEDIATE; ALTER TABLE jobs ADD COLUMN profile_key TEXT NOT NULL DEFAULT '';"
                " PRAGMA user_version = 2; COMMIT;"
            )
        if version in (1, 2):
            db.executescript(f"BEGIN IMMEDIATE; {LEARNED_TABLE} PRAGMA user_version = 3; COMMIT;")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except BaseException as err:
                # A full disk has rolled it back already: doing so again would be the error shown.
                if self._in_transaction():
                    self._db.execute("ROLLBACK")
                if isinstance(err, sqlite3.Error):
                    raise self._failure(err) from err
                raise

    def _in_transaction(self) -> bool:
        try:
            return self._db.in_transaction
        except sqlite3.ProgrammingError:  # closed
            return False

    def _query(self, sql: str, *values: object) -> list[sqlite3.Row]:
        with self._lock:
            try:
                return self._db.execute(sql, values).fetchall()
            except sqlite3.Error as err:
                raise self._failure(err) from err

    def _meta(self, key: str) -> str | None:
        rows = self._query("SELECT value FROM meta WHERE key = ?", key)
        return rows[0]["value"] if rows else None

    def _profile_text(self, key: str) -> str | None:
        rows = self._query("SELECT profile FROM profiles WHERE key = ?", key)
        return str(rows[0]["profile"]) if rows else None

    def _written(self) -> int:
        """How many rows were changed so far. Nobody else writes: the directory is locked."""
        try:
            return self._db.total_changes
        except sqlite3.Error as err:  # closed
            raise self._failure(err) from err

    def _attained_gpu_s(self, row: sqlite3.Row, now_s: float) -> float:
        attained = float(row["attained_gpu_s"])
        if row["lease"] is None or row["holds_since_s"] is None:
            return attained
        gpus = self._decoded(Lease, row["lease"]).placement.gpus
        return attained + gpus * max(0.0, now_s - float(row["holds_since_s"]))

    def _decoded(self, kind: type[_T], text: str) -> _T:
        try:
            return decode(kind, json.loads(text))
        except (ModelError, json.JSONDecodeError) as err:
            raise self._failure(err) from err

    def _failure(self, err: Exception) -> LedgerError:
        self.error_count += 1
        code = getattr(err, "sqlite_errorcode", 0)
        remedy = _REMEDIES.get(code & 0xFF)
        if code in _WRITE_FAILED:
            remedy = "free some space on its file system (or raise the quota)"
        if remedy is not None:
            return LedgerUnavailable(f"the ledger {self._path} cannot be written: {err}; {remedy}")
        return LedgerError(
            f"the ledger {self._path} cannot be used: {err}; nothing was deleted: restore a copy "
            "of it, or move it away and start again (running jobs are then adopted as Slurm shows "
            "them)"
        )


def _lease_row(item: StoredLease, now_s: float) -> tuple[object, ...]:
    lease, stopping = item.lease, item.stopping
    return (
        lease.job_id,
        lease.generation,
        json.dumps(encode(lease)),
        item.owner_uid,
        item.incarnation,
        item.wrapped,
        now_s,
        json.dumps(encode(stopping)) if stopping else None,
        item.stop_deadline_s,
        json.dumps([dict(report) for report in item.finished]),
    )


def _set_meta(db: sqlite3.Connection, key: str, value: str) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))


def _lock_directory(state_dir: Path) -> IO[str]:
    lock_path = state_dir / "lock"
    try:
        make_state_dir(state_dir)
        fd = open_private(lock_path, os.O_RDWR | os.O_APPEND)
        file = os.fdopen(fd, "a+", encoding="utf-8")
    except OSError as err:
        raise LedgerError(
            f"cannot use the state directory {state_dir}: {err}; set state_dir to a directory "
            "that this user may write"
        ) from err
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise LedgerError(
            f"{state_dir} is in use by another controller (process {holder}); stop that one, or "
            "give this one its own state_dir"
        ) from err
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def holder_of(state_dir: Path) -> str | None:
    """The process id of the daemon that uses ``state_dir``, "unknown", or None when none does.

    Changes nothing, and takes no lock that would be in a starting daemon's way for long.
    """
    try:
        with (state_dir / "lock").open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() or "unknown"
    except OSError:
        return None
    return None
