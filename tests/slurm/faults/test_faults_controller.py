"""The controller dies, cannot be reached, or cannot write: jobs must not notice."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing

import pytest
from fault_network import Relay, skewed_library
from fault_site import Site, SmallDisk, Trainee, until

from slurm_synergy.cli.control import Target, ask

HUNGRY = "--comment=synergy:profile=resnet18-imagenet,min_mem=100M"
MODEST = "--comment=synergy:profile=gnmt-wmt16,min_mem=100M"


def preempt(site: Site) -> list[Trainee]:
    """A long job that trains, and a short one that takes its place."""
    long = site.train(time_limit="20:00:00").training()
    return [long, site.train(time_limit="0:30:00")]


def queue_up(site: Site) -> list[Trainee]:
    """A job that trains, and a longer one that waits for it."""
    first = site.train(time_limit="1:00:00").training()
    return [first, site.train(time_limit="20:00:00")]


def share_out(site: Site) -> list[Trainee]:
    """A hungry job that has more than its share, and a modest one that brings it back."""
    hungry = site.train(HUNGRY, gpus=2).training()
    return [hungry, site.train(MODEST, gpus=2)]


SCENES: dict[str, Callable[[Site], list[Trainee]]] = {
    "start": lambda site: [site.train()],
    "hold": queue_up,
    "renew": queue_up,
    "stop": preempt,
    "resize": share_out,
}


def intents(site: Site) -> set[str]:
    """The kinds of action that the dead controller has left unconfirmed."""
    with closing(sqlite3.connect(site.daemon.home / "state" / "ledger.sqlite")) as db, db:
        rows = db.execute("SELECT json_extract(action, '$.kind') FROM intents").fetchall()
    db.close()
    return {kind for (kind,) in rows}


def row(point: str, kind: str, where: str, **more: object) -> object:
    fault = pytest.mark.fault(
        broken=f"the controller is killed (SIGKILL) {where}",
        happens="jobs run on; the next controller reads Slurm, repeats what is still wanted, and "
        "repairs nothing blindly",
        seen=f"its log: `job N: {kind} of round R was not confirmed`"
        if point.startswith(("intend", "applied", "written"))
        else "nothing but the start of the next controller in its log",
        **more,
    )
    return pytest.param(point, kind, marks=fault, id=point.replace(":", "-"))


@pytest.mark.parametrize(
    ("point", "kind"),
    [
        *(
            row(f"intend:{kind}", kind, f"after a {kind.capitalize()} was intended, before it")
            for kind in SCENES
        ),
        *(
            row(
                f"applied:{kind}",
                kind,
                f"after a {kind.capitalize()}, before it was committed",
                everywhere=kind in ("start", "stop"),
            )
            for kind in SCENES
        ),
        row(
            "call:reshape",
            "start",
            "in a Start, after the job's shape was written to Slurm",
            everywhere=False,
        ),
        row(
            "written:resizes",
            "resize",
            "after the leases of all Resizes of a round were written, before any task was told",
            everywhere=False,
        ),
        row("lease:grant", "start", "in a Start, after the lease was granted, before the release"),
        row(
            "lease:stop",
            "stop",
            "in a Stop, after the job was told, before the round's end",
            everywhere=False,
        ),
        row(
            "call:requeue_hold",
            "stop",
            "in a Stop, right after the job was requeued",
            everywhere=False,
        ),
    ],
)
def test_a_controller_killed_there_loses_nothing(site: Site, point: str, kind: str) -> None:
    mechanism = "tune" if kind == "resize" else "proportional"
    site.start(fault=point, scheduling={"mechanism": mechanism}, pool={"nodes": "n-1"})
    jobs = SCENES[kind](site)
    site.await_death()
    if not point.startswith("call:requeue"):
        assert kind in intents(site)
    site.restart()
    jobs[-1].finish() if kind == "stop" else jobs[0].finish()
    for job in jobs:
        job.training(saves=0)
    site.complete()
    if kind != "stop":
        assert [job.starts for job in jobs] == [1] * len(jobs)


@pytest.mark.fault(
    broken="the file system of the state directory is full, for as long as it lasts",
    happens="running jobs go on renewing their leases; nothing is started that could not be "
    "recorded; with room again the controller goes on by itself",
    seen="log and `synergyctl status`: the ledger cannot be written, free some space on its file "
    "system; running jobs keep what they have",
)
def test_a_full_ledger_disk_stops_only_starts(site: Site) -> None:
    disk = SmallDisk(site.daemon.home / "state")
    try:
        site.start()
        running = site.train().training()
        disk.fill()
        site.broken()
        waiting = site.train()
        site.logged("free some space")
        # Longer than the lease of 6 s: it was renewed meanwhile.
        begun_s = time.monotonic()
        until(lambda: time.monotonic() - begun_s > 7, "time passes")
        running.goes_on()
        assert "silent" not in running.output
        assert waiting.facts.pending
        assert waiting.facts.priority == 0
        assert site.daemon.died() is None
        disk.free()
        site.logged("working again")
        waiting.training()
        site.complete()
        assert site.daemon.stop() == 0
    finally:
        site.daemon.kill()
        disk.close()


@pytest.mark.fault(
    broken="the ledger file is damaged while the controller is down",
    happens="the controller refuses to start and leaves the file as it is; with the file moved "
    "away it adopts the running jobs",
    seen="exit status 1 and `the ledger … cannot be used: …; nothing was deleted: restore a copy "
    "of it, or move it away and start again`",
)
def test_a_damaged_ledger_is_refused_and_kept(site: Site) -> None:
    site.start()
    job = site.train().training()
    site.daemon.kill()
    site.broken()
    ledger = site.daemon.home / "state" / "ledger.sqlite"
    for name in ("ledger.sqlite-wal", "ledger.sqlite-shm"):
        ledger.with_name(name).unlink(missing_ok=True)
    damaged = b"SQLite format 3\0" + os.urandom(ledger.stat().st_size)
    ledger.write_bytes(damaged)
    done = site.daemon.run()
    assert done.returncode == 1, done.stderr
    assert "nothing was deleted" in done.stderr
    assert "move it away" in done.stderr
    assert "Traceback" not in done.stderr
    assert ledger.read_bytes() == damaged
    ledger.rename(ledger.with_name("ledger.damaged"))
    site.restart()
    site.logged(f"job {job.job_id}: adopted")
    site.complete()
    assert job.starts == 1


@pytest.mark.fault(
    broken="a second controller is started on the same state directory",
    happens="the second refuses; the first does not notice",
    seen="exit status 1 and `… is in use by another controller (process N)`",
    everywhere=False,
)
def test_a_second_controller_is_refused(site: Site) -> None:
    site.start()
    job = site.train().training()
    done = site.daemon.run()
    assert done.returncode == 1
    assert "in use by another controller" in done.stderr
    assert f"job {job.job_id}" not in done.stderr
    site.complete()
    assert job.starts == 1


def lease_left_s(site: Site, job: Trainee) -> float:
    """For how many seconds the controller has promised the job its lease."""
    target = Target(
        endpoint=site.daemon.endpoint, source="test", munge_socket=site.cluster.munge_socket
    )
    shown = {one["job_id"]: one for one in ask(target, "jobs")["jobs"]}
    return float(shown[job.job_id]["lease"]["expires_in_s"])


@pytest.mark.fault(
    broken="the lease service cannot be reached from one node (packets are dropped), while jobs "
    "on other nodes reach it",
    happens="that node's job falls back to its floor set and runs on; the others keep their "
    "leases; once the network is back it renews",
    seen="the job's output: `the controller is silent: falling back to this job's proportional "
    "share`",
)
def test_a_node_that_cannot_reach_the_controller_runs_on(site: Site) -> None:
    site.start()
    relay = Relay(site.port)
    try:
        cut_off = site.train(endpoint=relay.endpoint)
        other = site.train()
        cut_off.training()
        other.training()
        assert cut_off.node != other.node
        until(lambda: lease_left_s(site, cut_off) > 0, "it has a lease")
        relay.cut()
        site.broken()
        until(lambda: "controller is silent" in cut_off.output, cut_off)
        cut_off.goes_on()
        until(lambda: lease_left_s(site, cut_off) < 0, "its lease has run out:", cut_off)
        assert lease_left_s(site, other) > 0
        relay.mend()
        until(lambda: lease_left_s(site, cut_off) > 0, "it renews again", cut_off)
        site.recovered()
        site.complete()
        assert "silent" not in other.output
        assert cut_off.starts == other.starts == 1
    finally:
        relay.close()


@pytest.mark.fault(
    broken="munged ends on the controller's host (and with it all authentication of Slurm)",
    happens="running jobs renew by their session tokens; with munged back the round goes on",
    seen="log: `Slurm does not answer …; will be tried again`, then `working again`",
    everywhere=False,
)
def test_without_munge_jobs_run_on_and_the_rest_waits(site: Site) -> None:
    site.start()
    running = site.train(time_limit="1:00:00").training()
    waiting = site.train("--begin=now+2", time_limit="2:00:00")
    site.cluster.munged_stop()
    try:
        site.broken()
        site.logged("will be tried again", timeout_s=60)
        begun_s = time.monotonic()
        until(lambda: time.monotonic() - begun_s > 7, "time passes")
        running.goes_on()
        assert "silent" not in running.output
    finally:
        site.cluster.munged_start()
    site.logged("working again", timeout_s=60)
    waiting.training(timeout_s=90)
    site.complete()
    assert running.starts == 1


SLOW_MUNGE = """#!/bin/bash
# The first credential lives for a second and comes late; the others are as usual.
if mkdir '{once}' 2>/dev/null; then
    /usr/bin/munge --ttl=1 "$@"; sleep 4
else
    exec /usr/bin/munge "$@"
fi
"""


@pytest.mark.fault(
    broken="a job's credential has expired by the time it arrives (a stuck node)",
    happens="the job starts on what Slurm gave it, and gets its lease with a fresh credential",
    seen="the job's output: `the controller … refuses this task: … Expired credential`",
    everywhere=False,
)
def test_an_expired_credential_is_replaced(site: Site) -> None:
    site.start()
    tools = site.home / "tools"
    tools.mkdir()
    (tools / "munge").write_text(SLOW_MUNGE.format(once=site.home / "once"), encoding="utf-8")
    (tools / "munge").chmod(0o755)
    site.broken()
    job = site.train(env={"PATH": f"{tools}:{os.environ['PATH']}"}).training()
    until(lambda: "Expired credential" in job.output, job)
    until(lambda: "'registered': 1" in str(progress(site, job)), job)
    site.recovered()
    site.complete()
    assert job.starts == 1


def progress(site: Site, job: Trainee) -> object:
    """What the controller knows of the job's tasks."""
    target = Target(
        endpoint=site.daemon.endpoint, source="test", munge_socket=site.cluster.munge_socket
    )
    shown = {one["job_id"]: one for one in ask(target, "jobs")["jobs"]}
    return shown[job.job_id]["lease"]["progress"]


@pytest.mark.fault(
    broken="a node's clock is an hour ahead, as munged there sees it (its other programs and "
    "Slurm's own daemons keep the right time: their clocks cannot be set apart on one machine)",
    happens="its job runs on what Slurm gave it; when the clock is right again it gets its lease",
    seen="the job's output: `the controller … refuses this task: … Rewound credential`",
    everywhere=False,
)
def test_a_clock_that_is_off_costs_the_lease_only(site: Site) -> None:
    library, flag = skewed_library(site.home, 3600)
    flag.touch()
    munge = site.home / "munge"
    munge.mkdir(mode=0o755)
    key = site.cluster.state_dir / "munge" / "munge.key"
    node = subprocess.Popen(
        [
            "env", f"LD_PRELOAD={library}", "munged", "--foreground", "--force",
            f"--key-file={key}", f"--socket={munge}/socket", f"--pid-file={munge}/pid",
            f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        ],
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until((munge / "socket").exists, "the node's munged is up")
        site.start()
        site.broken()
        job = site.train(env={"SYNERGY_MUNGE_SOCKET": f"{munge}/socket"}).training()
        until(lambda: "Rewound credential" in job.output, job)
        job.goes_on()
        flag.unlink()
        until(lambda: "'registered': 1" in str(progress(site, job)), job)
        site.recovered()
        site.complete()
        assert job.starts == 1
    finally:
        node.terminate()
        node.wait()
