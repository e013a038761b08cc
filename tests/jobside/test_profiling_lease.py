"""Measuring a job's speed under a profiling lease: the launcher's part."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
from fake_controller import FakeController, until
from test_launch import CPUS, Rig, rig, two_cpus

from slurm_synergy.errors import LeaseError
from slurm_synergy.jobside.board import Board, Report
from slurm_synergy.jobside.data_reading import DataFound, DataReading
from slurm_synergy.jobside.data_told import described, tell
from slurm_synergy.jobside.profiling_lease import (
    Answer,
    Order,
    OrderKeeper,
    own_memory_mib,
    program_name,
)
from slurm_synergy.proto import lease_pb2 as pb

__all__ = ["rig"]  # fixture

ORDER = Order(number=3, warmup_steps=10, steps=50, longest_s=60.0)

# Steps of 4 samples at 100 samples/s for each core of the lease; three quarters of it is waiting.
PROGRAM = """
import os, sys, time
from pathlib import Path
from slurm_synergy.jobside.board import Board, Report
board = Board.attach(Path(os.environ["SYNERGY_BOARD"]))
step, stepped_s, waited_s = 0, 0.0, 0.0
while not Path(sys.argv[1]).exists():
    took_s = 4 / (100.0 * board.read_lease().core_count)
    time.sleep(took_s)
    step += 1
    stepped_s += took_s / 4
    waited_s += took_s * 3 / 4
    board.write_report(
        Report(step=step, samples=4 * step, stepped_s=stepped_s, waited_s=waited_s)
    )
"""


def report(step: int, rate: float = 40.0, wait: float = 0.25) -> Report:
    """After so many steps of 4 samples at that rate, waiting for that part of the time."""
    took_s = 4 * step / rate
    return Report(
        step=step, samples=4 * step, stepped_s=took_s * (1 - wait), waited_s=took_s * wait
    )


def test_an_order_is_carried_out_once(tmp_path: Path) -> None:
    keeper = OrderKeeper()
    assert keeper.follow(ORDER, cpus=6, possible=True) is None
    assert keeper.busy
    answer = None
    for step in range(0, 200, 5):
        assert answer is None
        answer = keeper.look(report(step), now_s=step / 10)
        if answer is not None:
            break
    assert answer is not None and answer.found is not None
    assert (answer.number, answer.found.cpus) == (3, 6)
    assert answer.found.iterations >= 50
    assert answer.found.samples_per_s == pytest.approx(40.0)
    assert answer.found.wait_share == pytest.approx(0.25)
    assert answer.found.busy_samples_per_s == pytest.approx(40.0 / 0.75)
    assert not keeper.busy
    assert keeper.follow(ORDER, cpus=6, possible=True) is None
    assert keeper.look(report(500), now_s=99.0) is None


def test_cores_that_could_not_be_had_are_not_measured() -> None:
    keeper = OrderKeeper()
    answer = keeper.follow(ORDER, cpus=6, possible=False)
    assert answer is not None
    assert (answer.number, answer.found, keeper.busy) == (3, None, False)


def test_a_job_that_makes_no_steps_is_told_as_such_in_time() -> None:
    keeper = OrderKeeper()
    keeper.follow(ORDER, cpus=6, possible=True)
    assert keeper.look(report(10), now_s=0.0) is None
    answer = keeper.look(report(12), now_s=61.0)
    assert answer is not None and answer.found is None


def test_an_order_that_is_taken_back_is_forgotten() -> None:
    keeper = OrderKeeper()
    keeper.follow(ORDER, cpus=6, possible=True)
    assert keeper.follow(None, cpus=3, possible=True) is None
    assert not keeper.busy
    assert keeper.look(report(1000), now_s=1000.0) is None


READ = Order(number=4, warmup_steps=0, steps=1, longest_s=5.0, read_s=1.0, readers=2)


def test_an_order_to_read_is_answered_when_the_reading_is_done() -> None:
    go = threading.Event()

    def measured() -> DataFound:
        go.wait(60)
        return DataFound(samples=7)

    keeper = OrderKeeper(lambda order: DataReading(measured))
    assert keeper.follow(READ, cpus=3, possible=False) is None
    assert keeper.busy
    assert keeper.look(report(10), now_s=0.0) is None
    go.set()
    answer = until(lambda: keeper.look(report(10), now_s=0.0), timeout_s=60, what="answer")
    assert (answer.number, answer.found, answer.data) == (4, None, DataFound(samples=7))
    assert not keeper.busy


def test_a_reading_that_fails_or_is_nobodys_task_is_answered_too() -> None:
    def fails() -> DataFound:
        raise OSError(5, "the storage is gone")

    keeper = OrderKeeper(lambda order: DataReading(fails))
    keeper.follow(READ, cpus=3, possible=True)
    answer = until(lambda: keeper.look(report(10), now_s=0.0), timeout_s=60, what="answer")
    assert "the storage is gone" in answer.data.how
    assert OrderKeeper().follow(READ, cpus=3, possible=True) == Answer(number=4)
    assert OrderKeeper(lambda order: None).follow(READ, cpus=3, possible=True) == Answer(number=4)


def test_a_program_has_the_name_of_its_command_place_and_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("one")
    command = ("python", "train.py", "--lr=1")
    name = program_name(command, str(tmp_path))
    assert name == program_name(command, str(tmp_path))
    assert name.startswith("run-train-") and len(name) <= 64
    for words, shown in (
        (("python", "-m", "my_nets.train"), "run-my-nets-train-"),
        (("./a.out",), "run-a-out-"),
        (("\N{SNOWMAN}",), "run-program-"),
        (("sh", "/data/" + "x" * 300 + ".sh"), "run-" + "x" * 24 + "-"),
    ):
        assert program_name(words, str(tmp_path)).startswith(shown)
    assert name != program_name((*command[:2], "--lr=2"), str(tmp_path))
    assert name != program_name(command, str(tmp_path.parent))
    script.write_text("two")
    assert name != program_name(command, str(tmp_path))


def test_memory_of_its_own_is_what_no_file_backs() -> None:
    before = own_memory_mib([os.getpid()])
    filled = bytearray(os.urandom(1 << 20) * 64)
    assert own_memory_mib([os.getpid(), 2**22 + 1]) >= before + 60
    assert len(filled)


def attached(rig: Rig) -> Board | None:
    """The launcher's board, once it is there and whole."""
    try:
        return rig.board()
    except LeaseError:
        return None


class Measuring:
    """A launcher with a training program whose speed depends on the cores of its lease."""

    def __init__(self, rig: Rig, cores: int = 3, node_cores: int = 1000, **env: str) -> None:
        self.controller: FakeController = rig.controller(
            cores=range(cores), floor_cores=range(min(cores, 2)), node_cores=node_cores
        )
        self._end = rig.tmp / "end"
        program = rig.tmp / "program.py"
        program.write_text(PROGRAM)
        self.process = rig.start(sys.executable, str(program), str(self._end), **env)
        self.board: Board = until(lambda: attached(rig), timeout_s=60, what="board")
        until(lambda: self.board.read_report().step, timeout_s=60, what="first step")

    def answer(self, number: int) -> pb.Measured | None:
        """What the launcher answered to that probe."""
        told = [one.profiling.measured for one in self.controller.renewed]
        return next((one for one in told if one.probe == number), None)

    def finish(self) -> int:
        self._end.touch()
        self.process.communicate(timeout=60)
        return self.process.returncode


def test_a_probe_changes_the_cores_measures_and_gives_them_back(rig: Rig) -> None:
    job = Measuring(rig)
    wanted = pb.Probe(number=5, warmup_steps=5, steps=60, longest_s=60.0)
    job.controller.measure(wanted, cores=range(8))
    until(lambda: job.board.read_lease().core_count == 8, timeout_s=60, what="cores of the probe")
    answer = until(lambda: job.answer(5), timeout_s=90, what="answer")
    assert answer.steps >= 60
    assert answer.samples_per_s == pytest.approx(800.0)
    assert answer.waits_known and answer.wait_share == pytest.approx(0.75)
    assert answer.busy_samples_per_s == pytest.approx(3200.0)
    told = job.controller.renewed[-1].profiling
    assert told.own_mem_mib > 0
    progress = job.controller.renewed[-1].progress
    assert progress.waited_s == pytest.approx(3 * progress.stepped_s)
    assert told.program.startswith("run-")
    job.controller.measure(pb.Probe(), cores=range(3))
    until(lambda: job.board.read_lease().core_count == 3, timeout_s=60, what="cores of the lease")
    assert job.finish() == 0


def test_a_silent_controller_leaves_the_floor_and_no_measurement(rig: Rig) -> None:
    job = Measuring(rig)
    wanted = pb.Probe(number=5, warmup_steps=5, steps=1_000_000, longest_s=600.0)
    job.controller.measure(wanted, cores=range(8), expires_in_s=1.0)
    until(lambda: job.board.read_lease().core_count == 8, timeout_s=60, what="cores of the probe")
    job.controller.stop()
    until(lambda: job.board.read_lease().silent, timeout_s=60, what="silence")
    assert job.board.read_lease().core_count == 2
    assert job.answer(5) is None
    assert job.finish() == 0


def test_some_of_the_data_is_read_when_it_is_asked_for(rig: Rig, tmp_path: Path) -> None:
    files = []
    for number in range(8):
        files.append(tmp_path / f"{number}.bin")
        files[-1].write_bytes(os.urandom(1 << 20))
    job = Measuring(rig, SYNERGY_CACHE_DIR=str(tmp_path))
    tell(job.board.path, described(files, samples=800))
    wanted = pb.Probe(number=5, warmup_steps=0, steps=1, longest_s=5.0, read_s=1.0, readers=2)
    job.controller.measure(wanted, cores=range(3))
    answer = until(lambda: job.answer(5), timeout_s=90, what="answer")
    assert answer.steps == 0
    found = answer.data
    assert (found.dataset_mib, found.samples, found.cached) == (8.0, 800, False)
    if not found.in_memory:  # the place of temporary files is a tmpfs
        assert (found.read_mib, found.storage_mib_s > 0) == (8.0, True)
        assert "8 MiB of 8 files" in found.how and "by 2 readers" in found.how
    # What can be measured else goes on as before.
    job.controller.measure(pb.Probe(number=6, warmup_steps=5, steps=40, longest_s=60.0))
    assert until(lambda: job.answer(6), timeout_s=90, what="answer").steps >= 40
    assert job.finish() == 0


@two_cpus
def test_cores_are_measured_where_the_tree_is_really_pinned_to_them(rig: Rig) -> None:
    job = Measuring(rig, cores=1, node_cores=len(CPUS))
    wanted = pb.Probe(number=5, warmup_steps=5, steps=40, longest_s=60.0)
    job.controller.measure(wanted, cores=range(2))
    assert until(lambda: job.answer(5), timeout_s=90, what="answer").steps >= 40
    status = Path(f"/proc/{job.process.pid}/status").read_text()
    allowed = next(line for line in status.splitlines() if line.startswith("Cpus_allowed_list"))
    assert allowed.split()[1] in (f"{CPUS[0]},{CPUS[1]}", f"{CPUS[0]}-{CPUS[1]}")
    assert job.finish() == 0


@two_cpus
def test_a_job_that_cannot_have_the_cores_says_so_instead_of_measuring(rig: Rig) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {CPUS[0]})
    try:
        job = Measuring(rig, cores=1, node_cores=len(CPUS), SYNERGY_KEEP_BINDING="1")
    finally:
        os.sched_setaffinity(0, before)
    wanted = pb.Probe(number=5, warmup_steps=5, steps=40, longest_s=60.0)
    job.controller.measure(wanted, cores=range(2))
    assert until(lambda: job.answer(5), timeout_s=90, what="answer").steps == 0
    assert job.finish() == 0
