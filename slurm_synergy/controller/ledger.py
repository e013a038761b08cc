"""The ledger: the scheduler's durable memory in one SQLite file (``Records`` of the seam).

It holds what Slurm does not know or forgets: leases, stops in progress, progress, attained
service, what the user originally asked for, intents that were not confirmed, measured profiles.
Slurm stays the truth about what runs. Every write is on disk when the call returns. A damaged file
is never repaired or deleted here: the error says what to do.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from slurm_synergy.cluster import Action, Clock, Outcome, Record
from slurm_synergy.controller.journal import Journal, decode_action
from slurm_synergy.controller.ledger_file import SCHEMA_VERSION, holder_of, set_meta
from slurm_synergy.controller.ledger_memory import RECORD_COLUMNS, RecordMemory, held_until
from slurm_synergy.controller.ledger_profiles import ProfileLedger
from slurm_synergy.controller.rounds import Round
from slurm_synergy.controller.stored_leases import (
    JobProgress,
    OpenIntent,
    StoredLease,
    lease_row,
)
from slurm_synergy.core.model import Lease, Plan, Profile, Reason, Snapshot
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import LedgerError, ModelError

__all__ = [
    "SCHEMA_VERSION",
    "JobProgress",
    "Ledger",
    "OpenIntent",
    "StoredLease",
    "holder_of",
]


class Ledger(ProfileLedger):
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
        super().__init__(state_dir, catalogue)
        self._clock = clock
        self._journal = Journal(state_dir, max_mib=journal_max_mib, keep=journal_keep)
        self._records = RecordMemory(self._decoded)
        self._data_version: int | None = None

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Records of the seam

    def read(self) -> Mapping[int, Record]:
        """Records by job id; attained service includes the lease in force, up to now."""
        now_s = self._clock.now_s()
        with self._lock:
            self._read_touched()
            return self._beliefs.applied(self._records.records(now_s), self.profile)

    def _read_touched(self) -> None:
        """Bring the memory of records up: all at first, later those that were written."""
        # Another number: somebody else has written, which the lock of the directory forbids.
        version = self._query("PRAGMA data_version")[0][0]
        if version != self._data_version:
            rows = self._query(f"SELECT {RECORD_COLUMNS} FROM jobs ORDER BY job_id")
            self._records.take(map(tuple, rows))
        else:
            touched = [row[0] for row in self._query("SELECT job_id FROM touched")]
            if not touched:
                return
            rows = self._query(
                f"SELECT {RECORD_COLUMNS} FROM jobs NATURAL JOIN touched ORDER BY job_id"
            )
            self._records.take(map(tuple, rows), touched)
        self._query("DELETE FROM touched")
        self._data_version = version

    def draining(self) -> bool:
        """Whether an operator asked that nothing be started."""
        return self._meta("draining") == "1"

    def set_draining(self, draining: bool) -> None:
        """Remember, over restarts too, whether anything may be started."""
        with self._transaction() as db:
            set_meta(db, "draining", "1" if draining else "0")

    def mode(self) -> str:
        """The mode that was last in force, as a word; empty when none ever was."""
        return self._meta("mode") or ""

    def set_mode(self, mode: str) -> None:
        """Remember, over restarts too, which mode is in force: what it did may need undoing."""
        if self.mode() != mode:
            with self._transaction() as db:
                set_meta(db, "mode", mode)

    def reservation(self) -> str:
        """Which reservation is ours, as its keeper noted it; empty when none ever was."""
        return self._meta("reservation") or ""

    def set_reservation(self, mark: str) -> None:
        """Remember, over restarts too, which reservation is ours."""
        if self.reservation() != mark:
            with self._transaction() as db:
                set_meta(db, "reservation", mark)

    def next_round(self) -> int:
        """A round number greater than all earlier ones, also after a restart."""
        with self._transaction() as db:
            row = db.execute("SELECT value FROM meta WHERE key = 'round'").fetchone()
            number = int(row["value"]) + 1 if row else 1
            set_meta(db, "round", str(number))
        return number

    def intend(self, round_number: int, actions: Sequence[Action]) -> None:
        """Write what is about to be done, durably, before it is done."""
        rows = [
            (round_number, seq, action.job_id, self._journal.action_text(action))
            for seq, action in enumerate(actions)
        ]
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO intents VALUES (?, ?, ?, ?)", rows)

    def commit(self, round_number: int, outcomes: Sequence[Outcome], snapshot: Snapshot) -> None:
        """Close the intents that have an outcome.

        What was granted, changed or ended is written by the keeper of leases at that moment.
        """
        done = {outcome.action.job_id for outcome in outcomes}
        with self._transaction() as db:
            rows = db.execute("SELECT seq, job_id FROM intents WHERE round = ?", (round_number,))
            closed = [(round_number, row[0]) for row in rows.fetchall() if row[1] in done]
            db.executemany("DELETE FROM intents WHERE round = ? AND seq = ?", closed)

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
        rows = [lease_row(item, now_s) for item in stored]
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
                "UPDATE jobs SET attained_gpu_s = ?, held_s = ?, lease = NULL,"
                " holds_since_s = NULL, stopping = NULL, stop_deadline_s = NULL, finished = '[]'"
                " WHERE job_id = ?",
                (*self._service(row, now_s), job_id),
            )

    def save_progress(self, told: Iterable[JobProgress]) -> None:
        """Remember how far known jobs are, in one transaction."""
        rows = [(one.done_samples, one.samples_per_s, one.step, one.job_id) for one in told]
        with self._transaction() as db:
            db.executemany(
                "UPDATE jobs SET done_samples = ?, samples_per_s = ?, step = ? WHERE job_id = ?",
                rows,
            )

    # Memory of jobs

    def remember_request(self, job_id: int, request: Mapping[str, object]) -> None:
        """Keep what the user originally asked for (JSON); the first word stands."""
        self.remember_requests({job_id: request})

    def remember_requests(self, requests: Mapping[int, Mapping[str, object]]) -> None:
        """``remember_request`` of several jobs, all or none."""
        rows = [
            (job_id, json.dumps(dict(request), allow_nan=False))
            for job_id, request in requests.items()
        ]
        with self._transaction() as db:
            db.executemany(
                "INSERT INTO jobs (job_id, request) VALUES (?, ?) ON CONFLICT (job_id) DO UPDATE"
                " SET request = coalesce(request, excluded.request)",
                rows,
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

    def _service(self, row: sqlite3.Row, now_s: float) -> tuple[float, str]:
        """GPU seconds in all, and seconds by GPU type as JSON, until now."""
        attained_gpu_s, held_s = float(row["attained_gpu_s"]), str(row["held_s"])
        if row["lease"] is None or row["holds_since_s"] is None:
            return attained_gpu_s, held_s
        lease, since_s = self._decoded(Lease, row["lease"]), float(row["holds_since_s"])
        attained_gpu_s += lease.placement.gpus * max(0.0, now_s - since_s)
        by_type = held_until(self._decoded(dict[str, float], held_s), lease, since_s, now_s)
        return attained_gpu_s, json.dumps(dict(by_type))
