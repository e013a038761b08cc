"""The items of a data cache: taken in until the budget is full, never replaced, shared by all.

Items lie one behind the other in segment files. A view of an item stays good for as long as
somebody holds it, also after the cache gave the item up. A hit is a look at the index and a slice
of a mapping.

Each item has a place in a seeded permutation of its data set. Where the number of items is known
only a prefix of the permutation is taken in, and when the budget shrinks the cache keeps the
longest prefix that fits: which items are held follows from the seed and the budget alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from slurm_synergy.errors import CacheError
from slurm_synergy.jobside.minio_index import Index
from slurm_synergy.jobside.minio_insert import (
    Miss,
    Offer,
    insert_quickly,
    limit_of,
    sample_of,
)
from slurm_synergy.jobside.minio_item import Item, Source, stride_of
from slurm_synergy.jobside.minio_layout import Head, Namespace, Slot
from slurm_synergy.jobside.minio_place import CachePlace
from slurm_synergy.jobside.minio_segments import Segments

__all__ = ["Item", "MinioStore", "Offer", "Source"]

_MIN_SEGMENT, _MAX_SEGMENT = 16 << 20, 16 << 30
# A process maps each segment once, which takes a descriptor; giving memory back copies one at most.
_SEGMENTS = 64
_ENOUGH_SIZES = 64
_MOST_MISSES = 1024


def _no_stamp() -> int:
    return 0


class MinioStore:
    """The cache in one directory, as one process sees it; forked children may use it as well.

    Raises CacheError when the directory cannot be used or has no room for an index.
    """

    def __init__(self, path: Path) -> None:
        self._place = CachePlace(path)
        try:
            self._index = Index(self._place)
        except OSError as err:
            self._place.close()
            raise CacheError(f"cannot use {path} for the data cache: {err.strerror}") from err
        except CacheError:
            self._place.close()
            raise
        self.path, self._pid = path, os.getpid()
        self._segments = Segments(self._place)
        self._run, self._generation = self._index.head.run, self._index.generation
        # Looks that found nothing, which need not be made again before the items are put in.
        self._missed: dict[bytes, Miss] = {}
        self._refused = False

    def enter(self, name: str, items: int) -> Source:
        """The data set ``name`` with so many items (0: unknown). Raises CacheError, OSError."""
        self._follow_fork()
        digest = hashlib.blake2b(f"{name}:{items}".encode("utf-8", "surrogateescape"))
        ident = int.from_bytes(digest.digest()[:8], "little") | 1
        return Source(
            self._index.enter_namespace(ident, items), ident, items, stride_of(items or 1)
        )

    @property
    def began_run(self) -> bool:
        """Nobody else used the cache when it was opened."""
        return self._place.alone

    @property
    def head(self) -> Head:
        """The counters: items, used and budgeted bytes."""
        return self._index.head

    @property
    def known_sizes(self) -> tuple[int, float]:
        """Items and bytes of this run's data sets, by the mean of the sizes that were seen.

        Of those whose number of items is known; two zeros where there is none yet.
        """
        run, items, total = self._index.head.run, 0, 0.0
        for space in self._index.namespaces():
            if space.run == run and space.items and space.seen:
                items += space.items
                total += space.items * space.seen_bytes / space.seen
        return items, total

    def keys(self) -> set[bytes]:
        """The keys of all items that are held."""
        self._catch_up()
        return {slot.key for _, slot in self._index.slots()}

    def _follow_fork(self) -> None:
        if self._pid != os.getpid():
            self._index.reopen()
            self._segments.after_fork()
            self._pid = os.getpid()

    def _catch_up(self) -> None:
        self._follow_fork()
        self._segments.forget_maps()
        self._generation = self._index.generation
        self._index.refresh()

    # -- reading -----------------------------------------------------------------------------------

    def get(self, key: bytes, stamp: Callable[[], int] = _no_stamp) -> memoryview | None:
        """The item, read-only and not copied; None when it is not held.

        What an earlier run left is believed after a look: its checksum holds and ``stamp()``, which
        is called for that only, is what it was. Raises OSError when the cache itself is gone.
        """
        if self._index.generation != self._generation or self._pid != os.getpid():
            self._catch_up()
        return self._get(key, stamp)

    def get_all(self, keys: Iterable[bytes]) -> list[memoryview | None]:
        """What :meth:`get` gives for each, for items without a stamp."""
        if self._index.generation != self._generation or self._pid != os.getpid():
            self._catch_up()
        return [self._get(key, _no_stamp) for key in keys]

    def _get(self, key: bytes, stamp: Callable[[], int]) -> memoryview | None:
        # What lies in a segment never changes, so a look at a table that was replaced meanwhile
        # finds nothing wrong.
        for _ in range(3):
            at, slot = self._index.look(key)
            if slot is None:
                if len(self._missed) >= _MOST_MISSES:
                    self._missed.clear()
                self._missed[key] = self._generation, self._index.table[0], at
                return None
            view = self._segments.view(slot)
            if view is None:
                self._catch_up()
                continue  # moved between the two looks
            if slot.run != self._run and not self._still_good(at, slot, view, stamp):
                return None
            return view
        return None

    def _still_good(self, at: int, slot: Slot, view: memoryview, stamp: Callable[[], int]) -> bool:
        self._run = self._index.head.run
        if slot.run == self._run:
            return True
        if slot.sample == sample_of(view) and slot.stamp == stamp():
            self._index.set_run(at, self._run)
            return True
        with contextlib.suppress(BlockingIOError), self._index.exclusive() as head:
            again = self._index.find(slot.key)
            if again is not None and again[1] == slot:
                self._forget(head, *again)
        return False

    # -- taking in ---------------------------------------------------------------------------------

    @property
    def takes_more(self) -> bool:
        """False when :meth:`put` cannot take anything in: one look, no lock."""
        return not self._index.full

    def put(self, item: Item, content: bytes | memoryview, stamp: int = 0) -> bool:
        """Take an item in, if there is room and it belongs to the prefix; True when it is held.

        Raises OSError (ENOSPC among others) when the storage has no room; nothing more is taken
        in then, by any process, until the budget changes.
        """
        index = self._index
        if index.full or (self._refused and self._is_beyond(item)):
            return False
        if self._pid != os.getpid():
            self._follow_fork()
        if not index.shrinking and insert_quickly(
            index, self._segments.tail, ((item, content, stamp),), self._missed
        ):
            return True
        return self._put_slowly(item, content, stamp)

    def put_all(self, offers: Sequence[Offer]) -> None:
        """Like :meth:`put` for each, in less time; all of one data set."""
        index = self._index
        if self._pid != os.getpid():
            self._follow_fork()
        if len(offers) > 1:  # a batch may have an item twice
            offers = list({offer[0].key: offer for offer in offers}.values())
        while offers and not index.full:
            if self._refused:
                offers = [each for each in offers if not self._is_beyond(each[0])]
            done = 0
            if offers and not index.shrinking:
                done = insert_quickly(index, self._segments.tail, offers, self._missed)
            if offers and not done:
                self._put_slowly(*offers[0])
                done = 1
            offers = offers[done:]

    def _put_slowly(self, item: Item, content: bytes | memoryview, stamp: int) -> bool:
        index = self._index
        try:
            head = index.acquire(False)
        except BlockingIOError:
            return False  # memory is being given back
        good: Head | None = None
        try:
            held = self._take(head, item, content, stamp)
            good = head
        except OSError:
            head.no_space = 1
            good = head
            raise
        finally:
            index.release(good)
        return held

    def _is_beyond(self, item: Item) -> bool:
        """Known without a lock, once the sizes are, where one data set has the whole budget."""
        space = self._index.namespace(item.namespace)
        if space.seen < _ENOUGH_SIZES or not self._index.has_one_namespace:
            return False
        return item.place >= _limit(space, self._index.budget_bytes, item)

    def _take(self, head: Head, item: Item, content: bytes | memoryview, stamp: int) -> bool:
        space = self._index.namespace(item.namespace)
        _note_size(space, len(content))
        held = not (head.full or head.no_space) and self._take_noted(
            head, space, item, content, stamp
        )
        self._index.write_namespace(item.namespace, space)
        return held

    def _take_noted(
        self, head: Head, space: Namespace, item: Item, content: bytes | memoryview, stamp: int
    ) -> bool:
        length = len(content)
        others: list[Namespace] = []
        in_use: list[Namespace] = []
        share = head.budget_bytes
        if not self._index.has_one_namespace:
            others = self._index.namespaces()
            in_use = [each for each in others if each.run == head.run and each.ident != space.ident]
            share -= sum(each.used_bytes for each in in_use)
        if item.place >= _limit(space, share, item):
            self._refused = True
            return False
        *state, free = self._missed.pop(item.key, (-1, -1, -1))
        is_new = state == [head.generation, head.table] and self._index.is_free(free)
        if not is_new and self._index.find(item.key) is not None:
            return True
        if length > head.budget_bytes - head.used_bytes:
            self._drop_unused(head, others)
            space.used_bytes = self._index.namespace(item.namespace).used_bytes
        left = head.budget_bytes - head.used_bytes
        if length > left:
            # One large item among small ones must not end it.
            filled = left <= head.budget_bytes // 64
            head.full = int(head.used_bytes > 0 and (filled or length <= space.smallest))
            return False
        segment, offset = self._segments.append(head, content)
        self._index.insert(
            head,
            Slot(
                item.key, item.place, offset, length, stamp, segment, item.namespace,
                sample_of(content), 0, head.run,
            ),
        )  # fmt: skip
        space.used_bytes += length
        smallest = space.smallest
        for each in in_use:
            if each.seen:
                smallest = min(smallest, each.smallest)
        head.full = int(left - length < smallest)
        return True

    # -- giving back -------------------------------------------------------------------------------

    def set_budget(
        self,
        budget_bytes: int,
        *,
        process_bytes: int = 0,
        at_most: int | None = None,
        lease_generation: int = 0,
        now_s: float = 0.0,
    ) -> None:
        """Change how many bytes of items are held, at once.

        ``process_bytes`` is taken off it, where the largest value that any process told counts;
        ``at_most`` limits the result. A change by an older lease is ignored; ``now_s`` is noted.
        Raises BlockingIOError while another process gives memory back, OSError when the cache is
        gone.
        """
        self._follow_fork()
        with self._index.exclusive() as head:
            if lease_generation < head.lease_generation:
                return
            head.lease_generation, head.measured_at_s = lease_generation, int(now_s)
            head.process_bytes = max(head.process_bytes, process_bytes)
            budget = max(budget_bytes - head.process_bytes, 0)
            if at_most is not None:
                budget = min(budget, at_most)
            if budget == head.budget_bytes and head.used_bytes <= budget:
                return
            if budget > head.budget_bytes:
                head.full = head.no_space = 0
            head.budget_bytes = budget
            wanted = 1 << max(budget // _SEGMENTS, 1).bit_length()
            head.segment_bytes = min(max(_MIN_SEGMENT, wanted), _MAX_SEGMENT)
            if head.used_bytes > budget:
                self._shrink(head)

    def _shrink(self, head: Head) -> None:
        """Keep the longest prefix of the permutation that fits."""
        self._index.announce_shrinking()
        held = sorted(self._index.slots(), key=lambda each: (each[1].place, each[1].key))
        left = head.budget_bytes
        drop: list[tuple[int, Slot]] = []
        for number, (_, slot) in enumerate(held):
            left -= slot.length
            if left < 0:
                drop = held[number:]
                break
        self._release(head, drop)

    def _drop_unused(self, head: Head, spaces: list[Namespace]) -> None:
        """Make room of data sets that this run has not opened."""
        stale = {number for number, space in enumerate(spaces) if space.run != head.run}
        if any(spaces[number].used_bytes for number in stale):
            drop = [each for each in self._index.slots() if each[1].namespace in stale]
            self._release(head, drop)

    def _forget(self, head: Head, at: int, slot: Slot) -> None:
        self._index.remove(head, at, slot)
        space = self._index.namespaces()[slot.namespace]
        space.used_bytes -= slot.length
        self._index.write_namespace(slot.namespace, space)

    def _release(self, head: Head, drop: Iterable[tuple[int, Slot]]) -> None:
        """Forget items and free their memory: what else lies in their segments moves."""
        touched = set()
        for at, slot in drop:
            self._forget(head, at, slot)
            touched.add(slot.segment)
        if not touched:
            return
        if head.tail:
            head.segment, head.tail = head.segment + 1, 0
        stay: dict[int, list[tuple[int, Slot]]] = {number: [] for number in touched}
        for at, slot in self._index.slots():
            if slot.segment in stay:
                stay[slot.segment].append((at, slot))
        for number in sorted(touched):
            for at, slot in stay[number]:
                self._move(head, at, slot)
            self._segments.remove(number)
            head.generation += 1
            self._index.publish(head)
        self._catch_up()

    def _move(self, head: Head, at: int, slot: Slot) -> None:
        view = self._segments.view(slot)
        try:
            if view is None:
                raise OSError(2, "a segment of the data cache is gone")
            segment, offset = self._segments.append(head, view)
        except OSError:
            self._forget(head, at, slot)  # no room even for moving it
            return
        self._index.replace(at, slot._replace(segment=segment, offset=offset))

    def leave(self) -> None:
        """Give the directory's lock back, and no more: other threads may be writing an item."""
        self._place.close()

    def close(self) -> None:
        """Give the directory's lock back. Views that were handed out stay good."""
        self._segments.close()
        self._index.close()
        self._place.close()


def _note_size(space: Namespace, length: int) -> None:
    if length < space.smallest or not space.seen:
        space.smallest = length
    if length > space.largest:
        space.largest = length
    space.seen += 1
    space.seen_bytes += length


def _limit(space: Namespace, share_bytes: int, item: Item) -> int:
    """Where the prefix of the data set ends, as far as its sizes are known."""
    one_size = space.smallest == space.largest
    known = space.items, space.seen, space.seen_bytes
    return limit_of(share_bytes, *known, one_size=one_size, exact=item.exact)
