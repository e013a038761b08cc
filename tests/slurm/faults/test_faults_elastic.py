"""The controller dies while a job's GPUs change: the training goes on, with its checkpoint."""

from __future__ import annotations

import json

import pytest
from fault_site import ROOT, Site, Trainee, until

HINTS = "--comment=synergy:elastic=scale,min_gpus=1,max_gpus=4"
# One task whatever its GPUs are: the program under test is no distributed one.
ONE_TASK = f"{ROOT}/wrapper/synergy-srun --nodes=1 --ntasks=1"


def row(point: str, where: str, *, everywhere: bool = False) -> object:
    fault = pytest.mark.fault(
        broken=f"a job changes from 1 to 4 GPUs, and the controller is killed (SIGKILL) {where}",
        happens="the next controller finishes the change, or plans it anew; the training goes on "
        "from the checkpoint of its stop",
        seen="the job with its new GPUs in `synergyctl jobs`",
        everywhere=everywhere,
    )
    return pytest.param(point, marks=fault, id=point.replace(":", "-"))


def want(site: Site, gpus: int) -> None:
    """Let the scripted policy give every elastic job so many GPUs."""
    script = site.home / "script.json"
    fresh = script.with_suffix(".new")
    fresh.write_text(
        json.dumps({"elastic": {"gpu_type": "v100", "gpus": gpus, "nodes": 1}}), encoding="utf-8"
    )
    fresh.replace(script)


def elastic(site: Site) -> Trainee:
    """A job that trains on one GPU."""
    return site.train(HINTS, "--job-name=elastic", gpus=1, wrapper=ONE_TASK)


@pytest.mark.parametrize(
    "point",
    [
        row("intend:stop", "after the stop was intended, before it"),
        row("lease:stop", "after the job was told to stop"),
        row("applied:stop", "after the stop, before it was committed"),
        row("call:requeue_hold", "right after the job was requeued", everywhere=True),
        row("lease:end", "after the lease of the old GPUs has ended"),
        row("intend:start", "after the start on the new GPUs was intended, before it"),
        row("call:reshape", "after the new shape was written to Slurm"),
        row("call:set_start_now", "after the begin time was set, before the lease was made"),
        row("lease:grant", "after the lease of the new GPUs was granted", everywhere=True),
        row("call:release", "right after the job was released"),
        row("applied:start", "after the start, before it was committed"),
    ],
)
def test_a_change_of_gpus_survives_the_controller(site: Site, point: str) -> None:
    site.daemon.script = site.home / "script.json"
    want(site, 1)
    site.start(scheduling={"policy": "scripted", "round_s": 2.0}, pool={"nodes": "n-1"})
    job = elastic(site).training()
    site.daemon.stop()
    site.daemon.fault = point
    want(site, 4)
    site.daemon.start()
    site.await_death()
    site.restart()
    job.training(starts=2, saves=0)
    until(lambda: job.facts.running and job.facts.gpus_held == 4, "it holds 4 GPUs:", job)
    site.complete()
    assert job.starts == 2, str(job)
    starts = job.events("start")
    assert [len(str(start["gpus"]).split(",")) for start in starts] == [1, 4], str(job)
    assert starts[1]["at"] > 0, "it began from a checkpoint"
