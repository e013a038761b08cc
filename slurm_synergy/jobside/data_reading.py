"""Measuring what memory would bring a running job: how large its items are, how fast they are read.

The launcher does this once, in a profiling lease, for a second or two and in threads of its own:
it reads some of the job's own files past every cache, and counts what the job itself reads from the
storage meanwhile as well. Sizes are those of the items in the job's data cache, where it has one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_synergy.errors import SynergyError
from slurm_synergy.jobside.data_told import read_told
from slurm_synergy.jobside.minio_place import cache_path
from slurm_synergy.jobside.storage_probe import Bandwidth, OpenFiles, read_bandwidth

__all__ = ["DataFound", "DataReader", "DataReading"]

_MIB = 1 << 20
_MOST_MIB = 200.0
_MOST_FILES = 256
_LOOKS = 5
_LOOK_EVERY_S = 0.04


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFound:
    """What is known of the job's data on this node; zeros for what is not.

    ``dataset_mib`` in ``samples`` items. ``storage_mib_s`` is what reads past every cache come to,
    with what the job itself read meanwhile; ``read_mib`` of it were ours. ``in_memory``: there is
    no storage behind the files. ``cached``: the job has a data cache, which uses its memory.
    ``how`` says it in words.
    """

    dataset_mib: float = 0.0
    samples: int = 0
    storage_mib_s: float = 0.0
    read_mib: float = 0.0
    in_memory: bool = False
    cached: bool = False
    how: str = ""


class DataReader:
    """Knows where a task's data are; :meth:`begin` measures them once.

    ``board`` is the path of the task's board, ``pids`` yields the processes of its command.
    """

    def __init__(
        self, env: Mapping[str, str], board: Path, pids: Callable[[], Iterable[int]]
    ) -> None:
        self._cache, self._board, self._pids = cache_path(env), board, pids
        self._seen = OpenFiles()

    def look(self) -> None:
        """See which files the processes have open, where the program does not tell its files."""
        told = read_told(self._board)
        if told is None or not told.files:
            self._seen.look(self._pids())

    def begin(self, *, readers: int, most_s: float) -> DataReading:
        """Read with so many threads for at most ``most_s`` seconds, beside the caller."""
        return DataReading(lambda: self._found(readers, most_s))

    def _found(self, readers: int, most_s: float) -> DataFound:
        told = read_told(self._board)
        if told is None or not told.files:
            for _ in range(_LOOKS):
                self.look()
                threading.Event().wait(_LOOK_EVERY_S)
        files = [Path(name) for name in told.files] if told else []
        files = files or list(self._seen.files)
        files = files[:_MOST_FILES]
        items, dataset_mib = self._cached_items()
        if not items and told is not None:
            items, dataset_mib = told.samples, told.mib()
        before = _read_bytes(self._pids())
        reading = read_bandwidth(files, readers=readers, most_mib=_MOST_MIB, most_s=most_s)
        by_job_mib = _grown(before, _read_bytes(self._pids())) / _MIB
        storage_mib_s = 0.0
        if reading.mib_s is not None:
            storage_mib_s = reading.mib_s + by_job_mib / reading.seconds
        return DataFound(
            dataset_mib=dataset_mib,
            samples=items if dataset_mib else 0,
            storage_mib_s=storage_mib_s,
            read_mib=reading.read_mib,
            in_memory=reading.in_memory,
            cached=self._cache.is_dir(),
            how=_in_words(reading, files, readers, by_job_mib),
        )

    def _cached_items(self) -> tuple[int, float]:
        """Items and MiB of the data sets in the job's cache; zeros where none is known."""
        if not self._cache.is_dir():
            return 0, 0.0
        from slurm_synergy.jobside.minio_store import MinioStore  # most launchers never need it

        try:
            store = MinioStore(self._cache)
        except (SynergyError, OSError):
            return 0, 0.0
        try:
            items, in_bytes = store.known_sizes
            return items, in_bytes / _MIB
        finally:
            store.close()


class DataReading:
    """A measurement that is under way in a thread; ``found`` is None until it is done."""

    def __init__(self, measure: Callable[[], DataFound]) -> None:
        self.found: DataFound | None = None
        self._measure = measure
        self._thread = threading.Thread(target=self._run, name="data", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        found = DataFound(how="reading failed")
        try:
            found = self._measure()
        except (SynergyError, OSError, RuntimeError, ValueError) as err:
            found = DataFound(how=f"{type(err).__name__}: {err}")
        finally:
            self.found = found  # whatever it was, the training goes on


def _read_bytes(pids: Iterable[int]) -> dict[int, int]:
    """What each process has had fetched from storage, as far as the kernel tells."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = Path(f"/proc/{pid}/io").read_text(encoding="ascii").split()
            found[pid] = int(words[words.index("read_bytes:") + 1])
    return found


def _grown(before: Mapping[int, int], after: Mapping[int, int]) -> int:
    return sum(max(0, count - before[pid]) for pid, count in after.items() if pid in before)


def _in_words(reading: Bandwidth, files: Sequence[Path], readers: int, by_job_mib: float) -> str:
    if reading.mib_s is None:
        return reading.how
    said = (
        f"{reading.read_mib:.0f} MiB of {len(files)} files in {reading.seconds:.2f} s by "
        f"{readers} reader{'s' if readers != 1 else ''}, {reading.how}"
    )
    return said + (f"; {by_job_mib:.0f} MiB by the job meanwhile" if by_job_mib >= 1 else "")
