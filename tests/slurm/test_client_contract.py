"""Every client against a real Slurm: the same facts, the same changes, the same errors.

The command-line client always runs. The one on pyslurm runs where pyslurm fits the Slurm that is
here, and is skipped with the reason where it does not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

from slurm_synergy.devcluster import DevCluster, NodeShape
from slurm_synergy.errors import ConfigError, SlurmCommandError, SlurmTimeout
from slurm_synergy.slurm.cli_client import CliSlurmClient
from slurm_synergy.slurm.commands import SlurmCommands
from slurm_synergy.slurm.facts import GpuForm, Hold, JobFacts, JobShape, JobState
from slurm_synergy.slurm.json_jobs import parse_json_jobs
from slurm_synergy.slurm.pyslurm_client import PyslurmClient, open_pyslurm
from slurm_synergy.slurm.reshaping import MIXED, PUT_BACK
from slurm_synergy.slurm.sdiag import DiagFacts
from slurm_synergy.slurm.session import run_lines

SLEEPER = "#!/bin/sh\nexec sleep 600\n"
STUBBORN = "#!/bin/bash\ntrap 'sleep 3; exit 0' TERM\nfor i in $(seq 600); do sleep 1; done\n"

Submit = Callable[..., int]


KINDS = ("cli", "pyslurm")


def client_of(cluster: DevCluster, timeout_s: float = 30.0, kind: str = "cli") -> CliSlurmClient:
    commands = SlurmCommands(slurm_conf=str(cluster.conf_path))
    if kind == "pyslurm":
        process = open_pyslurm(commands, str(cluster.conf_path))
        return PyslurmClient(commands, process, timeout_s=timeout_s)
    return CliSlurmClient(commands, timeout_s=timeout_s)


def case_id(value: object) -> str:
    if isinstance(value, JobShape):
        tasks = f"x{value.tasks_per_node}" if value.tasks_per_node > 1 else ""
        return f"{'+'.join(value.nodes)}{tasks}:{value.gpus_per_node}gpu"
    return "".join(value) if isinstance(value, list) else str(value)


@pytest.fixture(scope="session", params=KINDS)
def client(request: pytest.FixtureRequest, cluster: DevCluster) -> CliSlurmClient:
    try:
        return client_of(cluster, kind=request.param)
    except ConfigError as err:
        pytest.skip(str(err))


@pytest.fixture
def submit(cluster: DevCluster, client: CliSlurmClient) -> Iterator[Submit]:
    """Submit a held job; all of them are gone from the nodes after the test."""
    jobs: list[int] = []

    def sbatch(*options: str, script: str = SLEEPER) -> int:
        argv = ["sbatch", "--parsable", "-p", "main", "-H", "-o", "/dev/null", *options]
        done = cluster.run(argv, input=script)
        jobs.append(int(done.stdout.strip().partition(";")[0]))
        return jobs[-1]

    yield sbatch
    # The client cancels one job; an array's id names its last member there and all of them here.
    if jobs:
        cluster.run(["scancel", "--quiet", *map(str, jobs)], check=False)
    deadline_s = time.monotonic() + 40
    while left := _alive(cluster) & set(jobs):
        if time.monotonic() > deadline_s:
            pytest.fail(f"jobs of a test outlived it: {left}")
        time.sleep(0.05)


def _alive(cluster: DevCluster) -> set[int]:
    """Ids of the jobs (and of arrays) that wait, run or end; not asked through the client."""
    listed = cluster.run(["squeue", "-h", "-p", "main", "-o", "%A %F"]).stdout
    return {int(word) for word in listed.split()}


def await_job(
    client: CliSlurmClient, job_id: int, holds: Callable[[JobFacts], bool], timeout_s: float = 15
) -> JobFacts:
    deadline_s = time.monotonic() + timeout_s
    while not holds(job := client.read_job(job_id)):
        if time.monotonic() > deadline_s:
            pytest.fail(f"not within {timeout_s:g} s: {job}")
        time.sleep(0.05)
    return job


def shape(
    nodes: str, gpus: int, gpu_type: str | None, cpus: int, mem: int, **more: int
) -> JobShape:
    tasks = more.get("tasks", 1)
    return JobShape(
        nodes=tuple(nodes.split()),
        gpus_per_node=gpus,
        gpu_type=gpu_type,
        cpus_per_node=cpus,
        mem_mib_per_node=mem,
        tasks_per_node=tasks,
        cpus_per_task=cpus // tasks,
    )


def start(client: CliSlurmClient, job_id: int, wanted: JobShape) -> JobFacts:
    """Reshape, start, and check that Slurm allocated exactly what was wanted."""
    client.reshape(job_id, wanted)
    client.set_start_now(job_id)
    client.release(job_id)
    job = await_job(client, job_id, lambda job: job.running)
    assert {part.node for part in job.allocation} == set(wanted.nodes)
    for part in job.allocation:
        assert len(part.cpu_ids) == len(set(part.cpu_ids)) == wanted.cpus_per_node
        assert len(part.gpu_ids) == len(set(part.gpu_ids)) == wanted.gpus_per_node
        assert part.mem_mib == wanted.mem_mib_per_node
        if wanted.gpu_type and wanted.gpus_per_node:
            assert part.gpu_type == wanted.gpu_type
    return job


@pytest.mark.parametrize(
    ("options", "form", "asked", "per_node"),
    [
        (["--gres=gpu:v100:2", "-c3"], GpuForm.PER_NODE, {"v100": 2}, {"v100": 2}),
        (["--gpus-per-node=2"], GpuForm.PER_NODE, {"": 2}, {"": 2}),
        (["--gpus=4"], GpuForm.PER_JOB, {"": 4}, {"": 4}),
        (["--gpus=v100:4", "-N2"], GpuForm.PER_JOB, {"v100": 4}, {"v100": 2}),
        (["--gpus-per-task=1", "-n4"], GpuForm.PER_TASK, {"": 1}, {"": 4}),
        (["-c2"], GpuForm.NONE, {}, {}),
    ],
)
def test_a_submitted_job_is_read_in_the_form_it_asked(
    client: CliSlurmClient,
    submit: Submit,
    options: list[str],
    form: GpuForm,
    asked: dict[str, int],
    per_node: dict[str, int],
) -> None:
    begun_s = time.time()
    job_id = submit("--mem=3G", "-t", "1-02:03:00", "--comment=synergy:max_gpus=2 mine", *options)
    (job,) = (job for job in client.read_queue("main") if job.job_id == job_id)
    assert job == client.read_job(job_id)
    assert (job.gpu_form, job.gpus_asked, job.gpus_per_node) == (form, asked, per_node)
    assert (job.state, job.held, job.user, job.uid) == (JobState.PENDING, Hold.USER, "root", 0)
    assert (job.min_mem_node_mib, job.time_limit_s) == (3072, 93780.0)
    assert job.comment == "synergy:max_gpus=2 mine"
    assert job.submit_s == pytest.approx(begun_s, abs=5)
    assert job.start_s is None and job.allocation == () and job.pending


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--gres=gpu:v100:1", "-c2", "--mem=1G"], shape("v100-2", 3, "v100", 6, 20_001)),
        (["--gres=gpu:1"], shape("a100-1", 2, "a100", 8, 30_000)),
        (["--gres=gpu:1"], shape("v100-3 v100-1", 4, "v100", 6, 20_000)),
        (
            ["-N2", "--ntasks-per-node=1", "--gres=gpu:v100:1"],
            shape("v100-1 v100-2", 4, "v100", 7, 20_000),
        ),
        (["-N2", "--ntasks-per-node=1", "--gres=gpu:2"], shape("v100-4", 4, "v100", 7, 20_000)),
        (
            ["-N2", "--ntasks-per-node=2", "--gres=gpu:v100:2", "-c1"],
            shape("v100-2 v100-3", 2, "v100", 8, 20_000, tasks=2),
        ),
        (["-n4", "--gres=gpu:2"], shape("v100-1 v100-2", 2, "v100", 8, 20_000, tasks=2)),
        (["--gpus=4"], shape("a100-2", 2, "a100", 8, 20_000)),
        (["--gpus-per-task=1", "-n4"], shape("a100-1", 4, "a100", 8, 20_000, tasks=4)),
        (["--mem-per-cpu=100", "--gres=gpu:1"], shape("v100-1", 8, "v100", 24, 400_000)),
        (["-c2"], shape("v100-1", 0, None, 4, 1000)),
    ],
    ids=case_id,
)
def test_a_reshaped_job_starts_with_exactly_that_shape(
    client: CliSlurmClient, submit: Submit, options: list[str], wanted: JobShape
) -> None:
    start(client, submit(*options), wanted)


def test_a_type_once_asked_for_is_kept_or_refused_but_never_left_waiting(
    client: CliSlurmClient, submit: Submit
) -> None:
    job_id = submit("--gres=gpu:v100:2")
    if client.read_config().version >= (23, 2):
        start(client, job_id, shape("a100-1", 2, "a100", 4, 1000))
        return
    with pytest.raises(SlurmCommandError, match="cannot change a job's GPU type") as caught:
        client.reshape(job_id, shape("a100-1", 2, "a100", 4, 1000))
    assert caught.value.kind == "invalid"
    start(client, job_id, shape("v100-1", 4, "v100", 4, 1000))


def test_an_untyped_job_moves_from_one_gpu_type_to_another_and_back(
    client: CliSlurmClient, submit: Submit
) -> None:
    job_id = submit("--gres=gpu:1")
    for nodes, kind in (("v100-1", "v100"), ("a100-1", "a100"), ("v100-2", "v100")):
        start(client, job_id, shape(nodes, 2, kind, 4, 1000))
        client.requeue_hold(job_id)
        await_job(client, job_id, lambda job: job.pending)


def test_a_shape_that_ntasks_per_node_forbids_is_refused_before_anything_is_sent(
    client: CliSlurmClient, submit: Submit
) -> None:
    job_id = submit("-N2", "--ntasks-per-node=2", "--gres=gpu:2")
    before = client.read_job(job_id)
    with pytest.raises(SlurmCommandError, match="ntasks-per-node=2"):
        client.reshape(job_id, shape("v100-1", 4, "v100", 8, 1000, tasks=4))
    assert client.read_job(job_id) == before


def test_hold_is_an_admin_hold_and_changes_are_idempotent(
    client: CliSlurmClient, submit: Submit
) -> None:
    job_id = submit("--gres=gpu:1")
    for _ in range(2):
        client.hold(job_id)
        assert client.read_job(job_id).held is Hold.ADMIN
    for _ in range(2):
        client.reshape(job_id, shape("v100-1", 1, "v100", 2, 500))
    client.release(job_id)
    await_job(client, job_id, lambda job: job.running)
    with pytest.raises(SlurmCommandError) as caught:
        client.reshape(job_id, shape("v100-1", 2, "v100", 2, 500))
    assert caught.value.kind == "not_pending"


def test_a_stopped_job_lands_held_by_the_admin_and_starts_elsewhere_within_seconds(
    client: CliSlurmClient, submit: Submit
) -> None:
    job_id = submit("--gres=gpu:1", "--no-requeue")
    start(client, job_id, shape("v100-1", 2, "v100", 6, 2000))
    client.hold_running(job_id)
    running = client.read_job(job_id)
    assert running.running and running.held is Hold.ADMIN
    begun_s = time.monotonic()
    client.requeue_hold(job_id)
    job = await_job(client, job_id, lambda job: job.pending)
    assert (job.held, job.restarts, job.allocation) == (Hold.ADMIN, 1, ())
    client.requeue_hold(job_id)
    job = start(client, job_id, shape("a100-2", 4, "a100", 16, 3000))
    assert job.restarts == 1
    assert time.monotonic() - begun_s < 10


def test_a_restart_on_the_same_node_in_the_second_of_the_stop_survives(
    client: CliSlurmClient, submit: Submit
) -> None:
    job_id = submit("--gres=gpu:1")
    wanted = shape("v100-1", 1, "v100", 2, 500)
    start(client, job_id, wanted)
    for restart in (1, 2, 3):
        time.sleep(1 - time.time() % 1)  # a second begins: stop and restart would both fit into it
        client.requeue_hold(job_id)
        await_job(client, job_id, lambda job: job.pending)
        client.set_start_now(job_id)
        client.release(job_id)
        again = await_job(client, job_id, lambda job: job.start_s is not None and not job.pending)
        assert (again.state, again.restarts) == (JobState.RUNNING, restart)
    time.sleep(0.5)  # a job whose credential is refused is FAILED at once
    assert client.read_job(job_id).running


def test_a_job_that_is_still_ending_is_neither_released_nor_reshaped(
    client: CliSlurmClient, submit: Submit
) -> None:
    job_id = submit("--gres=gpu:1", script=STUBBORN)
    start(client, job_id, shape("v100-1", 1, "v100", 2, 500))
    time.sleep(1)  # the script has to set its trap
    client.requeue_hold(job_id)
    assert client.read_job(job_id).completing
    client.requeue_hold(job_id)
    for change in (client.release, client.set_start_now):
        with pytest.raises(SlurmCommandError) as caught:
            change(job_id)
        assert caught.value.kind == "not_pending"
    job = await_job(client, job_id, lambda job: job.pending, 60)
    assert job.held is Hold.ADMIN


def test_finished_and_unknown_jobs_are_told_apart(client: CliSlurmClient, submit: Submit) -> None:
    job_id = submit("--gres=gpu:1")
    client.cancel(job_id)
    client.cancel(job_id)
    client.cancel(999_999)
    for change in (client.hold, client.release, client.set_start_now, client.requeue_hold):
        for target, kind in ((job_id, "finished"), (999_999, "not_found")):
            with pytest.raises(SlurmCommandError) as caught:
                change(target)
            assert caught.value.kind == kind, change.__name__


def test_hostile_texts_of_a_job_do_not_touch_another(
    client: CliSlurmClient, submit: Submit
) -> None:
    victim = submit("-J", "victim", "--gres=gpu:v100:1")
    fake = f"JobId={victim} JobName=victim UserId=root(0) GroupId=root(0) MCS_label=N/A"
    fake += " Priority=7 Nice=0 Account=(null) QOS=(null) JobState=RUNNING Reason=None"
    name = "x JobState=COMPLETED UserId=games(5) GroupId=games(60)\nJobId=1 JobName=y"
    hostile = submit("-J", name, f"--comment=a\n{fake}\nb", "-A", "acc JobState=FAILED")
    jobs = {job.job_id: job for job in client.read_queue("main")}
    assert (jobs[victim].state, jobs[victim].priority) == (JobState.PENDING, 0)
    assert jobs[victim].gpus_asked == {"v100": 1}
    assert (jobs[hostile].name, jobs[hostile].state) == (name, JobState.PENDING)
    assert (jobs[hostile].user, jobs[hostile].comment) == ("root", f"a\n{fake}\nb")
    assert client.read_job(hostile) == jobs[hostile]


def test_a_text_that_is_no_utf_8_hides_no_job(client: CliSlurmClient, submit: Submit) -> None:
    name = os.fsdecode(b"caf\xe9 \xff")
    odd, plain = submit("-J", name, "--gres=gpu:1"), submit("--gres=gpu:1")
    jobs = {job.job_id: job for job in client.read_queue("main")}
    assert plain in jobs and jobs[odd].name == name
    assert client.read_job(odd) == jobs[odd]


def test_comments_are_set_as_given_and_line_breaks_refused(
    client: CliSlurmClient, submit: Submit
) -> None:
    job_id = submit("--gres=gpu:1")
    client.set_comment(job_id, "x, y=z JobState=RUNNING")
    client.set_admin_comment(job_id, "synergy rigid=1")
    job = client.read_job(job_id)
    assert (job.comment, job.admin_comment) == ("x, y=z JobState=RUNNING", "synergy rigid=1")
    with pytest.raises(ValueError, match="control characters"):
        client.set_comment(job_id, "a\nJobId=1")


def test_array_tasks_and_het_components_have_records_of_their_own(
    cluster: DevCluster, client: CliSlurmClient, submit: Submit
) -> None:
    array = submit("-a", "0-2", "--gres=gpu:1", "--mem=100")
    assert client.read_job(array).array_pending
    client.release(array)
    await_job(client, array, lambda job: job.running)
    tasks = [job for job in client.read_queue("main") if job.array_job_id == array]
    assert sorted(str(job.array_task_id) for job in tasks) == ["0", "1", "2"]
    assert [client.read_job(job.job_id).array_task_id for job in tasks] == [
        job.array_task_id for job in tasks
    ]
    het = submit("-c1", ":", "-p", "main", "-c2")
    assert [client.read_job(het + n).het_offset for n in (0, 1)] == [0, 1]
    assert client.read_job(het + 1).cpus_per_task == 2


def test_a_reservation_is_made_grown_used_and_deleted(
    client: CliSlurmClient, submit: Submit
) -> None:
    name = f"pool-{time.monotonic_ns()}"
    for _ in range(2):
        client.create_reservation(name, ["v100-1"], ["root"])
    with pytest.raises(SlurmCommandError) as caught:
        client.create_reservation(name, ["v100-2"], ["root"])
    assert caught.value.kind == "exists"
    client.update_reservation_nodes(name, ["v100-1", "v100-2"])
    client.update_reservation_users(name, ["root", "games"])
    (found,) = (each for each in client.read_reservations() if each.name == name)
    assert found.nodes == ("v100-1", "v100-2") and set(found.users) == {"root", "games"}
    assert "SPEC_NODES" in found.flags and found.state == "ACTIVE"
    job_id = submit("--gres=gpu:1")
    wanted = shape("v100-2", 1, "v100", 2, 500)
    start(
        client,
        job_id,
        JobShape(**{f: getattr(wanted, f) for f in wanted.__slots__} | {"reservation": name}),
    )
    assert client.read_job(job_id).reservation == name
    with pytest.raises(SlurmCommandError) as caught:
        client.delete_reservation(name)
    assert caught.value.kind == "in_use"
    client.cancel(job_id)
    await_job(client, job_id, lambda job: job.state.finished and not job.completing)
    client.delete_reservation(name)
    client.delete_reservation(name)
    assert name not in {each.name for each in client.read_reservations()}


def test_nodes_partitions_configuration_and_ping_of_the_cluster(
    cluster: DevCluster, client: CliSlurmClient
) -> None:
    nodes = {node.name: node for node in client.read_nodes()}
    assert set(nodes) == set(cluster.node_names)
    assert (nodes["v100-1"].gpus, nodes["v100-1"].cpus_total) == ({"v100": 8}, 24)
    assert nodes["a100-2"].real_memory_mib == 1_000_000 and nodes["a100-2"].usable
    assert client.read_partition("synergy").oversubscribe == ("FORCE", 8)
    with pytest.raises(SlurmCommandError) as caught:
        client.read_partition("nosuch")
    assert caught.value.kind == "not_found"
    assert client.read_config().select_type == "select/cons_tres"
    assert client.ping().up and not client.ping().down


def test_with_the_controller_down_every_call_raises_and_nothing_reads_as_empty(
    fresh_cluster: Callable[..., DevCluster],
) -> None:
    node = NodeShape(nodes="n1", gpus=2, cores=4, mem_mib=8000, gpu_type="v100")
    cluster = fresh_cluster(nodes=(node,), real_node=False)
    client = client_of(cluster)
    assert client.read_queue() == ()
    assert client.read_reservations() == ()
    cluster.slurmctld_stop()
    assert client.ping().down and not client.ping().up
    with pytest.raises(SlurmCommandError) as caught:
        client.read_queue()
    assert caught.value.kind == "controller_down"
    hasty = client_of(cluster, timeout_s=1.5)
    for call in (hasty.read_nodes, hasty.read_reservations, lambda: hasty.hold(1)):
        with pytest.raises((SlurmCommandError, SlurmTimeout)):
            call()
    cluster.slurmctld_start()
    assert client.read_queue() == ()


# Several jobs at once


def test_several_jobs_are_held_and_given_their_shapes_in_one_session(
    client: CliSlurmClient, submit: Submit
) -> None:
    plain, both, per_job, running = (
        submit("--gres=gpu:1"),
        submit("-N2", "--ntasks-per-node=1", "--gres=gpu:v100:1"),
        submit("--gpus=4"),
        submit("--gres=gpu:1"),
    )
    start(client, running, shape("a100-1", 1, "a100", 2, 500))
    assert client.hold_all([plain, both, per_job, 999_999]).keys() == {999_999}
    shapes = {
        plain: shape("v100-1", 2, "v100", 6, 2000),
        both: shape("v100-1 v100-2", 4, "v100", 7, 20_000),
        per_job: shape("a100-2", 2, "a100", 8, 20_000),
        running: shape("a100-1", 2, "a100", 2, 500),
        999_998: shape("a100-1", 2, "a100", 2, 500),
    }
    before = client.budget().calls.get("session", 0)
    results = client.prepare_starts(shapes)
    assert client.budget().calls["session"] - before == 1
    errors = {job: found for job, found in results.items() if isinstance(found, SlurmCommandError)}
    assert {job: err.kind for job, err in errors.items()} == {
        running: "not_pending",
        999_998: "not_found",
    }
    for job_id in (plain, both, per_job):
        client.release(job_id)
        job = await_job(client, job_id, lambda job: job.running)
        assert {part.node for part in job.allocation} == set(shapes[job_id].nodes)
        assert {len(part.gpu_ids) for part in job.allocation} == {shapes[job_id].gpus_per_node}


def test_a_refused_shape_leaves_the_request_as_it_was(
    client: CliSlurmClient, submit: Submit
) -> None:
    jobs = [submit("--gres=gpu:v100:2", "-c3", "--mem=1000", "-N1"), submit("--gpus=4")]
    before = [client.read_job(job_id) for job_id in jobs]
    wanted = {
        # No node has so many CPUs; Slurm refuses that and keeps the numbers.
        jobs[0]: shape("v100-1", 2, "v100", 9999, 2000),
        jobs[1]: shape("v100-1", 2, "v100", 4, 2000),
    }
    results = client.prepare_starts(wanted)
    error = results[jobs[0]]
    assert isinstance(error, SlurmCommandError) and error.kind == "invalid", error
    assert PUT_BACK in str(error) and MIXED not in str(error)
    after = client.read_job(jobs[0])
    for name in ("num_cpus", "cpus_per_task", "min_cpus_node", "min_mem_node_mib", "gpus_asked"):
        assert getattr(after, name) == getattr(before[0], name), name
    assert isinstance(results[jobs[1]], JobFacts)
    # And the job can be given another shape now.
    start(client, jobs[0], shape("v100-1", 2, "v100", 4, 2000))


def test_errors_of_a_session_belong_to_their_lines(
    cluster: DevCluster, client: CliSlurmClient, submit: Submit
) -> None:
    job_id = submit("--gres=gpu:1")
    lines = [
        ("update", f"JobId={job_id}", "TimeLimit=30"),
        ("update", "JobId=999999", "TimeLimit=30"),
        ("update", f"JobId={job_id}", "Foo=1"),
        ("update", f"JobId={job_id}"),
        ("update", f"JobId={job_id}", "TimeLimit=31", "Features=h100"),
        ("hold", "999998"),
        ("update", f"JobId={job_id}", "NumCPUs=abc"),
        ("hold", str(job_id)),
    ]
    commands = SlurmCommands(slurm_conf=str(cluster.conf_path))
    errors = [result.error for result in run_lines(commands, lines, timeout_s=30)]
    kinds = [err.kind if isinstance(err, SlurmCommandError) else err for err in errors]
    missing, invalid = "not_found", "invalid"
    assert kinds == [None, missing, invalid, invalid, invalid, missing, invalid, None]
    job = client.read_job(job_id)
    # Refused for its features, and changed all the same: Slurm's updates are not all-or-nothing.
    assert (job.time_limit_s, job.held) == (31 * 60.0, Hold.ADMIN)


# What is asked of Slurm


def test_a_reading_stays_within_its_budget_of_rpcs(
    cluster: DevCluster, client: CliSlurmClient, submit: Submit
) -> None:
    for _ in range(3):
        submit("--gres=gpu:1")
    # Not "main": jobs there that forge records of others cost two commands each.

    def rpcs(found: DiagFacts) -> dict[str, int]:
        return {name: load.count for name, load in found.rpcs.items()}

    client.read_queue("synergy")
    client.diagnose()
    before = rpcs(client.diagnose())
    client.read_queue("synergy")
    client.read_nodes()
    after = rpcs(client.diagnose())
    client.read_queue("synergy")
    asked = {
        name: count - before.get(name, 0)
        for name, count in after.items()
        if name.startswith("REQUEST_") and count != before.get(name, 0)
    }
    budget = client.budget()
    assert sum(budget.last_turn.values()) <= 4, budget.last_turn
    assert budget.last_turn["nodes"] == budget.last_turn["diag"] == 1
    if type(client) is CliSlurmClient:
        # The queue twice, the nodes once (and once more for the cores of jobs that run), and the
        # partitions that two of the commands want. sdiag counts itself.
        assert asked.pop("REQUEST_NODE_INFO") in (1, 2)
        asked.pop("REQUEST_STATS_INFO", None)
        assert asked == {"REQUEST_JOB_INFO": 2, "REQUEST_PARTITION_INFO": 2}
    assert budget.exceeded == 0 and not budget.failed.get("nodes")


def test_the_load_of_slurmctld_is_read(client: CliSlurmClient) -> None:
    found = client.diagnose()
    assert found.server_threads >= 0 and found.rpcs["REQUEST_PARTITION_INFO"].count > 0
    assert found.since_s > 1e9 and found.agent_queue >= 0


def test_json_and_text_tell_the_same_of_hostile_running_and_waiting_jobs(
    cluster: DevCluster, client: CliSlurmClient, submit: Submit
) -> None:
    running = submit("--gres=gpu:v100:2", "-N2", "-c3", "--mem=500", "--ntasks-per-node=2")
    client.release(running)
    await_job(client, running, lambda job: job.running)
    submit(
        "-J", "x UserId=root(0)\nJobId=1 JobName=y", "--comment=a\nb JobState=FAILED", "-a", "1-9%2"
    )
    nodes = {node.name: node for node in client.read_nodes()}
    commands = SlurmCommands(slurm_conf=str(cluster.conf_path))
    text = commands.run(("squeue", "-a", "-t", "all", "--json"), timeout_s=60).check().stdout
    by_json = {job.job_id: job for job in parse_json_jobs(text, nodes)}
    by_text = {job.job_id: job for job in client.read_queue()}
    assert by_json.keys() == by_text.keys()
    for job_id, job in by_json.items():
        other = by_text[job_id]
        if other.state.finished or other.completing:
            continue
        for name in ("name", "comment", "state", "uid", "gpus_asked", "num_cpus", "array_task_id"):
            assert getattr(job, name) == getattr(other, name), (job_id, name)
        assert job.allocation == other.allocation
