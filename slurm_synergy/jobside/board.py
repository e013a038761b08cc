"""The board: a small memory-mapped file between a launcher and its training process.

One board per task, on node-local storage, 4096 bytes, little endian, version 1. Four records, each
written by exactly one side and protected by a sequence counter (odd while being written), so that a
reader never sees half a record and never takes a lock:

=========  ======  ===========  ==============================================================
record     offset  written by   fields
=========  ======  ===========  ==============================================================
header          0  launcher     magic ``SYNB``, version, launcher pid, rank, ranks
lease         256  launcher     see :class:`LeaseView`
report       1024  training     see :class:`Report`
training     2048  training     see :class:`slurm_synergy.jobside.training.Training`
=========  ======  ===========  ==============================================================

``lease`` begins with its sequence counter (u64): a training process that finds the counter
unchanged has nothing to do, which is one 8-byte read per batch. Core lists stand behind the fixed
part of the lease, as a u32 count and u32 core indices. Any language can read it; Python needs the
standard library only.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from slurm_synergy.errors import LeaseError
from slurm_synergy.jobside.training import TRAINING_BYTES, Training, packed, unpacked

__all__ = ["BOARD_BYTES", "Board", "LeaseView", "Report"]

BOARD_BYTES = 4096
_MAGIC = b"SYNB"
_VERSION = 1
_HEADER = struct.Struct("<4sIIII")
_LEASE_AT = 256
_REPORT_AT = 1024
_TRAINING_AT = 2048
_SEQ = struct.Struct("<Q")
# generation, until (monotonic s), mem MiB, batch, stop wanted, stop step, stop committed, silent
_LEASE = struct.Struct("<QdQQQQQQ")
# step, samples, epoch, step_s, wait_s, proposed, accepted, refused, checkpoint done, heartbeat,
# stepped_s, waited_s
_REPORT = struct.Struct("<QQQddQQQQddd")
_MAX_CORES = (_REPORT_AT - _LEASE_AT - _SEQ.size - _LEASE.size - 4) // 4
_RETRY_S = 0.0002
_GIVE_UP_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """What the training process may know of its lease.

    ``cores`` are this task's OS CPU numbers (empty: nothing was pinned), ``core_count`` how many
    cores the lease gives to this task, also where they do not exist on this machine;
    ``until_monotonic_s`` is on this machine's monotonic clock. ``stop`` asks for a checkpoint,
    ``stop_step`` is the proposed last step (0: none), ``stop_committed`` that all ranks accepted
    it. ``silent`` tells that the controller is silent and the floor set is in force.
    """

    generation: int = 0
    until_monotonic_s: float = 0.0
    mem_mib: int = 0
    batch_size: int = 0
    stop: bool = False
    stop_step: int = 0
    stop_committed: bool = False
    silent: bool = False
    core_count: int = 0
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the training process tells its launcher.

    ``step`` batches and ``samples`` (of all ranks) since the job began, over all incarnations;
    ``step_s`` and ``wait_s`` recent means per step. ``proposed_stop_step`` comes from rank 0,
    ``accepted_stop_step`` promises not to pass that step, ``refused_stop_step`` says that it was
    passed already. ``checkpoint_done`` is set after this rank's checkpoint was published.
    ``stepped_s`` and ``waited_s`` are sums since the process began: seconds in steps without
    waiting, and seconds of waiting for data. Their differences over a time are the true share of
    it that was a data stall, which recent means are not.
    """

    step: int = 0
    samples: int = 0
    epoch: int = 0
    step_s: float = 0.0
    wait_s: float = 0.0
    proposed_stop_step: int = 0
    accepted_stop_step: int = 0
    refused_stop_step: int = 0
    checkpoint_done: bool = False
    heartbeat_monotonic_s: float = 0.0
    stepped_s: float = 0.0
    waited_s: float = 0.0


class Board:
    """An open board. ``create`` is the launcher's, ``attach`` the training process's way in."""

    __slots__ = ("_map", "path", "rank", "ranks")

    def __init__(self, path: Path, mapped: mmap.mmap, rank: int, ranks: int) -> None:
        self.path, self._map, self.rank, self.ranks = path, mapped, rank, ranks

    @classmethod
    def create(cls, path: Path, *, rank: int, ranks: int) -> Board:
        """Make a fresh board, mode 0600. Raises LeaseError when there is no room for it."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.fchmod(fd, 0o600)  # whatever the umask
                # Reserve the page now: on a full tmpfs a later store would be a bus error.
                os.posix_fallocate(fd, 0, BOARD_BYTES)
                mapped = mmap.mmap(fd, BOARD_BYTES)
            finally:
                os.close(fd)
        except OSError as err:
            raise LeaseError(f"cannot create the board {path}: {err}") from err
        _HEADER.pack_into(mapped, 0, _MAGIC, _VERSION, os.getpid(), rank, ranks)
        return cls(path, mapped, rank, ranks)

    @classmethod
    def attach(cls, path: Path) -> Board:
        """Open the board at ``path``. Raises LeaseError when it is missing or not a board."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_uid != os.getuid():
                    raise ValueError("it belongs to another user")
                mapped = mmap.mmap(fd, BOARD_BYTES)
            finally:
                os.close(fd)
        except (OSError, ValueError) as err:
            raise LeaseError(f"cannot open the board {path}: {err}") from err
        magic, version, _pid, rank, ranks = _HEADER.unpack_from(mapped, 0)
        if magic != _MAGIC or version != _VERSION:
            mapped.close()
            raise LeaseError(f"{path} is not a version {_VERSION} board")
        return cls(path, mapped, rank, ranks)

    @property
    def launcher_pid(self) -> int:
        """The process that made the board: the parent of the training process."""
        pid: int = _HEADER.unpack_from(self._map, 0)[2]
        return pid

    def lease_sequence(self) -> int:
        """Changes with every lease written: the one read that a batch costs."""
        sequence: int = _SEQ.unpack_from(self._map, _LEASE_AT)[0]
        return sequence

    def write_lease(self, lease: LeaseView) -> None:
        """Publish a lease (launcher only). Raises LeaseError for too many cores."""
        if len(lease.cores) > _MAX_CORES:
            raise LeaseError(f"a board holds at most {_MAX_CORES} cores, got {len(lease.cores)}")
        fixed = _LEASE.pack(
            lease.generation,
            lease.until_monotonic_s,
            lease.mem_mib,
            lease.batch_size,
            lease.stop,
            lease.stop_step,
            lease.stop_committed | lease.silent << 1,
            lease.core_count,
        )
        cores = struct.pack(f"<I{len(lease.cores)}I", len(lease.cores), *lease.cores)
        self._write(_LEASE_AT, fixed + cores)

    def read_lease(self) -> LeaseView:
        """The current lease, whole."""
        raw = self._read(_LEASE_AT, _REPORT_AT - _LEASE_AT - _SEQ.size)
        generation, until, mem, batch, stop, stop_step, flags, count = _LEASE.unpack_from(raw)
        n = struct.unpack_from("<I", raw, _LEASE.size)[0]
        cores = struct.unpack_from(f"<{min(n, _MAX_CORES)}I", raw, _LEASE.size + 4)
        return LeaseView(
            generation=generation,
            until_monotonic_s=until,
            mem_mib=mem,
            batch_size=batch,
            stop=bool(stop),
            stop_step=stop_step,
            stop_committed=bool(flags & 1),
            silent=bool(flags & 2),
            core_count=count,
            cores=cores,
        )

    def write_report(self, report: Report) -> None:
        """Publish progress (training process only)."""
        fixed = _REPORT.pack(
            report.step,
            report.samples,
            report.epoch,
            report.step_s,
            report.wait_s,
            report.proposed_stop_step,
            report.accepted_stop_step,
            report.refused_stop_step,
            report.checkpoint_done,
            report.heartbeat_monotonic_s,
            report.stepped_s,
            report.waited_s,
        )
        self._write(_REPORT_AT, fixed)

    def read_report(self) -> Report:
        """The latest progress; all zero before the first batch."""
        raw = self._read(_REPORT_AT, _REPORT.size)
        step, samples, epoch, step_s, wait_s, proposed, accepted, refused, done, *seconds = (
            _REPORT.unpack_from(raw)
        )
        beat_s, stepped_s, waited_s = seconds
        return Report(
            step=step,
            samples=samples,
            epoch=epoch,
            step_s=step_s,
            wait_s=wait_s,
            proposed_stop_step=proposed,
            accepted_stop_step=accepted,
            refused_stop_step=refused,
            checkpoint_done=bool(done),
            heartbeat_monotonic_s=beat_s,
            stepped_s=stepped_s,
            waited_s=waited_s,
        )

    def write_training(self, training: Training) -> None:
        """Publish what a training tells of itself (the process of its first rank only)."""
        self._write(_TRAINING_AT, packed(training))

    def read_training(self) -> Training | None:
        """The latest of it; None before the first."""
        return unpacked(self._read(_TRAINING_AT, TRAINING_BYTES))

    def close(self) -> None:
        """Unmap the board; the file stays until its launcher removes it."""
        self._map.close()

    def _write(self, at: int, body: bytes) -> None:
        sequence = _SEQ.unpack_from(self._map, at)[0]
        _SEQ.pack_into(self._map, at, sequence | 1)
        self._map[at + _SEQ.size : at + _SEQ.size + len(body)] = body
        _SEQ.pack_into(self._map, at, (sequence | 1) + 1)

    def _read(self, at: int, size: int) -> bytes:
        deadline_s = time.monotonic() + _GIVE_UP_S
        while True:
            before = _SEQ.unpack_from(self._map, at)[0]
            if not before & 1:
                raw = self._map[at + _SEQ.size : at + _SEQ.size + size]
                if _SEQ.unpack_from(self._map, at)[0] == before:
                    return raw
            # The writer holds the record for microseconds, unless it died inside.
            if time.monotonic() > deadline_s:
                raise LeaseError(f"{self.path}: a record was left half written; its writer died")
            time.sleep(_RETRY_S)
