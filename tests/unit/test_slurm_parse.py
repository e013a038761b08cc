"""Parsers against outputs captured from Slurm 22.05.8, 24.11.5 and 25.11.2.

The fixtures are one scenario with the same job ids on all three. ``identities.json`` holds the
values of the captured JSON output from which the text of ``squeue -O`` is put together here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slurm_synergy.errors import SlurmParseError
from slurm_synergy.slurm import parse, parse_jobs
from slurm_synergy.slurm.commands import classify
from slurm_synergy.slurm.facts import GpuForm, Hold, JobFacts, JobState, NodeAllocation

FIXTURES = Path(__file__).parent.parent / "fixtures" / "slurm"
VERSIONS = ("22.05.8", "24.11.5", "25.11.2")
MARK = "|0f3c6a|"

every_version = pytest.mark.parametrize("version", VERSIONS)


def read(version: str, name: str) -> str:
    return (FIXTURES / version / f"{name}.out").read_text("utf-8", "surrogateescape")


def squeue_text(rows: list[dict[str, object]]) -> str:
    fields = [item.removesuffix(f":{MARK}") for item in parse_jobs.identity_format(MARK).split(",")]
    return "".join("".join(f"{row[f] or '(null)'}{MARK}" for f in fields) + "\n" for row in rows)


def rows_of(version: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads(
        (FIXTURES / version / "identities.json").read_text("utf-8")
    )
    return rows


def jobs_of(version: str) -> dict[int, JobFacts]:
    identities = parse_jobs.parse_identities(squeue_text(rows_of(version)), MARK)
    records = parse_jobs.parse_jobs(read(version, "scontrol_d_show_job_o"), identities)
    assert records.unresolved == ()
    return {job.job_id: job for job in records.jobs}


@every_version
def test_every_job_of_the_queue_is_read(version: str) -> None:
    jobs = jobs_of(version)
    assert sorted(jobs) == sorted(int(str(row["JobId"])) for row in rows_of(version))
    assert len(jobs) >= 41


@every_version
def test_a_running_job_is_read_exactly(version: str) -> None:
    job = jobs_of(version)[7]
    assert (job.user, job.uid, job.name) == ("alice", 2001, "resnet50-imagenet")
    assert (job.state, job.reason, job.held) == (JobState.RUNNING, "", Hold.NONE)
    assert job.running and not job.pending and not job.completing
    start = 1795991742.0 + (2 if version == "24.11.5" else 0)
    assert job.start_s == pytest.approx(start, abs=1)
    assert job.end_s == job.start_s + 12 * 3600 if job.start_s else False
    assert (job.time_limit_s, job.restarts, job.partition) == (43200.0, 0, "synergy")
    assert job.comment == "synergy:max_gpus=8,batch=128-1024 my note"
    assert (job.gpu_form, job.gpus_asked) == (GpuForm.PER_NODE, {"v100": 2})
    assert (job.num_nodes, job.num_tasks, job.ntasks_per_node) == ((1, 1), 1, None)
    assert (job.cpus_per_task, job.num_cpus, job.min_cpus_node) == (6, 6, 6)
    assert (job.min_mem_node_mib, job.min_mem_cpu_mib) == (102400, None)
    assert (job.batch_host, job.node_list, job.req_nodes) == ("v100-1", ("v100-1",), ())
    assert (job.work_dir, job.std_out) == ("/home/alice/train", "/home/alice/train/slurm-7.out")
    assert job.requeueable and job.account is None and job.reservation is None
    assert job.allocation == (
        NodeAllocation(
            node="v100-1",
            cpu_ids=(2, 3, 4, 5, 6, 7),
            gpu_ids=(4, 5),
            gpu_type="v100",
            mem_mib=102400,
        ),
    )


@every_version
def test_nodes_grouped_into_one_allocation_are_told_apart(version: str) -> None:
    job = jobs_of(version)[8]
    assert (job.num_nodes, job.ntasks_per_node, job.num_tasks) == ((2, 2), 1, 2)
    assert [part.node for part in job.allocation] == ["v100-1", "v100-2"]
    assert all(part.gpu_ids == (0, 1, 2, 3) for part in job.allocation)
    assert all(part.mem_mib == 61440 for part in job.allocation)
    assert (job.gpus_asked, job.gpu_total, job.features) == ({"": 4}, 8, "v100")


@every_version
@pytest.mark.parametrize(
    ("job_id", "form", "asked", "per_node"),
    [
        (12, GpuForm.PER_TASK, {"": 1}, {"": 4}),
        (13, GpuForm.PER_NODE, {"a100": 2}, {"a100": 2}),
        (28, GpuForm.PER_JOB, {"": 4}, {"": 4}),
        (37, GpuForm.PER_SOCKET, {"": 1}, {"": 1}),
        (38, GpuForm.PER_JOB, {"v100": 4}, {"v100": 2}),
        (16, GpuForm.PER_NODE, {"a100": 1}, {"a100": 1}),
        (33, GpuForm.NONE, {}, {}),
    ],
)
def test_each_form_of_a_gpu_request_is_told_apart(
    version: str, job_id: int, form: GpuForm, asked: dict[str, int], per_node: dict[str, int]
) -> None:
    job = jobs_of(version)[job_id]
    assert (job.gpu_form, job.gpus_asked, job.gpus_per_node) == (form, asked, per_node)


@every_version
def test_holds_states_and_limits_are_told_apart(version: str) -> None:
    jobs = jobs_of(version)
    assert (jobs[26].held, jobs[27].held, jobs[29].held) == (Hold.USER, Hold.ADMIN, Hold.NONE)
    assert (jobs[27].ntasks_per_node, jobs[27].num_nodes) == (2, (2, 2))
    assert jobs[21].reason == "job_requeued_in_held_state" and jobs[21].held is Hold.USER
    assert jobs[21].pending and jobs[21].restarts == 1
    assert jobs[24].completing and not jobs[24].pending
    assert jobs[16].time_limit_s is None and jobs[16].end_s is None
    assert jobs[32].reason.startswith("ReqNodeNotAvail") and jobs[32].req_nodes == ("a100-2",)
    assert (jobs[35].min_mem_node_mib, jobs[35].min_mem_cpu_mib) == (None, 4096)
    assert jobs[41].num_nodes == (1, 3) and jobs[41].account == "proj42"
    assert jobs[11].reservation == "synergy_pool"
    assert jobs[29].dependency is not None and "afterok:7" in jobs[29].dependency
    assert (jobs[14].het_job_id, jobs[15].het_job_id, jobs[15].het_offset) == (14, 14, 1)
    assert jobs[44].array_pending and jobs[44].array_job_id == 44
    assert (jobs[44].array_limit, jobs[44].address, jobs[16].array_limit) == (2, "44", None)
    assert sum(job.deadline_s is not None for job in jobs.values()) == 1
    assert jobs[44].array_task_id is not None and jobs[44].array_task_id.startswith("3-5")
    assert jobs[6].state is JobState.SPECIAL_EXIT and jobs[6].exit_code == (85, 0)
    if version != "24.11.5":  # that capture of JSON has no finished jobs
        assert jobs[2].state is JobState.NODE_FAIL and jobs[2].state.finished
        assert not jobs[2].requeueable
        assert jobs[45].allocation[0].gpu_ids == ()


@every_version
def test_user_text_that_looks_like_fields_changes_nothing(version: str) -> None:
    jobs = jobs_of(version)
    assert jobs[18].name == "x JobState=COMPLETED UserId=root(0) Priority=1"
    assert (jobs[18].user, jobs[18].uid, jobs[18].state) == ("alice", 2001, JobState.PENDING)
    assert (jobs[18].priority, jobs[18].held) == (0, Hold.USER)
    assert jobs[19].comment == "first line\nJobId=1 JobState=RUNNING\n\tthird, after a tab"
    assert jobs[19].state is JobState.PENDING
    assert jobs[17].name == 'my run=7 "v2" | α-β 100% #1'
    assert jobs[17].work_dir == "/home/alice/train/exp 1 (lr=0.1)"
    assert jobs[17].std_out == "/home/alice/train/exp 1 (lr=0.1)/out 17.log"
    if version != "24.11.5":
        assert jobs[1].state is JobState.TIMEOUT and jobs[1].name == "lr-finder"


def test_a_copied_record_makes_its_job_unresolved_and_alone_the_first_counts() -> None:
    text = read("22.05.8", "scontrol_d_show_job_o")
    identities = parse_jobs.parse_identities(squeue_text(rows_of("22.05.8")), MARK)
    true = next(line for line in text.splitlines() if line.startswith("JobId=7 "))
    forged = true.replace("JobState=RUNNING", "JobState=FAILED")
    both = text.replace("Comment=first line\n", f"Comment=first line\n{forged}\n")
    records = parse_jobs.parse_jobs(both, identities)
    assert records.unresolved == (7,)
    assert len(records.jobs) == len(identities) - 1
    alone = parse_jobs.parse_jobs(f"{true}\n{forged}\n", identities, (7,), first_only=7)
    assert alone.jobs[0].state is JobState.RUNNING


def test_a_forged_record_of_another_owner_or_name_is_not_taken() -> None:
    text = read("22.05.8", "scontrol_d_show_job_o")
    identities = parse_jobs.parse_identities(squeue_text(rows_of("22.05.8")), MARK)
    line = next(line for line in text.splitlines() if line.startswith("JobId=7 "))
    for forged in (line.replace("alice(2001)", "bob(2002)"), line.replace("resnet50", "resnet51")):
        records = parse_jobs.parse_jobs(f"{forged}\n", identities, (7,))
        assert (records.jobs, records.unresolved) == ((), (7,))


def test_a_job_that_is_missing_is_unresolved_and_never_dropped() -> None:
    identities = parse_jobs.parse_identities(squeue_text(rows_of("22.05.8")), MARK)
    records = parse_jobs.parse_jobs("No jobs in the system\n", identities, (7, 8))
    assert (records.jobs, records.unresolved) == ((), (7, 8))


@pytest.mark.parametrize("text", ["", "\n", "slurm_load_jobs error\n", "JobIdx\n", "JobId=7 J"])
def test_an_answer_that_is_neither_records_nor_no_jobs_is_an_error(text: str) -> None:
    with pytest.raises(SlurmParseError):
        parse_jobs.parse_jobs(text, {})


def test_a_record_without_a_key_that_all_releases_have_is_an_error_naming_both() -> None:
    text = read("25.11.2", "scontrol_d_show_job_o").replace(" Restarts=", " Restart=")
    identities = parse_jobs.parse_identities(squeue_text(rows_of("25.11.2")), MARK)
    with pytest.raises(SlurmParseError, match=r"job 7: no Restarts="):
        parse_jobs.parse_jobs(text, identities, (7,))


def test_cut_squeue_output_is_an_error() -> None:
    text = squeue_text(rows_of("22.05.8"))
    with pytest.raises(SlurmParseError, match="squeue"):
        parse_jobs.parse_identities(text[: len(text) // 2], MARK)
    assert parse_jobs.parse_identities("\n", MARK) == {}


@pytest.mark.parametrize("mark", ["", "abc", "1234567890", "ab,cdefgh", "a b c d e f g"])
def test_a_mark_that_squeue_would_misread_is_refused(mark: str) -> None:
    with pytest.raises(ValueError, match="mark"):
        parse_jobs.identity_format(mark)


@every_version
def test_nodes_are_read_with_gpus_states_and_reasons(version: str) -> None:
    nodes = {node.name: node for node in parse.parse_nodes(read(version, "scontrol_d_show_node_o"))}
    assert list(nodes) == ["a100-1", "a100-2", "v100-1", "v100-2", "v100-3", "v100-4"]
    a100 = nodes["a100-1"]
    assert (a100.cpus_total, a100.sockets, a100.cores_per_socket, a100.threads_per_core) == (
        64,
        2,
        32,
        1,
    )
    assert (a100.real_memory_mib, a100.gpus, a100.gpus_used) == (1000000, {"a100": 8}, {"a100": 8})
    assert (a100.partitions, a100.features) == (("synergy", "main"), ("a100",))
    assert a100.usable and a100.boot_s is not None
    down = nodes["a100-2"]
    assert down.down and not down.usable
    assert down.reason == "GPU 3 fell off the bus (Xid 79), ticket #4711"
    assert nodes["v100-4"].drained and not nodes["v100-4"].usable
    assert nodes["v100-4"].reason == "ECC errors on GPU 5 - swap planned = Monday"
    assert nodes["v100-3"].reserved and nodes["v100-3"].usable


def test_a_node_that_has_not_reported_to_a_new_slurmctld_is_not_usable() -> None:
    record = (
        "NodeName=n-1 CoresPerSocket=8 CPUAlloc=8 CPUTot=8 CPULoad=N/A Gres=gpu:v100:4 "
        "GresUsed=gpu:v100:0 RealMemory=64000 AllocMem=0 Sockets=1 State=MIXED ThreadsPerCore=1 "
        "Partitions=synergy BootTime=None SlurmdStartTime={start}\n"
    )
    (before,) = parse.parse_nodes(record.format(start="None"))
    (after,) = parse.parse_nodes(record.format(start="2026-11-29T22:35:34"))
    assert (before.registered, before.usable) == (False, False)
    assert (after.registered, after.usable) == (True, True)


@every_version
def test_nodes_in_trouble_are_not_usable(version: str) -> None:
    text = read(version, "nodes2_scontrol_show_node_o")
    nodes = {node.name: node for node in parse.parse_nodes(text)}
    assert {name for name, node in nodes.items() if node.usable} == {"v100-1"}
    assert not nodes["a100-2"].responding and nodes["v100-4"].in_maintenance
    if version != "22.05.8":
        assert nodes["v100-3"].reservation == "synergy_pool"
        assert nodes["v100-3"].reason == "Not responding"


def test_an_old_style_node_state_with_marks_is_understood() -> None:
    line = read("22.05.8", "scontrol_d_show_node_o").splitlines()[0]
    (node,) = parse.parse_nodes(line.replace("State=MIXED", "State=DOWN*+DRAIN") + "\n")
    assert (node.state, node.responding, node.drained) == ("DOWN", False, True)


@every_version
def test_partitions_reservations_configuration_and_ping_are_read(version: str) -> None:
    synergy, main = parse.parse_partitions(read(version, "scontrol_show_partition_o"))
    assert (synergy.name, synergy.oversubscribe) == ("synergy", ("FORCE", 8))
    assert (synergy.max_time_s, synergy.default_time_s, synergy.state) == (None, None, "UP")
    assert (main.default, main.oversubscribe) == (True, ("NO", 1))
    assert (main.max_time_s, main.default_time_s) == (7 * 86400.0, 8 * 3600.0)
    assert set(main.nodes) == {"a100-1", "a100-2", "v100-1", "v100-2", "v100-3", "v100-4"}
    pool, maint = parse.parse_reservations(read(version, "scontrol_show_reservation_o"))
    assert (pool.name, pool.users, pool.state) == ("synergy_pool", ("alice",), "ACTIVE")
    assert pool.nodes == ("v100-3",) and pool.flags == {"IGNORE_JOBS", "SPEC_NODES"}
    assert pool.start_s is not None and pool.end_s == pool.start_s + 365 * 86400
    assert "MAINT" in maint.flags and maint.state == "INACTIVE"
    config = parse.parse_config(read(version, "scontrol_show_config"))
    assert config.version == tuple(int(part) for part in version.split("."))
    assert (config.cluster_name, config.kill_wait_s, config.slurm_user) == ("demo", 60.0, "slurm")
    assert config.select_type == "select/cons_tres" and config.task_plugins == ()
    assert config.select_parameters == ("CR_CORE_MEMORY",) and config.job_requeue
    assert parse.parse_ping(read(version, "scontrol_ping")).up == ("head",)
    assert parse.parse_ping(read(version, "down_scontrol_ping")).down == ("head",)


def test_nothing_there_and_no_answer_are_told_apart() -> None:
    assert parse.parse_reservations("No reservations in the system\n") == ()
    for parser in (parse.parse_nodes, parse.parse_partitions, parse.parse_reservations):
        with pytest.raises(SlurmParseError):
            parser("")
    with pytest.raises(SlurmParseError):
        parse.parse_config("")
    with pytest.raises(SlurmParseError):
        parse.parse_ping("")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
            "controller_down",
        ),
        ("Unexpected message received for job 26", "controller_down"),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", "controller_down"),
        ("squeue: error: Munge encode failed: Failed to access", "controller_down"),
        ("slurm_load_jobs error: Invalid job id specified", "not_found"),
        ("Partition nosuch not found", "not_found"),
        (
            "delete_reservation reservationname=nosuch: Requested reservation is invalid",
            "not_found",
        ),
        ("delete_reservation reservationname=p: Requested reservation is in use", "in_use"),
        ("Job is no longer pending execution for job 7", "not_pending"),
        ("Job has already finished for job 4", "finished"),
        ("Job is pending execution for job 26", "pending"),
        ("Access/permission denied for job 27", "permission"),
        ("Invalid user id for job 26", "permission"),
        ("Requested operation is presently disabled for job 2", "disabled"),
        ("Requested partition configuration not available now for job 49", "invalid"),
        ("Invalid generic resource (gres) specification for job 48", "invalid"),
        ("Unspecified error for job 1", "other"),
    ],
)
def test_captured_error_texts_are_classified(text: str, kind: str) -> None:
    assert classify(text) == kind


@every_version
def test_a_record_that_has_not_changed_is_not_parsed_again(version: str) -> None:
    memory, rows = parse_jobs.JobMemory(), rows_of(version)
    text = read(version, "scontrol_d_show_job_o")

    def reading() -> dict[int, JobFacts]:
        identities = parse_jobs.parse_identities(squeue_text(rows), MARK, memory)
        records = parse_jobs.parse_jobs(text, identities, memory=memory)
        assert records.unresolved == ()
        assert {job.job_id: job for job in records.jobs} == {
            job.job_id: job for job in parse_jobs.parse_jobs(text, identities).jobs
        }
        return {job.job_id: job for job in records.jobs}

    first = reading()
    assert first == jobs_of(version)
    again = reading()
    assert all(again[job_id] is first[job_id] for job_id in first)
    # The clock of a running job goes on.
    before = text
    text = re.sub(r"RunTime=(?!00:00:00)\S+", "RunTime=9-09:09:09", text)
    assert text != before
    again = reading()
    assert all(again[job_id] is first[job_id] for job_id in first)
    # Slurm's part, and the owner's.
    text = re.sub(r"(JobId=17 .*) TimeLimit=\S+", r"\1 TimeLimit=3-00:00:00", text)
    next(row for row in rows if str(row["JobId"]) == "26")["Comment"] = "another"
    again = reading()
    assert {job_id for job_id in first if again[job_id] is not first[job_id]} == {17, 26}
    assert (again[17].time_limit_s, again[26].comment) == (3 * 86_400.0, "another")


def test_a_text_that_begins_with_a_line_break_parts_no_row() -> None:
    rows = rows_of("22.05.8")
    rows[3]["Name"], rows[5]["Comment"] = "\nJobId=1", "\n"
    memory = parse_jobs.JobMemory()
    for _ in range(2):
        found = parse_jobs.parse_identities(squeue_text(rows), MARK, memory)
        assert len(found) == len(rows)
        assert found[int(str(rows[3]["JobId"]))].name == "\nJobId=1"
        assert found[int(str(rows[5]["JobId"]))].comment == ""


@every_version
def test_a_node_of_which_only_the_load_has_changed_is_not_parsed_again(version: str) -> None:
    memory, text = parse.NodeTexts(), read(version, "scontrol_d_show_node_o")
    first = parse.parse_nodes(text, memory)
    assert first == parse.parse_nodes(text)
    busier = re.sub(r"CPULoad=\S+", "CPULoad=77.7", text)
    busier = re.sub(r"FreeMem=\S+", "FreeMem=1", busier)
    assert busier != text
    assert all(
        one is other for one, other in zip(parse.parse_nodes(busier, memory), first, strict=True)
    )
    name = first[0].name
    drained = re.sub(rf"(NodeName={name} .*?State=)\w+", r"\1DOWN", busier)
    last = parse.parse_nodes(drained, memory)
    assert (last[0].state, last[1:]) == ("DOWN", first[1:])
    reasons = [f"{drained.splitlines()[0]} Reason=for FreeMem={mib}\n" for mib in (1, 2)]
    assert [parse.parse_nodes(one, memory)[0].reason[-9:] for one in reasons] == [
        "FreeMem=1",
        "FreeMem=2",
    ]
