"""The live profiler: what it measures, whose cores it takes, and what ends it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from manual_clock import ManualClock

from slurm_synergy.cluster import Observation, ObservedJob
from slurm_synergy.config import ProfilingSettings
from slurm_synergy.controller.leases import LeaseBook
from slurm_synergy.controller.ledger import Ledger
from slurm_synergy.controller.probes import DataRead, Measured, Probe, TaskProfiling, choose_cores
from slurm_synergy.controller.profiling import Profiler
from slurm_synergy.controller.tasks import TaskIdentity, TaskReport
from slurm_synergy.core.model import (
    Enforcement,
    Job,
    JobPhase,
    JobStatus,
    Node,
    PipelineModel,
    Placement,
    Plan,
    Profile,
    Reason,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.pipeline import demand, preprocess_rate
from slurm_synergy.core.resources import Resources

FULL = Resources(gpus=8, cpus=24, mem_mib=800_000)
NODES = {
    name: Node(name=name, gpu_type="v100", total=FULL, capacity=FULL, sockets=2)
    for name in ("n1", "n2")
}
TRUTH = PipelineModel(preprocess=((1, 120.0), (4, 400.0), (8, 700.0), (24, 1100.0)))
GPU_RATE = 600.0
KNOWN = "resnet18-imagenet"  # of the catalogue
MOVED = Reason(code=ReasonCode.MOVED, text="elsewhere")


class World:
    """A book, a profiler over it, and jobs whose launchers answer by the truth."""

    def __init__(self, directory: Path, clock: ManualClock, **settings: object) -> None:
        self.directory, self.clock = directory, clock
        self.settings = ProfilingSettings(**settings)
        self.jobs: dict[int, ObservedJob] = {}
        self.tokens: dict[TaskIdentity, int] = {}
        self.answered: dict[int, list[int]] = {}
        self.own_mem_mib = 1000
        self.data: DataRead | None = None
        self.read: list[Probe] = []
        self.reads_per_s = float("inf")  # what the storage allows
        self.epoch = 0
        self.sums: dict[int, tuple[float, float, float]] = {}
        self.open()

    def open(self) -> None:
        self.ledger = Ledger(self.directory, clock=self.clock)
        self.book = LeaseBook(
            self.ledger,
            self.clock,
            lease_s=60,
            node_of=NODES.get,
            on_measured=lambda job_id: self.profiler.measured(job_id),
        )
        self.profiler = Profiler(
            self.settings, leases=self.book, store=self.ledger, clock=self.clock
        )

    def start(
        self,
        job_id: int,
        *,
        gpus: int = 1,
        cpus: int = 3,
        nodes: tuple[str, ...] = ("n1",),
        key: str = "k",
        uid: int = 1000,
        limit_s: float | None = None,
        tasks: int = 1,
        gpu_type: str = "v100",
    ) -> None:
        """A job that runs and has made steps."""
        job = Job(
            job_id=job_id,
            user="u",
            submitted_s=0.0,
            gpus=gpus * len(nodes),
            nodes=len(nodes),
            tasks_per_node=tasks,
            time_limit_s=limit_s,
        )
        share = Resources(gpus=gpus, cpus=cpus, mem_mib=100_000 * gpus)
        shares = tuple((name, share) for name in nodes)
        self.book.grant(
            status=JobStatus(job=job),
            owner_uid=uid,
            incarnation=0,
            placement=Placement(job_id=job_id, gpu_type=gpu_type, shares=shares),
            granted=dict(shares),
        )
        self.jobs[job_id] = ObservedJob(
            job=job, phase=JobPhase.RUNNING, allocated=shares, profile_key=key
        )
        ranks = tasks * len(nodes)
        for rank in range(ranks):
            identity = TaskIdentity(
                job_id=job_id, restart_count=0, rank=rank, ranks=ranks, node=nodes[rank // tasks]
            )
            self.book.register(identity)
            self.tokens[identity] = 0
        for identity in [one for one in self.tokens if one.job_id == job_id]:
            self.renew(identity)

    def renew(self, identity: TaskIdentity, measured: Measured | None = None) -> Probe | None:
        """One renewal of a task; the probe that it is told."""
        view = self.book.renew(
            identity,
            TaskReport(
                step=10,
                epoch=self.epoch,
                samples=round(self.sums.get(identity.job_id, (100.0, 0.0, 0.0))[0]),
                stepped_s=self.sums.get(identity.job_id, (0.0, 0.0, 0.0))[1],
                waited_s=self.sums.get(identity.job_id, (0.0, 0.0, 0.0))[2],
                profiling=TaskProfiling(
                    measured=measured, own_mem_mib=self.own_mem_mib, program="run-1"
                ),
            ),
        )
        return view.probe

    def observe(self) -> None:
        self.profiler.observed(
            Observation(
                nodes=tuple(NODES.values()),
                jobs=tuple(self.jobs.values()),
                enforcement=Enforcement.SHARED,
                free={},
            )
        )

    def answer(self, job_id: int, *, steps: int = 50) -> bool:
        """All tasks of the job answer its probe by the truth; False without one."""
        probe = self.book.probing(job_id)
        if probe is None:
            return False
        nodes = len(probe.cores)
        cpus = min(len(ids) for ids in probe.cores.values())
        tasks = [one for one in self.tokens if one.job_id == job_id]
        if probe.read_s:
            self.read.append(probe)
            for identity in tasks:
                first = all(one.rank >= identity.rank for one in tasks if one.node == identity.node)
                data = self.data if first else None
                self.renew(identity, Measured(probe=probe.number, data=data))
            return True
        self.answered.setdefault(job_id, []).append(cpus)
        rate = min(GPU_RATE, self.reads_per_s, preprocess_rate(TRUTH, cpus)) * nodes
        self.clock.advance(10.0)
        told = Measured(
            probe=probe.number,
            steps=steps,
            samples_per_s=rate,
            wait_share=1 - rate / (GPU_RATE * nodes),
            busy_samples_per_s=GPU_RATE * nodes,
        )
        for identity in tasks:
            self.renew(identity, told)
        return True

    def finish(self, job_id: int) -> None:
        while self.answer(job_id):
            pass

    def train(self, job_id: int, seconds: float, *, slower: float = 1.0) -> None:
        """The job trains for a while with its lease, its loader ``slower`` than the truth."""
        lease = self.book.lease(job_id)
        assert lease is not None
        loads = preprocess_rate(TRUTH, lease.placement.shares[0][1].cpus) / slower
        rate = min(GPU_RATE, loads)
        samples, stepped_s, waited_s = self.sums.get(job_id, (100.0, 0.0, 0.0))
        stepped_s += seconds * rate / GPU_RATE
        waited_s += seconds * (1 - rate / GPU_RATE)
        self.sums[job_id] = (samples + rate * seconds, stepped_s, waited_s)
        self.clock.advance(seconds)
        for identity in [one for one in self.tokens if one.job_id == job_id]:
            self.renew(identity)

    def round(self) -> None:
        """A round has been run on the jobs as they are."""
        statuses = []
        for job_id, seen in self.jobs.items():
            lease = self.book.lease(job_id)
            profile = self.ledger.profile(seen.profile_key) or Profile()
            statuses.append(
                JobStatus(job=seen.job, profile=profile, phase=JobPhase.RUNNING, lease=lease)
            )
        shot = Snapshot(
            round=1,
            now_s=self.clock.now_s(),
            round_s=300.0,
            nodes=tuple(NODES.values()),
            jobs=tuple(statuses),
        )
        plan = Plan(round=1, policy="fifo", mechanism="tune", placements=())
        self.profiler.publish(shot, plan, {})
        self.observe()

    def resize(self, job_id: int, cpus: int) -> None:
        """The round gives the job other cores."""
        lease = self.book.lease(job_id)
        assert lease is not None
        shares = tuple((name, replace(one, cpus=cpus)) for name, one in lease.placement.shares)
        placement = replace(lease.placement, shares=shares)
        assert self.book.resize_all((placement,)) == {}

    def cores(self, job_id: int, node: str = "n1") -> set[int]:
        """The cores that the job's task is told to have now."""
        identity = next(one for one in self.tokens if (one.job_id, one.node) == (job_id, node))
        return set(self.book.view(identity).cores)

    def profile(self, key: str = "k") -> Profile | None:
        return self.ledger.profile(key)


@pytest.fixture
def world(tmp_path: Path, clock: ManualClock) -> Iterator[World]:
    made = World(tmp_path, clock)
    yield made
    made.ledger.close()


def everybody_elses(book: LeaseBook, but: int, node: str = "n1") -> set[int]:
    """Cores and floors of all other leases."""
    taken: set[int] = set()
    for job_id in book.job_ids():
        lease = book.lease(job_id)
        assert lease is not None
        if job_id != but:
            taken |= {*lease.cores.get(node, ()), *lease.floor.get(node, ())}
    return taken


def test_a_job_of_unknown_speed_is_measured_and_the_profile_kept(world: World) -> None:
    world.start(1)
    world.observe()
    assert len(world.cores(1)) == 24
    world.finish(1)
    profile = world.profile()
    assert profile is not None and profile.pipeline is not None and profile.confident
    assert profile.gpu_rate_per_gpu == {"v100": pytest.approx(GPU_RATE)}
    assert len(world.answered[1]) == len(set(world.answered[1])) <= 8
    assert {1, 3, 24} <= set(world.answered[1])
    for cpus in range(1, 25):
        assert min(GPU_RATE, preprocess_rate(profile.pipeline, cpus)) == pytest.approx(
            min(GPU_RATE, preprocess_rate(TRUTH, cpus)), rel=0.05
        )
    assert len(world.cores(1)) == 3
    assert world.profiler.describe(1) is None


def test_what_was_found_is_on_disk_before_the_cores_go_back(world: World) -> None:
    world.start(1)
    world.observe()
    seen: list[tuple[bool, bool]] = []
    save = world.ledger.save_profile

    def saved(profile: Profile, evidence: object = None) -> None:
        save(profile, evidence)  # type: ignore[arg-type]
        seen.append((world.book.probing(1) is not None, world.profile() is not None))

    world.ledger.save_profile = saved  # type: ignore[method-assign, assignment]
    world.finish(1)
    assert seen == [(True, True)]


def test_the_next_job_with_the_same_key_is_not_measured(world: World) -> None:
    world.start(1)
    world.observe()
    world.finish(1)
    world.start(2)
    world.observe()
    assert world.book.probing(2) is None
    assert world.profiler.describe(2) is None


@pytest.mark.parametrize(("own_mib", "kept_mib"), [(1000, 100_000), (95_000, 100_000)])
def test_memory_is_not_traded_for_what_was_not_measured(
    world: World, own_mib: int, kept_mib: int
) -> None:
    world.own_mem_mib = own_mib
    world.start(1)
    world.observe()
    world.finish(1)
    profile = world.profile()
    assert profile is not None and profile.pipeline is not None
    assert profile.pipeline.process_mem_mib == kept_mib


def test_on_a_pool_of_unlike_nodes_memory_is_that_of_the_smallest(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(FULL, mem_mib=200_000)
    monkeypatch.setitem(NODES, "n2", replace(NODES["n2"], total=small, capacity=small))
    world.own_mem_mib = 40_000
    world.start(1)
    world.observe()
    world.finish(1)
    profile = world.profile()
    assert profile is not None and profile.pipeline is not None
    # More than the 25,000 MiB of a GPU's share there: what was seen, and a quarter.
    assert profile.pipeline.process_mem_mib == 50_000


SMALL = DataRead(
    dataset_mib=40_000.0, samples=400_000, storage_mib_s=20.0, cached=True, how="by 7 readers"
)


def wanted_mib(world: World, gpus: int = 1) -> int:
    """The memory that the profile asks for on a whole node."""
    profile = world.profile()
    assert profile is not None
    status = JobStatus(job=world.jobs[1].job, profile=profile)
    return demand(status, NODES["n1"], gpus).mem_mib


def told_of_data(world: World) -> str:
    """What the evidence says of the memory side."""
    stored = world.ledger.stored_profile("k")
    assert stored is not None and stored.evidence is not None
    return stored.evidence.data


def test_what_memory_brings_follows_from_sizes_and_storage(world: World) -> None:
    world.data = SMALL
    world.start(1)
    world.observe()
    world.finish(1)
    profile = world.profile()
    assert profile is not None and profile.pipeline is not None and profile.confident
    # With the cores of its lease, by as many readers as the knee has cores.
    (probe,) = world.read
    assert (len(probe.cores["n1"]), probe.read_s, probe.readers) == (3, 2.0, 7)
    pipeline = profile.pipeline
    known = (pipeline.dataset_mib, pipeline.samples_per_epoch, pipeline.storage_mib_s)
    assert known == (40_000.0, 400_000, 20.0)
    # 582 samples/s are 58 MiB/s, of which two thirds have to come from the cache.
    assert 27_000 < wanted_mib(world) < 36_000
    assert told_of_data(world).startswith("data set 40000 MiB in 400000 items storage 20 MiB/s")


def test_more_than_the_share_is_asked_for_where_it_brings_something(world: World) -> None:
    world.data = replace(SMALL, dataset_mib=300_000.0)
    world.start(1)
    world.observe()
    world.finish(1)
    assert wanted_mib(world) > 200_000  # of a share of 100,000
    world.data = replace(SMALL, storage_mib_s=0.0, in_memory=True)
    world.ledger.forget_profile("k")
    world.start(2)
    world.observe()
    world.finish(2)
    assert wanted_mib(world) < 10_000  # nothing to wait for


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (None, "its launcher does not read data"),
        (replace(SMALL, cached=False), "the job keeps no data cache"),
        (replace(SMALL, dataset_mib=0.0, samples=0), "the program does not tell its data set"),
        (replace(SMALL, storage_mib_s=0.0), "the bandwidth of the storage is not known"),
    ],
)
def test_where_it_is_not_known_the_share_stays(
    world: World, data: DataRead | None, why: str
) -> None:
    world.data = data
    world.start(1)
    world.observe()
    world.finish(1)
    assert wanted_mib(world) >= 100_000
    assert why in told_of_data(world)


def test_the_slowest_node_reads_for_all_and_one_task_of_each(world: World) -> None:
    world.data = SMALL
    world.start(1, nodes=("n1", "n2"), gpus=2, tasks=2)
    slower, renew = replace(SMALL, storage_mib_s=5.0), world.renew

    def answers(identity: TaskIdentity, measured: Measured | None = None) -> Probe | None:
        if measured is not None and measured.data is not None and identity.node == "n2":
            measured = replace(measured, data=slower)
        return renew(identity, measured)

    world.renew = answers  # type: ignore[method-assign]
    world.observe()
    world.finish(1)
    profile = world.profile()
    assert profile is not None and profile.pipeline is not None
    assert profile.pipeline.storage_mib_s == 5.0


def test_a_search_that_is_over_is_kept_whatever_becomes_of_the_reading(world: World) -> None:
    world.start(1)
    world.observe()
    while not (probe := world.book.probing(1)) or not probe.read_s:
        assert world.answer(1)
    world.book.stop(job_id=1, reason=MOVED, grace_s=60)
    world.observe()
    assert world.profile() is not None
    assert "it was interrupted" in told_of_data(world)


def test_a_job_that_waited_for_storage_is_measured_again_with_its_cache_full(world: World) -> None:
    """Items of a sixth of a MiB, of which 20 MiB/s of storage are 120 a second."""
    world.data, world.reads_per_s = replace(SMALL, samples=240_000), 120.0
    world.start(1)
    world.observe()
    world.finish(1)
    first = world.profile()
    assert first is not None and first.pipeline is not None and not first.confident
    # What the cores can do is hidden: the profile does not say that they can do no more.
    assert preprocess_rate(first.pipeline, 24) > 500
    assert wanted_mib(world) >= 100_000
    # Not before the data have been seen once, and not all the time.
    world.clock.advance(86_400.0)
    world.renew(next(iter(world.tokens)))
    world.observe()
    assert world.book.probing(1) is None
    world.epoch, world.reads_per_s = 1, float("inf")
    world.renew(next(iter(world.tokens)))
    world.observe()
    assert world.book.probing(1) is not None
    world.finish(1)
    second = world.profile()
    assert second is not None and second.confident
    world.epoch = 2
    world.clock.advance(86_400.0)
    world.renew(next(iter(world.tokens)))
    world.observe()
    assert world.book.probing(1) is None


def test_reading_can_be_switched_off(tmp_path: Path, clock: ManualClock) -> None:
    world = World(tmp_path, clock, read_s=0.0)
    world.start(1)
    world.observe()
    world.finish(1)
    assert world.profile() is not None and not world.read
    assert "profiling.read_s is 0" in told_of_data(world)
    world.ledger.close()


def test_two_jobs_with_one_key_are_not_measured_at_once(world: World) -> None:
    world.start(1)
    world.start(2, nodes=("n2",))
    world.observe()
    assert [world.book.probing(job) is not None for job in (1, 2)] == [True, False]
    world.finish(1)
    world.observe()
    assert world.book.probing(2) is None


def test_only_one_job_of_a_node_is_measured_at_a_time(world: World) -> None:
    world.start(1, key="a")
    world.start(2, key="b")
    world.observe()
    assert [world.book.probing(job) is not None for job in (1, 2)] == [True, False]
    world.finish(1)
    world.observe()
    assert world.book.probing(2) is not None


def test_a_probe_takes_no_core_of_another_lease_or_floor(world: World) -> None:
    world.start(2, gpus=2, cpus=4, key=KNOWN)  # below its floor of 6
    world.start(1)
    world.observe()
    assert world.book.probing(1) is not None
    while True:
        assert world.cores(1).isdisjoint(everybody_elses(world.book, 1))
        if not world.answer(1):
            break
    assert world.profile() is not None
    assert max(world.answered[1]) == 18


def test_a_job_that_starts_meanwhile_gets_its_cores_at_once(world: World) -> None:
    world.start(1)
    world.observe()
    assert len(world.cores(1)) == 24
    world.start(2, gpus=4, cpus=12, key=KNOWN)
    assert world.book.probing(1) is None
    assert len(world.cores(1)) == 3
    assert len(world.cores(2)) == 12
    assert world.cores(1).isdisjoint(world.cores(2))
    world.observe()
    assert world.profiler.describe(1) is None
    assert world.profile() is None


def test_a_sweep_that_lost_its_cores_late_is_kept_with_low_confidence(world: World) -> None:
    world.start(1)
    world.observe()
    for _ in range(3):
        assert world.answer(1)
    assert world.book.probing(1) is not None
    world.book.end_probe(1)
    world.observe()
    profile = world.profile()
    assert profile is not None and not profile.confident
    evidence = world.ledger.stored_profile("k")
    assert evidence is not None and evidence.evidence is not None
    assert "went to others" in evidence.evidence.why


def test_it_waits_for_free_cores(world: World) -> None:
    world.start(2, gpus=7, cpus=21, key=KNOWN)
    world.start(1)
    world.observe()
    assert world.book.probing(1) is None
    world.book.end(2)
    world.observe()
    assert world.book.probing(1) is not None


def test_a_job_with_all_gpus_of_its_nodes_is_measured_without_free_cores(world: World) -> None:
    world.start(1, gpus=8, cpus=24)
    world.observe()
    assert len(world.cores(1)) == 24
    world.finish(1)
    assert world.profile() is not None


def test_a_stop_ends_a_sweep_and_nothing_of_it_is_kept(world: World) -> None:
    world.start(1)
    world.observe()
    for _ in range(4):
        world.answer(1)
    world.book.stop(job_id=1, reason=MOVED, grace_s=60)
    assert world.book.probing(1) is None
    assert len(world.cores(1)) == 3
    world.observe()
    assert (world.profiler.describe(1), world.profile()) == (None, None)


def test_the_end_of_a_job_ends_its_sweep(world: World) -> None:
    world.start(1)
    world.observe()
    world.answer(1)
    world.book.end(1)
    del world.jobs[1]
    world.observe()
    assert (world.profiler.describe(1), world.profile()) == (None, None)
    assert world.book.free_cores("n1") == frozenset(range(24))


def test_a_launcher_that_begins_anew_has_the_cores_of_the_lease(world: World) -> None:
    world.start(1)
    world.observe()
    identity = next(iter(world.tokens))
    _, view = world.book.register(identity)
    assert (view.probe, len(view.cores)) == (None, 3)


def test_a_launcher_that_does_not_answer_loses_the_cores(world: World, clock: ManualClock) -> None:
    world.start(1)
    world.observe()
    clock.advance(1000)
    world.observe()
    assert (world.book.probing(1), world.profile()) == (None, None)
    # It is tried again, but not for ever.
    tries = 1
    for _ in range(10):
        clock.advance(10_000)
        world.observe()
        if world.book.probing(1) is not None:
            tries += 1
            clock.advance(10_000)
            world.observe()
    assert tries == 3


def test_a_restarted_controller_knows_nothing_of_a_sweep(world: World) -> None:
    world.start(1)
    world.observe()
    world.answer(1)
    number = world.book.probing(1)
    assert number is not None
    world.ledger.close()
    world.clock.advance(5)
    world.open()
    lease = world.book.lease(1)
    assert lease is not None and len(lease.cores["n1"]) == 3
    assert world.book.probing(1) is None
    assert world.profile() is None
    # Its tasks introduce themselves again, and the job is measured from the beginning.
    for identity in world.tokens:
        _, view = world.book.register(identity)
        assert (view.probe, len(view.cores)) == (None, 3)
        world.renew(identity)
    world.observe()
    again = world.book.probing(1)
    assert again is not None and again.number > number.number
    world.finish(1)
    assert world.profile() is not None


def test_a_sweep_is_over_within_its_time(tmp_path: Path, clock: ManualClock) -> None:
    world = World(tmp_path, clock, longest_s=35.0)
    began_s = clock.now_s()
    world.start(1)
    world.observe()
    world.finish(1)
    world.observe()
    assert clock.now_s() - began_s <= 40.0
    profile = world.profile()
    assert profile is not None and not profile.confident
    world.ledger.close()


def test_a_short_job_is_measured_for_a_small_share_of_its_time(world: World) -> None:
    world.start(1, limit_s=1000.0)  # 3 % are 30 s, three points of 10 s
    world.observe()
    world.finish(1)
    world.observe()
    assert len(world.answered[1]) == 3


def test_a_job_of_minutes_is_not_measured(world: World) -> None:
    world.start(1, limit_s=400.0)  # 3 % are 12 s: not enough for three points
    world.observe()
    assert world.book.probing(1) is None


def test_gpu_bound_at_one_core_ends_after_three_points(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "test_profiling.TRUTH", PipelineModel(preprocess=((1, 2 * GPU_RATE), (24, 9000.0)))
    )
    world.start(1)
    world.observe()
    world.finish(1)
    assert sorted(world.answered[1]) == [1, 3, 24]
    assert world.profile() is not None


def test_a_task_that_cannot_measure_ends_the_sweep(world: World) -> None:
    world.start(1)
    world.observe()
    world.answer(1, steps=0)
    assert (world.book.probing(1), world.profile()) == (None, None)


def test_several_tasks_on_several_nodes_are_measured_together(world: World) -> None:
    world.start(1, gpus=2, cpus=6, nodes=("n1", "n2"), tasks=2)
    world.observe()
    probe = world.book.probing(1)
    assert probe is not None
    assert {name: len(ids) for name, ids in probe.cores.items()} == {"n1": 24, "n2": 24}
    first = next(iter(world.tokens))
    world.renew(first, Measured(probe=probe.number, steps=50, samples_per_s=1.0))
    assert world.book.probing(1) == probe  # the others have not answered
    world.finish(1)
    profile = world.profile()
    assert profile is not None and profile.pipeline is not None
    # Of one node: two GPUs share what one node's cores load.
    assert profile.gpu_rate_per_gpu["v100"] == pytest.approx(GPU_RATE / 2)
    assert all(cpus % 2 == 0 for cpus in world.answered[1])


def test_switched_off_it_gives_everything_back(world: World) -> None:
    world.start(1)
    world.observe()
    world.profiler.reload(ProfilingSettings(enabled=False))
    assert (world.book.probing(1), len(world.cores(1))) == (None, 3)
    world.observe()
    assert world.book.probing(1) is None


def test_nothing_is_measured_where_a_change_would_need_a_restart(world: World) -> None:
    world.start(1)
    world.profiler.observed(
        Observation(
            nodes=tuple(NODES.values()),
            jobs=tuple(world.jobs.values()),
            enforcement=Enforcement.REQUEUE,
            free={},
        )
    )
    assert world.book.probing(1) is None


def test_somebody_elses_profile_is_not_changed(world: World) -> None:
    world.start(1, uid=1000)
    world.observe()
    world.finish(1)
    kept = world.profile()
    assert kept is not None
    world.ledger.save_profile(
        replace(kept, confident=False, measured_cpus=3),
        world.ledger.stored_profile("k").evidence,  # type: ignore[union-attr]
    )
    world.start(2, uid=2000)
    world.observe()
    assert world.book.probing(2) is None
    world.start(3, uid=1000)
    world.observe()
    assert world.book.probing(3) is not None


def test_a_job_that_names_no_key_gets_one_of_its_own_users(world: World) -> None:
    world.start(1, key="", uid=1000)
    world.observe()
    world.finish(1)
    assert world.profile("u1000-run-1") is not None
    assert world.ledger.read()[1].profile_key == "u1000-run-1"
    # Another one that runs the same is not measured; the next round plans with what is known.
    world.start(2, key="", uid=1000)
    world.observe()
    assert world.book.probing(2) is None
    assert world.ledger.read()[2].profile_key == "u1000-run-1"
    # For another user's job the same program is another matter.
    world.start(3, key="", uid=2000)
    world.observe()
    assert world.book.probing(3) is not None


def test_nobody_takes_the_key_under_which_anothers_job_looks(world: World) -> None:
    world.start(1, key="u1000-run-1", uid=2000)
    world.observe()
    assert world.book.probing(1) is None
    world.start(2, key="", uid=1000)
    world.observe()
    assert world.book.probing(2) is not None


def test_what_somebody_else_has_put_there_meanwhile_is_kept(world: World) -> None:
    world.start(1)
    world.observe()
    theirs = Profile(key="k", gpu_rate_per_gpu={"v100": 5.0})
    world.ledger.save_profile(theirs)  # by an operator, for all
    world.finish(1)
    assert len(world.answered[1]) > 2
    assert world.profile() == theirs
    assert world.book.probing(1) is None


def test_a_users_oldest_profile_goes_when_there_are_too_many(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurm_synergy.controller.profiling.MOST_OF_A_USER", 2)
    world.ledger.save_profile(Profile(key="a"))  # an operator's
    for job_id, (key, uid) in enumerate((("z", 1), ("y", 1), ("o", 2), ("x", 1)), start=1):
        world.start(job_id, key=key, uid=uid)
        world.observe()
        world.finish(job_id)
    assert [one.profile.key for one in world.ledger.stored_profiles()] == ["a", "o", "x", "y"]
    assert world.ledger.profiles_of(1) == ("y", "x")


def test_a_name_from_a_launcher_cannot_be_another_key(world: World) -> None:
    world.start(1, key="")
    identity = next(iter(world.tokens))
    odd = TaskProfiling(program="../x y")
    world.book.renew(identity, TaskReport(step=10, profiling=odd))
    world.observe()
    assert world.book.probing(1) is None


def test_a_launcher_of_an_earlier_release_is_left_alone(world: World) -> None:
    world.start(1)
    world.book.renew(next(iter(world.tokens)), TaskReport(step=20, samples=200))
    world.observe()
    assert world.book.probing(1) is None


@pytest.mark.parametrize(
    ("count", "cores"),
    [
        (2, (12, 13)),  # fewer than it has: those of its floor
        (3, (12, 13, 14)),
        (4, (12, 13, 14, 15)),  # then its own
        (6, (12, 13, 14, 15, 20, 21)),  # then free ones on its socket
        (8, (0, 1, 12, 13, 14, 15, 20, 21)),
        (9, None),
    ],
)
def test_cores_are_chosen_near_what_the_job_has(count: int, cores: tuple[int, ...] | None) -> None:
    found = choose_cores(
        count, node=NODES["n1"], own=(12, 13, 14, 15), floor=(12, 13, 14), free=(0, 1, 20, 21)
    )
    assert found == cores


def _described(world: World) -> Mapping[str, object]:
    found = world.profiler.describe(1)
    assert found is not None
    return found


def test_more_gpus_of_a_node_than_were_measured_are_measured_anew(world: World) -> None:
    world.start(1)
    world.observe()
    world.finish(1)
    one = world.profile()
    assert one is not None and one.measured_gpus == 1
    world.start(2, gpus=2, cpus=6, nodes=("n2",))
    world.observe()
    assert world.book.probing(2) is not None
    world.finish(2)
    two = world.profile()
    assert two is not None and two.measured_gpus == 2
    # That says more about the loader: it serves jobs with fewer GPUs too, and stays.
    world.start(3)
    world.observe()
    assert world.book.probing(3) is None


def test_fewer_gpus_of_another_type_add_their_rate_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start(1, gpus=2, cpus=6)
    world.observe()
    world.finish(1)
    before = world.profile()
    assert before is not None
    other = Node(name="n2", gpu_type="a100", total=FULL, capacity=FULL, sockets=2)
    monkeypatch.setitem(NODES, "n2", other)
    world.start(2, nodes=("n2",), gpu_type="a100")
    world.observe()
    world.finish(2)
    after = world.profile()
    assert after is not None
    assert set(after.gpu_rate_per_gpu) == {"v100", "a100"}
    assert (after.pipeline, after.measured_gpus) == (before.pipeline, 2)


def test_a_loader_that_something_else_holds_up_is_not_trusted_with_fewer_cores(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Reads that are not cached yet: 200 samples/s however many cores there are.
    monkeypatch.setattr("test_profiling.TRUTH", PipelineModel(preprocess=((1, 199.0), (24, 200.0))))
    world.start(1)
    world.observe()
    world.finish(1)
    profile = world.profile()
    assert profile is not None and not profile.confident
    status = JobStatus(job=world.jobs[1].job, profile=profile)
    assert demand(status, NODES["n1"], 1).cpus >= 3


def test_it_tells_how_far_it_is(world: World) -> None:
    world.start(1)
    world.observe()
    world.answer(1)
    told = _described(world)
    # As in docs/json-output.md.
    assert set(told) == {"key", "cpus_per_node", "points", "most_points", "since_s"}
    assert (told["key"], told["points"], told["most_points"]) == ("k", 1, 8)
    assert told["cpus_per_node"] == 1


# while it runs --------------------------------------------------------------------------------


def measured_world(world: World) -> Profile:
    """Job 1 has been measured and runs with 3 cores, of which its loader makes less than 600/s."""
    world.start(1)
    world.observe()
    world.finish(1)
    profile = world.profile()
    assert profile is not None and profile.pipeline is not None
    return profile


def loads(profile: Profile | None, cpus: int) -> float:
    assert profile is not None and profile.pipeline is not None
    return preprocess_rate(profile.pipeline, cpus)


def test_a_small_difference_is_taken_over_little_by_little(world: World) -> None:
    before = measured_world(world)
    seen = [loads(before, 3)]
    world.round()
    for _ in range(30):
        world.train(1, 120.0, slower=1.12)
        world.round()
        seen.append(loads(world.profile(), 3))
    assert all(later <= earlier for earlier, later in pairwise(seen))
    assert len(set(seen)) > 3
    truth = preprocess_rate(TRUTH, 3) / 1.12
    assert seen[-1] == pytest.approx(truth, rel=0.03)
    # On other cores it is as much slower; what was measured of the GPU stays.
    assert loads(world.profile(), 2) / loads(before, 2) == pytest.approx(seen[-1] / seen[0])
    assert world.profile().gpu_rate_per_gpu == before.gpu_rate_per_gpu  # type: ignore[union-attr]
    assert world.profiler.describe(1) is None


def test_what_did_not_move_is_not_written(world: World) -> None:
    measured_world(world)
    written = world.ledger._written()
    world.round()
    for _ in range(5):
        world.train(1, 120.0)
        world.round()
    saves = world.ledger._written() - written
    assert saves <= 5  # progress of the job, once for each report; no profile
    assert loads(world.profile(), 3) == pytest.approx(preprocess_rate(TRUTH, 3), rel=0.02)


def test_another_phase_is_measured_anew_at_a_round(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = measured_world(world)
    world.clock.advance(24 * 3600.0)
    world.round()
    # A new augmentation: from now on every sample takes twice as long.
    for _ in range(2):
        world.train(1, 120.0, slower=2.0)
        world.round()
        assert world.book.probing(1) is None
    assert world.profile() == before
    slow = replace(TRUTH, preprocess=tuple((c, rate / 2) for c, rate in TRUTH.preprocess))
    world.train(1, 120.0, slower=2.0)
    monkeypatch.setattr("test_profiling.TRUTH", slow)
    world.observe()
    assert world.book.probing(1) is None  # not before the round
    world.round()
    assert world.book.probing(1) is not None
    world.finish(1)
    for cpus in range(1, 25):
        found = min(GPU_RATE, loads(world.profile(), cpus))
        assert found == pytest.approx(min(GPU_RATE, preprocess_rate(slow, cpus)), rel=0.06)
    world.train(1, 120.0)
    world.round()
    assert world.book.probing(1) is None


def test_a_job_that_changes_all_the_time_is_not_measured_all_the_time(world: World) -> None:
    measured_world(world)
    began_s = world.clock.now_s()
    world.round()
    while world.book.probing(1) is None:
        world.train(1, 120.0, slower=2.0)
        world.round()
        assert world.clock.now_s() - began_s < 10 * 3600
    # The first sweep took 10 s for each of its points.
    took_s = 10.0 * len(world.answered[1])
    assert world.clock.now_s() - began_s >= took_s / 0.03


def test_one_odd_window_changes_nothing(world: World) -> None:
    before = measured_world(world)
    world.clock.advance(24 * 3600.0)
    world.round()
    for slower in (1.0, 3.0, 3.0, 1.0, 3.0, 1.0):
        world.train(1, 120.0, slower=slower)
        world.round()
    assert world.book.probing(1) is None
    assert loads(world.profile(), 3) == pytest.approx(loads(before, 3), rel=0.03)


def test_a_window_in_which_cores_moved_says_nothing(world: World) -> None:
    before = measured_world(world)
    world.clock.advance(24 * 3600.0)
    world.round()
    for cpus in (6, 3, 6, 3, 6):
        world.train(1, 120.0, slower=3.0)
        world.resize(1, cpus)
        world.round()
    assert world.profile() == before
    assert world.book.probing(1) is None


def test_another_users_job_does_not_refine_a_profile(world: World) -> None:
    before = measured_world(world)
    world.start(2, uid=2000, nodes=("n2",))
    world.round()
    for _ in range(10):
        world.train(2, 120.0, slower=1.1)
        world.round()
    assert world.profile() == before


def test_small_steps_are_forgotten_when_the_profile_is_replaced(world: World) -> None:
    before = measured_world(world)
    world.round()
    for _ in range(2):  # too little to be written yet
        world.train(1, 120.0, slower=1.03)
        world.round()
    assert world.profile() == before
    # Its owner imports it again, corrected: with what it rests on, but with other points.
    stored = world.ledger.stored_profile("k")
    assert stored is not None and before.pipeline is not None
    fewer = replace(before.pipeline, preprocess=((3, 300.0), (24, 1100.0)))
    corrected = replace(before, pipeline=fewer, gpu_rate_per_gpu={"a100": 900.0})
    world.ledger.save_profile(corrected, stored.evidence)
    world.train(1, 120.0, slower=1.03)
    world.round()
    assert world.profile() == corrected
