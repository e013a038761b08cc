"""How many bytes of a job's memory on this node its data cache may hold.

The lease's memory (of the job on the node) without what the job's processes use and a tenth for
what they use only now and then; never more than ``SYNERGY_CACHE_MIB``. Without a lease that names
memory it is ``SYNERGY_CACHE_MIB``, or what there is room for if that is less; else nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from slurm_synergy.errors import CacheError
from slurm_synergy.jobside.board import Board
from slurm_synergy.jobside.ending import say
from slurm_synergy.jobside.environment import task_from
from slurm_synergy.jobside.minio_room import Room, room_for
from slurm_synergy.jobside.minio_store import MinioStore

__all__ = ["Budget", "anonymous_bytes", "asked_bytes"]

_MIB = 1 << 20
_SPARE_PART = 10
_MEASURE_EVERY_S = 30.0


def asked_bytes(env: Mapping[str, str]) -> int | None:
    """``SYNERGY_CACHE_MIB`` in bytes; None when it is unset. Raises CacheError for nonsense."""
    text = env.get("SYNERGY_CACHE_MIB", "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        raise CacheError(f"SYNERGY_CACHE_MIB = {text!r}: expected a whole number of MiB")
    return int(text) * _MIB


def anonymous_bytes(root_pid: int) -> int:
    """The memory of a process and its children that no file stands behind, shared parts once."""
    tree = [root_pid]
    for pid in tree:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                tree.extend(map(int, children.read_text(encoding="ascii").split()))
    return sum(_anonymous_kib(pid) for pid in tree) * 1024


def _anonymous_kib(pid: int) -> int:
    for name, word in (("smaps_rollup", "Pss_Anon:"), ("status", "RssAnon:")):
        try:
            text = Path(f"/proc/{pid}/{name}").read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        for line in text.splitlines():
            if line.startswith(word):
                return int(line.split()[1])
    return 0


class Budget:
    """Keeps a store's budget at what the lease on the board gives; nothing where there is none.

    ``board`` is the launcher's, ``asked_bytes`` the user's limit. Raises CacheError when neither
    tells how much memory there is.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        board: Board | None,
        asked: int | None,
        *,
        measure: Callable[[int], int] = anonymous_bytes,
        clock: Callable[[], float] = time.monotonic,
        room: Callable[[Path, int], Room] = room_for,
    ) -> None:
        self._board, self._asked, self._measure, self._clock = board, asked, measure, clock
        self._room = room
        self._sequence, self._cut = -1, False
        self._ranks = task_from(env).local_ranks
        self._root = board.launcher_pid if board is not None else 0
        if asked is None and (board is None or not board.read_lease().mem_mib):
            raise CacheError(
                "the job's memory is not known, so there is no data cache; set SYNERGY_CACHE_MIB"
                " to the MiB that it may hold on each node"
            )

    def follow(self, store: MinioStore) -> None:
        """Put a new lease, or processes that have grown, into force. Raises OSError."""
        board = self._board
        if board is None:
            if self._sequence < 0:
                store.set_budget(self._to_be_had(store))
                self._sequence = 0
            return
        sequence, now_s = board.lease_sequence(), self._clock()
        if sequence == self._sequence and now_s - store.head.measured_at_s < _MEASURE_EVERY_S:
            return
        lease = board.read_lease()
        if lease.mem_mib:
            store.set_budget(
                lease.mem_mib * _MIB * (_SPARE_PART - 1) // _SPARE_PART,
                process_bytes=self._measure(self._root) * self._ranks,
                at_most=self._asked,
                lease_generation=lease.generation,
                now_s=now_s,
            )
        else:
            store.set_budget(self._to_be_had(store), lease_generation=lease.generation, now_s=now_s)
        self._sequence = sequence

    def _to_be_had(self, store: MinioStore) -> int:
        """What was asked for, or what there is room for; the first process of the run says so."""
        asked, head = self._asked or 0, store.head
        room = self._room(store.path, head.used_bytes)
        if asked <= room.most_bytes:
            return asked
        if not store.began_run and 0 < head.budget_bytes < asked:
            return head.budget_bytes  # as the first one found it
        if not self._cut:
            self._cut = True
            say(
                f"SYNERGY_CACHE_MIB = {asked // _MIB} is more than there is room for: the data"
                f" cache holds {room.most_bytes / _MIB:.1f} MiB at most ({room.what})"
            )
        return room.most_bytes
