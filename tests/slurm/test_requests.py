"""Every form of asking for GPUs on a real Slurm: given exactly as planned, or refused in words."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from harness import ROOT, ControllerProcess, Slurm, controller, slurm

from slurm_synergy.slurm.facts import Hold, JobFacts

__all__ = ["controller", "slurm"]  # fixtures

Factory = Callable[..., ControllerProcess]

SRUN = ROOT / "wrapper" / "synergy-srun"
CORES = {"v100": 24, "a100": 64}
# One line per task of the step: its node, and the GPUs that it sees. Then the job waits to be seen.
SCRIPT = f"""
export SYNERGY_ENDPOINT=%(endpoint)s SYNERGY_MUNGE_SOCKET=%(socket)s
{SRUN} bash -c 'echo "task $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"'
echo "steps ended with $?"
until [ -e %(seen)s/$SLURM_JOB_ID ]; do sleep 0.2; done
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a form stands for: nodes, GPUs on each, tasks of a step over the whole job, type."""

    nodes: int = 1
    gpus: int = 1
    tasks: int = 1
    kind: str = ""
    least_mib: int = 0


CONTROLLED: Mapping[str, Wanted] = {
    "--gres=gpu:2": Wanted(gpus=2),
    "--gres=gpu:a100:2": Wanted(gpus=2, kind="a100"),
    "--gpus-per-node=2 -N2": Wanted(nodes=2, gpus=2, tasks=2),
    "--gpus-per-node=v100:2": Wanted(gpus=2, kind="v100"),
    "--gpus=4": Wanted(gpus=4),
    "--gpus=a100:4 -N2": Wanted(nodes=2, gpus=2, tasks=2, kind="a100"),
    "--gpus=4 --gpus-per-node=2": Wanted(nodes=2, gpus=2, tasks=2),
    "--gpus=2 -n2": Wanted(gpus=2, tasks=2),
    "--gpus=2 --ntasks-per-node=2": Wanted(gpus=2, tasks=2),
    "--gpus-per-task=1 -n2": Wanted(gpus=2, tasks=2),
    "--gpus-per-task=v100:1 -N2 --ntasks-per-node=2": Wanted(
        nodes=2, gpus=2, tasks=4, kind="v100"
    ),
    "--gpus=4 --gpus-per-task=2": Wanted(gpus=4, tasks=2),
    "--gres=gpu:2 --cpus-per-gpu=2": Wanted(gpus=2),
    "--gres=gpu:2 --mem-per-gpu=2G": Wanted(gpus=2, least_mib=4096),
    "--gpus=2 --cpus-per-gpu=2 --mem-per-gpu=1G -n2": Wanted(gpus=2, tasks=2, least_mib=2048),
    "--gres=gpu:1 -c2 --mem-per-cpu=100M": Wanted(least_mib=200),
    "--gres=gpu:1 --mem=300M": Wanted(least_mib=300),
    "--gres=gpu:2 -N2 --ntasks-per-node=2 -c2": Wanted(nodes=2, gpus=2, tasks=4),
    "--gres=gpu:4 -n2": Wanted(gpus=4, tasks=2),
    "--gres=gpu:1 -N2 -n2": Wanted(nodes=2, tasks=2),
    "--gres=gpu:1 --constraint=a100": Wanted(kind="a100"),
    "--gres=gpu:1 --constraint=v100|a100": Wanted(),
    "--gres=gpu:1 --overcommit": Wanted(),
}  # fmt: skip

REFUSED: Mapping[str, str] = {
    "": "must ask for GPUs; use --gres=gpu:N",
    "--gpus=5 -N2": "cannot be spread evenly over 2 nodes; use --gres=gpu:N",
    "--gpus=16": "ask for at most 8 per node, and for more nodes with -N",
    "--gpus=v100:2,a100:2": "several GPU types in one request; name one",
    "--gres=gpu:v100:1,gpu:a100:1": "several GPU types in one request; name one",
    "--gpus=v100:4 --gpus-per-node=a100:2": "the GPU types a100 and v100; name one",
    "--gpus-per-socket=1 --sockets-per-node=2": "use --gres=gpu:2 (GPUs per node)",
    "--gpus-per-task=1 --gpus-per-node=2 -N2": "use --gres=gpu:2 -N 2 --ntasks-per-node=2",
    "--gpus-per-task=1 -n9": "ask for at most 8 per node",
    "--gpus=4 --ntasks-per-gpu=1": "use --ntasks-per-node=N for one task per GPU",
    "--gres=gpu:4 -n3": "use one task per node (--ntasks-per-node=1) or one per GPU",
    "--gres=gpu:1 -n3 -N2": "cannot be spread evenly over 2 nodes",
    "--gres=gpu:1 -N1-2": "use -N K with one number",
    "--gres=gpu:1 --exclusive": "ask for all GPUs of a node instead",
    "--gres=gpu:1 --nodelist=v100-1": "the controller chooses the nodes",
    "--gres=gpu:1 --exclude=v100-1": "the controller chooses the nodes",
    "--gres=gpu:1 --constraint=v100&a100": "only GPU types can be chosen (v100, a100)",
    "--gres=gpu:v100:1 --constraint=a100": "--constraint does not; make them agree",
    "--gres=gpu:1 --sockets-per-node=2": "the controller chooses the cores",
    "--gres=gpu:1 --hint=nomultithread": "the controller chooses the cores",
    "--gres=gpu:1 --ntasks-per-socket=1 -n1": "the controller chooses the cores",
    "--gres=gpu:1 --mincpus=4": "-c says how many a task needs",
    "--gres=gpu:1 --contiguous": "the controller chooses the nodes",
    "--gres=gpu:1 --switches=1": "the controller chooses the nodes",
    "--gres=gpu:1 --time=10 --time-min=5": "give one limit with --time",
}


def test_every_option_of_the_tables_is_in_the_user_guide() -> None:
    guide = (ROOT / "docs" / "user-guide.md").read_text(encoding="utf-8")
    table = "".join(line for line in guide.splitlines() if line.startswith("|"))
    for form in (*CONTROLLED, *REFUSED):
        for option in form.split():
            name = re.match(r"--[a-z-]+|-[A-Za-z]", option)
            assert name is not None
            assert name[0] in table, option


def planned(daemon: ControllerProcess, job_id: int) -> dict[str, Any] | None:
    """The newest placement that the journal has for the job: node -> share."""
    for record in reversed(daemon.journal):
        for one in record["plan"]["placements"]:
            if one["job_id"] == job_id:
                return dict(one["shares"])
    return None


def check(form: str, facts: JobFacts, plan: Mapping[str, Any]) -> None:
    """Nodes, GPUs, CPUs and memory: what was planned, and what the form stands for."""
    wanted = CONTROLLED[form]
    assert {part.node for part in facts.allocation} == set(plan), form
    assert len(facts.allocation) == wanted.nodes, form
    for part in facts.allocation:
        share = plan[part.node]
        assert len(part.gpu_ids) == share["gpus"] == wanted.gpus, form
        assert part.gpu_type in ([wanted.kind] if wanted.kind else CORES), form
        # All cores of the node: the lease says which of them are the job's.
        assert len(part.cpu_ids) == CORES[part.gpu_type or ""], form
        assert part.mem_mib == share["mem_mib"] >= wanted.least_mib, form


def check_step(form: str, output: str) -> None:
    """Each task saw all GPUs that the job has on its node."""
    wanted = CONTROLLED[form]
    tasks = [line.split() for line in output.splitlines() if line.startswith("task ")]
    assert len(tasks) == wanted.tasks, (form, output)
    assert len({words[1] for words in tasks}) == wanted.nodes, (form, output)
    for words in tasks:
        assert len(words[2].split(",")) == wanted.gpus, (form, output)
    assert "steps ended with 0" in output, (form, output)


@pytest.mark.timeout(240)
def test_each_form_gets_exactly_what_it_stands_for(controller: Factory, slurm: Slurm) -> None:
    daemon = controller()
    daemon.start()
    seen = slurm.home / "seen"
    seen.mkdir()
    script = SCRIPT % {
        "endpoint": daemon.endpoint, "socket": daemon.cluster.munge_socket, "seen": seen,
    }  # fmt: skip
    waiting = {
        slurm.submit("--time=5", *form.split(), script=script, wrapped=False): form
        for form in CONTROLLED
    }
    deadline_s = time.monotonic() + 150
    while waiting:
        if time.monotonic() > deadline_s:
            pytest.fail(f"never started or ended: {waiting}\n{daemon.log[-3000:]}")
        for facts in slurm.client.read_queue("synergy"):
            form = waiting.get(facts.job_id)
            if form is None or not facts.running:
                continue
            output, plan = slurm.output(facts.job_id), planned(daemon, facts.job_id)
            if plan is not None and "steps ended" in output:
                check(form, facts, plan)
                check_step(form, output)
                (seen / str(facts.job_id)).touch()
                del waiting[facts.job_id]
        time.sleep(0.3)


# Plain srun in a script without the wrapper: tasks of the step, and GPUs that each of them sees.
PLAIN: Mapping[str, tuple[int, int]] = {
    "--gpus=2 -n2": (2, 2),
    "--gpus=4 -N2": (2, 2),
    "--gpus-per-task=1 -n2": (2, 1),
    "--gpus=4 --gpus-per-task=2": (2, 2),
}


def test_plain_srun_works_in_every_rewritten_form(controller: Factory, slurm: Slurm) -> None:
    daemon = controller()
    daemon.start()
    script = 'srun bash -c \'echo "task $CUDA_VISIBLE_DEVICES"\'\necho "ended with $?"\n'
    jobs = {
        slurm.submit("--time=5", *form.split(), script=script, wrapped=False): form
        for form in PLAIN
    }
    for job_id, form in jobs.items():
        slurm.wait(job_id, lambda facts: facts.state.finished, timeout_s=60)
        lines = slurm.output(job_id).splitlines()
        tasks, gpus = PLAIN[form]
        seen = [len(line.split()[1].split(",")) for line in lines if line.startswith("task ")]
        assert (seen, lines[-1]) == ([gpus] * tasks, "ended with 0"), (form, lines)


@pytest.mark.parametrize("form", REFUSED)
def test_every_other_form_is_refused_with_the_one_to_use(slurm: Slurm, form: str) -> None:
    argv = ["sbatch", "--partition=synergy", "--output=/dev/null", *form.split()]
    text = "#!/bin/bash\nsynergy-srun true\n"
    done = slurm.cluster.run(argv, input=text, check=False)
    assert done.returncode != 0
    assert REFUSED[form] in done.stderr


@pytest.mark.parametrize(
    ("option", "instead"), [("--cpus-per-gpu=2", "use -c"), ("--mem-per-gpu=1G", "use --mem")]
)
def test_what_plain_srun_would_stumble_over_needs_the_wrapper(
    slurm: Slurm, option: str, instead: str
) -> None:
    argv = ["sbatch", "--partition=synergy", "--gres=gpu:1", option, "--output=/dev/null"]
    done = slurm.cluster.run(argv, input="#!/bin/bash\nsrun true\n", check=False)
    assert done.returncode != 0
    assert "synergy-srun" in done.stderr
    assert instead in done.stderr


def test_a_job_that_waits_stays_held_in_the_form_that_can_be_changed(slurm: Slurm) -> None:
    job_id = slurm.submit("--gpus=v100:8", "-N2", "--time=10", "--mem-per-gpu=1G")
    facts = slurm.job(job_id)
    assert facts.held is not Hold.NONE
    assert (facts.gpus_asked, facts.gpus_per_node) == ({"v100": 4}, {"v100": 4})
    assert facts.min_mem_node_mib == 4096
    assert "gpn=4,type=v100,nodes=2,tpn=0,cpt=0,mem=4096,limit=10" in facts.admin_comment


def test_requests_that_leave_the_type_open_restart_on_another_type(
    controller: Factory, slurm: Slurm
) -> None:
    daemon = controller(pool={"nodes": "v100-1"})
    daemon.start()
    jobs = [
        slurm.submit("--gres=gpu:2", "--time=5"),
        slurm.submit("--gpus=2", "--constraint=v100|a100", "--time=5"),
    ]
    for job_id in jobs:
        slurm.wait(job_id, lambda facts: facts.running and facts.held is Hold.ADMIN)
    daemon.stop()
    daemon.configure(pool={"nodes": "a100-1"})
    daemon.start()
    # On 22.05 a type once written into the request could never be taken back.
    slurm.cluster.run(["scontrol", "requeue", ",".join(map(str, jobs))])
    for job_id in jobs:
        facts = slurm.wait(job_id, lambda facts: facts.running and facts.restarts == 1)
        assert [(part.node, part.gpu_type) for part in facts.allocation] == [("a100-1", "a100")]
        assert len(facts.allocation[0].gpu_ids) == 2


def test_what_an_administrator_edits_is_put_right_at_the_start(
    controller: Factory, slurm: Slurm
) -> None:
    daemon = controller(pool={"nodes": "v100-1"})
    daemon.start()
    go = slurm.home / "go"
    first = slurm.submit("--gres=gpu:8", script=f"until [ -e {go} ]; do sleep 0.2; done\n")
    slurm.running(first)
    job_id = slurm.submit("--gres=gpu:4", "--time=5")
    slurm.wait(job_id, lambda facts: facts.held is Hold.ADMIN)
    update = ["scontrol", "update", f"JobId={job_id}"]
    # This one sets a priority, and so lets it go: on full nodes it is held again before it starts.
    slurm.cluster.run([*update, "ReqNodeList=v100-1", "Nice=5"])
    slurm.wait(job_id, lambda facts: facts.held is Hold.ADMIN)
    slurm.cluster.run([*update, "NumCPUs=3", "CPUsPerTask=3", "MinMemoryNode=77", "TimeLimit=9"])
    slurm.cluster.run([*update, "TresPerNode=gres:gpu:1", "ReqNodeList=a100-1"])
    go.touch()
    facts = slurm.running(job_id)
    (part,) = facts.allocation
    assert (part.node, len(part.gpu_ids), len(part.cpu_ids)) == ("v100-1", 4, 24)
    assert part.mem_mib == (planned(daemon, job_id) or {})["v100-1"]["mem_mib"]
    assert facts.time_limit_s == 9 * 60
