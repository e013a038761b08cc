"""The launcher as a real process, against a real gRPC server."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fake_controller import FakeController, until

from slurm_synergy.errors import LeaseError
from slurm_synergy.jobside.board import Board, Report
from slurm_synergy.jobside.environment import task_from
from slurm_synergy.jobside.launch import Launcher
from slurm_synergy.jobside.lease_client import LeaseClient

ROOT = Path(__file__).resolve().parents[2]
CPUS = sorted(os.sched_getaffinity(0))
two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="moving between CPUs needs two of them")


class Rig:
    """Starts launchers in an environment like a step's, with a munge that signs anything."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp = tmp_path
        tools = tmp_path / "bin"
        tools.mkdir()
        munge = tools / "munge"
        munge.write_text('#!/bin/sh\necho "MUNGE:$*"\n')
        munge.chmod(0o755)
        # Short: sockets of a training's loader workers lie in it, and their paths are bounded.
        self.local = Path(tempfile.mkdtemp(prefix="rig-"))
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SYNERGY", "OMP"))
        }
        self.env = {
            **kept,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.local),
            "SLURM_JOB_ID": "77",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "0",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_TASKS_PER_NODE": "1",
            "SLURM_STEP_ID": "0",
            "SLURMD_NODENAME": "n1",
            "SLURM_CPUS_PER_TASK": "24",
            "SLURM_MEM_PER_NODE": "1000",
        }
        self.started: list[subprocess.Popen[str]] = []
        self.controllers: list[FakeController] = []

    def controller(self, port: int = 0, **lease: object) -> FakeController:
        made = FakeController(port, **lease)
        self.controllers.append(made)
        self.env["SYNERGY_ENDPOINT"] = made.endpoint
        return made

    def start(self, *command: str, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "slurm_synergy.jobside.launch", "--", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.env, **env},
            cwd=self.tmp,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def start_python(self, code: str, **env: str) -> subprocess.Popen[str]:
        return self.start(sys.executable, "-c", textwrap.dedent(code), **env)

    def board(self) -> Board:
        found = until(lambda: list(self.local.glob("synergy-*/board")), what="board")
        return Board.attach(found[0])

    def boards_left(self) -> list[Path]:
        return list(self.local.iterdir())

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        for controller in self.controllers:
            controller.stop()
        shutil.rmtree(self.local, ignore_errors=True)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def ended(process: subprocess.Popen[str], given: str = "") -> tuple[int, str, str]:
    out, err = process.communicate(given, timeout=30)
    return process.returncode, out, err


AWARE = """
import os, sys, time
from slurm_synergy.jobside.board import Board, Report
board = Board.attach(__import__("pathlib").Path(os.environ["SYNERGY_BOARD"]))
def report(**more):
    board.write_report(Report(heartbeat_monotonic_s=time.monotonic(), **more))
"""


def test_exit_status_input_and_output_are_the_commands_own(rig: Rig) -> None:
    code, out, err = ended(rig.start("sh", "-c", "cat; echo oops >&2; exit 7"), "hello\n")
    assert (code, out) == (7, "hello\n")
    assert "oops" in err.splitlines()
    assert rig.boards_left() == []


def test_a_command_killed_by_a_signal_ends_the_launcher_the_same_way(rig: Rig) -> None:
    assert ended(rig.start("sh", "-c", "kill -SEGV $$"))[0] == -signal.SIGSEGV
    assert ended(rig.start("sh", "-c", "kill -KILL $$"))[0] == -signal.SIGKILL
    assert rig.boards_left() == []


def test_a_command_that_cannot_be_run_gives_the_shells_status(rig: Rig) -> None:
    code, _, err = ended(rig.start("no-such-command"))
    assert code == 127
    assert "cannot run no-such-command: No such file" in err
    (rig.tmp / "plain").write_text("text")
    assert ended(rig.start(str(rig.tmp / "plain")))[0] == 126


def test_a_script_without_interpreter_line_is_run_by_sh(rig: Rig) -> None:
    script = rig.tmp / "script"
    script.write_text("exit 5\n")
    script.chmod(0o755)
    assert ended(rig.start(str(script)))[0] == 5


def test_variables_are_filled_in_once_said_and_never_overwritten(rig: Rig) -> None:
    two = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    code, out, err = ended(rig.start("env", MASTER_PORT="1234", OMP_NUM_THREADS="3", **two))
    env = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
    assert code == 0
    assert env["MASTER_PORT"] == "1234"
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["MASTER_ADDR"] == "127.0.0.1"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert env["SYNERGY_LEASE_CPUS"] == "24"  # what Slurm gave each task
    assert env["SYNERGY_LEASE_MEM_MIB"] == "1000"
    assert env["SYNERGY_CHECKPOINT_DIR"] == f"{rig.tmp}/synergy-checkpoints/77"
    inject, rest = env["PYTHONPATH"].split(":")
    assert inject.endswith("slurm_synergy/jobside/inject")
    assert rest == str(ROOT)
    assert err.count("synergy-srun: set ") == 1
    assert "MASTER_PORT" not in err
    second = {**two, "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    _, out, err = ended(rig.start("env", SYNERGY_INJECT="0", **second))
    assert f"PYTHONPATH={ROOT}\n" in out
    assert "MASTER_ADDR=127.0.0.1\n" in out
    assert err == ""


def test_without_a_known_controller_the_first_rank_says_so_once(rig: Rig) -> None:
    _, out, err = ended(rig.start("env"))
    assert "MASTER_" not in out
    told = (
        "synergy-srun: no controller is known (SYNERGY_ENDPOINT, /etc/slurm-synergy/endpoint): "
        "running without leases"
    )
    assert err.splitlines().count(told) == 1
    second = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NODEID": "1"}
    assert "controller" not in ended(rig.start("env", **second))[2]
    assert "controller" not in ended(rig.start("env", SLURM_JOB_ID=""))[2]
    rig.controller()
    assert "no controller is known" not in ended(rig.start("env"))[2]


def test_a_signal_to_the_launcher_reaches_the_command_and_it_ends_last(rig: Rig) -> None:
    script = "trap 'sleep 0.3; echo bye; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    process = rig.start("sh", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    code, out, _ = ended(process)
    assert (code, out) == (3, "bye\n")
    assert rig.boards_left() == []


@pytest.mark.parametrize("name", ["INT", "HUP", "USR1", "USR2", "QUIT"])
def test_user_signals_are_passed_on(rig: Rig, name: str) -> None:
    script = f"trap 'echo got; exit 0' {name}; echo ready; while :; do sleep 0.05; done"
    process = rig.start("sh", "-c", script)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(getattr(signal, f"SIG{name}"))
    assert ended(process)[:2] == (0, "got\n")


def test_the_command_starts_with_an_unblocked_mask_and_no_file_of_the_launcher(rig: Rig) -> None:
    rig.controller(cores=[0], floor_cores=[0])
    process = rig.start("sh", "-c", "grep SigBlk /proc/self/status; ls -l /proc/self/fd")
    code, out, _ = ended(process)
    assert code == 0
    assert "SigBlk:\t0000000000000000" in out
    for inherited in ("socket:", "anon_inode", "board"):
        assert inherited not in out


def test_the_first_lease_is_in_the_environment(rig: Rig) -> None:
    controller = rig.controller(
        cores=range(6), floor_cores=[0], mem_mib=512, batch_size=64, node_cores=1000
    )
    _, out, err = ended(rig.start("env"))
    assert "SYNERGY_LEASE_CPUS=6\n" in out
    assert "SYNERGY_LEASE_MEM_MIB=512\n" in out
    assert "SYNERGY_BATCH_SIZE=64\n" in out
    assert f"SYNERGY_ENDPOINT={controller.endpoint}\n" in out
    # The lease's six cores are not on this machine: no more threads than there are CPUs.
    assert f"OMP_NUM_THREADS={min(6, len(CPUS))}\n" in out
    assert f"{len(CPUS)} of the node's 1000 cores are visible" in err
    registered = controller.registered[0]
    assert registered.credential == (f"MUNGE:-s synergy-register:77:0:0:{registered.nonce}")
    assert (registered.task.job_id, registered.task.node) == (77, "n1")
    assert controller.finished[0].exit_code == 0
    assert not controller.finished[0].checkpointed


@two_cpus
def test_all_threads_and_children_move_within_a_second_of_a_resize(rig: Rig) -> None:
    controller = rig.controller(cores=[0], floor_cores=[0], node_cores=len(CPUS))
    process = rig.start_python(
        """
        import os, subprocess, sys, threading, time
        for _ in range(3):
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        subprocess.Popen(["sh", "-c", "sleep 60 & wait"])
        print("ready", flush=True)
        sys.stdin.read()
        """
    )
    assert process.stdout is not None
    process.stdout.readline()

    def masks() -> list[set[int]]:
        found = []
        todo = [process.pid]
        for pid in todo:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                # Threads of the launcher's own come and go.
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                    found.append(os.sched_getaffinity(int(thread.name)))
                    todo += map(int, (thread / "children").read_text().split())
        return found

    assert len(masks()) >= 6
    assert all(mask == {CPUS[0]} for mask in masks())
    for cores in ([1], [0, 1], [0]):
        controller.grant(cores=cores)
        wanted = {CPUS[core] for core in cores}
        until(lambda wanted=wanted: all(mask == wanted for mask in masks()), what="masks moved")
    view = rig.board().read_lease()
    assert (view.core_count, view.cores) == (1, (CPUS[0],))
    until(lambda: controller.renewed[-1].progress.pinned_cpus == 1, what="pinning reported")


@two_cpus
def test_a_thread_that_strays_is_brought_back_and_a_narrower_one_is_left(rig: Rig) -> None:
    controller = rig.controller(cores=[1], floor_cores=[0], node_cores=len(CPUS))
    process = rig.start("sleep", "60")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    child = int(until(children.read_text, what="child"))
    until(lambda: controller.renewed, what="first renewal")
    os.sched_setaffinity(child, CPUS)
    until(lambda: os.sched_getaffinity(child) == {CPUS[1]}, timeout_s=5, what="brought back")
    controller.grant(cores=[0, 1])
    until(lambda: os.sched_getaffinity(child) == set(CPUS[:2]), what="widened")
    os.sched_setaffinity(child, {CPUS[0]})
    time.sleep(2.5)
    assert os.sched_getaffinity(child) == {CPUS[0]}


def test_a_stop_runs_through_the_board_and_is_reported(rig: Rig) -> None:
    controller = rig.controller(cores=[0], floor_cores=[0])
    process = rig.start_python(
        AWARE
        + textwrap.dedent(
            """
            report(step=4, samples=40)
            print("ready", flush=True)
            while not board.read_lease().stop: time.sleep(0.01)
            report(step=5, samples=50, proposed_stop_step=9)
            while board.read_lease().stop_step != 9: time.sleep(0.01)
            report(step=6, samples=60, proposed_stop_step=9, accepted_stop_step=9)
            while not board.read_lease().stop_committed: time.sleep(0.01)
            report(step=9, samples=90, checkpoint_done=True)
            sys.exit(85)
            """
        )
    )
    assert process.stdout is not None
    process.stdout.readline()
    controller.grant(stop=True, stop_within_s=30)
    until(lambda: controller.renewed[-1].proposed_stop_step == 9, what="proposal")
    controller.agree(9, committed=False)
    until(lambda: controller.renewed[-1].accepted_stop_step == 9, what="acceptance")
    controller.agree(9, committed=True)
    code, _, _ = ended(process)
    assert code == 85
    last = controller.finished[-1]
    assert (last.exit_code, last.checkpointed, last.step, last.samples) == (85, True, 9, 90)
    assert rig.boards_left() == []


def test_torchruns_zero_after_a_checkpoint_counts_as_stopped(rig: Rig) -> None:
    controller = rig.controller(cores=[0], floor_cores=[0])
    process = rig.start_python(
        AWARE
        + textwrap.dedent(
            """
            report(step=1)
            while not board.read_lease().stop: time.sleep(0.01)
            report(step=2, checkpoint_done=True)
            """
        )
    )
    until(lambda: rig.board().read_report().step == 1, what="training")
    controller.grant(stop=True, stop_within_s=30)
    assert ended(process)[0] == 85
    assert controller.finished[-1].checkpointed


def test_a_program_unaware_of_us_gets_its_chosen_signal(rig: Rig) -> None:
    controller = rig.controller(cores=[0], floor_cores=[0])
    script = "trap 'echo saved; exit 0' USR1; echo ready; while :; do sleep 0.05; done"
    process = rig.start("sh", "-c", script, SYNERGY_STOP_SIGNAL="usr1")
    assert process.stdout is not None
    process.stdout.readline()
    controller.grant(stop=True, stop_within_s=1.0)
    code, out, _ = ended(process)
    assert (code, out) == (85, "saved\n")
    assert (controller.finished[-1].exit_code, controller.finished[-1].checkpointed) == (85, True)


def test_a_program_that_does_not_save_is_ended_and_that_is_told(rig: Rig) -> None:
    controller = rig.controller(cores=[0], floor_cores=[0])
    process = rig.start("sleep", "60")
    until(lambda: controller.renewed, what="renewal")
    controller.grant(stop=True, stop_within_s=1.0)
    code, _, err = ended(process)
    assert code == 85
    assert "stopped without a checkpoint" in err
    last = controller.finished[-1]
    assert (last.exit_code, last.checkpointed) == (128 + signal.SIGTERM, False)


def test_a_silent_controller_means_the_floor_set_and_a_new_one_is_obeyed(rig: Rig) -> None:
    controller = rig.controller(
        cores=range(8), floor_cores=range(3), mem_mib=900, floor_mem_mib=300,
        node_cores=1000, expires_in_s=1.5,
    )  # fmt: skip
    process = rig.start("sleep", "60")
    board = rig.board()
    until(lambda: board.read_lease().generation, what="lease")
    assert not board.read_lease().silent
    controller.grant(stop=True, stop_within_s=1000)
    until(lambda: board.read_lease().stop, what="stop")
    controller.stop()
    until(lambda: board.read_lease().silent, timeout_s=6, what="floor set")
    view = board.read_lease()
    assert (view.core_count, view.mem_mib, view.stop) == (3, 300, False)
    assert process.poll() is None
    back = rig.controller(controller.port, cores=range(5), floor_cores=range(3))
    until(lambda: board.read_lease().core_count == 5, timeout_s=15, what="new lease")
    assert not board.read_lease().silent
    assert back.registered, "a controller that does not know the session is told again"


def test_two_tasks_of_a_node_share_its_cores(rig: Rig) -> None:
    rig.controller(cores=range(7), floor_cores=range(2), node_cores=1000)
    env = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    counts = [
        ended(rig.start("env", **env, SLURM_PROCID=rank, SLURM_LOCALID=rank))[1] for rank in "01"
    ]
    assert ["SYNERGY_LEASE_CPUS=3\n" in counts[0], "SYNERGY_LEASE_CPUS=4\n" in counts[1]] == [
        True,
        True,
    ]


def test_without_munge_or_when_refused_the_command_just_runs(rig: Rig) -> None:
    controller = rig.controller(cores=[0])
    (rig.tmp / "bin" / "munge").write_text("#!/bin/sh\necho no munged here >&2; exit 1\n")
    code, out, err = ended(rig.start("echo", "done"))
    assert (code, out) == (0, "done\n")
    assert "no munged here; running on without the controller" in err
    assert controller.registered == []
    (rig.tmp / "bin" / "munge").write_text("#!/bin/sh\necho MUNGE:x\n")
    controller.refuse = grpc.StatusCode.PERMISSION_DENIED
    code, out, err = ended(rig.start("echo", "done"))
    assert (code, out) == (0, "done\n")
    assert "refuses this task: not this one" in err
    assert "no answer from the controller" not in err
    assert controller.finished == []


def test_a_refusal_is_an_answer_and_nobody_waits_longer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = rig.controller(cores=[0])
    controller.refuse = grpc.StatusCode.PERMISSION_DENIED
    monkeypatch.setenv("PATH", rig.env["PATH"])
    client = LeaseClient(
        controller.endpoint,
        task_from(rig.env),
        os_cpus=(0,),
        report=Report,
        notify=lambda: None,
        say=lambda text: None,
    )
    client.start()
    try:
        assert client.wait_for_answer(60)
    finally:
        client.close()


def test_a_credential_that_was_refused_is_replaced_later(rig: Rig) -> None:
    controller = rig.controller(cores=[0])
    controller.refuse = grpc.StatusCode.UNAUTHENTICATED
    process = rig.start("sleep", "60")
    until(lambda: controller.registered, what="first registration")
    controller.refuse = None
    until(lambda: controller.renewed, timeout_s=30, what="a lease after all")
    nonces = {request.nonce for request in controller.registered}
    assert len(nonces) == len(controller.registered) == 2
    process.terminate()
    assert "refuses this task: not this one" in ended(process)[2]


SPAWNS = """
    import subprocess, time
    child = subprocess.Popen(["sleep", "300"])
    print(child.pid, flush=True)
    time.sleep(300)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_run_that_slurm_has_ended_is_ended_with_all_it_started(rig: Rig) -> None:
    controller = rig.controller(cores=[0])
    process = rig.start_python(SPAWNS)
    assert process.stdout is not None
    grandchild = int(process.stdout.readline())
    until(lambda: controller.renewed, what="its lease")
    controller.over = True
    code, _, err = ended(process)
    assert code == -signal.SIGKILL
    assert "Slurm has ended this run of the job: ending what is left of it" in err
    until(lambda: not alive(grandchild), what="the end of what it started")


def test_a_program_does_not_outlive_its_launcher(rig: Rig) -> None:
    process = rig.start("sh", "-c", "echo $$; exec sleep 300")
    assert process.stdout is not None
    program = int(process.stdout.readline())
    process.kill()
    until(lambda: not alive(program), what="the end of the program")


def test_a_script_without_an_interpreter_runs_and_finds_signals_as_usual(rig: Rig) -> None:
    script = rig.tmp / "plain-script"
    script.write_text('grep SigIgn /proc/$$/status; echo "$1"; exit 3\n')
    script.chmod(0o755)
    code, out, _ = ended(rig.start(str(script), "word"))
    ignored, said = out.splitlines()
    assert (code, said) == (3, "word")
    assert int(ignored.split()[1], 16) & (1 << (signal.SIGPIPE - 1)) == 0


@pytest.mark.parametrize("deaf", [False, True])
def test_a_launcher_does_not_outlive_its_step_daemon(rig: Rig, deaf: bool) -> None:
    # A shell whose name is that of the daemon.
    daemon = rig.tmp / "slurmstepd"
    shutil.copy(os.path.realpath("/bin/sh"), daemon)
    code = "trap '' TERM; echo $$; while :; do sleep 0.1; done" if deaf else "echo $$; sleep 300"
    launcher = f'{sys.executable} -m slurm_synergy.jobside.launch -- sh -c "$CODE" & wait'
    process = subprocess.Popen(
        [str(daemon), "-c", launcher],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**rig.env, "CODE": code},
        start_new_session=True,
    )
    rig.started.append(process)
    assert process.stdout is not None
    program = int(process.stdout.readline())
    process.kill()
    until(lambda: not alive(program), timeout_s=25, what="the end of the program")
    assert process.stderr is not None
    said = process.stderr.read()
    assert "Slurm's step daemon has died: stopping the program" in said
    assert ("the program did not stop: ending it" in said) is deaf


def test_a_controller_that_is_not_there_delays_the_start_by_three_seconds_only(rig: Rig) -> None:
    controller = rig.controller()
    controller.stop()
    begun_s = time.monotonic()
    code, out, err = ended(rig.start("echo", "done"))
    assert (code, out) == (0, "done\n")
    assert "no answer from the controller" in err
    assert time.monotonic() - begun_s > 2.5


def test_a_job_that_the_controller_does_not_schedule_runs_on(rig: Rig) -> None:
    controller = rig.controller()
    controller.gone = True
    code, out, err = ended(rig.start("echo", "done"))
    assert (code, out) == (0, "done\n")
    assert "does not schedule this job" in err


def test_a_malformed_endpoint_is_named_and_the_command_runs(rig: Rig) -> None:
    code, _, err = ended(rig.start("true", SYNERGY_ENDPOINT="head-node"))
    assert code == 0
    assert "SYNERGY_ENDPOINT = 'head-node' is not host:port; for example head-node:7737" in err


def test_many_forks_in_the_program_do_not_meet_the_connection(rig: Rig) -> None:
    controller = rig.controller(cores=[0], floor_cores=[0])
    process = rig.start_python(
        """
        import multiprocessing as mp
        context = mp.get_context("fork")
        total = 0
        for _ in range(5):
            with context.Pool(4) as pool:
                total += sum(pool.map(abs, range(100)))
        print(total)
        """
    )
    for cores in range(20):
        controller.grant(cores=range(cores + 1))
        time.sleep(0.02)
    code, out, _ = ended(process)
    assert (code, out) == (0, "24750\n")
    assert controller.finished[-1].exit_code == 0


def test_no_room_for_a_board_is_a_lease_error(tmp_path: Path) -> None:
    Board.create(tmp_path / "board", rank=0, ranks=1).close()
    with pytest.raises(LeaseError, match="cannot create the board"):
        Board.create(tmp_path / "board", rank=0, ranks=1)


def test_the_launcher_loads_nothing_heavy_and_the_program_no_grpc() -> None:
    heavy = {"torch", "numpy", "pydantic", "yaml", "click", "pulp", "rich", "sklearn"}
    ours = {"slurm_synergy.slurm", "slurm_synergy.controller", "slurm_synergy.cli"}
    code = "import sys, {0}; print(*[m for m in sys.modules])"
    for module, unwanted in (
        ("slurm_synergy.jobside.launch", heavy | ours),
        ("slurm_synergy.jobside.srun", heavy | ours | {"grpc", "psutil", "google.protobuf"}),
        ("slurm_synergy.jobside.session", heavy | ours | {"grpc"}),
    ):
        loaded = subprocess.run(
            [sys.executable, "-P", "-c", code.format(module)],
            capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        ).stdout.split()  # fmt: skip
        assert module in loaded
        assert unwanted.isdisjoint(loaded), (module, unwanted & set(loaded))


def test_a_half_written_report_leaves_the_one_before_it_standing(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", rank=0, ranks=1)
    launcher = Launcher(["true"], {}, task_from({}), board)
    board.write_report(Report(step=3, heartbeat_monotonic_s=1.0))
    assert launcher._read_report().step == 3
    with (tmp_path / "board").open("r+b") as raw:
        raw.seek(1024)
        raw.write((7).to_bytes(8, "little"))
    assert launcher._read_report().step == 3


def test_a_stop_signal_before_the_command_has_started_ends_the_launcher(rig: Rig) -> None:
    controller = rig.controller()
    controller.stop()
    process = rig.start("echo", "never")
    until(lambda: list(rig.local.glob("*/board")), what="board")
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    code, out, _ = ended(process)
    assert (code, out) == (-signal.SIGTERM, "")
    assert rig.boards_left() == []
