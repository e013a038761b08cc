"""Why a job waits or has what it has, in words: definite cases."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from builders import GIB, job, node, pending, placement, profile, res, running, snapshot

from slurm_synergy.controller.log_format import PlainFormatter
from slurm_synergy.core.decide import decide
from slurm_synergy.core.explain import (
    Explanation,
    Limit,
    explain,
    find_job,
    in_words,
    public,
)
from slurm_synergy.core.model import (
    JobPhase,
    JobStatus,
    Node,
    Reason,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.wording import duration, gib, printable
from slurm_synergy.errors import ModelError
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES
from slurm_synergy.policies.queue import queue_order

FIFO, TUNE = POLICIES["fifo"], MECHANISMS["tune"]


def explained(world: Snapshot, job_id: int, **more: Any) -> Explanation:
    plan = decide(world, FIFO, TUNE)
    order = queue_order(FIFO, world)  # type: ignore[arg-type]
    return explain(world, plan, job_id, order=order, **more)


def text(found: Explanation) -> str:
    return "\n".join(in_words(found))


def world(nodes: Sequence[Node], *jobs: JobStatus, **more: Any) -> Snapshot:
    return snapshot(nodes, jobs, **more)


def test_a_job_behind_others_is_told_its_rank_and_when_gpus_come_free() -> None:
    made = world(
        [node()],
        running(job(1, 6, time_limit_s=7200.0), placement(1, v100_1=res(6, 18, 375_000))),
        pending(job(2, 8)),
        pending(job(3, 4)),
    )
    found = explained(made, 3)
    assert (found.rank, found.of, found.waiting_ahead) == (3, 3, 1)
    assert (found.binding, found.phase) == (Limit.GPUS, JobPhase.PENDING)
    assert found.reason is not None
    assert found.reason.code is ReasonCode.NO_GPUS
    smaller, ends = found.changes
    assert smaller == "a request of 2 GPUs would fit now"
    assert ends == (
        "it fits when job 1 has ended, by its time limit in about 2.0 h, unless the job that waits "
        "ahead of it takes it"
    )
    assert text(found).startswith("job 3 of u waits: needs 4 GPUs (any type); jobs ahead of it")
    assert "rank: 3 of 3 by policy fifo; 1 waiting ahead of it" in text(found)
    assert "bound by: GPUs" in text(found)


def test_the_end_that_its_work_lets_expect_goes_before_the_limit() -> None:
    belief = profile(1000.0, 100.0)
    one = job(1, 8, total_samples=1_440_000.0, time_limit_s=36_000.0)
    made = world(
        [node()],
        running(one, placement(1, v100_1=res(8, 24, 500_000)), belief, done_samples=0.0),
        pending(job(2, 4)),
    )
    # 8 GPUs of 100 samples/s each: half an hour.
    (_, ends) = explained(made, 2).changes
    assert ends == (
        "it fits when job 1 has ended, expected in about 30 min, at the latest in 10.0 h by time "
        "limit"
    )
    unknown = replace(one, total_samples=None, time_limit_s=None)
    made = world(
        [node()],
        running(unknown, placement(1, v100_1=res(8, 24, 500_000))),
        pending(job(2, 4)),
    )
    none_free, ends = explained(made, 2).changes
    assert none_free == "no GPU is free, so no smaller request would start now either"
    assert ends.endswith("which has no known end (no time limit, no amount of work told)")


def test_several_ends_are_named_only_where_one_is_not_enough() -> None:
    limits = {1: 3600.0, 2: 7200.0, 3: 10_800.0}
    made = world(
        [node("v100-1"), node("v100-2")],
        running(job(1, 4, time_limit_s=limits[1]), placement(1, v100_1=res(4, 12, 250_000))),
        running(job(2, 4, time_limit_s=limits[2]), placement(2, v100_1=res(4, 12, 250_000))),
        running(job(3, 4, time_limit_s=limits[3]), placement(3, v100_2=res(4, 12, 250_000))),
        pending(job(4, 8)),
    )
    # Job 3 alone frees v100-2, but later than jobs 1 and 2 free v100-1: one job is told first.
    assert explained(made, 4).changes[-1].startswith("it fits when job 3 has ended")
    made = world(
        made.nodes,
        *made.jobs[:3],
        running(job(5, 4, time_limit_s=900.0), placement(5, v100_2=res(4, 12, 250_000))),
        pending(job(6, 8)),
    )
    told = explained(made, 6).changes[-1]
    assert told.startswith("it fits when jobs 1, 2 have ended, by its time limit in about 2.0 h")


def test_fragments_other_types_and_memory_are_told_apart() -> None:
    taken = [
        running(job(at, 5), placement(at, **{f"v100_{at}": res(5, 15, 312_500)})) for at in (1, 2)
    ]
    nodes = [node("v100-1"), node("v100-2"), node("a100-1", "a100", 8, 64, 1_000_000)]
    found = explained(world(nodes, *taken, pending(job(3, 4, gpu_types=("v100",)))), 3)
    assert found.binding is Limit.SHAPE
    assert found.changes[0] == (
        "GPUs of type a100 would fit now (ask for --gres=gpu:N and the hint gpu_types=v100+a100)"
    )
    assert found.changes[1] == "a request of 3 GPUs would fit now"
    hungry = job(4, 2, min_mem_mib_per_node=300 * GIB)
    found = explained(world(nodes[:2], *taken, pending(hungry)), 4)
    assert found.reason is not None
    assert (found.reason.code, found.binding) == (ReasonCode.NO_MEMORY, Limit.MEMORY)
    assert found.changes[0].startswith("it needs 300 GiB of memory on each node; a request of 183")


def test_a_request_that_never_fits_is_told_the_largest_that_does() -> None:
    found = explained(world([node(), node("v100-2")], pending(job(1, 32, nodes=2))), 1)
    assert found.binding is Limit.SHAPE
    assert found.changes == ("a request of 8 GPUs on each of 2 nodes could run here",)


def test_what_is_outside_our_hands_is_said_so() -> None:
    waits = Reason(code=ReasonCode.NOT_OURS, text="waits for afterok:7")
    found = explained(world([node()], pending(job(1), blocked=waits)), 1)
    assert (found.rank, found.binding) == (None, Limit.OUTSIDE)
    assert text(found).splitlines() == [
        "job 1 of u waits: waits for afterok:7",
        "bound by: something outside the plan",
        "what would change it: it is planned as soon as that is over",
    ]
    limit = Reason(code=ReasonCode.LIMITED, text="PartitionTimeLimit")
    limited = explained(world([node()], pending(job(1), blocked=limit)), 1)
    assert limited.changes == ("it is planned again when the limit, or the job, is changed",)
    shown = Reason(code=ReasonCode.ONLY_SHOWN, text="observe: nothing is changed")
    observed = explained(world([node()], pending(job(1))), 1, outcomes={1: shown})
    assert "Slurm alone starts the job" in observed.changes[0]
    drained = explained(world([node()], pending(job(1)), draining=True), 1)
    assert drained.changes == ("an operator's 'synergyctl resume'",)


def test_a_job_with_more_than_its_share_is_told_what_that_gains() -> None:
    hungry, modest = profile(50.0, 10_000.0), profile(5000.0, 100.0)
    made = world([node()], pending(job(1, 4), hungry), pending(job(2, 4), modest))
    found = explained(made, 1)
    share = found.shares["v100-1"]
    assert share.cpus > found.proportional["v100-1"].cpus == 12
    assert found.speedup == pytest.approx(share.cpus / 12)
    assert found.binding is Limit.CPUS
    assert "is to start on v100-1 with 4 v100 GPUs" in text(found)
    assert f"{found.speedup:.2f} times as fast" in text(found)
    assert "it would run at full speed (+" in found.changes[0]
    other = explained(made, 2)
    assert (other.binding, other.speedup) == (Limit.GPUS, pytest.approx(1.0))
    assert other.changes == (
        "more cores or memory would not make it faster: its GPUs set the pace",
    )


def test_memory_is_found_to_bind_where_reading_does() -> None:
    reading = profile(
        10_000.0, 10_000.0, dataset_mib=600_000.0, samples=1_000_000, storage_mib_s=100.0
    )
    one = running(job(1, 4), placement(1, v100_1=res(4, 12, 250_000)), reading)
    two = running(job(2, 4, wrapped=False), placement(2, v100_1=res(4, 12, 250_000)))
    assert explained(world([node()], one, two), 1).binding is Limit.MEMORY


def test_unknown_speed_and_missing_wrapper_are_told() -> None:
    made = world(
        [node()],
        running(job(1, 4), placement(1, v100_1=res(4, 12, 250_000))),
        running(job(2, 4, wrapped=False), placement(2, v100_1=res(4, 12, 250_000))),
    )
    known, bare = explained(made, 1), explained(made, 2)
    assert (known.binding, known.speedup) == (Limit.UNKNOWN, None)
    assert "name a profile" in known.changes[0]
    assert "start its tasks with synergy-srun" in bare.changes[0]


def test_deferred_starts_and_stops_say_why() -> None:
    busy = Reason(code=ReasonCode.GPUS_BUSY, text="placed on v100-1, where 0 of 4 GPUs are free")
    made = world([node()], pending(job(1, 4)))
    found = explained(made, 1, outcomes={1: busy})
    assert found.summary.endswith("not yet: placed on v100-1, where 0 of 4 GPUs are free")
    assert found.changes == ("it starts as soon as that is over",)
    made = world(
        [node()],
        running(job(1, 4), placement(1, v100_1=res(4, 12, 250_000)), phase=JobPhase.STOPPING),
    )
    assert explained(made, 1).summary.startswith("was told to checkpoint and leave; its place:")


def test_others_see_neither_speeds_nor_advice() -> None:
    hungry = profile(50.0, 10_000.0)
    found = public(explained(world([node()], pending(job(1, 4), hungry)), 1))
    assert (found.speedup, found.rate_samples_per_s, found.binding) == (None, None, None)
    assert found.changes == ()
    assert found.shares
    waits = explained(world([node()], pending(job(1, 8)), pending(job(2, 8))), 2)
    assert public(waits).binding is Limit.GPUS


def test_jobs_are_found_by_id_and_by_array_member() -> None:
    made = world(
        [node()],
        pending(job(12, array="10_0")),
        pending(job(13, array="10_1")),
        pending(job(20, array="20_7")),
        pending(job(30)),
    )
    assert [find_job(made, name) for name in ("30", "10_1", "13", "20", "20_7")] == [
        *(30, 13, 13, 20, 20)
    ]
    for name, told in (
        ("10", "job 10 is an array; name one of its members: 10_0, 10_1"),
        ("99", "job 99 is not among the 4 jobs of round 1"),
        ("10_5", "job 10_5 is not among"),
        ("1x", "'1x' is no job id"),
        ("", "'' is no job id"),
    ):
        with pytest.raises(ModelError, match=told):
            find_job(made, name)


def test_amounts_read_well() -> None:
    assert [duration(one) for one in (-1, 5, 90, 7200, 200_000)] == [
        *("0 s", "5 s", "2 min", "2.0 h", "2.3 days")
    ]
    assert [gib(one) for one in (0, 1536, 2048, 250_000)] == ["0", "1.5", "2", "244"]


def test_what_users_wrote_does_not_steer_who_reads_it() -> None:
    assert printable("caf\u00e9 [x] 12 %") == "caf\u00e9 [x] 12 %"
    assert printable("a\x1b]0;b\x07\n\u202ec\udc80") == r"a\x1b]0;b\x07\n\u202ec\udc80"
    said = logging.LogRecord("x", logging.WARNING, "", 1, "hint %s\nmore", ("\x1b[31m",), None)
    assert PlainFormatter("%(message)s").format(said) == "hint \\x1b[31m\nmore"
