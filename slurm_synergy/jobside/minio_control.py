"""The control file of a data cache, mapped: its counters, its lock and the data sets it knows.

Writers hold a lock that ends with their process. A writer that died inside leaves the busy word
set; whoever comes next sees to that first. Readers look at single words without a lock.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading

from slurm_synergy.errors import CacheError
from slurm_synergy.jobside import minio_layout as layout
from slurm_synergy.jobside.minio_layout import CONTROL_BYTES, MAX_SPACES, Head, Namespace, Word
from slurm_synergy.jobside.minio_place import CachePlace

__all__ = ["Control"]

# As plain numbers: a look at a class for each of them would cost as much as the rest.
_GENERATION, _BUDGET = int(Word.GENERATION), int(Word.BUDGET)
_FULL, _NO_SPACE = int(Word.FULL), int(Word.NO_SPACE)
_BUSY, _SHRINKING = int(Word.BUSY), int(Word.SHRINKING)
_SECOND_SPACE = int(Word.SPACES) + int(Word.SPACE_WORDS)


class _Exclusive:
    """A block under the lock: a class, as a generator costs each insert twice as much."""

    __slots__ = ("_control", "_head", "_patient")

    def __init__(self, control: Control, patient: bool) -> None:
        self._control, self._patient = control, patient

    def __enter__(self) -> Head:
        self._head = self._control.acquire(self._patient)
        return self._head

    def __exit__(self, kind: object, *_: object) -> None:
        self._control.release(self._head if kind is None else None)


class Control:
    """The control file in an open cache directory; makes it where there is none.

    ``words`` are its numbers of eight bytes, see :class:`Word`. Raises CacheError for one of
    another version in use, OSError where there is no room.
    """

    def __init__(self, place: CachePlace) -> None:
        self._place, self._thread = place, threading.Lock()
        self._lock_fd = place.open_file("control", os.O_RDWR | os.O_CREAT)
        if place.alone or not self._attach():
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            try:
                if not self._attach():
                    self._begin()
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        # For what is done for every item.
        self.words = memoryview(self._control).cast("Q")

    def _make_first_table(self) -> None:
        """Where nobody holds anything yet. Raises OSError."""
        raise NotImplementedError

    def _entered(self, head: Head) -> Head:
        """What comes first under the lock; the counters as they are then. Raises OSError."""
        raise NotImplementedError

    def _attach(self) -> bool:
        """Map the file; False when it is to be made."""
        if os.fstat(self._lock_fd).st_size < CONTROL_BYTES:
            return False
        self._control = mmap.mmap(self._lock_fd, CONTROL_BYTES)
        if not layout.is_marked(self._control):
            return False
        if layout.is_good(self._control):
            return True
        if not self._place.alone:
            raise CacheError(f"{self._place.path} is in use by another version of slurm-synergy")
        return False

    def _begin(self) -> None:
        for name in self._place.names():
            if name != "control":
                self._place.unlink(name)
        os.posix_fallocate(self._lock_fd, 0, CONTROL_BYTES)
        self._control = mmap.mmap(self._lock_fd, CONTROL_BYTES)
        self._control[:] = bytes(CONTROL_BYTES)
        self._make_first_table()
        layout.put_head(self._control, Head())
        layout.mark_good(self._control)

    # -- looks without a lock ----------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Grows whenever items moved or went."""
        return self.words[_GENERATION]

    @property
    def full(self) -> bool:
        """No item will be taken in."""
        return self.words[_FULL] != 0 or self.words[_NO_SPACE] != 0

    @property
    def head(self) -> Head:
        """The counters as they are now, perhaps while somebody changes them."""
        return layout.read_head(self._control)

    @property
    def budget_bytes(self) -> int:
        """The budget as it is now."""
        return self.words[_BUDGET]

    @property
    def shrinking(self) -> bool:
        """Somebody is giving memory back, which takes long."""
        return self.words[_SHRINKING] != 0

    # -- the lock ----------------------------------------------------------------------------------

    def reopen(self) -> None:
        """After a fork: a lock of this process's own. Raises OSError."""
        self._thread = threading.Lock()
        self._lock_fd = self._place.open_file("control", os.O_RDWR)

    def exclusive(self, *, patient: bool = False) -> _Exclusive:
        """The counters, to be changed; written back when the block ends well.

        Raises BlockingIOError while another process is giving memory back, which takes long,
        unless ``patient``.
        """
        return _Exclusive(self, patient)

    def lock(self) -> None:
        """Keep others out, and no more than that; see :meth:`acquire`."""
        self._thread.acquire()
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        except BaseException:
            self._thread.release()
            raise

    def unlock(self) -> None:
        """Let others in again."""
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        finally:
            self._thread.release()

    def acquire(self, patient: bool) -> Head:
        """What :meth:`exclusive` does before the block."""
        long = self.words[_SHRINKING] and not patient
        self._thread.acquire()
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | (fcntl.LOCK_NB if long else 0))
            try:
                head = self._entered(self.head)
                self.words[_BUSY] = 1
                return head
            except BaseException:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
                raise
        except BaseException:
            self._thread.release()
            raise

    def release(self, head: Head | None) -> None:
        """What it does behind it; without ``head``, the next one counts everything anew."""
        try:
            if head is not None:
                self.publish(head)
                self.words[_BUSY] = self.words[_SHRINKING] = 0
        finally:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
            self._thread.release()

    def publish(self, head: Head) -> None:
        """Make the counters seen by all."""
        layout.put_head(self._control, head)

    def announce_shrinking(self) -> None:
        """From now on the others do not wait for the lock."""
        self.words[_SHRINKING] = 1

    # -- data sets ---------------------------------------------------------------------------------

    def namespaces(self) -> list[Namespace]:
        """The data sets that are known, in the order of their numbers."""
        found = []
        for number in range(MAX_SPACES):
            space = self.namespace(number)
            if not space.ident:
                break
            found.append(space)
        return found

    @property
    def has_one_namespace(self) -> bool:
        """There is no second data set; one look without a lock."""
        return not self.words[_SECOND_SPACE]

    def namespace(self, number: int) -> Namespace:
        """The data set with this number."""
        return layout.read_namespace(self._control, number)

    def write_namespace(self, number: int, space: Namespace) -> None:
        """Under the lock only."""
        layout.put_namespace(self._control, number, space)

    def enter_namespace(self, ident: int, items: int) -> int:
        """The number of a data set, which is used in this run. Raises CacheError when too many."""
        run = self.head.run
        for number, space in enumerate(self.namespaces()):
            if space.ident == ident and space.run == run:
                return number
        with self.exclusive(patient=True) as head:
            spaces = self.namespaces()
            known = [number for number, space in enumerate(spaces) if space.ident == ident]
            number = known[0] if known else len(spaces)
            if number >= MAX_SPACES:
                raise CacheError(f"a job's data cache holds at most {MAX_SPACES} data sets")
            space = spaces[number] if known else Namespace(ident=ident, items=items)
            space.run = head.run
            self.write_namespace(number, space)
        return number

    def close(self) -> None:
        """Unmap everything; the files stay."""
        os.close(self._lock_fd)
