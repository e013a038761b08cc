"""No text, however hostile or damaged, makes a parser fail with anything but its own error."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable

import pytest
from captures import VERSIONS, answer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_slurm_parse import MARK, jobs_of, rows_of, squeue_text

from slurm_synergy.errors import ClusterError, SlurmParseError
from slurm_synergy.slurm import parse
from slurm_synergy.slurm.facts import GpuForm, Hold, JobFacts, JobState, NodeFacts
from slurm_synergy.slurm.fields import as_null
from slurm_synergy.slurm.json_jobs import parse_json_jobs
from slurm_synergy.slurm.parse_jobs import (
    JobIdentity,
    JobMemory,
    parse_identities,
    parse_jobs,
)
from slurm_synergy.slurm.sdiag import parse_diag

SOME = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))

CAPTURES: dict[str, Callable[[str], object]] = {
    "scontrol_d_show_node_o": parse.parse_nodes,
    "scontrol_show_partition_o": parse.parse_partitions,
    "scontrol_show_reservation_o": parse.parse_reservations,
    "scontrol_show_config": parse.parse_config,
    "scontrol_ping": parse.parse_ping,
    "sdiag": parse_diag,
}
PIECES = (
    *(" ", "\n", "=", "(null)", "JobId=7", "JobName=", " UserId=root(0)", " JobState=RUNNING"),
    *(
        "NodeName=x",
        "State=IDLE*+DRAIN",
        "gres/gpu:v100:2(IDX:0-1)",
        "[1-",
        "9" * 30,
        "é✓",
        "\udcff",
    ),
)
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=12)), max_size=12).map("".join)
user_texts = st.text(max_size=60).map(lambda text: text.replace("\0", "")) | st.sampled_from(
    (
        "a\nJobId=7 JobName=resnet50-imagenet UserId=alice(2001) GroupId=alice(2001) "
        "MCS_label=N/A Priority=9 Nice=0 Account=(null) QOS=(null) JobState=FAILED",
        "x JobState=COMPLETED UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=1",
        " Command=/bin/sh StdOut=/etc/passwd",
        "he said \"it\" | 'so' \\ `$(x)`; #",
        "日本語\u2028\x85\r\t",
    )
)


@pytest.mark.parametrize("name", CAPTURES)
@given(data=st.data())
@SOME
def test_a_damaged_answer_is_read_or_refused(name: str, data: st.DataObject) -> None:
    text = answer(data.draw(st.sampled_from(VERSIONS)), name).stdout
    start = data.draw(st.integers(0, len(text)))
    gone = data.draw(st.integers(0, 200))
    damaged = text[:start] + data.draw(texts) + text[start + gone :]
    with contextlib.suppress(SlurmParseError):
        CAPTURES[name](damaged)


@pytest.mark.parametrize("version", VERSIONS)
@given(cut=st.integers(1, 400_000), unit=st.sampled_from(["byte", "line"]))
@SOME
def test_a_queue_that_was_cut_off_never_loses_a_job_silently(
    version: str, cut: int, unit: str
) -> None:
    text = answer(version, "scontrol_d_show_job_o").stdout
    rows = squeue_text(rows_of(version))
    identities = parse_identities(rows, MARK)
    if unit == "line":
        lines = text.splitlines(keepends=True)
        short = "".join(lines[: cut % len(lines)])
    else:
        short = text[: cut % len(text)]
    try:
        records = parse_jobs(short, identities)
    except SlurmParseError:
        return
    told = {job.job_id for job in records.jobs} | set(records.unresolved)
    assert told == identities.keys()


jobs_before = functools.cache(jobs_of)


@given(name=user_texts, comment=user_texts, job_id=st.sampled_from([7, 8, 26, 27]))
@SOME
def test_texts_of_one_job_change_nothing_of_another(name: str, comment: str, job_id: int) -> None:
    """Whatever job 17 is called and says, every other job reads the same or is asked for alone."""
    version = "24.11.5"
    name = name.replace("\n", " ") or "x"
    before, rows = jobs_before(version), rows_of(version)
    text = answer(version, "scontrol_d_show_job_o").stdout
    old_name, old_comment = before[17].name, before[17].comment
    text = text.replace(f"JobName={old_name} ", f"JobName={name} ", 1)
    text = text.replace(f"Comment={old_comment}", f"Comment={comment}", 1)
    for row in rows:
        if row["JobId"] == "17" or row["JobId"] == 17:
            row["Name"], row["Comment"] = name, comment
    records = parse_jobs(text, parse_identities(squeue_text(rows), MARK))
    after = {job.job_id: job for job in records.jobs}
    if job_id in after:
        assert _told_by_slurm(after[job_id]) == _told_by_slurm(before[job_id])
    else:
        assert job_id in records.unresolved
    if 17 in after:
        mine = after[17]
        assert (mine.state, mine.user, mine.uid) == (JobState.RUNNING, "alice", 2001)
        # Nothing but blanks, or one of Slurm's words for nothing, is no comment.
        assert (mine.name, mine.comment, mine.held) == (name, as_null(comment) or "", Hold.NONE)


@given(named=st.lists(st.tuples(user_texts, user_texts), min_size=2, max_size=4))
@settings(SOME, max_examples=25)
def test_what_is_remembered_of_a_reading_changes_nothing_of_the_next(
    named: list[tuple[str, str]],
) -> None:
    """Job 17 is called and says something else at each reading, and the same at every second."""
    version, memory = "24.11.5", JobMemory()
    plain, old = answer(version, "scontrol_d_show_job_o").stdout, jobs_before(version)[17]
    for name, comment in [*named, *named]:
        rows, text = rows_of(version), plain
        text = text.replace(f"JobName={old.name} ", f"JobName={name or 'x'} ", 1)
        text = text.replace(f"Comment={old.comment}", f"Comment={comment}", 1)
        for row in rows:
            if str(row["JobId"]) == "17":
                row["Name"], row["Comment"] = name or "x", comment
        identities = parse_identities(squeue_text(rows), MARK, memory)
        assert parse_jobs(text, identities, memory=memory) == parse_jobs(text, identities)


def _told_by_slurm(job: JobFacts) -> JobFacts:
    # The path of the output is the last part of a record, and the first that a forged one hides.
    return dataclasses.replace(job, std_out="")


@given(texts)
@SOME
def test_any_text_is_refused_or_read_as_a_queue(text: str) -> None:
    identity = JobIdentity(
        job_id=7,
        uid=0,
        partitions=("synergy",),
        name="x",
        account="(null)",
        wckey="",
        comment="",
        admin_comment="",
        command="",
        work_dir="",
        gpu_form=GpuForm.NONE,
        gpus_asked={},
    )
    for parser in (
        lambda: parse_jobs(text, {7: identity}),
        lambda: parse_identities(text, MARK),
        lambda: parse_json_jobs(text, {}),
    ):
        with contextlib.suppress(ClusterError):
            parser()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**40) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@functools.cache
def held_job(version: str) -> tuple[dict[str, object], dict[str, object], dict[str, NodeFacts]]:
    """The JSON document without its jobs, the row of job 26, and the nodes."""
    document = json.loads(answer(version, "squeue_json").stdout)
    row = next(row for row in document.pop("jobs") if row["job_id"] == 26)
    nodes = parse.parse_nodes(answer(version, "scontrol_d_show_node_o").stdout)
    return document, row, {node.name: node for node in nodes}


@pytest.mark.parametrize("version", VERSIONS)
@given(data=st.data())
@SOME
def test_json_of_a_next_release_is_read_or_refused(version: str, data: st.DataObject) -> None:
    """Unknown keys change nothing, other shapes of known ones are an error of ours."""
    document, row, nodes = held_job(version)

    def read(more: dict[str, object], changed: dict[str, object]) -> tuple[JobFacts, ...]:
        return parse_json_jobs(json.dumps({**document, **more, "jobs": [row | changed]}), nodes)

    new = st.dictionaries(st.integers(0, 9).map("new_{}".format), json_values, max_size=2)
    more = data.draw(new)
    assert read(more, more) == read({}, {})
    with contextlib.suppress(ClusterError):
        read({}, {data.draw(st.sampled_from(sorted(row))): data.draw(json_values)})
