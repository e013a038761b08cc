"""The controller as a process: options, settings, signals, and what it says when it cannot work."""

from __future__ import annotations

import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, ControllerProcess, Slurm, controller, slurm

from slurm_synergy.cli.control import Target, ask
from slurm_synergy.devcluster import DevCluster

__all__ = ["controller", "slurm"]  # fixtures

Factory = Callable[..., ControllerProcess]


def until_logged(daemon: ControllerProcess, text: str, timeout_s: float = 15) -> None:
    deadline_s = time.monotonic() + timeout_s
    while text not in daemon.log:
        if time.monotonic() > deadline_s:
            pytest.fail(f"never said {text!r}:\n{daemon.log}")
        time.sleep(0.1)


def test_help_and_version_fit_on_a_screen() -> None:
    daemon = str(ROOT / "sbin" / "slurm-synergyd")
    for option in ("--help", "--version"):
        done = subprocess.run(
            [sys.executable, daemon, option], capture_output=True, text=True, check=True
        )
        assert 0 < len(done.stdout.splitlines()) <= 24


def test_a_dry_run_says_what_it_would_do_and_changes_nothing(
    controller: Factory, slurm: Slurm
) -> None:
    job_id = slurm.submit("--gres=gpu:v100:4")
    before = slurm.job(job_id)
    daemon = controller()
    done = daemon.run("--dry-run", "--once")
    assert done.returncode == 0, done.stderr
    assert "dry run: would make reservation synergy-test over a100-[1-2],v100-[1-4]" in done.stderr
    assert f"would start job {job_id} on v100-" in done.stderr
    assert "dry run: would start 1, stop 0" in done.stderr
    assert "not done" not in done.stderr
    assert slurm.job(job_id) == before
    assert slurm.client.read_reservations() == ()
    assert not Path(daemon.settings.state_dir).exists()


def test_once_runs_one_round_and_the_next_call_follows_it(
    controller: Factory, slurm: Slurm
) -> None:
    daemon = controller()
    job_id = slurm.submit("--gres=gpu:v100:4")
    assert daemon.run("--once").returncode == 0
    slurm.running(job_id)
    assert len(daemon.journal) == 1
    slurm.client.cancel(job_id)
    slurm.wait(job_id, lambda facts: facts.state.finished and not facts.completing)
    assert daemon.run("--once").returncode == 0
    assert daemon.journal[1]["snapshot"]["jobs"] == []


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"slurm": {"partition": "nowhere"}}, "slurm.partition"),
        ({"scheduling": {"policy": "best"}}, "scheduling.policy"),
        ({"scheduling": {"mechanism": "magic"}}, "scheduling.mechanism"),
        ({"enforcement": "sometimes"}, "enforcement"),
        ({"slurm": {"partition": "main"}, "enforcement": "shared"}, "OverSubscribe"),
        ({"schedulling": {}}, "did you mean"),
        ({"operators": ["nobody-of-that-name"]}, "operators"),
    ],
)
def test_wrong_settings_end_it_with_status_2_and_the_key(
    controller: Factory, slurm: Slurm, settings: dict[str, object], told: str
) -> None:
    if "slurm" in settings:
        settings = {
            **settings,
            "slurm": {**settings["slurm"], "conf": str(slurm.cluster.conf_path)},
        }
    daemon = controller()
    name = daemon.settings.reservation_name
    daemon.configure(**settings)
    done = daemon.run()
    daemon.configure()
    assert (done.returncode, told in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr
    assert name not in [one.name for one in slurm.client.read_reservations()]


def test_a_second_controller_on_the_same_state_directory_is_refused(
    controller: Factory, slurm: Slurm
) -> None:
    daemon = controller()
    daemon.start()
    done = daemon.run("--once")
    assert done.returncode == 1
    assert "in use by another controller" in done.stderr


def test_a_munge_that_cannot_be_used_ends_it_with_the_remedy(
    controller: Factory, slurm: Slurm, tmp_path: Path
) -> None:
    daemon = controller(leases={"listen": "127.0.0.1:0", "munge": {"socket": "/nowhere/munge"}})
    done = daemon.run()
    assert done.returncode == 1
    for told in ("munge cannot be used", "leases.munge.socket", "start munged", "/nowhere/munge"):
        assert told in done.stderr
    assert "Traceback" not in done.stderr
    daemon.configure()
    assert slurm.client.read_reservations() == ()


def test_the_status_follows_jobs_between_rounds_and_knows_the_clusters_name(
    controller: Factory, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also: without leases.munge.socket the controller takes SYNERGY_MUNGE_SOCKET."""
    socket = slurm.cluster.munge_socket
    monkeypatch.setenv("SYNERGY_MUNGE_SOCKET", str(socket))
    daemon = controller(
        leases={"listen": "127.0.0.1:0", "munge": {"socket": None}},
        scheduling={"policy": "fifo", "round_s": 600.0, "poll_s": 0.3, "debounce_s": 0.2},
    )
    daemon.start()
    assert stat.S_IMODE((daemon.home / "state" / "endpoint").stat().st_mode) == 0o644
    target = Target(endpoint=daemon.endpoint, source="test", munge_socket=socket)
    job_id = slurm.submit("--gres=gpu:v100:4", "--comment=synergy:profile=nosuchmodel")

    def until(phase: str | None) -> dict[str, Any]:
        deadline_s = time.monotonic() + 20
        while True:
            found = {one["job_id"]: one for one in ask(target, "jobs")["jobs"]}.get(job_id, {})
            if found.get("phase") == phase:
                return found
            assert time.monotonic() < deadline_s, (phase, found, daemon.log)
            time.sleep(0.05)

    assert "'nosuchmodel' is not in the catalogue" in until("running")["note"]
    status = ask(target, "status")
    assert sum(node["gpus_used"] for node in status["nodes"]) == 4
    assert status["cluster"] == slurm.client.read_config().cluster_name
    assert (status["jobs"]["running"], status["observed_age_s"] < 5) == (1, True)
    slurm.client.cancel(job_id)
    until(None)
    assert daemon.stop() == 0


def test_a_port_in_use_is_told(controller: Factory, slurm: Slurm) -> None:
    first = controller()
    first.start()
    second = controller(leases={"listen": first.endpoint})
    done = second.run()
    assert done.returncode == 1
    assert "leases.listen" in done.stderr


def test_settings_are_read_again_and_wrong_ones_keep_the_old(
    controller: Factory, slurm: Slurm
) -> None:
    daemon = controller(scheduling={"policy": "fifo", "round_s": 20.0, "poll_s": 0.5})
    daemon.start()
    until_logged(daemon, "round 1")
    daemon.configure(scheduling={"policy": "no-such"})
    daemon.reload()
    until_logged(daemon, "settings not reloaded")
    daemon.configure(scheduling={"policy": "srtf", "round_s": 20.0, "poll_s": 0.5})
    daemon.reload()
    until_logged(daemon, "settings reloaded")
    job_id = slurm.submit("--gres=gpu:v100:1")
    slurm.running(job_id)
    assert daemon.journal[-1]["plan"]["policy"] == "srtf"
    assert daemon.stop() == 0


def test_a_clean_stop_leaves_jobs_and_reservation(controller: Factory, slurm: Slurm) -> None:
    daemon = controller()
    daemon.start()
    job_id = slurm.submit("--gres=gpu:v100:1")
    slurm.running(job_id)
    assert daemon.stop() == 0
    assert "stopped; running jobs go on" in daemon.log
    time.sleep(1)
    assert slurm.job(job_id).running
    assert [one.name for one in slurm.client.read_reservations()] == ["synergy-test"]
    assert not (daemon.home / "state" / "endpoint").exists()


def test_slurm_accepts_the_lines_that_admins_are_given(
    fresh_cluster: Callable[..., DevCluster],
) -> None:
    text = (ROOT / "etc" / "slurm.conf.d" / "synergy.conf").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    # The embedded cluster has most of them already, and a partition of that name.
    (partition,) = (line for line in lines if line.startswith("PartitionName=synergy "))
    cluster = fresh_cluster(
        real_node=False, extra_conf=[partition.replace("=synergy ", "=given ", 1)]
    )
    conf = cluster.conf_path.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line not in conf and line != partition] == []
    shown = cluster.run(["scontrol", "show", "partition", "given"]).stdout
    assert "OverSubscribe=FORCE:8" in shown
