"""Job arrays, dependencies, begin times and deadlines under the controller, on a real Slurm."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from harness import ControllerProcess, Slurm, controller, slurm

from slurm_synergy.slurm.facts import Hold, JobFacts, JobState

__all__ = ["controller", "slurm"]  # fixtures

Factory = Callable[..., ControllerProcess]

NODE = "v100-1"


def members(slurm: Slurm, array_id: int) -> dict[str, JobFacts]:
    """The records of an array by task; the one for several waiting members by all of them."""
    return {
        str(facts.array_task_id): facts
        for facts in slurm.client.read_queue("synergy")
        if facts.array_job_id == array_id
    }


def until(
    holds: Callable[[], Any], what: str, daemon: ControllerProcess, *, timeout_s: float = 40.0
) -> Any:
    """Poll until ``holds`` gives something true; that."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := holds()):
        if time.monotonic() > deadline_s:
            pytest.fail(f"not within {timeout_s:g} s: {what}\n{daemon.log[-3000:]}")
        time.sleep(0.1)
    return found


def seen_jobs(daemon: ControllerProcess) -> dict[int, dict[str, Any]]:
    """The jobs as the newest round saw them."""
    found = daemon.journal[-1]["snapshot"]["jobs"] if daemon.journal else []
    return {one["job"]["job_id"]: one for one in found}


def waits_because(daemon: ControllerProcess, job_id: int) -> str:
    """Why the newest plan lets the job wait, in words; empty when it does not."""
    plan = daemon.journal[-1]["plan"] if daemon.journal else {"waiting": {}}
    reason = plan["waiting"].get(str(job_id))
    return reason["text"] if reason else ""


def active(facts: JobFacts) -> bool:
    """Released or running."""
    return not facts.state.finished and (not facts.pending or facts.priority != 0)


def test_an_array_keeps_its_limit_and_each_member_is_a_job_of_its_own(
    controller: Factory, slurm: Slurm
) -> None:
    daemon = controller(pool={"nodes": NODE})
    daemon.start()
    go = slurm.home / "go"
    script = (
        f"until [ $SLURM_ARRAY_TASK_ID != 0 -o -e {go} ]; do sleep 0.2; done\n"
        'echo "$SLURM_ARRAY_TASK_ID run ${SLURM_RESTART_COUNT:-0}" >> members\n'
    )
    hints = "--comment=synergy:profile=resnet18-imagenet,min_mem=200M"
    array_id = slurm.submit("--array=0-4%2", "--gres=gpu:1", "--time=5", hints, script=script)
    first = until(lambda: members(slurm, array_id).get("0"), "split", daemon)
    until(lambda: members(slurm, array_id)["0"].running, "the first member runs", daemon)
    # One member is requeued; the others go on meanwhile, and none of them is.
    slurm.cluster.run(["scontrol", "requeue", f"{array_id}_0"])

    def again() -> bool:
        facts = members(slurm, array_id)
        assert sum(active(one) for one in facts.values()) <= 2
        return facts["0"].running and facts["0"].restarts == 1

    until(again, "the requeued member runs again", daemon)
    view = until(lambda: seen_jobs(daemon).get(first.job_id), "the member in a round", daemon)
    assert view["job"]["array"] == f"{array_id}_0"
    assert view["profile"]["key"] == "resnet18-imagenet"
    go.touch()

    def done() -> bool:
        facts = members(slurm, array_id)
        assert sum(active(one) for one in facts.values()) <= 2
        return len(facts) == 5 and all(one.state.finished for one in facts.values())

    until(done, "all members end", daemon)
    facts = members(slurm, array_id)
    assert {one.state for one in facts.values()} == {JobState.COMPLETED}
    assert {task: one.restarts for task, one in facts.items()} == {
        "0": 1, "1": 0, "2": 0, "3": 0, "4": 0,
    }  # fmt: skip
    lines = sorted((slurm.home / "members").read_text().splitlines())
    assert lines == ["0 run 1", "1 run 0", "2 run 0", "3 run 0", "4 run 0"]


def test_of_a_large_array_only_what_could_run_has_records(
    controller: Factory, slurm: Slurm
) -> None:
    daemon = controller(pool={"nodes": NODE})
    daemon.start()
    array_id = slurm.submit("--array=1-900", "--gres=gpu:4", "--time=5")
    until(lambda: sum(one.running for one in members(slurm, array_id).values()) == 2, "2", daemon)
    assert sorted(members(slurm, array_id)) == ["1", "2", "3-900"]

    def held() -> bool:
        return all(one.held is Hold.ADMIN for one in members(slurm, array_id).values())

    until(held, "every later requeue will land held", daemon)
    until(lambda: "members 3-900 of the array" in waits_because(daemon, array_id), "why", daemon)
    # The first one's end lets the next in.
    slurm.cluster.run(["scancel", f"{array_id}_1"])
    until(lambda: (one := members(slurm, array_id).get("3")) and one.running, "the third", daemon)
    assert sum(not one.state.finished for one in members(slurm, array_id).values()) == 3


def test_jobs_wait_for_their_dependency_and_begin_and_are_not_released_before(
    controller: Factory, slurm: Slurm
) -> None:
    daemon = controller(pool={"nodes": NODE})
    daemon.start()
    go = slurm.home / "go"
    wait = f"until [ -e {go} ]; do sleep 0.2; done\n"
    before = slurm.submit("--gres=gpu:1", "--time=5", script=wait)
    after = slurm.submit("--gres=gpu:1", "--time=5", f"--dependency=afterok:{before}")
    never = slurm.submit("--gres=gpu:1", "--time=5", f"--dependency=afternotok:{before}")
    begins_s = time.time() + 6
    begin = slurm.submit("--gres=gpu:1", "--time=5", "--begin=now+6")
    late = slurm.submit("--gres=gpu:8", "--time=1", "--deadline=now+1hour")
    until(lambda: "waits for afterok" in waits_because(daemon, after), "why it waits", daemon)
    until(lambda: waits_because(daemon, begin).startswith("begins "), "when it begins", daemon)
    # Slurm looks at deadlines only when it tries to start a job: a held one would wait for ever.
    slurm.cluster.run(["scontrol", "update", f"JobId={late}", "Deadline=now+1"])
    facts = slurm.running(begin)
    assert facts.start_s is not None and facts.start_s >= begins_s - 1
    assert slurm.job(after).held is Hold.ADMIN
    go.touch()
    slurm.running(after, timeout_s=60)
    until(lambda: "can never start" in waits_because(daemon, never), "it never can", daemon)
    assert slurm.job(never).held is Hold.ADMIN
    slurm.wait(late, lambda facts: facts.state is JobState.DEADLINE, timeout_s=30)
    for job_id in (after, begin, never):
        assert f"job {job_id}: did not start" not in daemon.log


def test_the_last_member_is_changed_alone_although_its_id_is_the_arrays(slurm: Slurm) -> None:
    array_id = slurm.submit("--array=0-2", "--gres=gpu:1", "--mem=100", "--time=5")
    slurm.client.hold(array_id)
    slurm.client.split(array_id, (0, 1))
    last = members(slurm, array_id)["2"]
    assert (last.job_id, last.address) == (array_id, f"{array_id}_2")
    for facts in members(slurm, array_id).values():
        slurm.client.release(facts.job_id)
        slurm.running(facts.job_id)
    slurm.client.hold_running(array_id)
    slurm.client.set_time_limit(array_id, 170.0)
    slurm.client.requeue_hold(array_id)
    slurm.wait(array_id, lambda facts: facts.pending)
    found = members(slurm, array_id)
    assert (found["2"].held, found["2"].restarts) == (Hold.ADMIN, 1)
    assert {one.time_limit_s for one in found.values()} == {300.0, 180.0}
    for task in ("0", "1"):
        assert found[task].running and found[task].held is Hold.NONE
        assert found[task].time_limit_s == 300.0
    slurm.client.cancel(array_id)
    found = members(slurm, array_id)
    assert found["2"].state is JobState.CANCELLED
    assert found["0"].running and found["1"].running
    slurm.cluster.run(["scancel", str(array_id)])
