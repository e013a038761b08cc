"""Users cancel, checkpoints cannot be written or read, ranks die: the job's side."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_site import Site, SmallDisk, Trainee, until

from slurm_synergy.slurm.facts import Hold, JobState


def cancelled(site: Site, job: Trainee) -> None:
    """The job is cancelled and stays so, its GPUs are free, and its log is sound."""
    until(lambda: job.over, "its end:", job)
    site.recovered()
    assert job.facts.state is JobState.CANCELLED
    steps = job.steps()
    again = site.train().training()
    site.complete(again)
    assert job.facts.state is JobState.CANCELLED
    assert job.steps() == steps, "nothing of it lives on"
    site.judge(job)


def scancel(site: Site, job: Trainee) -> None:
    site.broken()
    site.cluster.run(["scancel", str(job.job_id)])


@pytest.mark.fault(
    broken="its user cancels a job that the controller holds",
    happens="it is gone from the next round's plan",
    seen="`CANCELLED`",
    everywhere=False,
)
def test_scancel_while_held(site: Site) -> None:
    site.start(pool={"nodes": "n-1"})
    running = site.train(time_limit="1:00:00").training()
    job = site.train(time_limit="2:00:00")
    until(lambda: job.facts.held is Hold.ADMIN, "it is held by us:", job)
    scancel(site, job)
    until(lambda: job.over, "its end:", job)
    running.goes_on().finish()
    cancelled(site, job)
    assert job.starts == 0


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(
            point,
            id=point.partition(":")[2],
            marks=pytest.mark.fault(
                broken=f"its user cancels a job while the controller starts it, {when}",
                happens="the start comes to nothing; lease and GPUs are free at the next reading",
                seen="`CANCELLED`",
                everywhere=everywhere,
            ),
        )
        for point, when, everywhere in (
            ("call:reshape", "after its shape was written", False),
            ("lease:grant", "after its lease was made, before its release", False),
            ("call:release", "right after its release", True),
        )
    ],
)
def test_scancel_while_starting(site: Site, point: str) -> None:
    # Its id is not known before: name it.
    site.start(fault=point, run=("scancel", "--name=to-be-cancelled"), pool={"nodes": "n-1"})
    site.broken()
    job = site.train("--job-name=to-be-cancelled")
    cancelled(site, job)
    assert job.starts <= 1


@pytest.mark.fault(
    broken="its user cancels a running job",
    happens="it ends; its GPUs go to the next",
    seen="`CANCELLED`",
    everywhere=False,
)
def test_scancel_while_running(site: Site) -> None:
    site.start(pool={"nodes": "n-1"})
    job = site.train().training()
    scancel(site, job)
    cancelled(site, job)


@pytest.mark.fault(
    broken="its user cancels a job that writes its checkpoint because it was told to stop",
    happens="it ends, and is not requeued",
    seen="`CANCELLED`",
)
def test_scancel_while_checkpointing(site: Site) -> None:
    site.start(pool={"nodes": "n-1"})
    job = site.train(
        time_limit="20:00:00", env={"FAULT_SAVE_S": "5", "FAULT_SAVE_EVERY": "0"}
    ).training(saves=0)
    short = site.train(time_limit="0:30:00")
    until(lambda: list((job.home / "checkpoints").glob("*.tmp-*")), "it saves:", job)
    scancel(site, job)
    until(lambda: job.over, "its end:", job)
    short.training().finish()
    until(lambda: short.over, "its end:", short)
    cancelled(site, job)


@pytest.mark.fault(
    broken="its user cancels a job in the moment in which the controller requeues it",
    happens="whichever Slurm did last counts: it is cancelled and not started again",
    seen="`CANCELLED`",
    everywhere=False,
)
def test_scancel_while_requeuing(site: Site) -> None:
    site.start(
        fault="call:requeue_hold", run=("scancel", "--name=to-be-cancelled"), pool={"nodes": "n-1"}
    )
    job = site.train("--job-name=to-be-cancelled", time_limit="20:00:00").training()
    short = site.train(time_limit="0:30:00")
    site.broken()
    until(lambda: job.over, "its end:", job)
    short.training().finish()
    until(lambda: short.over, "its end:", short)
    cancelled(site, job)
    assert job.starts == 1


# -- checkpoints ----------------------------------------------------------------------------------


def full(disk: SmallDisk) -> None:
    disk.fill()


def read_only(disk: SmallDisk) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk.place)], check=True)


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(
            harm,
            id=harm.__name__.replace("_", "-"),
            marks=pytest.mark.fault(
                broken=f"the job's checkpoint directory {what} when it is told to stop",
                happens="it says so and trains on; after the grace time it is requeued all the "
                "same, and starts anew from its last good checkpoint",
                seen="the job's output: `not stopped, training goes on: cannot save a checkpoint "
                "in …: …; the previous one is kept`",
                everywhere=everywhere,
            ),
        )
        for harm, what, everywhere in (
            (full, "is full", True),
            (read_only, "has become read-only", False),
        )
    ],
)
def test_checkpoints_that_cannot_be_written(site: Site, harm: Callable[[SmallDisk], None]) -> None:
    site.start(pool={"nodes": "n-1"}, scheduling={"grace_s": 4.0})
    place = site.home / "disk"
    disk = SmallDisk(place)
    try:
        job = site.train(time_limit="20:00:00", env={"SYNERGY_CHECKPOINT_DIR": str(place / "c")})
        job.training(saves=2)
        site.broken()
        harm(disk)
        short = site.train(time_limit="0:30:00").training(timeout_s=90)
        assert "cannot save a checkpoint" in job.output
        subprocess.run(["mount", "-o", "remount,rw", str(disk.place)], check=True)
        disk.free()
        short.finish()
        job.training(starts=2)
        site.complete()
        assert job.events("start")[1]["at"] > 0
    finally:
        site.slurm.cancel_all()
        disk.close()


@pytest.mark.fault(
    broken="checkpoints are slow (3 s each), but within the grace time",
    happens="a stop waits for the checkpoint; nothing is repeated",
    seen="nothing",
    everywhere=False,
)
def test_slow_checkpoints(site: Site) -> None:
    site.start(pool={"nodes": "n-1"})
    job = site.train(
        time_limit="20:00:00", env={"FAULT_SAVE_S": "3", "FAULT_SAVE_EVERY": "0"}
    ).training(saves=0)
    site.broken()
    short = site.train(time_limit="0:30:00").training()
    short.finish()
    job.training(starts=2, saves=0)
    site.complete()
    assert site.judge(job).repeated == 0


@pytest.mark.fault(
    broken="a checkpoint takes longer (6 s) than a stop waits (3 s)",
    happens="the job is warned at its first checkpoint and at each start after it; a stop is cut "
    "off after the grace time, and the job starts anew from its last complete checkpoint",
    seen="the job's output: `a checkpoint takes 6.0 s, but a stop waits only 3 s for one: … ask "
    "for more time with the hint grace_s=13`",
)
def test_checkpoints_slower_than_the_grace(site: Site) -> None:
    site.start(pool={"nodes": "n-1"}, scheduling={"grace_s": 3.0})
    job = site.train(time_limit="20:00:00", env={"FAULT_SAVE_S": "6", "FAULT_SAVE_EVERY": "20"})
    job.training(saves=1)
    warning = "but a stop waits only 3 s for one"
    until(lambda: warning in job.output, "it is warned:", job)
    job.goes_on()
    site.broken()
    short = site.train(time_limit="0:30:00").training(timeout_s=90)
    short.finish()
    job.training(starts=2, saves=0)
    until(lambda: job.output.count(warning) == 2, "it is warned at its start:", job)
    site.complete()
    assert job.events("start")[1]["at"] > 0


def newest(job: Trainee) -> Path:
    """The job's newest checkpoint."""
    return max((job.home / "checkpoints").glob("step-" + 12 * "[0-9]"))


def torn(checkpoint: Path) -> None:
    file = checkpoint / "objects.json"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def corrupted(checkpoint: Path) -> None:
    file = checkpoint / "objects.json"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x40
    file.write_bytes(data)


def without_manifest(checkpoint: Path) -> None:
    (checkpoint / "MANIFEST.json").unlink()


def requeued_without_controller(site: Site, job: Trainee) -> None:
    """The job is requeued, and waits held until the controller is started again."""
    until(lambda: job.facts.held is Hold.ADMIN, "held while it runs:", job)
    site.daemon.kill()
    site.cluster.run(["scontrol", "requeue", str(job.job_id)])
    until(lambda: job.facts.pending and not job.facts.completing, "it is pending:", job)


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(
            harm,
            id=harm.__name__.replace("_", "-"),
            marks=pytest.mark.fault(
                broken=f"the newest checkpoint {what} while the job is not running",
                happens="it is set aside (`.damaged`), and the one before it is loaded",
                seen="the job's output: `checkpoint … is damaged and skipped: …`",
                everywhere=everywhere,
            ),
        )
        for harm, what, everywhere in (
            (torn, "is torn (half a file)", True),
            (corrupted, "has one wrong bit", False),
            (without_manifest, "has lost its manifest", False),
        )
    ],
)
def test_a_damaged_newest_checkpoint(site: Site, harm: Callable[[Path], None]) -> None:
    site.start()
    job = site.train().training(saves=3)
    requeued_without_controller(site, job)
    site.broken()
    good = sorted((job.home / "checkpoints").glob("step-*"))[-2]
    harm(newest(job))
    site.restart()
    job.training(starts=2, saves=0)
    site.complete(lost_saves=1)
    assert "is damaged and skipped" in job.output
    assert job.events("start")[1]["at"] == int(good.name.removeprefix("step-"))
    assert list((job.home / "checkpoints").glob("*.damaged"))


@pytest.mark.fault(
    broken="all checkpoints of a job are damaged while it is not running",
    happens="it fails with a clear error rather than to train from the beginning unasked",
    seen="`FAILED`, and `none of 2 checkpoints is intact (…); restore a copy, or move the "
    "directory away to start from the beginning`",
    everywhere=False,
)
def test_no_checkpoint_is_intact(site: Site) -> None:
    site.start()
    job = site.train().training(saves=3)
    requeued_without_controller(site, job)
    site.broken()
    for checkpoint in (job.home / "checkpoints").glob("step-" + 12 * "[0-9]"):
        corrupted(checkpoint)
    site.restart()
    until(lambda: job.over, "its end:", job)
    site.recovered()
    assert job.facts.state is JobState.FAILED
    assert "is intact" in job.output
    assert "move the directory away" in job.output
    assert job.starts == 1


# -- ranks ----------------------------------------------------------------------------------------


@pytest.mark.fault(
    broken="one rank of two is killed",
    happens="srun ends the other; the job fails as without us, and its GPUs are free",
    seen="`FAILED`; srun names the task",
    everywhere=False,
)
def test_a_rank_that_dies(site: Site) -> None:
    site.start(pool={"nodes": "n-1"})
    site.broken()
    job = site.train(ranks=2, env={"FAULT_DIE_AT": "8"})
    until(lambda: job.over, "its end:", job, timeout_s=90)
    site.recovered()
    assert job.facts.state is JobState.FAILED
    assert not job.events("end")
    site.complete(site.train().training())
    assert job.starts == 1


@pytest.mark.fault(
    broken="one rank of two hangs, and the job is told to stop",
    happens="the ranks cannot agree on a last step; after the grace time the job is requeued, and "
    "starts anew from its last checkpoint",
    seen="`Restarts=1`",
    everywhere=False,
)
def test_a_rank_that_hangs(site: Site) -> None:
    site.start(pool={"nodes": "n-1"}, scheduling={"grace_s": 4.0})
    job = site.train(ranks=2, time_limit="20:00:00", env={"FAULT_HANG_AT": "8"})
    until((job.home / "did-hang").exists, "its second rank hangs:", job, timeout_s=60)
    site.broken()
    short = site.train(time_limit="0:30:00").training(timeout_s=90)
    short.finish()
    job.training(starts=2, timeout_s=90)
    site.complete()
    assert job.events("start", rank=1)[1]["at"] > 0


@pytest.mark.fault(
    broken="a program knows nothing of checkpoints, ignores SIGTERM, and is told to stop",
    happens="after the grace time it is requeued, after KillWait killed; it starts from the "
    "beginning, having no checkpoint",
    seen="the job's output: `stopping the program with SIGTERM`; `Restarts=1`",
    everywhere=False,
)
def test_a_program_that_ignores_the_stop(site: Site) -> None:
    site.start(pool={"nodes": "n-1"}, scheduling={"grace_s": 3.0})
    job = site.train(
        time_limit="20:00:00", env={"FAULT_DEAF": "1", "FAULT_SAVE_EVERY": "0"}
    ).training(saves=0)
    site.broken()
    told_s = time.monotonic()
    short = site.train(time_limit="0:30:00").training(timeout_s=90)
    assert time.monotonic() - told_s > 3, "it had its grace time"
    short.finish()
    job.training(starts=2, saves=0)
    site.complete()
    assert "stopping the program with SIGTERM" in job.output
