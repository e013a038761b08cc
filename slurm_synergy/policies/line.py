"""The jobs that may start, in the order of their arrival, kept from one round to the next.

Where nobody holds anything, that order changes by those that come and go alone, and why a job waits
while no GPU is free does not depend on the others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from operator import attrgetter, itemgetter

from slurm_synergy.core.model import JobStatus, Reason, Snapshot
from slurm_synergy.core.request import Request, Trail
from slurm_synergy.core.snapshot import Ascending, Stamp, Standing, standing

__all__ = ["Line"]

_Key = tuple[float, int]
_first, _id = itemgetter(0), attrgetter("job.job_id")


class Line:
    """Jobs of a snapshot in which none holds anything, none of them blocked; kept with the nodes.

    ``walk`` are their statuses in order, ``blocked`` the reasons of the others; ``same`` is how
    many of the first are the same jobs as at the last look.
    """

    __slots__ = (
        "_ahead",
        "_alike",
        "_entered",
        "_in_order",
        "_key_of",
        "_keys",
        "_refused",
        "_refused_at",
        "_requests",
        "_stamp",
        "_trail",
        "blocked",
        "same",
        "walk",
    )

    def __init__(self) -> None:
        self.walk: list[JobStatus] = []
        self.blocked: dict[int, Reason] = {}
        self.same = 0
        self._stamp: Stamp | None = None
        # Beside each of the walk: its key, and its request once it was asked for.
        self._keys: list[_Key] = []
        self._requests: list[Request | None] = []
        self._key_of: dict[int, _Key] = {}
        # Who has entered since the reasons were last found, who was then ahead of those that found
        # no free GPU, in order, how many of these have stayed, and the reasons of the others.
        self._entered: set[int] = set()
        self._ahead: list[int] = []
        self._alike = 0
        self._refused: dict[int, Reason] | None = None
        # The round of these reasons.
        self._refused_at: Stamp | None = None
        # How the jobs of the last walk were packed, as far as they were in this order.
        self._trail: Trail | None = None
        self._in_order = 0

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> Line | None:
        """That of ``snapshot``; None where somebody holds something, or nothing may start."""
        jobs = standing(snapshot)
        if jobs.holding or snapshot.draining:
            return None
        found = snapshot.of_nodes.get(cls)
        if not isinstance(found, cls):
            found = snapshot.of_nodes[cls] = cls()
        found._bring_up(jobs)
        return found

    def _bring_up(self, jobs: Standing) -> None:
        changes = jobs.changes
        if jobs.stamp is self._stamp:
            return
        if changes is None or changes.earlier is not self._stamp:
            self._begin(jobs)
            return
        self._stamp, self.same = jobs.stamp, len(self.walk)
        for job_id in changes.gone:
            self._leave(job_id)
        for job_id in sorted(changes.renewed):
            self._renew(jobs.by_id[job_id])
        self._alike = min(self._alike, self.same)

    def _begin(self, jobs: Standing) -> None:
        self.__init__()  # type: ignore[misc]
        self._stamp = jobs.stamp
        for status in jobs.pending:
            if status.blocked is not None:
                self.blocked[status.job.job_id] = status.blocked
        self.walk = [status for status in jobs.pending if status.blocked is None]
        self.walk.sort(key=_key)
        self._keys = list(map(_key, self.walk))
        self._requests = [None] * len(self.walk)
        self._key_of = {key[1]: key for key in self._keys}

    def _leave(self, job_id: int) -> None:
        self.blocked.pop(job_id, None)
        key = self._key_of.pop(job_id, None)
        if key is not None:
            at = bisect_left(self._keys, key)
            del self._keys[at], self.walk[at], self._requests[at]
            self.same = min(self.same, at)
            self._entered.discard(job_id)
            if self._refused is not None:
                self._refused.pop(job_id, None)

    def _renew(self, status: JobStatus) -> None:
        job_id = status.job.job_id
        key = self._key_of.get(job_id)
        if key is not None and status.blocked is None:
            at = bisect_left(self._keys, key)
            before = self.walk[at]
            if before.job is status.job and before.profile is status.profile:
                self.walk[at] = status  # it has only done more
                return
        self._leave(job_id)
        if status.blocked is not None:
            self.blocked[job_id] = status.blocked
            return
        key = self._key_of[job_id] = _key(status)
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self.walk.insert(at, status)
        self._requests.insert(at, None)
        self.same = min(self.same, at)
        self._entered.add(job_id)

    def requests(self, begin: int, of: Callable[[JobStatus], Request]) -> Iterator[Request]:
        """What those from ``begin`` on ask for; ``of`` makes the request of one of them."""
        known = self._requests
        for at in range(begin, len(known)):
            request = known[at]
            if request is None:
                request = known[at] = of(self.walk[at])
            yield request

    def packed_alike(self, trail: Trail) -> int:
        """How many of the first jobs ``trail`` packs just as they were packed the last time."""
        return min(self.same, self._in_order) if trail is self._trail else 0

    def keep(self, trail: Trail | None, in_order: int) -> None:
        """Remember how this walk began to be packed; the first ``in_order`` as they came."""
        self._trail, self._in_order = trail, in_order

    def refuse(self, at: int, reason_of: Callable[[JobStatus], Reason]) -> Ascending:
        """Why all from ``at`` on wait, as no GPU is free; ``reason_of`` tells it of one of them."""
        keys, refused = self._keys, self._refused
        same = min(self._alike, at)
        ahead = [key[1] for key in keys[same:at]]
        if refused is None:
            entered = [status.job.job_id for status in self.walk[at:]]
            refused = {one.job.job_id: reason_of(one) for one in sorted(self.walk[at:], key=_id)}
        else:
            were, are = set(self._ahead[same:]), set(ahead)
            for job_id in are - were:
                refused.pop(job_id, None)
            back = (self._entered | were) - are
            entered = sorted(back & self._key_of.keys())
            last = next(reversed(refused), -1)
            for job_id in entered:
                place = bisect_left(keys, self._key_of[job_id])
                refused[job_id] = reason_of(self.walk[place])
            if entered and entered[0] < last:
                refused = dict(sorted(refused.items(), key=_first))
        earlier, self._refused_at = self._refused_at, self._stamp
        self._entered, self._refused = set(), refused
        self._ahead[same:] = ahead
        self._alike = at
        return Ascending(refused.copy(), earlier, entered)


def _key(status: JobStatus) -> _Key:
    job = status.job
    return job.submitted_s, job.job_id
