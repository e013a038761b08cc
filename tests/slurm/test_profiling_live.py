"""The optimistic profiler on a real Slurm: a job with a known truth is measured while it runs."""

from __future__ import annotations

import json
import socket
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, ControllerProcess, Slurm, controller, slurm

from slurm_synergy.cli.control import Target, ask
from slurm_synergy.controller.codec import decode
from slurm_synergy.core.model import Job, JobStatus, Node, PipelineModel, Profile
from slurm_synergy.core.pipeline import demand, preprocess_rate
from slurm_synergy.core.resources import Resources
from slurm_synergy.profiler.evidence import Evidence

__all__ = ["controller", "slurm"]  # fixtures

Factory = Callable[..., ControllerProcess]

SRUN = ROOT / "wrapper" / "synergy-srun"
PROGRAM = ROOT / "tests" / "slurm" / "emulated_loop.py"
# One v100 has 3 of its node's 24 cores; this job needs 7 of them for all that its GPU can do.
TRUTH = PipelineModel(preprocess=((1, 120.0), (4, 400.0), (8, 700.0), (24, 1100.0)))
GPU_RATE = 600.0
BATCH = 20
ITEM_MIB = 64
FULL = Resources(gpus=8, cpus=24, mem_mib=500_000)
NODE = Node(name="v100-1", gpu_type="v100", total=FULL, capacity=FULL, sockets=2)


def profiling_controller(controller: Factory, **profiling: Any) -> ControllerProcess:
    """A controller for one node, with FIFO and TUNE."""
    return controller(
        pool={"nodes": "v100-1"},
        scheduling={
            "policy": "fifo",
            "mechanism": "tune",
            "round_s": 3.0,
            "poll_s": 0.3,
            "debounce_s": 0.2,
            "start_deadline_s": 60.0,
        },
        # A port that a restarted controller takes again: the launchers know no other.
        leases={"listen": f"127.0.0.1:{free_port()}"},
        profiling={"steps": 30, **profiling},
    )


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def submit(
    slurm: Slurm, daemon: ControllerProcess, key: str, *options: str, data: Path | None = None
) -> int:
    """A job of one GPU with that profile key, whose truth is the one above.

    The files in ``data`` are said to be its data set.
    """
    curve = ",".join(f"{cores}:{rate:g}" for cores, rate in TRUTH.preprocess)
    script = (
        f"export SYNERGY_ENDPOINT={daemon.endpoint} SYNERGY_INJECT=0\n"
        f"export SYNERGY_CACHE_DIR={daemon.home}\n"
        f"{SRUN} {sys.executable} {PROGRAM} {GPU_RATE:g} {curve} {BATCH} {data or ''}\n"
    )
    hint = f"--comment=synergy:profile={key}"
    return slurm.submit("--gres=gpu:v100:1", hint, *options, script=script, wrapped=False)


def stored(daemon: ControllerProcess, key: str) -> Profile | None:
    """What the ledger has under the key."""
    with closing(sqlite3.connect(daemon.home / "state" / "ledger.sqlite")) as db, db:
        row = db.execute("SELECT profile FROM profiles WHERE key = ?", (key,)).fetchone()
    return decode(Profile, json.loads(row[0])) if row else None


def evidence(daemon: ControllerProcess, key: str) -> Evidence:
    """What the ledger has beside the profile."""
    with closing(sqlite3.connect(daemon.home / "state" / "ledger.sqlite")) as db, db:
        row = db.execute("SELECT profile FROM profiles WHERE key = ?", (key,)).fetchone()
    return decode(Evidence, json.loads(row[0])["evidence"])


def until(holds: Callable[[], Any], daemon: ControllerProcess, what: str, timeout_s: float) -> Any:
    """Poll until ``holds()`` gives something true, and return that."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := holds()):
        if time.monotonic() > deadline_s:
            pytest.fail(f"{what}: not within {timeout_s:g} s:\n{daemon.log[-6000:]}")
        time.sleep(0.2)
    return found


def shown_job(daemon: ControllerProcess, job_id: int) -> dict[str, Any]:
    """The job as ``synergyctl jobs --json`` shows it."""
    socket_path = daemon.cluster.munge_socket
    target = Target(endpoint=daemon.endpoint, source="test", munge_socket=socket_path)
    jobs = ask(target, "jobs")["jobs"]
    return next(dict(job) for job in jobs if job["job_id"] == job_id)


def cores_of(slurm: Slurm, job_id: int) -> list[int]:
    """The numbers of cores that the job's program has had, in order."""
    lines = slurm.output(job_id).splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("cores ")]


def data_set(folder: Path) -> Path:
    """A hundred files of 64 MiB and a small one, which take no room: all of them are holes."""
    folder.mkdir()
    for number in range(101):
        with (folder / f"{number:03}").open("wb") as file:
            file.truncate(ITEM_MIB << 20 if number else 1 << 20)
    return folder


def memory_of(daemon: ControllerProcess, job_id: int) -> int:
    """The memory of the job's lease, in MiB."""
    (share,) = leases(daemon)[job_id]["placement"]["shares"]
    mem_mib: int = share[1]["mem_mib"]
    return mem_mib


def test_a_job_is_measured_once_and_the_next_one_starts_profiled(
    controller: Factory, slurm: Slurm, tmp_path: Path
) -> None:
    daemon = profiling_controller(controller)
    daemon.start()
    data = data_set(tmp_path / "data")
    first = submit(slurm, daemon, "truth", data=data)
    slurm.running(first, timeout_s=60)
    shown = until(lambda: shown_job(daemon, first)["profiling"], daemon, "sweep is shown", 120)
    assert (shown["key"], shown["most_points"]) == ("truth", 8)
    profile = until(lambda: stored(daemon, "truth"), daemon, "profile", 240)
    assert profile.pipeline is not None
    assert profile.confident
    assert profile.gpu_rate_per_gpu["v100"] == pytest.approx(GPU_RATE, rel=0.05)
    for cores in range(1, 25):
        known = min(GPU_RATE, preprocess_rate(profile.pipeline, cores))
        assert known == pytest.approx(min(GPU_RATE, preprocess_rate(TRUTH, cores)), rel=0.10)
    # Its data were looked at, and its memory filled in from that.
    assert (profile.pipeline.dataset_mib, profile.pipeline.samples_per_epoch) == (
        pytest.approx(100 * ITEM_MIB, rel=0.01),
        101,
    )
    read = evidence(daemon, "truth").data
    if "in memory" in read:  # temporary files are in a tmpfs here
        assert profile.pipeline.storage_mib_s == float("inf")
    else:
        assert 0 < profile.pipeline.storage_mib_s < float("inf")
        assert "O_DIRECT" in read or "dropped from the page cache" in read
    # The next round gives it what it can use: 97 % of its GPU's rate takes 7 cores.
    until(lambda: cores_of(slurm, first)[-1] in (6, 7), daemon, "planned with the profile", 60)
    # And 64 MiB for each of 600 samples/s are more than any storage gives: all of them are cached,
    # with the processes' memory and what the cache leaves free; 62,500 MiB are its share.
    status = JobStatus(job=Job(job_id=1, user="u", submitted_s=0.0, gpus=1), profile=profile)
    wanted_mib = demand(status, NODE, 1).mem_mib
    assert memory_of(daemon, first) == wanted_mib < 12 * 1024
    tried = cores_of(slurm, first)
    assert len(set(tried)) <= 9
    # One round planned with 3 cores, the sweep tried up to all of the node's.
    assert tried[0] == 3 and 24 in tried and 1 in tried
    second = submit(slurm, daemon, "truth")
    slurm.running(second, timeout_s=60)
    until(lambda: cores_of(slurm, second), daemon, "the second job trains", 60)
    assert set(cores_of(slurm, second)) <= {6, 7}
    assert memory_of(daemon, second) == wanted_mib
    assert daemon.log.count("measured under 'truth' with") == 2  # begun and done, of the first
    # With 7 cores its GPU hardly waits for data; with its share of 3 it did half of the time.
    stall = until(
        lambda: shown_job(daemon, second)["lease"]["progress"]["data_stall"], daemon, "stall", 60
    )
    assert stall < 0.3


def leases(daemon: ControllerProcess) -> dict[int, dict[str, Any]]:
    """The leases in the ledger, by job id."""
    with closing(sqlite3.connect(daemon.home / "state" / "ledger.sqlite")) as db, db:
        rows = db.execute("SELECT job_id, lease FROM jobs WHERE lease IS NOT NULL").fetchall()
    return {job_id: json.loads(text) for job_id, text in rows}


def test_a_sweep_leaves_nothing_behind_whatever_ends_it(controller: Factory, slurm: Slurm) -> None:
    # Points that take long, so that there is time to interfere.
    daemon = profiling_controller(controller, steps=2000)
    daemon.start()
    job = submit(slurm, daemon, "cut")
    slurm.running(job, timeout_s=60)

    def has(cores: int, since: int = 0) -> bool:
        return cores in cores_of(slurm, job)[since:]

    until(lambda: has(24), daemon, "the node's free cores for the sweep", 120)
    # The controller dies: the launcher falls back to the floor, the ledger knows of no sweep.
    daemon.kill()
    until(lambda: cores_of(slurm, job)[-1] == 3, daemon, "the floor", 60)
    assert len(leases(daemon)[job]["cores"]["v100-1"]) == 3
    seen = len(cores_of(slurm, job))
    daemon.start()
    until(lambda: has(24, seen), daemon, "measured from the beginning", 120)
    assert slurm.job(job).restarts == 0
    # Another job starts: its share is no longer free, and it is given back before it begins.
    other = slurm.submit("--gres=gpu:v100:7")
    slurm.running(other, timeout_s=60)
    until(lambda: cores_of(slurm, job)[-1] == 3, daemon, "the free cores went to others", 60)
    held = leases(daemon)
    assert len(held[other]["cores"]["v100-1"]) == 21
    assert set(held[other]["cores"]["v100-1"]).isdisjoint(held[job]["cores"]["v100-1"])
    # And the job itself ends while it is measured.
    slurm.client.cancel(other)
    slurm.client.cancel(job)
    until(lambda: not leases(daemon), daemon, "no lease is left", 60)
    again = submit(slurm, daemon, "cut")
    until(lambda: 24 in cores_of(slurm, again), daemon, "the next one is measured", 120)
    slurm.client.cancel(again)
    until(lambda: not leases(daemon), daemon, "no lease is left", 60)
    assert stored(daemon, "cut") is None
