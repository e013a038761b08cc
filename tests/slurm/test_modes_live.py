"""Observe, advise, act on a real Slurm: what each writes, and that changing loses nothing."""

from __future__ import annotations

import json
import os
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import ControllerProcess, Slurm

from slurm_synergy.devcluster import DevCluster

ROOT = Path(__file__).resolve().parents[2]

_WRITES = ("update", "hold", "release", "requeue", "requeuehold", "create", "delete", "uhold")

# Stands before each of Slurm's commands, writes down what it is called with, and calls it.
_RECORDER = """#!/bin/sh
{{ printf '%s' "$0"; for word; do printf '\\t%s' "$word"; done; echo; }} >> {log}
if [ "${{0##*/}}" = scontrol ] && [ $# -eq 0 ]; then
  tee -a {log}.stdin | {real} "$@"
else
  exec {real} "$@"
fi
"""


class Watched:
    """A controller whose every command is written down, on a cluster that holds no job."""

    def __init__(self, cluster: DevCluster, home: Path) -> None:
        self.cluster, self.home = cluster, home
        self.slurm = Slurm(cluster, home)
        self.log = home / "commands"
        programs = home / "bin"
        programs.mkdir()
        for name in ("squeue", "scontrol", "scancel", "sdiag", "sinfo", "sacctmgr"):
            real = shutil.which(name)
            assert real is not None, name
            program = programs / name
            program.write_text(_RECORDER.format(log=self.log, real=real))
            program.chmod(0o755)
        self.daemon = ControllerProcess(cluster, home, **self.settings("observe"))

    def settings(self, mode: str) -> dict[str, Any]:
        return {
            "mode": mode,
            "slurm": {
                "conf": str(self.cluster.conf_path),
                "bin_dir": str(self.home / "bin"),
            },
            "metrics": {"listen": "127.0.0.1:0"},
            "scheduling": {"policy": "srtf", "mechanism": "proportional"},
        }

    def set_mode(self, mode: str) -> None:
        """Change the settings of the running controller, and those of job_submit.lua."""
        self.set_lua_mode(mode)
        self.daemon.configure(**self.settings(mode))
        self.daemon.reload()

    def set_lua_mode(self, mode: str) -> None:
        site = self.cluster.conf_path.parent / "synergy_site.lua"
        lines = [line for line in site.read_text().splitlines() if "  mode = " not in line]
        lines.insert(1, f'  mode = "{mode}",')
        site.write_text("\n".join(lines) + "\n")
        # slurmctld looks at the script's modification time, which has whole seconds.
        script = site.with_name("job_submit.lua")
        later_s = script.stat().st_mtime + 2
        os.utime(script, (later_s, later_s))

    def writes(self) -> list[str]:
        """Commands so far that change something, without those of this test."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        stdin = Path(f"{self.log}.stdin")
        lines += stdin.read_text().splitlines() if stdin.exists() else []
        return [
            line
            for line in lines
            if any(word in _WRITES for word in line.replace("\t", " ").split()[:4])
            or "scancel" in line.split("\t")[0]
        ]

    def until(self, holds: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline_s:
                pytest.fail(f"{what}: not within {timeout_s:g} s:\n{self.daemon.log[-6000:]}")
            time.sleep(0.1)

    def said(self, text: str) -> None:
        self.until(lambda: text in self.daemon.log, f"never said {text!r}")

    def metrics(self) -> dict[str, float]:
        url = self.daemon.log.rpartition("metrics are served at ")[2].split()[0]
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        found = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        return found


@pytest.fixture(scope="module")
def observed_cluster() -> Iterator[DevCluster]:
    """A cluster of its own: job_submit.lua is told another mode."""
    with DevCluster(real_node=False) as cluster:
        yield cluster


@pytest.fixture
def watched(observed_cluster: DevCluster, tmp_path: Path) -> Iterator[Watched]:
    tmp_path.chmod(0o755)
    one = Watched(observed_cluster, tmp_path)
    one.set_lua_mode("observe")
    yield one
    one.daemon.stop()
    # Those that wait first: one that is just being started takes KillWait to end.
    one.slurm.jobs.reverse()
    one.slurm.cancel_all()
    one.slurm.client.delete_reservation("synergy-test")


def _rpcs_that_write(cluster: DevCluster) -> dict[str, int]:
    """Counts of sdiag for what changes jobs and reservations."""
    text = cluster.run(["sdiag"]).stdout
    found = {}
    for line in text.splitlines():
        word = line.split("(")[0].strip()
        if word.startswith("REQUEST_") and "count:" in line:
            changes = ("UPDATE", "CREATE", "DELETE", "REQUEUE", "SUSPEND", "KILL", "CANCEL")
            if "STEP" not in word and any(change in word for change in changes):
                found[word] = int(line.split("count:")[1].split()[0])
    return found


def test_observing_writes_nothing_and_jobs_run_as_slurm_likes(watched: Watched) -> None:
    daemon, slurm = watched.daemon, watched.slurm
    first = slurm.submit("--gres=gpu:v100:8", "--nodelist=v100-1", "-c2", "--time=60")
    slurm.running(first)  # not held: by Slurm alone
    before = _rpcs_that_write(watched.cluster)
    daemon.start()
    wrapper = ROOT / "wrapper" / "synergy-srun"
    endpoint = f"export SYNERGY_ENDPOINT={daemon.endpoint}\n"
    second = slurm.submit(
        "--gres=gpu:v100:4", "-c2", "--time=5", script=f"{endpoint}{wrapper} nproc"
    )
    waiting = slurm.submit("--gres=gpu:v100:8", "--nodelist=v100-1", "-c2", "--time=5")
    watched.said("observe: would ")
    watched.until(lambda: len(daemon.journal) >= 2, "two rounds")
    shown = slurm.job(waiting)
    assert (shown.pending, shown.priority > 0, shown.reservation) == (True, True, None)
    assert "synergy-advice" not in shown.admin_comment
    # Under the wrapper too a job has what Slurm gave it, and ends with its program.
    slurm.wait(second, lambda facts: facts.state.finished)
    assert slurm.job(second).exit_code == (0, 0)
    assert slurm.output(second).splitlines()[-1].isdigit()
    assert slurm.job(second).admin_comment.startswith("synergy:v=1,wrapper=yes,gpn=4,")
    assert slurm.client.read_reservations() == ()
    kinds = {one["reason"]["code"] for one in daemon.journal[-1]["outcomes"] if not one["done"]}
    assert kinds == {"only_shown"}
    figures = watched.metrics()
    assert figures['synergy_mode{mode="observe"}'] == 1
    assert figures["synergy_rounds_total"] >= 2
    assert figures["synergy_scrape_errors"] == 0
    assert daemon.stop() == 0
    assert watched.writes() == []
    assert _rpcs_that_write(watched.cluster) == before


def test_advice_is_one_section_of_the_admin_comment_and_written_when_it_changes(
    watched: Watched,
) -> None:
    daemon, slurm = watched.daemon, watched.slurm
    blocker = slurm.submit("--gres=gpu:v100:8", "--nodelist=v100-1", "-c2", "--time=60")
    slurm.running(blocker)
    job_id = slurm.submit("--gres=gpu:v100:8", "--nodelist=v100-1", "-c2", "--time=5")
    mark = slurm.job(job_id).admin_comment
    slurm.client.set_admin_comment(job_id, f"{mark} accounting tool: x=1")
    daemon.configure(**watched.settings("advise"))
    watched.set_lua_mode("advise")
    daemon.start()
    watched.until(
        lambda: "synergy-advice{would " in slurm.job(job_id).admin_comment, "advice was given"
    )
    comment = slurm.job(job_id).admin_comment
    assert comment.startswith(f"{mark} accounting tool: x=1 synergy-advice{{would ")
    assert comment.count("synergy-advice") == 1
    assert slurm.job(job_id).priority > 0
    count = len(watched.writes())
    assert all("AdminComment=" in line for line in watched.writes())
    rounds = len(daemon.journal)
    other = slurm.submit("--gres=gpu:a100:1", "-c1", "--time=5")  # makes another round
    watched.until(
        lambda: (
            "synergy-advice{" in slurm.job(other).admin_comment and len(daemon.journal) > rounds
        ),
        "the other job got advice",
    )
    mine = [line for line in watched.writes()[count:] if f"JobId={job_id}\t" in line]
    assert mine == []
    watched.set_mode("observe")
    watched.said("the advice in ")
    assert slurm.job(job_id).admin_comment == f"{mark} accounting tool: x=1"
    assert slurm.job(job_id).pending


def test_modes_change_back_and_forth_on_a_live_cluster_and_nothing_is_lost(
    watched: Watched,
) -> None:
    daemon, slurm = watched.daemon, watched.slurm
    script = (
        f"for i in $(seq 600); do echo $i >> {watched.home}/steps-$SLURM_JOB_ID; sleep 0.1; done\n"
    )
    early = slurm.submit("--gres=gpu:v100:4", "-c3", script=script)  # runs before there is acting
    slurm.running(early)
    daemon.start()
    watched.said("observe: would ")
    watched.set_mode("act")
    watched.until(lambda: slurm.job(early).priority == 0, "the running job was adopted")
    started = slurm.submit("--gres=gpu:v100:8", "-c5", script=script)
    assert slurm.job(started).priority == 0  # held at submission
    slurm.running(started)
    # Asks for more than is free, so it waits, held, until the mode changes.
    shapes = [slurm.submit("--gres=gpu:a100:8", "-c2", "--mem=1000", script=script) for _ in "123"]
    watched.until(lambda: sum(slurm.job(one).running for one in shapes) == 2, "two a100 jobs run")
    waiting = next(one for one in shapes if not slurm.job(one).running)
    assert slurm.job(waiting).priority == 0
    runs = {one: slurm.job(one) for one in (early, started, *shapes) if slurm.job(one).running}
    watched.set_mode("observe")
    watched.said("1 waiting job released")
    for one, before in runs.items():
        now = slurm.job(one)
        assert (now.running, now.start_s, now.restarts) == (True, before.start_s, 0)
        assert (now.priority > 0, now.reservation) == (True, None)
    freed = slurm.job(waiting)
    assert (freed.priority > 0, freed.reservation, freed.req_nodes) == (True, None, ())
    assert slurm.client.read_reservations() == ()
    count = len(watched.writes())
    slurm.client.cancel(next(one for one in shapes if one != waiting))
    slurm.running(waiting, timeout_s=60)  # by Slurm alone, with its owner's request
    given = slurm.job(waiting)
    assert (given.gpus_asked, given.cpus_per_task, given.min_mem_node_mib) == ({"a100": 8}, 2, 1000)
    assert watched.writes()[count:] == []
    watched.set_mode("act")
    watched.until(lambda: slurm.job(waiting).priority == 0, "it was adopted again")
    for one in (early, started, waiting):
        assert slurm.job(one).restarts == 0
        steps = (watched.home / f"steps-{one}").read_text().split()
        assert steps == [str(i + 1) for i in range(len(steps))]


def test_a_controller_that_was_killed_while_acting_gives_back_when_it_comes_back_to_observe(
    watched: Watched,
) -> None:
    daemon, slurm = watched.daemon, watched.slurm
    watched.set_lua_mode("act")
    daemon.configure(**watched.settings("act"))
    daemon.start()
    running = slurm.submit("--gres=gpu:a100:8")
    slurm.running(running)
    jobs = [slurm.submit("--gres=gpu:a100:8", "-N2", "--ntasks-per-node=1") for _ in "12"]
    watched.until(lambda: str(jobs[-1]) in json.dumps(daemon.journal[-1]["plan"]), "it is planned")
    daemon.kill()
    watched.set_lua_mode("observe")
    daemon.configure(**watched.settings("observe"))
    daemon.start()
    watched.said("2 waiting jobs released, 1 running job kept, reservation synergy-test deleted")
    assert slurm.job(running).running
    assert all(slurm.job(one).priority > 0 for one in jobs)
    count = len(watched.writes())
    watched.until(lambda: "observe: would" in daemon.log, "it goes on")
    assert watched.writes()[count:] == []
