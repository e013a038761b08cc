"""How synergy-srun reads its command line and what it adds for srun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

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


# A step that is stopped by its lease at first, and ends well when it is run again.
STOPPED_ONCE_SRUN = """#!/bin/sh
echo run >> runs
cat >> input
[ -e stopped ] && exit 0
touch stopped
exit 85
"""


@pytest.fixture
def stopped_once(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the wrapper in a job whose first step is stopped and never requeued."""
    for name, text in (
        ("srun", STOPPED_ONCE_SRUN),
        ("scontrol", "#!/bin/sh\n[ ! -e slurmctld-is-down ]\n"),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SYNERGY_ENDPOINT": "127.0.0.1:1",
        "SYNERGY_REQUEUE_WAIT_S": "0.2",
        "SYNERGY_PYTHON": sys.executable,
    }

    started: list[subprocess.Popen[str]] = []

    def start(stdin: int | IO[bytes] | IO[str], *options: str) -> subprocess.Popen[str]:
        argv = [str(ROOT / "wrapper" / "synergy-srun"), *options, "python", "-"]
        started.append(
            subprocess.Popen(
                argv, stdin=stdin, stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path
            )
        )
        return started[-1]

    yield start
    for wrapper in started:
        wrapper.kill()
        wrapper.communicate()


def _said(process: subprocess.Popen[str], text: str) -> bool:
    assert process.stderr is not None
    return any(text in line for line in process.stderr)


def _runs(tmp_path: Path) -> int:
    return (tmp_path / "runs").read_text().count("run")


def test_a_program_from_a_pipe_is_not_run_again_without_its_text(
    stopped_once: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    wrapper = stopped_once(subprocess.PIPE)
    assert wrapper.stdin is not None
    wrapper.stdin.write("print(1)\n")
    wrapper.stdin.close()
    wrapper.stdin = None
    assert _said(wrapper, "cannot be read again: waiting on for the requeue")
    time.sleep(0.5)
    # An empty program would end well, and Slurm would book the job as completed.
    assert wrapper.poll() is None
    wrapper.send_signal(signal.SIGTERM)
    assert wrapper.wait(10) == 85
    assert _runs(tmp_path) == 1


def test_a_program_from_a_file_is_read_again_from_where_it_began(
    stopped_once: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("before\nprogram\n")
    with (tmp_path / "file").open("rb", buffering=0) as file:
        file.read(len("before\n"))
        wrapper = stopped_once(file)
        assert _said(wrapper, "continuing here")
        assert wrapper.wait(10) == 0
    assert (tmp_path / "input").read_text() == "program\n" * 2


@pytest.mark.parametrize("options", [("-i", "none"), ("--input=none",)])
def test_input_that_srun_was_told_not_to_take_is_not_in_the_way(
    stopped_once: Callable[..., subprocess.Popen[str]], options: tuple[str, ...]
) -> None:
    wrapper = stopped_once(subprocess.PIPE, *options)
    wrapper.communicate(timeout=10)
    assert wrapper.returncode == 0


def test_while_slurm_does_not_answer_a_stopped_command_waits(
    stopped_once: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "slurmctld-is-down").touch()
    wrapper = stopped_once(subprocess.DEVNULL)
    assert _said(wrapper, "Slurm does not answer: waiting on for the requeue")
    assert (wrapper.poll(), _runs(tmp_path)) == (None, 1)
    (tmp_path / "slurmctld-is-down").unlink()
    assert _said(wrapper, "continuing here")
    assert wrapper.wait(15) == 0
    assert _runs(tmp_path) == 2


@pytest.mark.parametrize(
    ("record", "env", "waits"),
    [
        ("JobId=7 TresPerNode=gres:gpu:2", {"ENVIRONMENT": "BATCH"}, True),
        ("JobId=7 TresPerNode=gres:gpu:2", {"ENVIRONMENT": "BATCH", "SLURM_JOB_GPUS": "0"}, False),
        ("JobId=7 TresPerNode=gres:gpu:2", {}, False),
        ("JobId=7 MinCPUsNode=1", {"ENVIRONMENT": "BATCH"}, False),
    ],
)
def test_a_job_that_slurm_started_without_its_gpus_waits_to_be_started_anew(
    tmp_path: Path, record: str, env: dict[str, str], waits: bool
) -> None:
    for name, text in (("srun", "exit 1"), ("scontrol", f"echo '{record}'")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    fixed = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SYNERGY_ENDPOINT": "127.0.0.1:1",
        "SYNERGY_PYTHON": sys.executable,
    }
    wrapper = subprocess.Popen(
        [str(ROOT / "wrapper" / "synergy-srun"), "true"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**fixed, **env},
        cwd=tmp_path,
    )
    assert _said(wrapper, "without its GPUs") is waits
    if waits:
        assert wrapper.poll() is None
        wrapper.send_signal(signal.SIGTERM)
    assert wrapper.wait(10) == 1
    wrapper.communicate()


@pytest.mark.parametrize(
    ("status", "steps", "runs"),
    [(233, "7.batch", 2), (245, "7.batch", 2), (233, "7.batch\\n7.0", 1), (1, "7.batch", 1)],
)
def test_tasks_that_slurm_could_not_launch_are_launched_again(
    tmp_path: Path, status: int, steps: str, runs: int
) -> None:
    for name, text in (
        # The status of a step whose slurmd had just died, then that of a good end.
        ("srun", f"echo run >> runs; [ -e failed ] && exit 0; touch failed; exit {status}"),
        ("squeue", f"printf '{steps}\\n'"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [str(ROOT / "wrapper" / "synergy-srun"), "true"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SYNERGY_PYTHON": sys.executable,
        },
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert (_runs(tmp_path), done.returncode) == (runs, 0 if runs == 2 else status)
    assert ("could not launch the tasks" in done.stderr) is (runs == 2)


# What srun does while slurmctld is away: an exit status of its own, before there is a step.
REFUSED_SRUN = """echo run >> runs
[ -e slurmctld-is-down ] || [ -e wrong ] && exit ${SLURM_EXIT_ERROR:-1}
exit 0
"""


@pytest.fixture
def refused(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the wrapper with an srun that cannot reach slurmctld, or dislikes its options."""
    for name, text in (("srun", REFUSED_SRUN), ("scontrol", "[ ! -e slurmctld-is-down ]")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    started: list[subprocess.Popen[str]] = []

    def start(**env: str) -> subprocess.Popen[str]:
        fixed = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SYNERGY_PYTHON": sys.executable,
        }
        started.append(
            subprocess.Popen(
                [str(ROOT / "wrapper" / "synergy-srun"), "true"],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env={**fixed, **env},
                cwd=tmp_path,
            )
        )
        return started[-1]

    yield start
    for wrapper in started:
        wrapper.kill()
        wrapper.communicate()


def test_a_step_that_slurmctld_is_not_there_to_create_is_created_later(
    refused: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "slurmctld-is-down").touch()
    wrapper = refused()
    assert _said(wrapper, "Slurm does not answer, so srun cannot start the tasks")
    assert (wrapper.poll(), _runs(tmp_path)) == (None, 1)
    (tmp_path / "slurmctld-is-down").unlink()
    assert wrapper.wait(60) == 0
    assert _runs(tmp_path) == 2


@pytest.mark.parametrize(("env", "runs", "status"), [({}, 2, 1), ({"SLURM_EXIT_ERROR": "9"}, 1, 9)])
def test_what_slurm_refuses_twice_is_an_error_and_a_status_of_the_users_stays_his(
    refused: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    env: dict[str, str],
    runs: int,
    status: int,
) -> None:
    (tmp_path / "wrong").touch()
    wrapper = refused(**env)
    assert wrapper.wait(60) == status
    assert _runs(tmp_path) == runs


def test_different_commands_of_a_script_have_checkpoints_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text('#!/bin/sh\necho "${SYNERGY_CHECKPOINT_DIR:-default}"\n')
    (tmp_path / "srun").chmod(0o755)
    job = f"77{os.getpid()}"
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "ENVIRONMENT": "BATCH",
        "SLURM_JOB_ID": job,
        "SLURM_SUBMIT_DIR": "/w",
        "SYNERGY_PYTHON": sys.executable,
        "W": str(ROOT / "wrapper" / "synergy-srun"),
    }
    script = (
        "$W one; $W two 2; $W one; SYNERGY_CHECKPOINT_DIR=/mine $W two 3; $W --synergy-dry-run x"
    )
    try:
        done = subprocess.run(
            ["sh", "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        again = subprocess.run(
            ["sh", "-c", "$W one; $W two 4"],
            env={**env, "SLURM_RESTART_COUNT": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        for path in Path("/tmp").glob(f"synergy-{os.getuid()}-{job}-*.commands"):
            path.unlink()
    second = f"/w/synergy-checkpoints/{job}.2"
    assert done.stdout.splitlines()[:4] == ["default", second, "default", "/mine"]
    assert again.stdout.splitlines() == ["default", second]
