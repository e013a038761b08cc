"""The file of the ledger: opened by one daemon, written in transactions, never repaired.

Every write is on disk when the call returns. A damaged file is never repaired or deleted here: the
error says what to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeVar

from slurm_synergy.controller.codec import decode
from slurm_synergy.controller.learning_store import LEARNED_TABLE
from slurm_synergy.controller.state_files import make_state_dir, open_private
from slurm_synergy.errors import LedgerError, LedgerUnavailable, ModelError

__all__ = ["SCHEMA_VERSION", "LedgerFile", "holder_of", "set_meta"]

SCHEMA_VERSION = 4
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
    profile_key TEXT NOT NULL DEFAULT '',         -- of a job that names none itself
    held_s TEXT NOT NULL DEFAULT '{}'             -- JSON: seconds that ended leases held, by type
);
CREATE TABLE intents (
    round INTEGER NOT NULL, seq INTEGER NOT NULL, job_id INTEGER NOT NULL, action TEXT NOT NULL,
    PRIMARY KEY (round, seq)
) WITHOUT ROWID;
CREATE TABLE profiles (key TEXT PRIMARY KEY, profile TEXT NOT NULL) WITHOUT ROWID;
"""
# Of this connection alone: which jobs were written since the records were last read. Without "OR
# IGNORE", as within a trigger the conflict clause of the statement outside holds.
_TOUCHED = """
PRAGMA temp_store = MEMORY;
CREATE TEMP TABLE touched (job_id INTEGER PRIMARY KEY);
CREATE TEMP TRIGGER made AFTER INSERT ON main.jobs
    WHEN NEW.job_id NOT IN (SELECT job_id FROM touched)
    BEGIN INSERT INTO touched VALUES (NEW.job_id); END;
CREATE TEMP TRIGGER changed AFTER UPDATE ON main.jobs
    WHEN NEW.job_id NOT IN (SELECT job_id FROM touched)
    BEGIN INSERT INTO touched VALUES (NEW.job_id); END;
CREATE TEMP TRIGGER gone AFTER DELETE ON main.jobs
    WHEN OLD.job_id NOT IN (SELECT job_id FROM touched)
    BEGIN INSERT INTO touched VALUES (OLD.job_id); END;
"""
# Service was known in sum only: what runs is taken to have had all of it where it is.
_HELD_S = """
ALTER TABLE jobs ADD COLUMN held_s TEXT NOT NULL DEFAULT '{}';
UPDATE jobs SET held_s = json_object(
    json_extract(lease, '$.placement.gpu_type'),
    attained_gpu_s
    / (SELECT sum(json_extract(value, '$[1].gpus')) FROM json_each(lease, '$.placement.shares'))
) WHERE attained_gpu_s > 0 AND json_valid(lease);
"""


class LedgerFile:
    """Opens (or makes) ``state_dir`` and the file in it; thread-safe.

    Raises LedgerError when the directory is in use by another daemon, or the file is damaged or
    from a newer release.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "ledger.sqlite"
        self._lock = threading.RLock()
        self.error_count = 0
        """Uses of ledger and journal that failed, since this object was made."""
        self._lock_file = _lock_directory(state_dir)
        try:
            self._db = self._open()
        except BaseException:
            self._lock_file.close()
            raise

    def close(self) -> None:
        """Close the file and let another daemon have the directory; idempotent."""
        with self._lock:
            self._db.close()
            self._lock_file.close()

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
            db.executescript(_TOUCHED)
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
        if version in (1, 2, 3):
            db.executescript(f"BEGIN IMMEDIATE; {_HELD_S} PRAGMA user_version = 4; COMMIT;")

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

    def _written(self) -> int:
        """How many rows were changed so far. Nobody else writes: the directory is locked."""
        try:
            return self._db.total_changes
        except sqlite3.Error as err:  # closed
            raise self._failure(err) from err

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


def set_meta(db: sqlite3.Connection, key: str, value: str) -> None:
    """Write a word of the file's own, within a transaction."""
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
