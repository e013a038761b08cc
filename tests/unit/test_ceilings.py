"""Sizes of elastic jobs that Slurm refuses for a limit: what is tried, and when once more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from builders import scaling
from slurm_world import World, make_world, world

from slurm_synergy.core.explain import explain, in_words
from slurm_synergy.core.model import Placement, Profile, ReasonCode
from slurm_synergy.core.resources import Resources
from slurm_synergy.slurm.accounting import AccountingFacts, Asker
from slurm_synergy.slurm.facts import Hold, JobState
from slurm_synergy.slurm.limits import obstacle_of

__all__ = ["make_world", "world"]  # fixtures

GROUP, USER = "AssocGrpGRES", "QOSMaxGRESPerUser"
ACCOUNT = ("lab", "GrpTRES gres/gpu")
MINE, THEIRS = ("", "high(2) 1000 MaxTRESPU gres/gpu"), ("", "high(2) 7 MaxTRESPU gres/gpu")
LIMITS = {ACCOUNT: (4, 2), MINE: (4, 0), THEIRS: (4, 4)}
HINTS = "synergy:elastic=full,max_gpus=8,batch=32-4096,profile=grown"


def accounting(
    changes: Mapping[tuple[str, str], tuple[int, int]] | None = None,
) -> AccountingFacts:
    """Each limit with its use."""
    known = {**LIMITS, **(changes or {})}
    return AccountingFacts(
        accounts=frozenset({"lab"}),
        limits={bound: str(limit) for bound, (limit, _) in known.items()},
        used={bound: float(used) for bound, (_, used) in known.items()},
    )


def submitted(world: World, hints: str = HINTS) -> int:
    """A job that Sia gives all GPUs of a node."""
    assert world.ledger is not None
    belief = scaling({"v100": 1.0}, explored={"v100": 8}, noise=1e4)
    world.ledger.save_profile(Profile(key="grown", scaling=belief, restart_s=1.0))
    world.slurm.accounting = accounting()
    return world.slurm.submit(gpus=1, account="lab", qos="high", comment=hints)


def offered(world: World, job_id: int, policy: str = "sia") -> int:
    """The GPUs that the next round starts the job on; 0 for none."""
    world.clock.advance(0.5)
    world.round(policy)
    facts = world.slurm.jobs[job_id]
    return 0 if facts.held is not Hold.NONE else sum(facts.gpus_asked.values())


def refuse(world: World, job_id: int, reason: str) -> None:
    world.slurm.change(job_id, reason=reason)
    for _ in range(3):
        world.cluster.tick()
    assert world.slurm.jobs[job_id].held is Hold.ADMIN


def settle(world: World, job_id: int, reason: str = GROUP, allowed: int = 2) -> None:
    """Slurm allows no more than so many GPUs, and the job comes to run on these."""
    gpus = 8
    while gpus > allowed:
        assert offered(world, job_id) == gpus
        refuse(world, job_id, reason)
        assert world.seen(job_id).blocked is None
        gpus //= 2
    assert offered(world, job_id) == allowed
    world.slurm.schedule()
    world.clock.advance(1.0)
    world.cluster.tick()
    assert world.slurm.jobs[job_id].state is JobState.RUNNING


def refused(world: World, job_id: int) -> int:
    """From how many GPUs on it is not offered more; 0 for no such bound."""
    world.cluster.tick()
    return min((one.refused for one in world.seen(job_id).job.ceilings), default=0)


def test_a_job_comes_to_what_it_is_allowed_without_waiting(world: World) -> None:
    job_id = submitted(world)
    settle(world, job_id)
    told = world.seen(job_id).job.ceilings
    assert [(one.gpu_type, one.refused) for one in told] == [("v100", 4)]
    assert GROUP in told[0].text and "the limit of GPUs" in told[0].text
    # And is left in peace.
    world.slurm.accounting = accounting({ACCOUNT: (4, 4)})
    for _ in range(5):
        world.clock.advance(300.0)
        assert not [one for one in world.round("sia").actions if type(one).__name__ != "Renew"]
    assert world.slurm.jobs[job_id].state is JobState.RUNNING


@pytest.mark.parametrize(
    ("reason", "changes", "eased"),
    [
        (GROUP, {}, False),
        (GROUP, {ACCOUNT: (4, 3)}, False),  # it has two of these: still not four
        (GROUP, {ACCOUNT: (4, 2)}, True),  # only its own are left
        (GROUP, {ACCOUNT: (6, 4)}, True),  # another limit: whatever it is, it is tried
        (USER, {ACCOUNT: (4, 2)}, False),  # not what was in the way
        (USER, {MINE: (4, 2)}, True),
        (USER, {THEIRS: (4, 0)}, False),
    ],
)
def test_a_running_job_is_disturbed_only_for_what_would_do(
    world: World,
    reason: str,
    changes: Mapping[tuple[str, str], tuple[int, int]],
    eased: bool,
) -> None:
    job_id = submitted(world)
    # Seen by the controller while it runs on two of them, and others have the rest.
    settle(world, job_id, reason)
    world.slurm.accounting = accounting({ACCOUNT: (4, 4), MINE: (4, 4)})
    world.clock.advance(10.0)
    assert refused(world, job_id) == 4
    world.slurm.accounting = accounting({ACCOUNT: (4, 4), MINE: (4, 4), **changes})
    world.clock.advance(10.0)
    assert (refused(world, job_id) != 4) is eased
    world.round("sia")
    assert world.ledger is not None
    assert (world.ledger.read()[job_id].stopping is not None) is eased


def test_the_same_size_is_left_alone_for_twice_as_long_each_time(world: World) -> None:
    job_id = submitted(world, HINTS.replace("max_gpus=8", "min_gpus=8,max_gpus=8"))
    wait_s = 5.0
    for _ in range(3):
        assert offered(world, job_id) == 8
        refuse(world, job_id, "QOSMaxGRESPerJob")
        blocked = world.seen(job_id).blocked
        assert blocked is not None and blocked.code is ReasonCode.LIMITED
        world.clock.advance(wait_s - 1.0)
        assert offered(world, job_id) == 0
        world.clock.advance(1.0)
        wait_s *= 2


def test_a_least_number_between_two_sizes_is_explained(world: World) -> None:
    """Sia offers four for three, and after a refusal of four nothing."""
    job_id = submitted(world, HINTS.replace("max_gpus=8", "min_gpus=3,max_gpus=4"))
    assert offered(world, job_id) == 4
    refuse(world, job_id, GROUP)
    assert offered(world, job_id) == 0
    (reason,) = world.round("sia").plan.waiting.values()
    assert reason.code is ReasonCode.LIMITED and GROUP in reason.text
    world.slurm.accounting = accounting({ACCOUNT: (4, 0)})
    world.clock.advance(5.0)
    assert offered(world, job_id) == 4


LEAST = "QOSMinGRES"
NEW = "synergy:elastic=full,max_gpus={},batch=32-4096,profile=new"


def test_a_job_comes_to_the_least_that_it_may_have(world: World) -> None:
    job_id = submitted(world, NEW.format(8))
    for gpus in (1, 2):
        assert offered(world, job_id) == gpus, "of what may be had the least, as nothing is known"
        refuse(world, job_id, LEAST)
        job = world.seen(job_id).job
        assert [(one.refused, one.too_few) for one in job.ceilings] == [(gpus, True)]
        assert LEAST in job.ceilings[0].text and "the least GPUs of one job" in job.ceilings[0].text
        assert job.least_gpus == gpus + 1
    found = world.round("sia")
    said = "\n".join(in_words(explain(found.snapshot, found.plan, job_id)))
    assert "more than 2 of type v100 (Slurm does not start it: its QOS sets the least" in said
    assert sum(world.slurm.jobs[job_id].gpus_asked.values()) == 4
    world.slurm.schedule()
    world.clock.advance(1.0)
    world.cluster.tick()
    assert world.slurm.jobs[job_id].state is JobState.RUNNING
    for limits, least in (({}, 3), ({MINE: (8, 0)}, 1)):
        world.slurm.accounting = accounting(limits)
        world.clock.advance(20.0)
        world.cluster.tick()
        assert world.seen(job_id).job.least_gpus == least, "until a limit is another one"


def test_less_than_the_least_is_explained_and_tried_when_a_limit_changes(world: World) -> None:
    job_id = submitted(world, NEW.format(2))
    for gpus in (1, 2):
        assert offered(world, job_id) == gpus
        refuse(world, job_id, LEAST)
    blocked = world.seen(job_id).blocked
    assert blocked is not None and blocked.code is ReasonCode.LIMITED and LEAST in blocked.text
    assert offered(world, job_id) == 0
    world.slurm.accounting = accounting({ACCOUNT: (5, 0)})
    world.clock.advance(5.0)
    assert offered(world, job_id) == 1


def test_a_policy_that_chooses_no_sizes_waits_after_the_second_refusal(world: World) -> None:
    world.slurm.accounting = accounting()
    job_id = world.slurm.submit(gpus=4, account="lab", comment=HINTS)
    tries, policy = 0, "srtf"
    for _ in range(6):
        if offered(world, job_id, policy):
            tries += 1
            refuse(world, job_id, GROUP)
    assert tries == 2
    blocked = world.seen(job_id).blocked
    assert blocked is not None and blocked.code is ReasonCode.LIMITED
    world.clock.advance(5.0)
    assert offered(world, job_id, policy) == 4


def test_a_slow_start_on_the_next_size_does_not_bring_the_larger_one_back(world: World) -> None:
    job_id = submitted(world)
    assert offered(world, job_id) == 8
    refuse(world, job_id, GROUP)
    world.clock.advance(60.0)
    assert offered(world, job_id) == 4


def test_a_job_that_is_changed_is_tried_anew(world: World) -> None:
    job_id = submitted(world)
    settle(world, job_id)
    world.slurm.change(job_id, qos="higher")
    assert refused(world, job_id) == 0


def test_what_is_not_a_matter_of_size_makes_the_job_wait(world: World) -> None:
    job_id = submitted(world)
    assert offered(world, job_id) == 8
    refuse(world, job_id, "QOSMaxJobsPerUserLimit")
    blocked = world.seen(job_id).blocked
    assert blocked is not None and blocked.code is ReasonCode.LIMITED
    assert world.seen(job_id).job.ceilings == ()


@pytest.mark.parametrize(
    ("reason", "within"),
    [
        (GROUP, "smaller"),
        (USER, "smaller"),
        ("AssocGrpCPURunMinutesLimit", "smaller"),
        ("QOSMaxNodePerUserLimit", "smaller"),
        ("AssocGrpBilling", "smaller"),
        ("QOSResourceLimit", "smaller"),
        (LEAST, "larger"),
        ("QOSMinCpuNotSatisfied", "larger"),
        ("QOSMinFutureThing", ""),
        ("AssocMaxJobsLimit", ""),
        ("QOSMaxWallDurationPerJobLimit", ""),
        ("PartitionNodeLimit", ""),
        ("QOSGrpFutureThing", ""),
    ],
)
def test_limits_that_a_job_of_another_size_may_be_within(reason: str, within: str) -> None:
    found = obstacle_of(reason)
    assert found is not None
    assert (found.of_size, found.of_least) == (within == "smaller", within == "larger")


def test_limits_of_accounts_above_concern_a_job_and_those_beside_do_not() -> None:
    bounds = [(name, "GrpTRES gres/gpu") for name in ("root", "lab", "other")]
    bounds += [("lab", "ann(1000) GrpTRES gres/gpu"), ("lab", "bob(7) GrpTRES gres/gpu")]
    bounds += [("lab", "GrpTRES gres/gpu:v100"), ("lab", "GrpTRES gres/gpu:a100")]
    found = AccountingFacts(
        limits=dict.fromkeys(bounds, "8"),
        used=dict.fromkeys(bounds, 3.0),
        above={"lab": "root", "other": "root"},
    ).gpus_left(Asker(uid=1000, account="lab", qos="high"), "v100")
    theirs = [bounds[at] for at in (2, 4, 6)]
    assert found == {bound: 5.0 for bound in bounds if bound not in theirs}


def test_of_a_kind_of_gpu_that_comes_into_the_pool_all_sizes_are_offered(world: World) -> None:
    job_id = world.slurm.submit(gpus=1, kind="", comment="synergy:elastic=scale,max_gpus=8")
    for kind, kinds in (("a100", ("a100",)), ("t4", ("a100", "t4"))):
        node = replace(world.slurm.nodes["v100-1"], name=kind, gpus={kind: 8})
        world.slurm.nodes[kind] = node
        if kind == "a100":
            assert world.seen(job_id).job.gpu_types == ()
            there = (("v100-1", Resources(gpus=1, cpus=1, mem_mib=1)),)
            smallest = Placement(job_id=job_id, gpu_type="v100", shares=there)
            obstacle, facts = obstacle_of(GROUP), world.slurm.jobs[job_id]
            assert obstacle is not None
            world.cluster._follower.ceilings.add(facts, smallest, obstacle, "too large", 1000.0)
        assert world.seen(job_id).job.gpu_types == kinds
