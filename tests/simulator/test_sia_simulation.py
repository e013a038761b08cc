"""Elastic jobs in the simulator: how they advance, what is learned of them, what they choose.

Most tests make small applications of their own, whose step times follow a formula. Those on the
artifact's data need SIA_DATA, as in ``test_measured``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_synergy.cli.commands import cli
from slurm_synergy.cli.experiment_run import simulate_cell
from slurm_synergy.cluster import Start
from slurm_synergy.core.decide import Policy
from slurm_synergy.core.model import Elasticity, Node, Placement, Profile
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.scaling import BatchSize
from slurm_synergy.errors import ConfigError, ModelError
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies.pollux import POLLUX
from slurm_synergy.policies.sia import SIA
from slurm_synergy.simulator.cluster import SimulatedCluster
from slurm_synergy.simulator.engine import Outline, Played, play
from slurm_synergy.simulator.experiment import Settings
from slurm_synergy.simulator.learning import Learning, Profiling, Taught
from slurm_synergy.simulator.measured import read_application
from slurm_synergy.simulator.metrics import job_results
from slurm_synergy.simulator.pace import Pace
from slurm_synergy.simulator.pipelines import dealt_cores, pipeline_of
from slurm_synergy.simulator.pool import make_nodes
from slurm_synergy.simulator.sia_jobs import ElasticWorkload
from slurm_synergy.simulator.sia_models import MICRO_BATCHES, SIA_MODELS
from slurm_synergy.simulator.sia_workload import read_workload
from slurm_synergy.simulator.traces import read_trace
from slurm_synergy.simulator.training import Training

_DATA = os.environ.get("SIA_DATA", "")

needs_data = pytest.mark.skipif(
    not (Path(_DATA) / "workloads").is_dir() if _DATA else True,
    reason="set SIA_DATA to the directory with the Sia artifact's profiles and workloads",
)

EPOCHS = 5
GOLDEN_POLLUX = [(1, 470, 3), (2, 316, 2), (3, 410, 3)]
"""Of each job of that run: its id, seconds until it was done, and restarts."""

EPOCH_STEPS = 600.0
SPEEDS = {"aws": 1.0, "rtx": 2.0}
BATCHES = (32, 64, 128, 256, 512, 1024)
INITIAL = SIA_MODELS["cifar10"].batch[0]


def step_s(kind: str, gpus: int, nodes: int, batch: int) -> tuple[float, float]:
    """What the made tables say: seconds of a step and of its synchronisation."""
    sync_s = 0.0 if gpus == 1 else 0.01 * nodes
    return (0.02 + 0.001 * batch) / SPEEDS[kind] + sync_s, sync_s


def noise(epoch: int) -> float:
    """Variance of the gradient over its squared norm in an epoch, from 0."""
    return 2.0 * 4.0**epoch


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made application under the name of one whose batch sizes are known."""
    root = tmp_path_factory.mktemp("profiles")
    directory = root / "cifar10"
    directory.mkdir()
    for kind in SPEEDS:
        rows = [
            f"{shape},{batch},{step},{sync}"
            for shape in ("1", "2", "3", "4", "44", "444")
            for batch in BATCHES
            for step, sync in [step_s(kind, sum(map(int, shape)), len(shape), batch)]
        ]
        text = "placement,local_bsz,step_time,sync_time\n" + "\n".join(rows) + "\n"
        (directory / f"placements-{kind}.csv").write_text(text)
    for batch in (128, 4096):
        rows = [
            f"{EPOCH_STEPS * epoch},{100 * epoch},0.5,1.0,{noise(epoch - 1)}"
            for epoch in range(1, EPOCHS + 1)
        ]
        text = "progress,iteration,metric,grad_sqr,grad_var\n" + "\n".join(rows) + "\n"
        (directory / f"validation-{batch}.csv").write_text(text)
    _make_pipelined(root / "gpt_pmp")
    return root


def _make_pipelined(directory: Path) -> None:
    directory.mkdir()
    for kind, stages in (("rtx", 8), ("dgx-ext", 2)):
        rows = [f"1,0.1,{0.2 * nodes},{nodes},{8 * nodes}" for nodes in (1, 2, 3)]
        rows += [f"1,0.1,0.2,1,{gpus}" for gpus in (2, 4) if gpus % stages == 0]
        (directory / f"scalability-{kind}.csv").write_text(
            "local_bsz,step_time,sync_time,num_nodes,num_replicas\n" + "\n".join(rows) + "\n"
        )
        (directory / f"placements-{kind}.csv").write_text(
            f"placement,local_bsz,step_time,sync_time\n{stages},1,0.1,0.2\n"
        )
    (directory / "validation-12.csv").write_text(
        "progress,iteration,metric,grad_sqr,grad_var\n50,50,0.5,1,2\n100,100,0.6,1,2\n"
    )


@pytest.fixture(scope="module")
def training(profiles: Path) -> Training:
    """The made application."""
    return Training(read_application(profiles / "cifar10", list(SPEEDS)), SIA_MODELS["cifar10"])


def pool(**counts: int) -> tuple[Node, ...]:
    """Nodes of 4 GPUs each."""
    made: list[Node] = []
    for kind, count in counts.items():
        made += make_nodes(name=kind, count=count, gpu_type=kind, gpus=4, cpus=12, mem_gib=100)
    return tuple(sorted(made, key=lambda node: node.name))


def placed(kind: str, *gpus: int, batch: BatchSize | None = None) -> Placement:
    """A placement of so many GPUs node by node."""
    shares = tuple((f"n{at}", Resources(gpus=n, cpus=n, mem_mib=1)) for at, n in enumerate(gpus))
    return Placement(job_id=1, gpu_type=kind, shares=shares, batch=batch)


Plays = Callable[..., Played]


def test_a_job_may_be_on_more_nodes_than_were_measured(profiles: Path) -> None:
    application = read_application(profiles / "cifar10", list(SPEEDS))
    training = Training(application, SIA_MODELS["cifar10"], own_batch=384)
    kind, wide = next(iter(SPEEDS)), (1, 1, 1, 1, 1, 1)
    with pytest.raises(ModelError, match="was not measured near a batch of 384 on 6 GPUs"):
        training.batch_on(kind, wide)
    batch = training.batch_on(kind, wide, wider=True)
    assert (batch.local, batch.replicas, batch.accumulation) == (64, 6, 0)
    one = training.gpu_rate(kind, (1,), training.batch_on(kind, (1,)))
    assert one < training.gpu_rate(kind, wide, batch) < 6 * one


@pytest.fixture
def plays(profiles: Path, tmp_path: Path) -> Plays:
    """Play jobs that are submitted at ``times_s``."""

    def run(
        *times_s: float,
        nodes: tuple[Node, ...] | None = None,
        mechanism: str = "tune",
        policy: Policy = SIA,
        **more: object,
    ) -> Played:
        path = tmp_path / "workload.csv"
        rows = [f"job-{at},{when},cifar10,3,384" for at, when in enumerate(times_s)]
        path.write_text("name,time,application,num_replicas,batch_size\n" + "\n".join(rows) + "\n")
        workload = ElasticWorkload(
            jobs=read_workload(path),
            profiles=profiles,
            file=str(path),
            **more,  # type: ignore[arg-type]
        )
        found = nodes or pool(aws=2, rtx=1)
        return play(
            Outline(
                nodes=found,
                jobs=workload.on(found, range(1, len(times_s) + 1)),
                policy=policy,
                mechanism=MECHANISMS[mechanism],
                round_s=60.0,
                event_delay_s=1.0,
            )
        )

    return run


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Placement]:
    """Every placement on which a job was started, in order."""
    found: list[Placement] = []
    before = SimulatedCluster.start_all

    def noted(self: SimulatedCluster, actions: Sequence[Start], statuses: object) -> object:
        found.extend(action.placement for action in actions)
        return before(self, actions, statuses)  # type: ignore[arg-type]

    monkeypatch.setattr(SimulatedCluster, "start_all", noted)
    return found


# how they advance ------------------------------------------------------------------------------


def test_a_pace_is_the_same_in_one_step_and_in_many() -> None:
    pace = Pace([10.0, 30.0, 60.0], [1.0, 4.0, 2.0])
    assert pace.left_s(0.0) == pytest.approx(10 + 5 + 15)
    assert pace.after(0.0, 12.0) == pytest.approx(10 + 2 * 4)
    assert pace.after(0.0, 1e9) == 60.0
    done = 0.0
    for _ in range(29):
        done = pace.after(done, 1.0)
        assert pace.left_s(done) == pytest.approx(pace.left_s(0.0) - (30 - pace.left_s(done)))
    assert done == pytest.approx(58.0)
    assert pace.left_s(60.0) == 0.0


def test_progress_is_steps_times_the_worth_of_their_samples(training: Training) -> None:
    batch = BatchSize(local=128, replicas=8, accumulation=1)
    pace = training.pace(placed("rtx", 4, 4, batch=batch), Profile())
    step, sync = step_s("rtx", 8, 2, 128)
    iteration_s = (step + (step - sync)) * SIA_MODELS["cifar10"].slowdown
    for epoch, rate in enumerate(pace.rates):
        variance, scale = noise(epoch), batch.total / INITIAL
        gain = (variance + 1.0) / (variance / scale + 1.0)
        assert rate == pytest.approx(gain * INITIAL / iteration_s)


def test_a_pipeline_bounds_the_speed(training: Training) -> None:
    profile = Profile(pipeline=pipeline_of(training))
    batch = BatchSize(local=1024, replicas=4)
    fed = training.pace(placed("rtx", 4, batch=batch), profile)
    free = training.pace(placed("rtx", 4, batch=batch), Profile())
    # One core for each GPU, and each would need twelve; the worth of the samples is the same.
    ratios = [ours / theirs for ours, theirs in zip(fed.rates, free.rates, strict=True)]
    step, _ = step_s("rtx", 4, 1, 1024)
    alone, _ = step_s("rtx", 1, 1, 1024)
    assert ratios == pytest.approx([step / alone / 12.0] * EPOCHS)


def test_needs_of_cores_are_dealt_out_as_in_synergy_s_evaluation(training: Training) -> None:
    needs = dealt_cores(100)
    assert sum(one == 1.0 for one in needs) == 70  # language
    assert sum(one in (12.0, 9.0, 6.0, 4.0, 3.0) for one in needs) == 30  # image and speech
    few, many = pipeline_of(training, 1.0), pipeline_of(training, 12.0)
    assert few is not None
    assert many is not None
    assert few.preprocess[0][1] == pytest.approx(12 * many.preprocess[0][1])


def test_models_over_several_gpus_need_cores_for_each_gpu(profiles: Path, tmp_path: Path) -> None:
    path = tmp_path / "workload.csv"
    path.write_text("name,time,application,num_replicas,batch_size\na,0,gpt_pmp,8,48\n")
    trace = read_trace(f"sia:{path},profiles={profiles},elastic=full,pipelines=dealt")
    assert trace.elastic is not None
    nodes = make_nodes(name="rtx", count=1, gpu_type="rtx", gpus=8, cpus=24, mem_gib=100)
    (one,) = trace.elastic.on(tuple(nodes), [1])
    found, fewer = one.truth.pipeline, pipeline_of(one.training, 2.0)  # type: ignore[arg-type]
    assert found is not None and fewer is not None
    (cores,) = dealt_cores(1)
    assert found.preprocess[0][1] == pytest.approx(fewer.preprocess[0][1] * 2.0 / cores)
    # A copy on eight GPUs that each have the cores that they need is fed just as fast as it trains.
    local = max(size for _, size in one.training.alone("rtx"))  # type: ignore[union-attr]
    _, step = one.training.times("rtx", (8,), local)  # type: ignore[union-attr, misc]
    assert found.preprocess[0][1] * 8 * cores == pytest.approx(local / step)


def test_jobs_of_one_application_may_need_different_cores(profiles: Path, tmp_path: Path) -> None:
    path = tmp_path / "workload.csv"
    rows = [f"job-{at},0,cifar10,3,384" for at in range(10)]
    path.write_text("name,time,application,num_replicas,batch_size\n" + "\n".join(rows) + "\n")
    trace = read_trace(f"sia:{path},profiles={profiles},elastic=full,pipelines=dealt")
    assert trace.elastic is not None
    jobs = trace.elastic.on(pool(aws=1, rtx=1), range(1, 11))
    assert [one.truth.pipeline for one in jobs] == [
        pipeline_of(jobs[0].training, cores)  # type: ignore[arg-type]
        for cores in dealt_cores(10)
    ]
    assert len({one.belief.key for one in jobs}) == len(set(dealt_cores(10)))
    assert not jobs[0].belief.gpu_rate_per_gpu
    # Rigid ones were profiled as they ask to run.
    rigid = read_trace(f"sia:{path},profiles={profiles},elastic=full,rigid=1,pipelines=dealt")
    assert rigid.elastic is not None
    (one,) = rigid.elastic.on(pool(aws=1, rtx=1), [1])
    slow = SIA_MODELS["cifar10"].slowdown
    assert one.belief.gpu_rate_per_gpu == {
        kind: pytest.approx(128 / (step_s(kind, 3, 1, 128)[0] * slow)) for kind in ("aws", "rtx")
    }


def test_the_time_of_a_job_is_its_restarts_and_its_work(plays: Plays) -> None:
    played = plays(0.0, nodes=pool(aws=1), rigid=1.0)
    (one,) = played.world.finished
    assert one.restarts == 0
    step, _ = step_s("aws", 3, 1, 128)
    per_epoch_s = []
    for epoch in range(EPOCHS):
        variance, scale = noise(epoch), 3.0
        gain = (variance + 1.0) / (variance / scale + 1.0)
        per_epoch_s.append(EPOCH_STEPS / gain * step * 1.8)
    assert one.completed_s == pytest.approx(50.0 + sum(per_epoch_s), abs=1.0)


def test_no_elastic_job_is_below_its_floor(plays: Plays) -> None:
    """One needs a core for each of its GPUs, the other twelve."""
    floors = plays(0.0, 0.0, nodes=pool(rtx=1), pipelines="dealt").world.floors
    assert floors.judged >= 4
    assert (floors.below, floors.worst) == (0, pytest.approx(1.0))
    assert type(floors.below) is int, "JSON knows no numbers of numpy"


def test_cores_of_use_are_those_of_the_configuration(profiles: Path, tmp_path: Path) -> None:
    path = tmp_path / "workload.csv"
    path.write_text("name,time,application,num_replicas,batch_size\njob-0,0,cifar10,1,128\n")
    (tmp_path / "pool.yaml").write_text(
        "nodes:\n  - {name: rtx, gpu_type: rtx, gpus: 4, cpus: 12, mem_gib: 100}\n"
    )
    found = simulate_cell(
        Settings(
            policy="sia",
            mechanism="proportional",
            elastic=True,
            round_s=60,
            pipelines="dealt",
            trace=f"sia:{path},profiles={profiles}",
            cluster=str(tmp_path / "pool.yaml"),
        )
    )
    # The job needs one core of the three that each of its GPUs brings.
    assert 0 < found.cpu_used < 0.6 * found.summary["cpu_util"]


# what is learned, and what they choose ---------------------------------------------------------


def test_an_elastic_job_starts_small_and_at_most_doubles(
    plays: Plays, starts: list[Placement]
) -> None:
    played = plays(0.0)
    (one,) = played.world.finished
    assert starts[0].gpus == 1
    largest = 0
    for placement in starts:
        assert placement.gpus <= max(2 * largest, 1)
        largest = max(largest, placement.gpus)
    assert largest >= 4
    assert one.restarts == len(starts) - 1
    (result,) = job_results(played)
    assert result.gpu_s == pytest.approx(one.gpu_s)
    assert result.run_s <= result.jct_s
    assert result.gpu_s > 1.5 * result.run_s


def test_a_golden_run_of_pollux(plays: Plays) -> None:
    """Three jobs; a run has a memory of its own, so the same again ends alike."""
    quick = replace(POLLUX, patience=5)
    runs = [plays(0.0, 30.0, 200.0, policy=quick, mechanism="proportional") for _ in "ab"]
    found = [
        [(one.job_id, round(one.jct_s), one.restarts) for one in job_results(run, ())]
        for run in runs
    ]
    assert found[0] == found[1] == GOLDEN_POLLUX


def test_an_oracle_lets_a_job_begin_large(plays: Plays, starts: list[Placement]) -> None:
    plays(0.0, regime=Profiling.ORACLE)
    assert starts[0].gpus > 1


def test_the_batch_follows_the_noise_without_a_restart(
    plays: Plays, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, Placement]] = []
    before = Learning.watch

    def noted(self: Learning, placement: Placement, done: float) -> None:
        seen.append((id(self), placement))
        before(self, placement, done)

    monkeypatch.setattr(Learning, "watch", noted)
    plays(0.0, nodes=pool(rtx=1), regime=Profiling.ORACLE)
    batches = {(one.gpu_layout, one.batch.total) for _, one in seen if one.batch}
    layouts = {layout for layout, _ in batches}
    assert len(batches) > len(layouts)


@pytest.mark.parametrize("regime", list(Profiling))
def test_what_is_known_on_arrival(training: Training, regime: Profiling) -> None:
    learning = Learning(training, Profile(), tuple(SPEEDS), regime)
    scaling = learning.belief.scaling
    assert scaling is not None
    assert set(scaling.speeds) == (set() if regime is Profiling.NONE else set(SPEEDS))
    explored = {one.explored_gpus for one in scaling.speeds.values()}
    assert all((gpus > 64) == (regime is Profiling.ORACLE) for gpus in explored)


def test_with_the_ledger_the_next_job_begins_with_what_earlier_ones_taught(
    training: Training,
) -> None:
    taught = Taught()

    def arrives(regime: Profiling) -> Learning:
        return Learning(training, Profile(), tuple(SPEEDS), regime, taught)

    first = arrives(Profiling.LEDGER)
    for gpus in (2, 4):
        first.watch(placed("aws", gpus, batch=BatchSize(local=64, replicas=gpus)), 1.0)
    second, stranger = arrives(Profiling.LEDGER), arrives(Profiling.BOOTSTRAP)
    for one, most in ((first, 4), (second, 4), (stranger, 0)):
        scaling = one.belief.scaling
        assert scaling is not None
        assert scaling.speeds["aws"].explored_gpus == most
        assert scaling.speeds["rtx"].explored_gpus == 0
    assert second.belief.scaling == first.belief.scaling
    stranger.watch(placed("aws", 8, batch=BatchSize(local=64, replicas=8)), 1.0)
    assert taught.explored == {"aws": 4}


def test_a_belief_is_new_exactly_when_something_was_learned(training: Training) -> None:
    learning = Learning(training, Profile(), tuple(SPEEDS), Profiling.NONE)
    batch = BatchSize(local=64, replicas=2)
    there = placed("aws", 2, batch=batch)
    first = learning.belief
    learning.watch(there, 1.0)
    second = learning.belief
    assert second is not first
    assert second.scaling is not None
    assert {kind: one.explored_gpus for kind, one in second.scaling.speeds.items()} == {"aws": 2}
    learning.watch(there, 2.0)
    assert learning.belief is second
    learning.watch(there, (EPOCH_STEPS + 1) * INITIAL)
    third = learning.belief
    assert third is not second
    assert third.scaling is not None
    assert third.scaling.statistics.variance == pytest.approx(noise(1))
    learning.watch(
        replace(there, batch=BatchSize(local=65, replicas=2)), EPOCH_STEPS * INITIAL * 1.1
    )
    fourth = learning.belief.scaling
    assert fourth is not None
    assert fourth.speeds["aws"].model is third.scaling.speeds["aws"].model  # too near to be news


def test_the_model_that_is_learned_is_near_the_truth(training: Training) -> None:
    learning = Learning(training, Profile(), tuple(SPEEDS), Profiling.BOOTSTRAP)
    for gpus in (2, 4):
        for local in (64, 256):
            learning.watch(placed("aws", gpus, batch=BatchSize(local=local, replicas=gpus)), 1.0)
    assert learning.belief.scaling is not None
    model = learning.belief.scaling.speeds["aws"].model
    expected, _ = step_s("aws", 4, 1, 128)
    assert float(model.iteration_s(1, 4, 128)) == pytest.approx(1.8 * expected, rel=0.05)


# workloads -------------------------------------------------------------------------------------


def test_less_elastic_jobs_are_spread_evenly(profiles: Path, tmp_path: Path) -> None:
    workload = ElasticWorkload(jobs=(), profiles=profiles, file="", rigid=0.25, scale=0.5)
    kinds = [workload.elasticity(job_id) for job_id in range(1, 41)]
    assert kinds.count(Elasticity.RIGID) == 10
    assert kinds.count(Elasticity.STRONG_SCALING) == 20
    for at in range(0, 40, 4):
        assert kinds[at : at + 4].count(Elasticity.RIGID) == 1


def test_rigid_jobs_keep_their_shape_and_scaling_ones_their_batch(
    plays: Plays, starts: list[Placement]
) -> None:
    plays(0.0, 30.0, 60.0, 90.0, rigid=0.5, scale=0.5)
    by_job: dict[int, list[Placement]] = {}
    for placement in starts:
        by_job.setdefault(placement.job_id, []).append(placement)
    rigid = [those for those in by_job.values() if those[0].batch is None]
    assert len(rigid) == 2
    assert {one.gpus for those in rigid for one in those} == {3}
    totals = {one.batch.total for those in by_job.values() for one in those if one.batch}
    assert totals
    assert all(384 <= total < 384 + 12 * 2 for total in totals)


def test_a_split_model_runs_on_whole_copies(
    profiles: Path, tmp_path: Path, starts: list[Placement]
) -> None:
    path = tmp_path / "workload.csv"
    path.write_text("name,time,application,num_replicas,batch_size\na,0,gpt_pmp,8,48\n")
    workload = ElasticWorkload(jobs=read_workload(path), profiles=profiles, file=str(path))
    made = make_nodes(name="rtx", count=2, gpu_type="rtx", gpus=8, cpus=24, mem_gib=100)
    made += make_nodes(name="dgx", count=1, gpu_type="dgx-ext", gpus=8, cpus=24, mem_gib=100)
    nodes = tuple(sorted(made, key=lambda node: node.name))
    (job,) = workload.on(nodes, [1])
    assert job.job.gpu_types == ()
    played = play(
        Outline(
            nodes=nodes,
            jobs=(job,),
            policy=SIA,
            mechanism=MECHANISMS["tune"],
            round_s=60.0,
            event_delay_s=1.0,
        )
    )
    assert len(played.world.finished) == 1
    assert starts
    for one in starts:
        assert one.gpus % {"rtx": 8, "dgx-ext": 2}[one.gpu_type] == 0
        assert one.batch is not None
        assert one.batch.local == MICRO_BATCHES


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ("elastic=some", "is neither full nor rigid"),
        ("rigid=0.5", "rigid = '0.5': has no meaning for rigid jobs"),
        ("elastic=full,gpu_type=aws", "has no meaning for elastic jobs"),
        ("elastic=full,rigid=2", "is not a part"),
        ("elastic=full,rigid=0.6,scale=0.6", "more than all jobs"),
        ("elastic=full,profiling=some", "choose one of bootstrap, ledger, oracle, none"),
        ("elastic=full,pipelines=some", "choose one of none, synergy"),
    ],
)
def test_a_wrong_option_is_named(profiles: Path, tmp_path: Path, options: str, what: str) -> None:
    path = tmp_path / "workload.csv"
    path.write_text("name,time,application,num_replicas,batch_size\na,0,cifar10,3,384\n")
    with pytest.raises(ConfigError) as caught:
        read_trace(f"sia:{path},profiles={profiles},{options}")
    assert what.replace("rigid = '0.5': ", "") in str(caught.value)


@pytest.mark.parametrize(
    ("application", "what"),
    [("resnet", "whose batch sizes are not known"), ("bert", "is not there")],
)
def test_an_application_that_is_not_known_is_named(
    profiles: Path, tmp_path: Path, application: str, what: str
) -> None:
    path = tmp_path / "workload.csv"
    path.write_text(f"name,time,application,num_replicas,batch_size\na,0,{application},3,384\n")
    trace = read_trace(f"sia:{path},profiles={profiles},elastic=full")
    assert trace.elastic is not None
    with pytest.raises(ConfigError, match=what):
        trace.elastic.on(pool(aws=1), [1])


def test_simulate_plays_elastic_jobs(profiles: Path, tmp_path: Path) -> None:
    workload = tmp_path / "workloads" / "made" / "workload.csv"
    workload.parent.mkdir(parents=True)
    (tmp_path / "profiles").symlink_to(profiles)  # beside the workloads, as in the artifact
    workload.write_text(
        "name,time,application,num_replicas,batch_size\na,0,cifar10,3,384\nb,90,cifar10,3,384\n"
    )
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        "nodes: [{name: a, count: 2, gpu_type: aws, gpus: 4, cpus: 12, mem_gib: 100}]\n"
    )
    rows = tmp_path / "jobs.csv"
    command = ["simulate", "--cluster", str(cluster), "--trace", f"sia:{workload},elastic=full"]
    more = ["--policy", "sia", "--round", "60", "--jobs-out", str(rows), "--json"]
    result = CliRunner().invoke(cli, [*command, *more])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert (summary["policy"], summary["jobs"]) == ("sia", 2)
    header, *lines = [line.split(",") for line in rows.read_text().split()]
    gpu_s = [float(line[header.index("gpu_s")]) for line in lines]
    assert summary["gpu_hours_per_job"] == pytest.approx(sum(gpu_s) / 2 / 3600)
    wrong = CliRunner().invoke(cli, [*command, *more, "--reference-semantics"])
    assert isinstance(wrong.exception, ConfigError)
    assert "reference semantics" in str(wrong.exception)


# the artifact ----------------------------------------------------------------------------------


@needs_data
def test_philly_is_no_worse_than_under_the_published_code() -> None:
    """One workload against a run of the published simulator (algorithms F.3)."""
    trace = read_trace(f"sia:{_DATA}/workloads/philly/workload-1.csv,elastic=full")
    assert trace.elastic is not None
    made: list[Node] = []
    for kind, gpus, count in (("aws", 4, 6), ("rtx", 8, 3), ("dgx-ext", 8, 2)):
        made += make_nodes(
            name=kind, count=count, gpu_type=kind, gpus=gpus, cpus=3 * gpus, mem_gib=62.5 * gpus
        )
    nodes = tuple(sorted(made, key=lambda node: node.name))
    played = play(
        Outline(
            nodes=nodes,
            jobs=trace.elastic.on(nodes, range(1, len(trace.jobs) + 1)),
            policy=SIA,
            mechanism=MECHANISMS["proportional"],
            round_s=60.0,
            event_delay_s=1.0,
        )
    )
    results = job_results(played)
    hours = sorted(one.jct_s / 3600 for one in results)
    assert len(hours) == 160
    assert sum(hours) / 160 <= 0.5462
    assert hours[158] <= 8.5425
    assert sum(one.restarts for one in results) / 160 <= 4.72
    # The last job is done somewhat later than there (14.86 h).
    assert max(one.completed_s for one in results) / 3600 <= 16.5
