"""The worker processes of a lease-aware loader: how many, when to change that, on which CPUs.

Their CPUs follow the lease at once: the launcher pins the whole process tree. Their number follows
when the next epoch begins, and within an epoch when it is off by a factor of two or more. A smaller
difference within an epoch matters in one direction only: too many workers share the CPUs that are
left, but with too few, CPUs lie idle. So a growth is followed once the lease has stood for a
moment, one by less than an eighth once it has stood for a minute (the start of all the new workers
costs more than it brings before), and a small reduction waits for the next epoch.

Nothing here imports torch: all of it runs in programs that did so themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any

from slurm_synergy.errors import ConfigError, LeaseError
from slurm_synergy.jobside.board import Board
from slurm_synergy.jobside.ending import TermWatch
from slurm_synergy.jobside.session import Session

__all__ = [
    "NEVER_S",
    "WorkerInit",
    "change_due_s",
    "cpus_for_workers",
    "end_quietly_with_parent",
    "limit_threads",
    "twin_of",
    "worker_count",
]

NEVER_S = float("inf")
_PARENT_ENDS_WITHIN_S = 1.0
_FAR_OFF = 2
_SETTLED_AFTER_S = 1.0
_SMALL_GROWTH = 8  # one in so many
_SMALL_SETTLED_AFTER_S = 60.0
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
# A forked worker has these libraries, with a pool as wide as the parent's, from its first moment.
_LIBRARIES = ("openblas", "libmkl_rt", "libblis", "libgomp", "libiomp", "libomp")
_SETTERS = (
    "openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "scipy_openblas_set_num_threads64_",
    "MKL_Set_Num_Threads",
    "bli_thread_set_num_threads",
    "omp_set_num_threads",
)


# -- how many ------------------------------------------------------------------------------------


def worker_count(loader: Any, session: Session) -> int:
    """Workers that the lease gives this process; the user's own number where it does not say."""
    asked: int = loader.num_workers
    if asked == 0 or os.environ.get("SYNERGY_WORKERS") == "keep":
        return asked
    if isinstance(loader.dataset, sys.modules["torch.utils.data"].IterableDataset):
        return asked
    if session.board is not None:
        session.lease = session.board.read_lease()
    cores = session.lease.core_count or int(os.environ.get("SYNERGY_LEASE_CPUS") or 0)
    return max(cores // session.identity.local_ranks, 1) if cores else asked


def change_due_s(workers: int, wanted: int, now_s: float) -> float:
    """When ``workers`` should become ``wanted`` within an epoch, on the clock of ``now_s``."""
    if wanted == workers:
        return NEVER_S
    if max(workers, wanted) >= _FAR_OFF * min(workers, wanted):
        return now_s
    if wanted < workers:
        return NEVER_S
    small = (wanted - workers) * _SMALL_GROWTH < workers
    return now_s + (_SMALL_SETTLED_AFTER_S if small else _SETTLED_AFTER_S)


# -- on which CPUs -------------------------------------------------------------------------------


def cpus_for_workers(session: Session) -> tuple[int, ...]:
    """The OS CPUs that a worker may use: a library may have narrowed this thread's own mask."""
    return session.lease.cores or _granted_cpus()


def _granted_cpus() -> tuple[int, ...]:
    granted = os.environ.get("SYNERGY_GRANTED_CPUS", "")
    return tuple(int(cpu) for cpu in granted.split(",")) if granted else ()


class WorkerInit:
    """Runs first in each worker: CPUs, threads and signals as they should be, then the user's own.

    A worker may take seconds to start, in which the lease may have changed: it looks at the board
    itself. ``board`` is the board's path, "" without a launcher.
    """

    def __init__(
        self, cpus: tuple[int, ...], then: Callable[[int], object] | None, board: str = ""
    ) -> None:
        self._cpus, self._then, self._board = cpus, then, board

    def __call__(self, worker_id: int) -> None:
        self._take_cpus()
        limit_threads()
        end_quietly_with_parent()
        handler = signal.getsignal(signal.SIGTERM)
        if isinstance(getattr(handler, "__self__", None), TermWatch):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._then is not None:
            self._then(worker_id)

    def _take_cpus(self) -> None:
        board = None
        if self._board:
            with contextlib.suppress(LeaseError):
                board = Board.attach(Path(self._board))
        while True:
            sequence = board.lease_sequence() if board is not None else 0
            cpus = (board.read_lease().cores if board is not None else ()) or self._cpus
            if cpus:
                # Never less than the launcher has given this process meanwhile; what is too much
                # it takes away again, what was too little it would not notice.
                with contextlib.suppress(OSError):  # these may have left the cpuset meanwhile
                    os.sched_setaffinity(0, os.sched_getaffinity(0) | set(cpus))
            if board is None:
                return
            if board.lease_sequence() == sequence:
                board.close()
                return


# -- the end -------------------------------------------------------------------------------------


def end_quietly_with_parent() -> None:
    """Let this process say nothing of a connection that broke because its parent has ended.

    A worker hands batches over through sockets. A program that ends in the middle of one, as on
    SIGTERM, would be followed by the tracebacks of its workers.
    """
    parent, usual = multiprocessing.parent_process(), sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        broken = issubclass(kind, ConnectionError | EOFError)
        # The kernel may close a dying process's sockets one by one.
        if broken and parent is not None and wait([parent.sentinel], _PARENT_ENDS_WITHIN_S):
            return
        usual(kind, error, traceback)

    sys.excepthook = report


# -- threads -------------------------------------------------------------------------------------


def limit_threads() -> None:
    """Make this worker's numerical libraries use one thread each, or SYNERGY_WORKER_THREADS.

    PyTorch limits itself only. ``keep`` leaves all as it is; a ``worker_init_fn`` of the program's
    own has the last word in any case. Raises ConfigError for anything else than a number.
    """
    asked = os.environ.get("SYNERGY_WORKER_THREADS", "") or "1"
    if asked == "keep":
        return
    if not asked.isdigit() or int(asked) < 1:
        raise ConfigError(
            "not a number of threads",
            key="SYNERGY_WORKER_THREADS",
            value=asked,
            remedy="give a whole number from 1 on, or keep",
        )
    threads = int(asked)
    for name in _THREAD_VARIABLES:  # for libraries that are loaded later
        os.environ[name] = asked
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
    opencv = sys.modules.get("cv2")
    if opencv is not None:
        opencv.setNumThreads(threads if threads > 1 else 0)
    for path in _loaded_libraries():
        _set_threads_of(path, threads)


def _loaded_libraries() -> set[str]:
    try:
        maps = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return set()
    paths = {line.partition("/")[2] for line in maps.splitlines() if ".so" in line}
    return {f"/{path}" for path in paths if any(name in path.lower() for name in _LIBRARIES)}


def _set_threads_of(path: str, threads: int) -> None:
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return  # a data file by that name, or unloaded meanwhile
    for name in _SETTERS:
        setter = getattr(library, name, None)
        if setter is not None:
            setter(ctypes.c_int(threads))


# -- the loader that fetches ---------------------------------------------------------------------


def _all_is_well() -> None:
    """Stands for PyTorch's check of the worker count, which knows nothing of the lease."""


def twin_of(loader: Any, workers: int, session: Session, **changes: Any) -> Any:
    """The same loader with another worker count and other attributes; fetches, is never kept."""
    twin = object.__new__(type(loader))
    twin.__dict__.update(loader.__dict__)
    twin.__dict__.update(
        num_workers=workers,
        check_worker_number_rationality=_all_is_well,
        **changes,
    )
    if workers:
        board = "" if session.board is None else str(session.board.path)
        twin.__dict__["worker_init_fn"] = WorkerInit(
            cpus_for_workers(session), loader.worker_init_fn, board
        )
    return twin
