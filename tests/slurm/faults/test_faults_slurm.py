"""Slurm's daemons and nodes fail, admins act behind our back: jobs come to their end once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_site import Site, Trainee, until
from harness import ROOT

from slurm_synergy.slurm.facts import Hold


def scontrol(site: Site, *words: str, check: bool = True) -> str:
    """Run scontrol as an admin would, by hand."""
    done = site.cluster.run(["scontrol", *words], check=check)
    return done.stdout + done.stderr


def step_daemon(job: Trainee) -> int:
    """The slurmstepd above the training program (launcher, then step daemon)."""
    return parent(parent(job.pid))


def parent(pid: int) -> int:
    """The parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.fault(
    broken="slurmctld is stopped in good order while a job runs and another waits, and started "
    "again",
    happens="the job runs on and keeps its lease; the waiting one is started afterwards",
    seen="log: `Slurm does not answer …; will be tried again; running jobs keep what they have`, "
    "then `working again`",
    everywhere=False,
)
def test_slurmctld_stopped_and_started(site: Site) -> None:
    site.start(pool={"nodes": "n-1"})
    running = site.train(time_limit="1:00:00").training()
    waiting = site.train(time_limit="2:00:00")
    until(lambda: waiting.facts.held is Hold.ADMIN, "it is held by us:", waiting)
    site.cluster.slurmctld_stop()
    site.broken()
    try:
        site.logged("will be tried again", timeout_s=60)
        running.goes_on()
    finally:
        site.cluster.slurmctld_start()
    site.logged("working again", timeout_s=60)
    site.recovered()
    running.finish()
    waiting.training()
    site.complete()
    assert (running.starts, waiting.starts) == (1, 1)
    assert "silent" not in running.output


@pytest.mark.fault(
    broken="slurmctld is killed (SIGKILL) within a round: after a job's shape was written, before "
    "its release",
    happens="the start fails and is tried again once slurmctld answers",
    seen="log: `round R: job N: start not done: …`, then `working again`",
)
def test_slurmctld_killed_in_a_round(site: Site) -> None:
    site.start(fault="call:set_start_now", run=("kill", "-9", str(site.cluster.pids["slurmctld"])))
    # Slurm itself forgets what it was told in the seconds before such a death: be older.
    job = site.train("--begin=now+9")
    try:
        until(lambda: "slurmctld" not in site.cluster.pids, "slurmctld was killed", timeout_s=60)
        site.broken()
    finally:
        site.cluster.slurmctld_start()
    job.training(timeout_s=90)
    site.complete()
    assert job.starts == 1


@pytest.mark.fault(
    broken="slurmctld is killed (SIGKILL) moments after a job was started, so that it forgets the "
    "start",
    happens="Slurm finds the job on its node and either keeps it or ends it; the controller "
    "starts it anew only when the first copy is gone",
    seen="perhaps a second start in the job's output; perhaps a node drained with `Duplicate "
    "jobid` (`sinfo -R`), which an admin resumes",
)
def test_slurmctld_killed_just_after_a_start(site: Site) -> None:
    site.start()
    job = site.train("--begin=now+9")
    until(lambda: job.starts == 1, "its first start:", job)
    site.cluster.slurmctld_kill()
    site.broken()
    job_before = job.steps()
    site.cluster.slurmctld_start()
    until(lambda: job.steps() > job_before + 5, "it trains:", job, timeout_s=90)
    site.complete(timeout_s=120)


@pytest.mark.fault(
    broken="slurmctld is away at the moment in which a job's script comes to its srun",
    happens="`synergy-srun` waits until Slurm answers, and starts the tasks then; a plain srun "
    "would end the script, and the job would be FAILED",
    seen="job output: `Slurm does not answer, so srun cannot start the tasks: waiting for it`",
    everywhere=False,
)
def test_slurmctld_away_when_the_tasks_should_start(site: Site) -> None:
    site.start()
    go = site.home / "go"
    begins = f"until [ -e {go} ]; do sleep 0.2; done; {ROOT / 'wrapper' / 'synergy-srun'}"
    job = site.train(wrapper=begins)
    until(lambda: job.facts.running, "it runs:", job)
    site.cluster.slurmctld_stop()
    site.broken()
    try:
        go.touch()
        until(lambda: "Slurm does not answer, so srun" in job.output, "it waits", job.home)
    finally:
        site.cluster.slurmctld_start()
    job.training(timeout_s=90)
    site.recovered()
    site.complete()
    assert job.starts == 1


@pytest.mark.fault(
    broken="slurmctld is restarted, and a job could start at once on a node where another runs",
    happens="the controller waits until the node has reported to the new slurmctld: what Slurm "
    "starts there before that gets no GPUs, and fails",
    seen="the job starts some seconds later",
)
def test_nothing_starts_on_a_node_that_has_not_reported_yet(site: Site) -> None:
    site.start(pool={"nodes": "n-1"})
    first = site.train(gpus=1).training()
    slurmd = site.cluster.pids["slurmd-n-1"]
    # Its report is late, as from a busy node.
    os.kill(slurmd, signal.SIGSTOP)
    try:
        site.cluster.slurmctld_stop()
        site.broken()
        site.cluster.slurmctld_start()
        other = site.train(gpus=1)
        begun_s = time.monotonic()
        until(lambda: time.monotonic() - begun_s > 6, "time passes")
        assert other.facts.pending
    finally:
        os.kill(slurmd, signal.SIGCONT)
    other.training()
    site.recovered()
    site.complete()
    assert (first.starts, other.starts) == (1, 1)


@pytest.mark.fault(
    broken="a node's slurmd is killed and comes back before Slurm gives the node up",
    happens="the job runs on",
    seen="nothing (`sinfo`: the node is marked `*` meanwhile)",
    everywhere=False,
)
def test_slurmd_killed_and_back(site: Site) -> None:
    site.start()
    job = site.train().training()
    site.cluster.slurmd_kill(job.node)
    site.broken()
    job.goes_on()
    site.cluster.slurmd_start(job.node)
    job.goes_on()
    site.complete()
    assert job.starts == 1


@pytest.mark.fault(
    broken="a node's slurmd is killed and stays away: Slurm gives the node up, while the job's "
    "processes live on there",
    happens="the job starts on another node; srun, where it notices, or else the launcher, whom "
    "the controller tells that its run is over, ends the old processes before that. On a node that "
    "is cut off from the controller as well they live on (nobody can reach them)",
    seen="the old run's output: `srun: error: Node failure on …`, or `Slurm has ended this run of "
    "the job: ending what is left of it`",
    everywhere=False,
)
def test_slurmd_that_stays_away(site: Site) -> None:
    site.start()
    job = site.train().training(saves=2)
    lost, pid = job.node, job.pid
    site.cluster.slurmd_kill(lost)
    site.broken()
    try:
        job.training(starts=2, saves=0, timeout_s=120)
        site.recovered()
        assert job.node != lost
        assert not alive(pid)
    finally:
        site.cluster.slurmd_start(lost)
    site.complete()


@pytest.mark.fault(
    broken="the step daemon (slurmstepd) of a training is killed: Slurm itself leaves the program "
    "running",
    happens="the program ends with it, so that its GPUs are never in use twice; srun and Slurm "
    "(22.05) do not notice: the job stays RUNNING until somebody cancels it or its time is over",
    seen="the job is RUNNING without progress (`synergyctl jobs`)",
)
def test_step_daemon_killed(site: Site) -> None:
    site.start(pool={"nodes": "n-1"})
    job = site.train().training()
    pid = job.pid
    os.kill(step_daemon(job), signal.SIGKILL)
    site.broken()
    until(lambda: not alive(pid), "the program ends:", job, timeout_s=15)
    site.recovered()
    site.cluster.run(["scancel", str(job.job_id)])
    until(lambda: job.over, "its end:", job)
    site.judge(job)
    site.complete(site.train().training())


@pytest.mark.fault(
    broken="the launcher of a training is killed (the kernel's OOM killer may choose it)",
    happens="Slurm ends the task; the job fails as for any program that is killed",
    seen="srun: `task 0: Killed`; the job is FAILED",
    everywhere=False,
)
def test_launcher_killed(site: Site) -> None:
    site.start()
    job = site.train().training()
    pid = job.pid
    os.kill(parent(pid), signal.SIGKILL)
    site.broken()
    until(lambda: not alive(pid), "the program does not outlive it:", job, timeout_s=30)
    until(lambda: job.over, "the job ends:", job, timeout_s=60)
    site.recovered()
    site.judge(job)


def lose(site: Site, node: str, how: str) -> None:
    """Set a node to a state, with a reason."""
    # A node that has come back by itself (ReturnToService) refuses to be resumed.
    words = ("update", f"nodename={node}", f"state={how}", "reason=test")
    scontrol(site, *words, check=how != "resume")


@pytest.mark.fault(
    broken="an admin sets a job's node DOWN, and resumes it later",
    happens="the job starts on another node from its last checkpoint; the node is used again "
    "when it is back",
    seen="`Restarts=1`",
)
def test_node_down_and_back(site: Site) -> None:
    site.start(pool={"nodes": "n-[1-2]"})
    job = site.train().training(saves=2)
    lost = job.node
    lose(site, lost, "drain")
    lose(site, lost, "down")
    site.broken()
    job.training(starts=2, saves=0)
    site.recovered()
    assert job.node != lost
    lose(site, lost, "resume")
    other = site.train().training()
    assert other.node == lost
    site.complete()


@pytest.mark.fault(
    broken="a job's node is set DOWN and back at once, while the job's old processes still live",
    happens="the job starts anew once, after the old processes are gone",
    seen="`Restarts=1`; a node drained by Slurm with `Duplicate jobid` has to be resumed by an "
    "admin (22.05 does that when a job comes back within moments)",
    everywhere=False,
)
def test_node_down_and_back_at_once(site: Site) -> None:
    site.start(pool={"nodes": "n-1"})
    job = site.train().training(saves=2)
    lose(site, "n-1", "down")
    lose(site, "n-1", "resume")
    site.broken()
    deadline_s = time.monotonic() + 90
    while job.starts < 2:
        assert time.monotonic() < deadline_s, str(job)
        if "drain" in site.cluster.run(["sinfo", "-h", "-n", "n-1", "-o", "%T"]).stdout:
            lose(site, "n-1", "resume")
        time.sleep(0.5)
    job.training(starts=2, saves=0)
    site.complete()


@pytest.mark.fault(
    broken="a node is drained under a running job, and resumed later",
    happens="the job runs on to its end there, nothing new is started there until it is back",
    seen="the waiting job's reason in `synergyctl jobs`",
)
def test_node_drained(site: Site) -> None:
    site.start(pool={"nodes": "n-1"})
    job = site.train(gpus=2).training()
    lose(site, "n-1", "drain")
    site.broken()
    waiting = site.train(gpus=2)
    until(lambda: waiting.facts.held is Hold.ADMIN, "it is held:", waiting)
    job.goes_on()
    assert waiting.facts.pending
    lose(site, "n-1", "resume")
    waiting.training()
    site.complete()
    assert job.starts == 1


@pytest.mark.fault(
    broken="the end of a job takes long: its epilog hangs for 8 s, its GPUs stay COMPLETING",
    happens="the next job waits for the GPUs and starts when they are really free",
    seen="`synergyctl jobs`: placed on n-1, where 0 of 4 GPUs are free so far",
    everywhere=False,
)
def test_completing_that_lasts(site: Site, epilog_hangs: Path) -> None:
    site.start(pool={"nodes": "n-1"})
    first = site.train(time_limit="1:00:00").training()
    second = site.train(time_limit="2:00:00")
    epilog_hangs.write_text("8", encoding="utf-8")
    first.finish()
    until(lambda: first.facts.completing, "it is COMPLETING:", first)
    site.broken()
    assert second.starts == 0
    until(lambda: not first.facts.completing, "its end:", first)
    epilog_hangs.unlink()
    second.training()
    site.complete()
    assert (first.starts, second.starts) == (1, 1)


# -- admins behind our back -----------------------------------------------------------------------


def requeue(site: Site, job: Trainee, waiting: Trainee) -> None:
    scontrol(site, "requeue", str(job.job_id))
    job.training(starts=2, saves=0)


def hold_and_release(site: Site, job: Trainee, waiting: Trainee) -> None:
    scontrol(site, "hold", str(job.job_id))
    scontrol(site, "release", str(job.job_id))
    job.goes_on()


def release_waiting(site: Site, job: Trainee, waiting: Trainee) -> None:
    scontrol(site, "release", str(waiting.job_id))
    until(lambda: waiting.facts.held is Hold.ADMIN, "held by us again:", waiting)


def other_gpus(site: Site, job: Trainee, waiting: Trainee) -> None:
    scontrol(site, "update", f"jobid={waiting.job_id}", "TresPerNode=gres:gpu:1", "NumCPUs=1")


def other_nodes(site: Site, job: Trainee, waiting: Trainee) -> None:
    scontrol(site, "update", f"jobid={waiting.job_id}", "ReqNodeList=n-3", "NumNodes=1-1")


def delete_reservation(site: Site, job: Trainee, waiting: Trainee) -> None:
    # Slurm refuses while a job runs in it; the next start makes it anew if it is gone.
    said = scontrol(site, "delete", "ReservationName=synergy-test", check=False)
    assert "in use" in said
    job.finish()
    until(lambda: job.over, "its end:", job)
    scontrol(site, "delete", "ReservationName=synergy-test", check=False)


def suspend_and_resume(site: Site, job: Trainee, waiting: Trainee) -> None:
    scontrol(site, "suspend", str(job.job_id))
    before = job.steps()
    begun_s = time.monotonic()
    # Longer than its lease of 6 s.
    until(lambda: time.monotonic() - begun_s > 7, "time passes")
    assert job.steps() <= before + 1
    assert waiting.facts.pending
    scontrol(site, "resume", str(job.job_id))
    job.goes_on()


@pytest.mark.parametrize(
    ("edit", "starts"),
    [
        pytest.param(
            edit,
            starts,
            id=edit.__name__.replace("_", "-"),
            marks=pytest.mark.fault(
                broken=broken,
                happens=happens,
                seen=seen,
                everywhere=edit in (requeue, other_gpus),
            ),
        )
        for edit, starts, broken, happens, seen in (
            (
                requeue,
                2,
                "an admin requeues a running job",
                "it lands held, and is started anew from the checkpoint it made at Slurm's SIGTERM",
                "`Restarts=1`",
            ),
            (
                hold_and_release,
                1,
                "an admin holds and releases a running job",
                "it runs on",
                "nothing",
            ),
            (
                release_waiting,
                1,
                "an admin releases a job that the controller holds",
                "it is held again, and starts when it is its turn; if Slurm was quicker to start "
                "it elsewhere, it is adopted as it runs",
                "`squeue`: JobHeldAdmin, or log: `job N: adopted as it runs`",
            ),
            (
                other_gpus,
                1,
                "an admin changes GPUs and CPUs of a held job",
                "what the user asked for counts (kept in AdminComment), and is written again "
                "before the start",
                "the job runs as submitted",
            ),
            (
                other_nodes,
                1,
                "an admin asks for another node for a held job",
                "the plan's node is written before the start",
                "the job runs where the plan says",
            ),
            (
                delete_reservation,
                1,
                "an admin deletes the controller's reservation",
                "Slurm refuses while a job runs in it; once deleted it is made again before the "
                "next start",
                "`Requested reservation is in use`",
            ),
            (
                suspend_and_resume,
                1,
                "an admin suspends a running job and resumes it after its lease has run out",
                "its GPUs stay its own meanwhile; it goes on and renews its lease",
                "`squeue`: S",
            ),
        )
    ],
)
def test_an_admins_edit(
    site: Site, edit: Callable[[Site, Trainee, Trainee], None], starts: int
) -> None:
    site.start(pool={"nodes": "n-1"})
    job = site.train(time_limit="1:00:00").training(saves=2)
    waiting = site.train(time_limit="2:00:00")
    until(lambda: waiting.facts.held is Hold.ADMIN, "it is held by us:", waiting)
    site.broken()
    edit(site, job, waiting)
    job.finish()
    waiting.training()
    (held,) = waiting.facts.allocation
    assert len(held.gpu_ids) == 4
    # Whom an admin releases, Slurm may be quicker to start, on any node.
    assert held.node == "n-1" or edit is release_waiting
    site.complete()
    assert (job.starts, waiting.starts) == (starts, 1)


@pytest.mark.fault(
    broken="a job that an admin has suspended is told to stop",
    happens="it cannot checkpoint; after the grace time it is requeued, and starts anew from its "
    "last checkpoint",
    seen="`Restarts=1`",
)
def test_a_suspended_job_is_told_to_stop(site: Site) -> None:
    site.start(pool={"nodes": "n-1"}, scheduling={"grace_s": 3.0})
    long = site.train(time_limit="20:00:00").training(saves=2)
    scontrol(site, "suspend", str(long.job_id))
    site.broken()
    short = site.train(time_limit="0:30:00").training(timeout_s=90)
    short.finish()
    long.training(starts=2, saves=0)
    site.complete()
