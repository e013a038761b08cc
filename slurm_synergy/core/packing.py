"""Packing of GPU requests onto nodes: can these jobs run together, and where.

Only GPUs are distributed here. Cores and memory count with what promises P1 and P7 make
indispensable, so that a set of jobs that packs can also be given its proportional rates, whatever
the mechanism does with the rest. Policies ask whether a set packs, mechanisms where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress, islice
from operator import attrgetter, itemgetter, not_
from typing import Any

from slurm_synergy.core.counting import staying_if_all_fit
from slurm_synergy.core.model import (
    Configuration,
    Grant,
    Job,
    JobPhase,
    JobStatus,
    Node,
    Placement,
    Profile,
    Snapshot,
)
from slurm_synergy.core.packer import Mark, Packer, pack_gpus
from slurm_synergy.core.pipeline import floor_share
from slurm_synergy.core.regrouping import largest_first
from slurm_synergy.core.request import Asked, Request, Step, Trail, layout_of, needs_by
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.room import Amounts, GpuLayout, Need, Needs, Parts, Pool, Shape, parts_of
from slurm_synergy.core.snapshot import held, keeps_all
from slurm_synergy.core.values import maker

__all__ = [
    "Packer",
    "Plain",
    "Request",
    "Requests",
    "Rule",
    "Step",
    "Trail",
    "layout_of",
    "pack_gpus",
    "parts_of",
]

Rule = Callable[[JobStatus, Node, int], Resources]
"""What a job needs on a node for a number of its GPUs, in somebody's opinion."""

_FORGOTTEN_AT_LEAST = 1000
_ONE_AT_BEST = (None, 1)
"""Numbers of nodes that let a job be on a single one."""

_GRANT_OF: Callable[[Request], Any] = attrgetter("grant")
_LAYOUT: Callable[[Step], GpuLayout] = itemgetter(1)
_REQUEST = maker(Request)
_GRANT = maker(Grant)
# Until Python 3.12, looking up a member of an enumeration takes longer than comparing it.
_RUNNING = JobPhase.RUNNING


Plain = tuple[Request, int, Asked, Resources]
"""A job that runs as asked on a single node: the number of that, and what it holds there.

Where most jobs stay, a round need not look at what lies behind them, each somewhere else.
"""

_Running = tuple[Job, Profile, Placement, Plain]
"""Such a job, and what it was made of."""


class _Lasting:
    """What requests have in common over all rounds with the same nodes."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.pool = Pool(snapshot.nodes)
        self._jobs = 0
        self._needs: dict[Rule, Needs] = {}
        self._usable = [0] * len(self.pool.kinds)
        for node, kind in zip(self.pool.nodes, self.pool.kind_of, strict=True):
            self._usable[kind] += node.capacity.gpus > 0
        # Of jobs that hold nothing, with what they were made from.
        self.requests: dict[int, tuple[Job, Profile, Request]] = {}
        # Of jobs that run as asked on a single node, likewise.
        self.running: dict[int, _Running] = {}
        # What jobs that are alike ask for; the profile is kept so that its id stays its own.
        self._sorts: dict[tuple[object, ...], tuple[Profile, Asked]] = {}
        self._reaches: dict[tuple[Shape, Need], int] = {}
        # How the last packing into empty nodes began, in the order of the policy and by size.
        self.trail: Trail = []
        self.largest_first: Trail = []
        # How many of the first of ``trail`` come largest first as well.
        self.ordered = 0
        self.marks: Sequence[Mark] = ()
        self.configurations: dict[Shape, Configuration] = {}

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> _Lasting:
        """What there is for the nodes of ``snapshot``."""
        found = snapshot.of_nodes.get(cls)
        if not isinstance(found, cls):
            found = snapshot.of_nodes[cls] = cls(snapshot)
        found._expect(len(snapshot.jobs))
        return found

    def _expect(self, jobs: int) -> None:
        """There are so many jobs now: forget all where most is about others."""
        self._jobs = jobs
        for needs in self._needs.values():
            needs.expect(jobs)
        several: tuple[dict[Any, Any], ...] = (
            *(self.requests, self.running),
            *(self._sorts, self._reaches),
        )
        for known in several:
            if len(known) > 2 * jobs + _FORGOTTEN_AT_LEAST:
                known.clear()

    def needs(self, rule: Rule) -> Needs:
        """What jobs need by ``rule``."""
        found = self._needs.get(rule)
        if found is None:
            found = self._needs[rule] = Needs.shared(self.pool, rule)
            found.expect(self._jobs)
        return found

    def pending(self, status: JobStatus) -> Request:
        """What a job that holds nothing asks for, as the user has it; made once."""
        job, profile = status.job, status.profile
        kept = self.requests.get(job.job_id)
        known = kept is not None and kept[0] is job and kept[1] is profile
        if kept is not None and known and kept[2].made_of is not None:
            return kept[2]
        asked = self.asked(status)
        made = _REQUEST(
            job_id=job.job_id,
            alike=asked,
            shape=asked.shape,
            need=asked.need,
            size=asked.size,
            held_parts=[],
            made_of=(job, profile),
        )
        self.requests[job.job_id] = (job, profile, made)
        return made

    def asked(self, status: JobStatus) -> Asked:
        """What a job asks for as the user has it."""
        job, profile = status.job, status.profile
        key = needs_by(job, profile)
        found = self._sorts.get(key)
        if found is None:
            shape, need = (job.gpus, job.nodes, job.gpu_types), self.needs(floor_share).of(status)
            asked = Asked(shape, need, self.reach(shape, need))
            found = self._sorts[key] = profile, asked
        return found[1]

    def reach(self, shape: Shape, need: Need) -> int:
        """GPUs that such jobs could take in the empty pool, regardless of how many nodes each."""
        found = self._reaches.get((shape, need))
        if found is None:
            found = self._reaches[shape, need] = _reach(self.pool, self._usable, shape, need)
        return found


class Requests:
    """The requests of one round's jobs, and how they pack.

    All of it follows from the snapshot alone; policy and mechanism ask for the same, so it is kept
    with the snapshot. What depends on the nodes and on jobs that hold nothing is kept with the
    nodes.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._lasting = _Lasting.of_snapshot(snapshot)
        self.pool = self._lasting.pool
        self._usable = snapshot.usable
        self._floors = self._lasting.needs(floor_share)
        self._made: dict[int, Request] = {}
        # Of the jobs that ``of_holding`` was asked for, in this order.
        self.plain: list[Plain] = []
        self._packed: tuple[list[Request], Mapping[int, GpuLayout | None]] = ([], {})
        self._counted: tuple[list[Request], frozenset[int] | None] = ([], None)
        # The packing of the requests of ``_counted``, if it is known but for being written down.
        self._again: Callable[[], Mapping[int, GpuLayout]] | None = None
        # The packer that put just the requests of ``_packed``, one after the other, if one did.
        self._adopted: Packer | None = None
        self._granted: tuple[tuple[Grant, ...], Sequence[Request]] = ((), ())

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> Requests:
        """The requests of ``snapshot``: the same object whenever asked."""
        found = snapshot.derived.get(cls)
        if not isinstance(found, cls):
            found = snapshot.derived[cls] = cls(snapshot)
        return found

    def pack(self, requests: Sequence[Request]) -> Mapping[int, GpuLayout | None]:
        """``pack_gpus`` of these requests, remembered until others are asked for."""
        before, packed = self._packed
        asked = list(requests)
        if self._again is not None and asked == self._counted[0]:
            packed = self._again()
            self._packed, self._adopted, self._again = (asked, packed), None, None
        elif asked != before:
            packed = pack_gpus(self.pool, asked, self._lasting.largest_first)
            self._packed, self._adopted = (asked, packed), None
        elif self._adopted is not None:
            packed = self._adopted.layouts
        return packed

    def staying(self, requests: Sequence[Request]) -> frozenset[int] | None:
        """Ids of those that ``pack`` of these leaves where they are, if each gets a place.

        None where only ``pack`` tells, and where it has been asked, so that it costs no more.
        """
        asked = list(requests)
        if asked == self._packed[0]:
            return None
        if asked != self._counted[0]:
            self._counted, self._again = (asked, staying_if_all_fit(self.pool, asked)), None
        return self._counted[1]

    def layouts(self, requests: Sequence[Request]) -> list[GpuLayout | None]:
        """``pack`` of these requests: where each of them goes."""
        if self._adopted is not None and requests == self._packed[0]:
            return list(map(_LAYOUT, self._adopted.trail))
        packed = self.pack(requests)
        return [packed[request.job_id] for request in requests]

    def adopt(self, requests: list[Request], packer: Packer) -> None:
        """Take over how ``packer`` put exactly these, where ``pack`` would do the very same."""
        lasting, self._adopted, self._again = self._lasting, None, None
        if packer.is_plain:
            ordered = largest_first(requests, min(packer.retraced, lasting.ordered))
            lasting.trail, lasting.ordered = packer.trail, min(ordered, len(packer.trail))
            lasting.marks = packer.marks
            if ordered == len(packer.trail) == len(requests):
                self._packed, self._adopted = (requests, {}), packer
            elif ordered == len(requests):
                self._packed = (requests, packer.layouts)
            return
        found = packer.staying_again()
        if found is not None:
            self._packed, self._counted = ([], {}), (requests, found[0])
            self._again = lambda: {**packer.layouts, **found[1]}

    def packer(self, holding: Iterable[Request]) -> Packer:
        """A packer for jobs of which ``holding`` hold something."""
        return Packer(self.pool, holding, self._lasting.trail, self._lasting.marks)

    def needs(self, rule: Rule) -> Needs:
        """What jobs need by ``rule``."""
        return self._lasting.needs(rule)

    def floor(self, status: JobStatus) -> Need:
        """What the job cannot do without (promises P1 and P7)."""
        return self._floors.of(status)

    def of(self, status: JobStatus, configuration: Configuration | None = None) -> Request:
        """The request of a job for ``configuration`` (as the user asked for it when None)."""
        job_id = status.job.job_id
        made = self._made.get(job_id)
        if configuration is None:
            if made is None and status.lease is None:
                made = self._made[job_id] = self._lasting.pending(status)
            if made is not None and made.made_of is not None:
                return made
            asked = self._lasting.asked(status)
            if made is not None and made.shape == asked.shape:
                return made
            return self._known(status, asked)
        grant = made.grant if made is not None else None
        if made is not None and grant is not None and grant.configuration is configuration:
            return made
        only = configuration.gpu_type
        types = (only,) if only else status.job.gpu_types
        shape = (configuration.gpus, configuration.nodes, types)
        if made is not None and made.shape == shape:
            return made
        need = self._floors.of(status)
        return self._known(status, Asked(shape, need, self._lasting.reach(shape, need)))

    def again(self, request: Request) -> Request:
        """A request that ``of`` made in an earlier round with these nodes, of a job as it was."""
        self._made[request.job_id] = request
        return request

    def _known(self, status: JobStatus, asked: Asked) -> Request:
        """The request of a job that asks for that; one that holds nothing may have it already."""
        job, profile = status.job, status.profile
        made = None
        if status.lease is None:
            kept = self._lasting.requests.get(job.job_id)
            if kept is not None and kept[0] is job and kept[1] is profile:
                made = kept[2]
            if made is None or made.shape != asked.shape:
                made = self._make(status, asked)
                self._lasting.requests[job.job_id] = (job, profile, made)
        else:
            made = self._make(status, asked)
        self._made[job.job_id] = made
        return made

    def grant(self, granted: Sequence[Request]) -> tuple[Grant, ...]:
        """The word of a policy that grants just these, which is kept with each of them."""
        grants = tuple(map(_GRANT_OF, granted))
        if not all(grants):
            self._make_grants(compress(granted, map(not_, grants)))
            grants = tuple(map(_GRANT_OF, granted))
        self._granted = grants, granted
        return grants

    def _make_grants(self, granted: Iterable[Request]) -> None:
        made = self._lasting.configurations
        for request in granted:
            kept = request.alike.kept
            configuration = kept.get(Configuration)
            if configuration is None:
                gpus, nodes, types = shape = request.shape
                only = types[0] if len(types) == 1 else None
                new = Configuration(gpus=gpus, nodes=nodes, gpu_type=only)
                configuration = kept[Configuration] = made.setdefault(shape, new)
            request.grant = _GRANT(job_id=request.job_id, configuration=configuration)

    def of_grants(self, grants: tuple[Grant, ...]) -> Sequence[Request]:
        """The requests of which ``grants`` are the word; empty if ``grant`` did not make it."""
        return self._granted[1] if self._granted[0] is grants else ()

    @property
    def trail(self) -> Trail:
        """How the last packing of jobs into these nodes began, when they were empty."""
        return self._lasting.trail

    def retrace(self, packer: Packer, walk: Sequence[JobStatus], alike: int = 0) -> list[Request]:
        """Put the first of ``walk``, all of jobs that hold nothing, where they were put before.

        From empty nodes the same jobs in the same order find the same places: as long as an earlier
        packer began with the very same, these need not be looked for. Their requests are as by
        ``of``. The first ``alike`` are known to be the same.
        """
        count, made, trail = alike, self._made, self._lasting.trail
        for status, step in zip(
            islice(walk, alike, len(trail)), islice(trail, alike, None), strict=False
        ):
            request = step[0]
            source = request.made_of
            if (
                source is None
                or source[0] is not status.job
                or source[1] is not status.profile
                or request.held is not None
            ):
                break
            made[request.job_id] = request
            count += 1
        return packer.retrace(count)

    def extend(
        self,
        packer: Packer,
        walk: Sequence[JobStatus],
        known: Sequence[Request | None],
        begin: int,
    ) -> list[Request]:
        """``Packer.extend`` from ``begin`` on, by the requests of ``walk`` so far as not ``known``.

        These are those of jobs that hold something, and stand at the same places.
        """
        of = self.of
        return packer.extend(known[at] or of(walk[at]) for at in range(begin, len(walk)))

    def of_holding(self, statuses: Iterable[JobStatus]) -> dict[int, Request]:
        """``of`` by job id, for those of ``statuses`` that hold something that they may keep."""
        found: dict[int, Request] = {}
        made, running, on_one_node = self._made, self._lasting.running, self._on_one_node()
        add = self.plain.append
        for status in statuses:
            job, lease, request = status.job, status.lease, None
            job_id = job.job_id
            if lease is None or status.phase is not _RUNNING:
                if held(status) is None:
                    continue
            elif job_id not in made:
                now, known = lease.placement, running.get(job_id)
                if (
                    known is not None
                    and known[0] is job
                    and known[1] is status.profile
                    and known[2] is now
                ):
                    row: Plain | None = known[3]
                else:
                    row = on_one_node(status, job, now)
                if row is not None:
                    add(row)
                    request = row[0]
            found[job_id] = request or self.of(status)
        made.update(found)
        return found

    def _on_one_node(self) -> Callable[[JobStatus, Job, Placement], Plain | None]:
        """``_make`` of a job that runs as asked, in a third of the time; None for any other.

        That is one on a single node that can be used, which may be stopped and follows leases.
        What it asks for is kept for the next rounds.
        """
        pool, asked_by, running = self.pool, self._lasting.asked, self._lasting.running
        numbers, kind_of, on_one = pool.number, pool.kind_of, pool.on_one
        usable = self._usable
        # What a job takes on a node of a kind, by what it asks for.
        takes: list[dict[Asked, Amounts]] = [{} for _ in pool.kinds]

        def make(status: JobStatus, job: Job, now: Placement) -> Plain | None:
            shares = now.shares
            if len(shares) != 1 or now.batch is not None or not (job.preemptible and job.wrapped):
                return None
            ((name, share),) = shares
            asked = asked_by(status)
            shape = asked.shape
            gpus, nodes, types = shape
            if gpus != share.gpus or types or name not in usable or nodes not in _ONE_AT_BEST:
                return None
            number = numbers[name]
            layout = on_one(number, gpus)
            if layout[0] != now.gpu_type:
                return None
            kind = kind_of[number]
            need, amounts = asked.need, takes[kind].get(asked)
            if amounts is None:
                amounts = takes[kind][asked] = need.at(kind, gpus)
            made = _REQUEST(
                job_id=job.job_id,
                alike=asked,
                shape=shape,
                need=need,
                size=asked.size,
                now=now,
                held=layout,
                held_parts=[(number, amounts)],
                may_stay=True,
            )
            row = made, number, asked, share
            running[job.job_id] = (job, status.profile, now, row)
            return row

        return make

    def _make(self, status: JobStatus, asked: Asked) -> Request:
        shape, need, job = asked.shape, asked.need, status.job
        now = held(status)
        if now is None:
            as_asked = shape == (job.gpus, job.nodes, job.gpu_types)
            return _REQUEST(
                job_id=job.job_id,
                alike=asked,
                shape=shape,
                need=need,
                size=asked.size,
                held_parts=[],
                made_of=(job, status.profile) if as_asked else None,
            )
        layout = layout_of(now)
        frozen = keeps_all(status, now, self._usable)
        pinned = frozen or not job.preemptible
        parts = (
            self._pinned_parts(need, now, frozen) if pinned else parts_of(self.pool, layout, need)
        )
        return _REQUEST(
            job_id=job.job_id,
            alike=asked,
            shape=shape,
            need=need,
            size=asked.size,
            now=now,
            held=layout,
            held_parts=parts,
            may_stay=len(parts) == len(layout[1]) and _has_shape(shape, layout),
            pinned=pinned,
            frozen=frozen,
        )

    def _pinned_parts(self, need: Need, now: Placement, frozen: bool) -> Parts:
        """What a pinned job cannot do without: all it holds when frozen, else its floor.

        The floor is cut to what it holds: that fits where it is, and a floor that has grown since
        (a better profile) must not make the pool look overfull.
        """
        parts: Parts = []
        for name, share in now.shares:
            number = self.pool.number.get(name)
            if number is None:
                continue
            _, cpus, mem_mib = (
                (0, share.cpus, share.mem_mib)
                if frozen
                else need.at(self.pool.kind_of[number], share.gpus)
            )
            least = (share.gpus, min(cpus, share.cpus), min(mem_mib, share.mem_mib))
            parts.append((number, least))
        return parts


def _reach(pool: Pool, usable: Sequence[int], shape: Shape, need: Need) -> int:
    """``_Lasting.reach``; ``usable`` counts the usable nodes of each kind."""
    gpus, nodes, types = shape
    each, found = gpus // nodes if nodes else 1, 0
    for kind, node in enumerate(pool.kinds):
        if usable[kind] and (not types or node.gpu_type in types):
            most = node.total
            pairs = zip((most.gpus, most.cpus, most.mem_mib), need.at(kind, each), strict=True)
            found += usable[kind] * each * min([has // needs for has, needs in pairs if needs])
    return found


def _has_shape(shape: Shape, layout: GpuLayout) -> bool:
    gpus, nodes, allowed = shape
    gpu_type, parts = layout
    if allowed and gpu_type not in allowed:
        return False
    if nodes is not None and len(parts) != nodes:
        return False
    if len(parts) == 1:  # most jobs; a list takes twice as long
        return parts[0][1] == gpus
    return sum([each for _, each in parts]) == gpus
