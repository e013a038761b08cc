"""How synergy-srun reads its command line and what it adds for srun."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from slurm_synergy.jobside.srun import main, parse, srun_options

ROOT = Path(__file__).resolve().parents[2]
ONE_NODE = {"SLURM_NNODES": "1", "SLURM_JOB_CPUS_PER_NODE": "24"}


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("python train.py -n 4", "python train.py -n 4"),
        ("-n 4 python x", "python x"),
        ("-n4 -l python x", "python x"),
        ("-ln 4 python x", "python x"),
        ("-lu python x", "python x"),
        ("-K python x", "python x"),
        ("-K0 -I python x", "python x"),
        ("--ntasks 4 python x", "python x"),
        ("--ntasks=4 python x", "python x"),
        ("--label --gres gpu:2 python x", "python x"),
        ("--kill-on-bad-exit python x", "python x"),
        ("--exclusive --pty bash -i", "bash -i"),
        ("--job-n name python x", "python x"),
        ("--unheard-of python x", "python x"),
        ("--unheard-of=3 python x", "python x"),
        ("--synergy-no-inject -n1 -- -weird", "-weird"),
        ("-n1", ""),
    ],
)
def test_the_command_begins_where_srun_would_find_it(line: str, command: str) -> None:
    assert " ".join(parse(line.split()).command) == command


def test_options_are_kept_as_they_were_written() -> None:
    found = parse(["-ln", "4", "--gres", "gpu:2", "-K0", "--synergy-no-inject", "-c3", "x", "-c9"])
    assert found.options == ("-ln", "4", "--gres", "gpu:2", "-K0", "-c3")
    assert found.own == {"--synergy-no-inject"}
    assert found.given["ntasks"] == "4"
    assert found.given["cpus-per-task"] == "3"
    assert found.given["kill-on-bad-exit"] == "0"
    assert found.command == ("x", "-c9")


def added(line: str, env: Mapping[str, str] = ONE_NODE, *, binds: bool = True) -> list[str]:
    return srun_options(parse([*line.split(), "x"]), env, binds_cpus=binds)[0]


def test_the_whole_allocation_is_asked_for_where_the_user_chose_nothing() -> None:
    assert added("") == ["--nodes=1", "--ntasks=1", "--cpus-per-task=24", "--kill-on-bad-exit=1"]
    many = {
        "SLURM_NNODES": "2",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_JOB_CPUS_PER_NODE": "24(x2)",
    }
    assert added("", many) == [
        "--nodes=2",
        "--ntasks=8",
        "--cpus-per-task=6",
        "--kill-on-bad-exit=1",
        "--cpu-bind=none",
    ]
    assert "--cpu-bind=none" not in added("", many, binds=False)
    assert "--cpu-bind=none" not in added("", {**many, "SLURM_CPU_BIND": "cores"})


@pytest.mark.parametrize(
    ("line", "absent"),
    [
        ("-n2", ["--nodes", "--ntasks"]),
        ("-N1", ["--nodes"]),
        ("-N1-2", ["--nodes", "--ntasks"]),
        ("--ntasks-per-node=2", ["--nodes", "--ntasks"]),
        ("-w n1", ["--nodes", "--ntasks"]),
        ("-c2", ["--cpus-per-task"]),
        ("--cpus-per-gpu=2", ["--cpus-per-task"]),
        ("--overlap", ["--cpus-per-task"]),
        ("-K0", ["--kill-on-bad-exit"]),
        ("--cpu-bind=cores", ["--cpu-bind"]),
    ],
)
def test_what_the_user_chose_is_not_added(line: str, absent: list[str]) -> None:
    names = {option.partition("=")[0] for option in added(line)}
    assert names.isdisjoint(absent)


def test_all_cores_are_shared_out_among_the_tasks_that_the_user_asked_for() -> None:
    assert "--cpus-per-task=12" in added("-n2")
    assert "--cpus-per-task=8" in added("--ntasks-per-node=3")
    two = {"SLURM_NNODES": "2", "SLURM_JOB_CPUS_PER_NODE": "24(x2)"}
    assert "--cpus-per-task=12" in added("-n4", two)
    assert "--cpus-per-task=24" in added("-n1", two)
    # More tasks than CPUs is for srun to judge.
    assert not any("cpus-per-task" in option for option in added("-n48"))
    assert not any("cpus-per-task" in o for o in added("", {**ONE_NODE, "SRUN_CPUS_PER_TASK": "2"}))


def test_mistakes_are_told_with_the_usage_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--synergy-nonsense", "x"]) == 2
    assert "--synergy-dry-run" in capsys.readouterr().err
    assert main(["-n1"]) == 2
    assert "no command given" in capsys.readouterr().err


def test_help_is_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("--help", "-h", "--synergy-help"):
        assert main([word]) == 0
        text = capsys.readouterr().out
        assert text.startswith("usage: synergy-srun")
        assert len(text.splitlines()) <= 40
        assert max(map(len, text.splitlines())) <= 100


def test_a_dry_run_shows_the_command_and_the_removed_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**ONE_NODE, "SLURM_JOB_ID": "1", "SLURM_GPUS": "4"}.items():
        monkeypatch.setenv(name, value)
    assert main(["--synergy-dry-run", "-l", "echo", "a b"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("env -u SLURM_GPUS srun -l --nodes=1 --ntasks=1")
    assert out.endswith("-- echo 'a b'\n")


def test_the_stub_works_from_anywhere_and_past_modules_of_the_same_name(tmp_path: Path) -> None:
    for name in ("signal", "random", "grpc", "slurm_synergy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    link = tmp_path / "my-srun"
    link.symlink_to(ROOT / "wrapper" / "synergy-srun")
    done = subprocess.run(
        [str(link), "echo", "fine"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "SYNERGY_PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
        | {"TMPDIR": str(tmp_path)},
    )
    # The stub runs in the user's environment; only the module path of its start is its own.
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
