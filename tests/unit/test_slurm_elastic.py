"""Elastic jobs on Slurm, the pure part: requests, run times, shapes, access, tasks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from builders import elastic, pending, placement, res, snapshot
from builders import node as cluster_node
from hypothesis import given
from hypothesis import strategies as st

from slurm_synergy.controller.codec import decode, encode
from slurm_synergy.core.decide import decide
from slurm_synergy.core.elastic import as_shaped
from slurm_synergy.core.model import Elasticity, Job, Plan
from slurm_synergy.errors import ModelError
from slurm_synergy.jobside.environment import (
    is_elastic,
    stale_variables,
    step_shape,
    task_from,
    training_defaults,
)
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import policy_of_plan
from slurm_synergy.policies.fifo import FIFO
from slurm_synergy.policies.sia import SIA
from slurm_synergy.slurm.access import Access, admits, groups_of_user
from slurm_synergy.slurm.facts import (
    GpuForm,
    JobFacts,
    JobShape,
    JobState,
    NodeFacts,
    PartitionFacts,
)
from slurm_synergy.slurm.original import fields_to_give_back
from slurm_synergy.slurm.parse import parse_partitions
from slurm_synergy.slurm.request import build_job, read_mark
from slurm_synergy.slurm.reshape import differences, restore_fields
from slurm_synergy.slurm.runtime import Served

MARK = "synergy:v=1,wrapper={wrapper},gpn=2,type=any,nodes=1,tpn={tpn},cpt=0,mem=0,limit=0{more}"


def facts(hints: str = "", **changes: object) -> JobFacts:
    made = JobFacts(
        job_id=1,
        user="ann",
        uid=1000,
        name="j",
        state=JobState.PENDING,
        partition="synergy",
        submit_s=1.0,
        gpu_form=GpuForm.PER_NODE,
        gpus_asked={"": 2},
        comment=f"synergy:{hints}" if hints else "",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def built(hints: str, *, wrapper: str = "yes", tpn: int = 0, more: str = ",elastic=yes") -> Job:
    request = read_mark(MARK.format(wrapper=wrapper, tpn=tpn, more=more))
    assert request is not None
    return build_job(facts(hints), request, lambda key: None)[0]


# what the job is -----------------------------------------------------------------------------


def test_hints_of_an_admitted_job_make_it_elastic() -> None:
    job = built("elastic=full,min_gpus=1,max_gpus=8,batch=64-512,gpu_types=v100+a100")
    assert job.elasticity is Elasticity.ADAPTIVE
    assert (job.least_gpus, job.most_gpus, job.batch) == (1, 8, (64, 512))
    assert job.gpu_types == ("v100", "a100")


def test_without_a_range_only_the_gpus_change() -> None:
    """So the one batch that is seen makes a model of it."""
    job = built("elastic=full,max_gpus=8")
    assert (job.elasticity, job.most_gpus) == (Elasticity.STRONG_SCALING, 8)


@pytest.mark.parametrize(("wrapper", "more"), [("no", ",elastic=yes"), ("yes", "")])
def test_a_job_whose_tasks_cannot_change_stays_rigid(wrapper: str, more: str) -> None:
    job = built("elastic=full,max_gpus=8", wrapper=wrapper, more=more)
    assert job.elasticity is Elasticity.RIGID
    assert job.most_gpus == 2


@pytest.mark.parametrize(
    ("tpn", "gpus", "nodes", "tasks"),
    [
        (0, 1, 1, 1),  # nothing said: a rank for each GPU
        (0, 8, 2, 4),
        (2, 4, 1, 4),  # one per GPU, said
        (1, 4, 1, 2),  # one for two GPUs
        (1, 1, 1, 1),
    ],
)
def test_tasks_follow_the_gpus_as_the_script_asks(
    tpn: int, gpus: int, nodes: int, tasks: int
) -> None:
    job = built("elastic=scale,max_gpus=16", tpn=tpn)
    shares = {f"n{at}": res(gpus // nodes, 4, 1000) for at in range(nodes)}
    shaped = as_shaped(job, placement(1, "v100", **shares))
    assert (shaped.gpus, shaped.nodes, shaped.tasks_per_node) == (gpus, nodes, tasks)


# what its tasks see --------------------------------------------------------------------------

STALE = {
    "SYNERGY_ELASTIC": "1",
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "1",
    "SLURM_NPROCS": "1",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_CPUS_PER_NODE": "64(x2)",
}


def test_the_step_has_the_tasks_of_this_run_not_of_the_submission() -> None:
    shape = step_shape(STALE)
    assert (shape.nodes, shape.tasks, shape.cpus_per_task) == (2, 4, 32)
    assert {"SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE"} <= set(
        stale_variables(STALE, 32)
    )
    rigid = {**STALE, "SYNERGY_ELASTIC": ""}
    assert step_shape(rigid).tasks == 2
    assert "SLURM_NTASKS" not in stale_variables(rigid, 32)
    unknown = {key: value for key, value in STALE.items() if key != "SLURM_TASKS_PER_NODE"}
    assert step_shape(unknown).tasks == 2


def test_a_single_rank_of_an_elastic_job_has_a_meeting_point_too() -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SYNERGY_ELASTIC": "1"}
    assert is_elastic(env)
    assert "MASTER_PORT" in training_defaults(env, task_from(env), threads=1, resolves=())
    del env["SYNERGY_ELASTIC"]
    assert "MASTER_PORT" not in training_defaults(env, task_from(env), threads=1, resolves=())


# how long it ran -----------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 1e5)), max_size=8), st.integers(1, 64))
def test_run_time_is_exact_over_runs_on_other_numbers_of_gpus(
    runs: list[tuple[int, float]], asked: int
) -> None:
    served, service = Served(gpus=asked), 0.0
    for gpus, seconds in runs:
        served = served.restart(service, gpus)
        # A start that came to nothing, and a controller that died before the next.
        served = Served.from_memory({"served": served.restart(service, gpus).to_memory()}, asked)
        service += gpus * seconds
    total_s = sum(seconds for _, seconds in runs)
    assert served.ran_until_s(service) == pytest.approx(total_s, rel=1e-9, abs=1e-6)


# what Slurm is asked for ---------------------------------------------------------------------


def shape(*nodes: str) -> JobShape:
    return JobShape(
        nodes=nodes,
        gpus_per_node=2,
        gpu_type="v100",
        cpus_per_node=4,
        cpus_per_task=2,
        mem_mib_per_node=100,
        tasks_per_node=2,
        reservation=None,
    )


def test_the_number_of_nodes_that_slurm_shows_is_not_believed_after_a_run() -> None:
    asked = facts(
        num_nodes=(1, 1),
        num_tasks=4,
        num_cpus=8,
        cpus_per_task=2,
        min_cpus_node=4,
        min_mem_node_mib=100,
        req_nodes=("a", "b"),
        gpus_asked={"v100": 2},
    )
    gpus = {"v100": 2}
    assert [text.split()[0] for text in differences(asked, shape("a", "b"), gpus)] == ["NumNodes"]
    ran = replace(asked, restarts=1)
    assert differences(ran, shape("a", "b"), gpus) == []
    assert differences(replace(ran, req_nodes=("a",)), shape("a", "b"), gpus)
    assert "NumNodes=2-2" in restore_fields(ran)
    assert "NumNodes=1-1" in restore_fields(asked)


# where it may go -----------------------------------------------------------------------------


def partition(**rules: object) -> PartitionFacts:
    made = PartitionFacts(name="p", nodes=(), state="UP", oversubscribe=("NO", 1))
    return replace(made, **rules)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rules", "account", "uid", "admitted"),
    [
        ({}, None, 1000, True),
        ({"allow_accounts": ("vision",)}, "Vision", 1000, True),
        ({"allow_accounts": ("vision",)}, "nlp", 1000, False),
        ({"allow_accounts": ("vision",)}, None, 1000, False),
        ({"deny_accounts": ("nlp",)}, "nlp", 1000, False),
        ({"deny_accounts": ("nlp",)}, "vision", 1000, True),
        ({"allow_groups": ("a100",)}, None, 1000, True),
        ({"allow_groups": ("staff",)}, None, 1000, False),
        ({"allow_groups": ("staff",)}, None, 0, True),
    ],
)
def test_a_partition_admits_whom_slurm_would(
    rules: dict[str, object], account: str | None, uid: int, admitted: bool
) -> None:
    one = facts(account=account, uid=uid)
    assert admits(partition(**rules), one, lambda user: frozenset({"a100"})) is admitted


def node(name: str, gpus: dict[str, int]) -> NodeFacts:
    return NodeFacts(
        name=name,
        state="IDLE",
        gpus=gpus,
        real_memory_mib=1000,
        alloc_mem_mib=0,
        cpus_total=8,
        cpus_alloc=0,
        sockets=1,
        cores_per_socket=8,
        threads_per_core=1,
    )


def test_a_job_goes_only_where_its_account_may_and_within_maxnodes() -> None:
    closed = partition(name="gpu-a100", allow_accounts=("vision",))
    pool = [
        node("v", {"v100": 8}),
        node("a", {"a100": 4}),
    ]
    access = Access(by_type={"a100": closed}, max_nodes=2).on(pool)
    assert access.on(reversed(pool)) is access
    one, ours = facts(account="nlp"), facts(account="vision")
    free = built("elastic=scale,max_gpus=64")
    bounded = access.bounded(free, one)
    assert (bounded.gpu_types, bounded.most_gpus) == (("v100",), 16)
    assert access.bounded(free, ours).gpu_types == ()
    assert access.bounded(free, ours).most_gpus == 8  # on either type
    rigid = replace(free, elasticity=Elasticity.RIGID)
    assert access.bounded(rigid, one).gpu_types == ("v100",)
    with pytest.raises(ModelError, match=r"a100 \(gpu-a100\).*sbatch -A"):
        access.bounded(built("elastic=scale,gpu_types=a100"), one)
    with pytest.raises(ModelError, match="MaxNodes"):
        access.bounded(built("elastic=scale,min_gpus=32,max_gpus=64"), ours)


def test_the_rules_of_a_partition_are_read() -> None:
    text = (
        "PartitionName=a AllowGroups=staff,a100 AllowAccounts=Vision,nlp Nodes=n-[1-2] "
        "MaxNodes=3 State=UP OverSubscribe=NO\n"
        "PartitionName=b AllowGroups=ALL DenyAccounts=guests Nodes=n-1 MaxNodes=UNLIMITED State=UP "
        "OverSubscribe=NO\n"
    )
    one, other = parse_partitions(text)
    assert (one.allow_accounts, one.allow_groups) == (("vision", "nlp"), ("staff", "a100"))
    assert one.max_nodes == 3
    assert (other.allow_accounts, other.allow_groups) == (None, None)
    assert (other.deny_accounts, other.max_nodes) == (("guests",), None)


def test_groups_are_those_of_the_machine() -> None:
    assert "root" in groups_of_user("root")
    assert groups_of_user("nobody-of-that-name") == frozenset()


# turned off, and settings --------------------------------------------------------------------


def test_given_back_to_slurm_it_is_what_its_owner_asked_for() -> None:
    request = read_mark(MARK.format(wrapper="yes", tpn=0, more=",elastic=yes"))
    started = facts(req_nodes=("a", "b"), num_nodes=(2, 2), restarts=1)
    fields = fields_to_give_back(started, request, "synergy")
    assert {"NumNodes=1-1", "NumTasks=2", "TresPerNode=gres:gpu:2"} <= set(fields)


def test_a_plan_names_the_settings_with_which_sia_made_it() -> None:
    eager = replace(SIA, power=-2.0, idle_cost=2.0, most_factor=0.5)
    pool = [cluster_node("v100-0", "v100", 4)]
    plan = decide(snapshot(pool, [pending(elastic())]), eager, MECHANISMS["tune"])
    again = decode(Plan, json.loads(json.dumps(encode(plan))))
    assert policy_of_plan(again) == eager
    assert policy_of_plan(replace(plan, solver={})) == SIA
    assert policy_of_plan(replace(plan, policy="fifo")) is FIFO
    assert policy_of_plan(replace(plan, policy="unheard-of")) is None
