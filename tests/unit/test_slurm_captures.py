"""Every captured answer of the three releases goes to the parser that is to understand it.

``RULES`` says for each capture which check that is, or why none of ours ever asks for such an
answer. A capture without a rule fails, so that none is left out unnoticed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable

import pytest
from captures import VERSIONS, answer, identities_in, names
from test_slurm_parse import MARK, jobs_of, rows_of, squeue_text

from slurm_synergy.errors import ClusterError, SlurmCommandError, SlurmParseError
from slurm_synergy.slurm import hostlist, parse
from slurm_synergy.slurm.commands import CommandResult, classify
from slurm_synergy.slurm.facts import JobFacts, JobState, NodeFacts
from slurm_synergy.slurm.json_jobs import parse_json_jobs, trusted_rows
from slurm_synergy.slurm.parse_jobs import parse_identities, parse_jobs
from slurm_synergy.slurm.sdiag import parse_diag, rpc_mean_s

Check = Callable[[str, str, CommandResult], None]

NODES = {"a100-1", "a100-2", "v100-1", "v100-2", "v100-3", "v100-4"}
NO_JSON = "22.05.8"  # only squeue and sinfo have --json there


@functools.cache
def nodes_of(version: str) -> dict[str, NodeFacts]:
    text = answer(version, "scontrol_d_show_node_o").check().stdout
    return {node.name: node for node in parse.parse_nodes(text)}


@functools.cache
def text_jobs(version: str) -> dict[int, JobFacts]:
    return jobs_of(version)


# Text


def job_records(version: str, name: str, result: CommandResult) -> None:
    """The whole queue, hostile names included, by the identities of squeue."""
    identities = parse_identities(squeue_text(rows_of(version)), MARK)
    records = parse_jobs(result.check().stdout, identities)
    assert records.unresolved == ()
    assert {job.job_id for job in records.jobs} == identities.keys()
    # Job 19 pretends to be a record of job 1.
    assert records.strangers <= {1, 2, 4, 5, 22, 45}
    assert JobState.UNKNOWN not in {job.state for job in records.jobs}


def one_job(version: str, name: str, result: CommandResult) -> None:
    """Records of single jobs."""
    text = result.check().stdout
    identities = identities_in(text)
    records = parse_jobs(text, identities)
    assert identities and not records.unresolved and not records.strangers
    assert JobState.UNKNOWN not in {job.state for job in records.jobs}


def unread_jobs(version: str, name: str, result: CommandResult) -> None:
    """Records over several lines, which we never ask for, are not misread either."""
    identities = parse_identities(squeue_text(rows_of(version)), MARK)
    assert parse_jobs(result.check().stdout, identities).jobs == ()


def node_records(version: str, name: str, result: CommandResult) -> None:
    found = parse.parse_nodes(result.check().stdout)
    assert {node.name for node in found} == NODES
    assert {sum(node.gpus.values()) for node in found} == {8}


def one_node_of_two(version: str, name: str, result: CommandResult) -> None:
    """Where one of the nodes asked for is unknown, the status tells; the other is shown."""
    with pytest.raises(SlurmCommandError):
        result.check()
    assert [node.name for node in parse.parse_nodes(result.stdout)] == ["v100-1"]


def partitions(version: str, name: str, result: CommandResult) -> None:
    found = parse.parse_partitions(result.check().stdout)
    assert [partition.name for partition in found] == ["synergy", "main"]


def reservations(version: str, name: str, result: CommandResult) -> None:
    found = parse.parse_reservations(result.check().stdout)
    assert "synergy_pool" in {one.name for one in found} and all(one.nodes for one in found)


def config(version: str, name: str, result: CommandResult) -> None:
    assert parse.parse_config(result.check().stdout).version == tuple(
        int(part) for part in version.split(".")
    )


def ping_up(version: str, name: str, result: CommandResult) -> None:
    assert parse.parse_ping(result.check().stdout).up == ("head",)


def diag(version: str, name: str, result: CommandResult) -> None:
    found = parse_diag(result.check().stdout)
    mean_s, count = rpc_mean_s(found, None)
    assert found.server_threads in (1, 3) and found.agent_queue == found.dbd_queue == 0
    assert len(found.rpcs) == 22 and count > 900 and 1e-5 < mean_s < 1e-3
    assert found.rpcs["REQUEST_JOB_INFO"].count >= 140


def not_one_line(version: str, name: str, result: CommandResult) -> None:
    """Records over several lines: keys in them are the same, so they are read the same."""
    kind = name.removeprefix("scontrol_show_")
    parser = {"node": parse.parse_nodes, "partition": parse.parse_partitions}.get(
        kind, parse.parse_reservations
    )
    assert len(parser(result.check().stdout)) == {"node": 6}.get(kind, 2)


HOSTS = {
    "simple": "v100-[1-4]",
    "list": "v100-[1-2,4],a100-1,login",
    "padded": "node[001-003,010,099-101]",
    "multi": "rack[0-1]node[08-11]",
    "dup": "v100-1,v100-[1-2]",
    "env": "v100-[2-3]",
    "bad": "v100-[1-",
    "bad2": "v100-[a-c]",
    "reversed": "v100-[4-1]",
    "empty": "",
}


def host_names(version: str, name: str, result: CommandResult) -> None:
    """Host lists expand as Slurm expands them; what Slurm refuses or botches is refused."""
    case = name.removeprefix("scontrol_show_hostnames_")
    if case in ("bad", "bad2", "reversed"):
        with pytest.raises(SlurmParseError):
            hostlist.expand(HOSTS[case])
        return
    assert list(hostlist.expand(HOSTS[case])) == result.stdout.split()


# JSON

LOOSE = {  # where JSON has other words for the same, or leaves it out
    "reason",
    "std_out",
    "flags",
    "end_s",
    "start_s",
    "array_limit",
}


def same_as_text(version: str, found: tuple[JobFacts, ...]) -> int:
    """Each job of JSON is the job of text; the number compared."""
    text, compared = text_jobs(version), 0
    for job in found:
        other = text.get(job.job_id)
        if other is None:
            continue
        compared += 1
        for field in dataclasses.fields(job):
            if field.name in LOOSE:
                continue
            if field.name == "min_mem_node_mib" and job.job_id == 36:
                continue  # --mem-per-gpu: text shows it under another key
            assert getattr(job, field.name) == getattr(other, field.name), (job.job_id, field.name)
        assert job.completing == other.completing and job.pending == other.pending
        if other.start_s is None or job.start_s is None:
            assert job.start_s == other.start_s
        elif not job.completing:
            assert abs(job.start_s - other.start_s) <= 1
    return compared


def json_queue(version: str, name: str, result: CommandResult) -> None:
    found = parse_json_jobs(result.check().stdout, nodes_of(version))
    assert same_as_text(version, found) >= 41 and len(found) >= 41


def json_some_jobs(version: str, name: str, result: CommandResult) -> None:
    found = parse_json_jobs(result.check().stdout, nodes_of(version))
    assert found
    same_as_text(version, found)


def json_rows(version: str, name: str, result: CommandResult) -> None:
    key = {"node": "nodes", "partition": "partitions", "reservation": "reservations"}
    found = next((rows for word, rows in key.items() if f"_{word}_" in name), "")
    if name == "sinfo_json":
        found = "nodes" if version == NO_JSON else "sinfo"
    if name.endswith("ping_json"):
        found = "pings"
    if version == NO_JSON and name != "sinfo_json":
        refused(version, name, result)
        return
    assert trusted_rows(result.check().stdout, found)


def json_object(version: str, name: str, result: CommandResult) -> None:
    """The load as JSON: no list, so it is not taken for one."""
    with pytest.raises((SlurmParseError, SlurmCommandError)):
        trusted_rows(result.check().stdout, "statistics")


def json_no_such_job(version: str, name: str, result: CommandResult) -> None:
    """An unknown job never reads as an empty queue."""
    if version == NO_JSON and name == "err_squeue_j_invalid_json":
        # It lists all jobs whatever -j says.
        assert parse_json_jobs(result.check().stdout, nodes_of(version), 999999) == ()
        return
    with pytest.raises(ClusterError):
        parse_json_jobs(result.check().stdout, nodes_of(version))


def json_finished_hidden(version: str, name: str, result: CommandResult) -> None:
    """squeue --json -j of a finished job: it answered, and shows no job."""
    if version == NO_JSON:
        json_queue(version, name, result)
        return
    assert parse_json_jobs(result.check().stdout, nodes_of(version)) == ()


def json_list(version: str, name: str, result: CommandResult) -> None:
    with pytest.raises((SlurmParseError, SlurmCommandError)):
        trusted_rows(result.check().stdout, "jobs")


# Failures


def refused(version: str, name: str, result: CommandResult) -> None:
    with pytest.raises(SlurmCommandError) as caught:
        result.check()
    assert caught.value.kind == "invalid"


def no_answer(version: str, name: str, result: CommandResult) -> None:
    """slurmctld stopped or frozen, or munge gone: an error on every release, and the right one."""
    parsers: dict[str, Callable[[str], object]] = {
        "ping_json": lambda text: text,
        "ping": parse.parse_ping,
        "sinfo_json": lambda text: trusted_rows(text, "nodes" if version == NO_JSON else "sinfo"),
        "json": lambda text: parse_json_jobs(text, {}),
    }
    if name.endswith("scontrol_ping"):
        # Not an error: the answer to the question is that it is down.
        assert parse.parse_ping(result.stdout).down == ("head",)
        assert parse.parse_ping(result.stdout).up == ()
        return
    if name.endswith("ping_json") and version != NO_JSON:
        (row,) = json.loads(result.stdout)["pings"]
        assert (result.rc, row["responding"]) == (0, False)
        return
    parser = next((made for end, made in parsers.items() if name.endswith(end)), None)
    with pytest.raises(ClusterError) as caught:
        text = result.check().stdout
        assert parser is not None, f"{name} passes for an answer"
        parser(text)
    assert isinstance(caught.value, SlurmCommandError)
    no_option = version == NO_JSON and "unrecognized option" in result.stderr
    assert caught.value.kind == ("invalid" if no_option else "controller_down")


def no_config(version: str, name: str, result: CommandResult) -> None:
    with pytest.raises(SlurmCommandError, match="cannot stat file"):
        result.check()


KINDS = {
    "array_partial": "finished",
    "adminheld_owner": "permission",
    "bad_dependency": "invalid",
    "bad_features": "invalid",
    "bad_gres_name": "invalid",
    "bad_nodelist": "invalid",
    "bad_numcpus": "invalid",
    "bad_partition": "not_found",
    "bad_reservation": "not_found",
    "bad_timelimit": "invalid",
    "cancelled": "finished",
    "completed": "finished",
    "completing": "finished",
    "invalid": "not_found",
    "invalid_id": "not_found",
    "invalid_o": "not_found",
    "j_invalid": "not_found",
    "j_invalid_h": "not_found",
    "list_one_bad": "not_found",
    "nice_negative_user": "permission",
    "no_changes": "invalid",
    "node_bad_state": "invalid",
    "node_unknown": "not_found",
    "nonowner": "permission",
    "norequeue": "disabled",
    "not_a_number": "not_found",
    "ntaskspernode": "invalid",
    "numcpus_too_many": "invalid",
    "owner": "permission",
    "pending": "pending",
    "priority_adminheld_owner": "invalid",
    "priority_userheld_root": "invalid",
    "resv_not_allowed": "permission",
    "running": "invalid",
    "running_cpus": "not_pending",
    "running_gres": "not_pending",
    "running_mem": "not_pending",
    "running_nodes": "invalid",
    "running_timelimit_user": "permission",
    "two_fields_one_bad": "not_found",
    "two_fields_one_bad2": "invalid",
    "two_fields_one_bad3": "invalid",
    "unknown": "not_found",
    "unknown_field": "invalid",
    "untyped_over_typed": "invalid",
    "user": "permission",
    # reservations
    "create_bad_node": "invalid",
    "create_bad_user": "permission",
    "create_busy": "invalid",
    "create_exists": "exists",
    "create_overlap": "overlap",
    "create_user": "permission",
    "delete_in_use": "in_use",
    "delete_unknown": "not_found",
    "delete_user": "permission",
    "update_nodes_plus": "invalid",
    "update_unknown": "not_found",
    "array_task_invalid": "not_found",
    "job_invalid": "not_found",
    "job_invalid_o": "not_found",
    "job_not_a_number": "not_found",
    "partition_unknown": "not_found",
    "reservation_unknown": "not_found",
}
ACCEPTED = {  # by this release, and refused by others
    ("22.05.8", "err_update_bad_dependency"),
    ("24.11.5", "err_update_untyped_over_typed"),
    ("25.11.2", "err_update_untyped_over_typed"),
    ("24.11.5", "err_resv_update_nodes_plus"),
    ("25.11.2", "err_resv_update_nodes_plus"),
}
OTHER = {  # nobody can tell what went wrong from that text
    ("25.11.2", "err_resv_create_bad_user"): "other",
    **{(version, "err_update_node_unknown"): "invalid" for version in VERSIONS},
    # "Unexpected message received" with slurmctld up: an answer to scontrol suspend only.
    ("22.05.8", "err_suspend_invalid"): "controller_down",
    ("24.11.5", "err_suspend_invalid"): "controller_down",
    ("25.11.2", "err_suspend_invalid"): "controller_down",
}
ALWAYS_ACCEPTED = {"err_update_bad_gres_type", "err_requeue_completing"}


def refusal(version: str, name: str, result: CommandResult) -> None:
    """What a command was refused with tells its kind, in the words of every release."""
    if (version, name) in ACCEPTED or name in ALWAYS_ACCEPTED:
        assert result.check().rc == 0
        return
    case = re.sub(
        r"^err_(update|hold|release|requeuehold|requeue|suspend|resume|resv|show|squeue)_", "", name
    )
    with pytest.raises(SlurmCommandError) as caught:
        result.check()
    assert caught.value.kind == OTHER.get((version, name), KINDS.get(case)), case


def squeue_unknown_field(version: str, name: str, result: CommandResult) -> None:
    """Exit status 0 and an empty column: only the other stream tells."""
    assert result.rc == 0 and "Invalid job format specification" in result.stderr


def squeue_empty(version: str, name: str, result: CommandResult) -> None:
    """An unknown user or partition: exit status 0 and no jobs. We never select by either."""
    assert result.rc == 0 and not result.stdout.strip()


def cancelled(version: str, name: str, result: CommandResult) -> None:
    """scancel of a finished or unknown job is no error; of somebody else's it is."""
    if "nonowner" in name:
        assert classify(result.stderr) == "permission" and result.rc == 210
    else:
        assert result.rc == 0


def accepted(version: str, name: str, result: CommandResult) -> None:
    assert result.check().rc == 0


def session(version: str, name: str, result: CommandResult) -> None:
    """One status for all lines; errors on the other stream, echoes of the lines on this one."""
    assert result.rc == 1 and result.stdout.startswith("scontrol: ")
    if "bad_line" in name:
        # What the marks of our sessions rest on.
        assert "invalid keyword: frobnicate\n" in result.stderr
    elif "-Q" not in name and "oneliner" not in name:
        assert classify(result.stderr) in ("not_found", "controller_down")


NOT_ASKED = "we never ask for it"
RULES: tuple[tuple[str, Check | str], ...] = (
    (r"down_.*session", session),
    (r"(down|hang|nomunge)_(sbatch|sprio)", "submission and priorities are not ours"),
    (r"(down|hang|nomunge)_.*", no_answer),
    (
        r"after_restart_squeue_t_all|squeue_(o|O|default|r|start|steps|t|j|version).*(?<!json)",
        "formats for people; ours is identity_format, whose fields rows_of has",
    ),
    (r"scontrol(_d)?_show_job_o", job_records),
    (r"scontrol_show_job(_(array|het)(_\w+)?)?_o(_epoch)?|show_after_.*", one_job),
    (r"scontrol_show_job", unread_jobs),
    (r"(nodes2_)?scontrol(_d)?_show_node_o", node_records),
    (r"err_show_node_unknown_o", one_node_of_two),
    (r"scontrol_show_partition_o", partitions),
    (r"(nodes2_)?scontrol_show_reservation_o|resv_after_nodes_plus", reservations),
    (r"scontrol_show_(node|partition|reservation)", not_one_line),
    (r"scontrol_show_config", config),
    (r"scontrol_ping", ping_up),
    (r"sdiag", diag),
    (r"sdiag_json", json_object),
    (r"scontrol_show_hostnames_multi_suffix", "Slurm does not understand that list; we do"),
    (r"scontrol_show_hostnames_.*", host_names),
    (r"scontrol_show_hostlist(sorted)?", "compress keeps the order, and is tested on its own"),
    (r"err_show_job_invalid_json|err_squeue_j_invalid_json", json_no_such_job),
    (r"squeue_json_j_completed", json_finished_hidden),
    (r"squeue_json_list", json_list),
    (r"squeue_json_t_all_j|squeue_j_array_json|scontrol_show_job_json_\w+", json_some_jobs),
    (r"squeue_json", json_queue),
    (r"scontrol_show_job_json", lambda v, n, r: (refused if v == NO_JSON else json_queue)(v, n, r)),
    (r"(nodes2_)?(scontrol_(show_\w+|ping)|sinfo)_json", json_rows),
    (r"err_squeue_bad_[oO]", squeue_unknown_field),
    (r"err_squeue_bad_(user|partition)", squeue_empty),
    (r"err_squeue_(bad_\w+|j_two_one_invalid|j_not_a_number)", NOT_ASKED),
    (r"err_scancel_.*|ok_scancel.*", cancelled),
    (r"(err|ok)_scontrol_stdin_session.*", session),
    (r"err_user_without_conf", no_config),
    (
        r"err_(update|hold|release|requeue|requeuehold|suspend|resume|resv|show)_.*(?<!drain_no_reason)",
        refusal,
    ),
    (r"err_squeue_j_invalid(_h)?", refusal),
    (r"update_after_numcpus_too_many|update_gres_too_many|update_gres_clear1?", NOT_ASKED),
    (
        r"ok_(hold|uhold|release|update|requeuehold).*|update_gres_(colon|slash)|update_numcpus_back"
        r"|hold_(running|completed)|release_(held_running|running|completing\w*|completed)",
        NOT_ASKED,
    ),
    (
        r"err_(sbatch|sacct|sacctmgr|sshare|reconfigure|node_update|scontrol)_.*|ok_sbatch.*",
        "submissions, accounting and administration are not ours",
    ),
    (r"err_update_node_drain_no_reason", "nodes are never changed by us"),
    (
        r"(nodes2_)?sinfo.*|sprio.*|nodes2_(setup|squeue_pd)|scontrol_(version|write\w*)"
        r"|scontrol_show_(licenses|step_o)|(state|resume)_after_\w+",
        NOT_ASKED,
    ),
    (r"pyslurm_.*", "see test_pyslurm_client.py"),
)


def rule_of(name: str) -> Check | str:
    return next((check for pattern, check in RULES if re.fullmatch(pattern, name)), "")


@pytest.mark.parametrize(
    ("version", "name"),
    [(version, name) for version in VERSIONS for name in names(version)],
    ids=lambda value: str(value),
)
def test_a_capture_is_understood(version: str, name: str) -> None:
    rule = rule_of(name)
    assert rule, f"no rule says what {name} is for"
    if not isinstance(rule, str):
        rule(version, name, answer(version, name))


def test_what_is_not_asked_for_is_the_smaller_part() -> None:
    for version in VERSIONS:
        rules = [rule_of(name) for name in names(version) if not name.startswith("pyslurm")]
        assert sum(not isinstance(rule, str) for rule in rules) > 150, version
