"""Slurm's variables: fresh and stale ones, in the forms that real clusters showed (22.05.8)."""

from __future__ import annotations

import pytest

from slurm_synergy.errors import LeaseError
from slurm_synergy.jobside.environment import (
    checkpoint_dir,
    endpoint_from,
    expand_counts,
    first_host,
    stale_variables,
    step_shape,
    task_from,
    training_defaults,
)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("24", (24,)),
        ("24(x2),12", (24, 24, 12)),
        ("1(x3)", (1, 1, 1)),
        ("", ()),
        ("x", ()),
        ("3(x1000000000)", ()),
    ],
)
def test_counts_per_node_are_expanded(text: str, counts: tuple[int, ...]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("v100-1", "v100-1"),
        ("a100-[1-2]", "a100-1"),
        ("gpu[03-04,9]-[1-2]x,y", "gpu03-1x"),
        ("a,b[1-2]", "a"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list_is_rank_zeros(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


# What batch scripts saw after a held job had been changed: (variables, nodes, tasks, cpus, most).
RESHAPED = [
    # --gres=gpu:1, grown to the node's cores; -n was not asked for
    (
        {
            "SLURM_NNODES": "1",
            "SLURM_TASKS_PER_NODE": "1",
            "SLURM_NTASKS": "1",
            "SLURM_JOB_CPUS_PER_NODE": "24",
        },
        (1, 1, 24, 1),
    ),
    # -N2 --ntasks-per-node=1, shrunk to one node: SLURM_NTASKS is stale
    (
        {
            "SLURM_NNODES": "1",
            "SLURM_TASKS_PER_NODE": "1",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "1",
            "SLURM_JOB_CPUS_PER_NODE": "24",
        },
        (1, 1, 24, 1),
    ),
    # -n4, changed to two tasks on two nodes: SLURM_NTASKS is stale
    (
        {
            "SLURM_NNODES": "2",
            "SLURM_TASKS_PER_NODE": "1(x2)",
            "SLURM_NTASKS": "4",
            "SLURM_JOB_CPUS_PER_NODE": "64(x2)",
        },
        (2, 2, 64, 1),
    ),
    # -n2 -N1
    (
        {
            "SLURM_NNODES": "1",
            "SLURM_TASKS_PER_NODE": "2",
            "SLURM_NTASKS": "2",
            "SLURM_JOB_CPUS_PER_NODE": "24",
        },
        (1, 2, 12, 2),
    ),
    # no tasks asked for: one per node, whatever Slurm would fit
    (
        {
            "SLURM_NNODES": "2",
            "SLURM_TASKS_PER_NODE": "24(x2)",
            "SLURM_JOB_CPUS_PER_NODE": "24(x2)",
        },
        (2, 2, 24, 1),
    ),
    # more CPUs per task than allocated: Slurm says zero tasks
    (
        {
            "SLURM_NNODES": "1",
            "SLURM_TASKS_PER_NODE": "0",
            "SLURM_NTASKS": "2",
            "SLURM_JOB_CPUS_PER_NODE": "8",
        },
        (1, 2, 4, 2),
    ),
    # unlike nodes: the smaller one decides
    (
        {
            "SLURM_NNODES": "2",
            "SLURM_TASKS_PER_NODE": "2,1",
            "SLURM_NTASKS": "3",
            "SLURM_JOB_CPUS_PER_NODE": "24,12",
        },
        (2, 3, 6, 2),
    ),
]


@pytest.mark.parametrize(("env", "shape"), RESHAPED)
def test_the_step_fills_the_allocation_as_it_is_now(
    env: dict[str, str], shape: tuple[int, ...]
) -> None:
    found = step_shape(env)
    assert (found.nodes, found.tasks, found.cpus_per_task, found.max_tasks_per_node) == shape


def test_a_part_of_the_nodes_gets_its_part_of_the_tasks() -> None:
    env = {
        "SLURM_NNODES": "4",
        "SLURM_TASKS_PER_NODE": "2(x4)",
        "SLURM_NTASKS": "8",
        "SLURM_JOB_CPUS_PER_NODE": "24(x4)",
    }
    found = step_shape(env, nodes=2)
    assert (found.nodes, found.tasks, found.cpus_per_task) == (2, 4, 12)


def test_stale_variables_are_named_only_when_they_are_there_and_wrong() -> None:
    env = {
        "SLURM_GPUS": "8",
        "SLURM_GPUS_PER_NODE": "4",
        "SLURM_MEM_PER_GPU": "100",
        "SLURM_CPUS_PER_GPU": "3",
        "SLURM_TRES_PER_TASK": "cpu=6",
    }
    assert stale_variables(env, 6) == ("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_CPUS_PER_GPU")
    env["SLURM_MEM_PER_NODE"] = "5000"
    assert "SLURM_MEM_PER_GPU" in stale_variables(env, 6)
    assert "SLURM_TRES_PER_TASK" in stale_variables(env, 12)
    assert "SLURM_TRES_PER_TASK" in stale_variables({"SLURM_TRES_PER_TASK": "cpu=6,gres/gpu:1"}, 6)
    assert stale_variables({"SLURM_TRES_BIND": "gres/gpu:per_task:1"}, 6) == ("SLURM_TRES_BIND",)
    assert stale_variables({"SLURM_TRES_BIND": "gres/gpu:closest"}, 6) == ()
    assert stale_variables({}, 6) == ()


STEP = {
    "SLURM_JOB_ID": "42",
    "SLURM_RESTART_COUNT": "3",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "a100-[1-2]",
    "SLURMD_NODENAME": "a100-2",
    "SLURM_CPUS_PER_TASK": "16",
    "SLURM_MEM_PER_NODE": "5000",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}


def test_a_task_knows_who_it_is() -> None:
    task = task_from(STEP)
    assert (task.job_id, task.restart_count, task.step_id) == (42, 3, 1)
    assert (task.rank, task.ranks, task.local_rank, task.local_ranks) == (5, 6, 1, 2)
    assert (task.node, task.nodes, task.granted_cpus, task.granted_mem_mib) == (
        "a100-2",
        2,
        16,
        5000,
    )
    outside = task_from({})
    assert (outside.job_id, outside.rank, outside.ranks, outside.local_ranks) == (0, 0, 1, 1)
    in_batch_script = task_from({"SLURM_JOB_ID": "42", "SLURM_NTASKS": "4"})
    assert (in_batch_script.ranks, in_batch_script.local_ranks) == (1, 1)


def test_rendezvous_is_on_the_first_host_or_where_srun_runs() -> None:
    task = task_from(STEP)
    filled = training_defaults(STEP, task, threads=6, resolves=["a100-1"])
    assert filled["MASTER_ADDR"] == "a100-1"
    assert training_defaults(STEP, task, threads=6, resolves=[])["MASTER_ADDR"] == "10.0.0.1"
    assert filled["OMP_NUM_THREADS"] == "6"
    others = [task_from({**STEP, name: "9"}) for name in ("SLURM_STEP_ID", "SLURM_JOB_ID")]
    ports = [training_defaults({}, who, threads=0, resolves=[]) for who in (task, *others)]
    named = {"SLURM_CLUSTER_NAME": "other"}
    ports.append(training_defaults(named, task, threads=0, resolves=[]))
    assert len({each["MASTER_PORT"] for each in ports}) == 4
    assert all(1024 < int(each["MASTER_PORT"]) < 32768 for each in ports)
    assert ports[0]["OMP_NUM_THREADS"] == "1"
    kept = {"MASTER_ADDR": "", "MASTER_PORT": "1", "CUDA_DEVICE_ORDER": "", "OMP_NUM_THREADS": "9"}
    assert training_defaults(kept, task, threads=4, resolves=[]) == {}


def test_one_task_alone_needs_no_meeting_point() -> None:
    def named(**changes: str) -> set[str]:
        task = task_from({**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0", **changes})
        return set(training_defaults({}, task, threads=1, resolves=[]))

    alone = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert named(**alone, SLURM_STEP_NUM_NODES="1") == {"CUDA_DEVICE_ORDER", "OMP_NUM_THREADS"}
    assert "MASTER_PORT" in named(SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NUM_NODES="1")
    assert "MASTER_PORT" in named(**alone, SLURM_STEP_NUM_NODES="2")


def test_checkpoints_are_kept_by_job_and_array_index() -> None:
    assert checkpoint_dir({"SLURM_JOB_ID": "7"}, "/w") == "/w/synergy-checkpoints/7"
    second = checkpoint_dir({"SLURM_JOB_ID": "7"}, "/w", command=2)
    assert second == "/w/synergy-checkpoints/7.2"
    array = {
        "SLURM_JOB_ID": "9",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_SUBMIT_DIR": "/home/u",
    }
    assert checkpoint_dir(array, "/w") == "/home/u/synergy-checkpoints/7_2"
    rooted = {**array, "SYNERGY_CHECKPOINT_ROOT": "/scratch"}
    assert checkpoint_dir(rooted, "/w") == "/scratch/synergy-checkpoints/7_2"
    assert checkpoint_dir({**rooted, "SYNERGY_CHECKPOINT_DIR": "/mine"}, "/w") == "/mine"


def test_the_endpoint_comes_from_the_variable_before_the_file() -> None:
    text = "# the controller\n\nhead:7737  # moved\n"
    assert endpoint_from({}, text, "/etc/f") == "head:7737"
    assert endpoint_from({"SYNERGY_ENDPOINT": "[::1]:80"}, text, "/etc/f") == "[::1]:80"
    assert endpoint_from({}, "# nothing\n", "/etc/f") == ""
    for wrong in ("head", "head:", ":77", "head:x", "head:70000", "a b:1"):
        with pytest.raises(LeaseError, match=r"/etc/f = .* is not host:port"):
            endpoint_from({}, wrong, "/etc/f")
