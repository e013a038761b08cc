"""Ranks of one job stop at one step: real processes, the controller's own agreement in between."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from forks import Forked, Forks
from inprocess import clean_environment, finish, injected, lease, start, wait_for
from launchers import Launchers, ended, free_port

from slurm_synergy.jobside.agreement import Agreement, Identity, Verdict
from slurm_synergy.jobside.board import Board, LeaseView, Report

PROGRAM = Path(__file__).with_name("ddp_program.py")


class Job:
    """A distributed training in several incarnations, each with its own ranks and boards."""

    def __init__(self, tmp_path: Path, forks: Forks, epochs: int, step_s: float = 0.1) -> None:
        self._tmp_path, self._forks, self._incarnation = tmp_path, forks, 0
        self._arguments = [str(tmp_path), str(epochs), str(step_s)]
        self._unpaced = [str(tmp_path), str(epochs), "0"]
        self.boards: list[Board] = []

    def _new_boards(self, count: int) -> None:
        self._incarnation += 1
        directory = self._tmp_path / f"boards{self._incarnation}"
        directory.mkdir()
        self.boards = [
            Board.create(directory / f"board{rank}", rank=rank, ranks=count)
            for rank in range(count)
        ]
        for board in self.boards:
            board.write_lease(lease(1))

    def srun(self, ranks: int, *, paced: bool = True) -> list[Forked]:
        """One task per rank, each with a board of its own."""
        self._new_boards(ranks)
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
            "WORLD_SIZE": str(ranks),
            "SLURM_RESTART_COUNT": str(self._incarnation - 1),
        }
        return [
            self._forks.start(
                [str(PROGRAM), *(self._arguments if paced else self._unpaced)],
                injected(board, self._tmp_path / "checkpoints", RANK=str(rank), **common),
            )
            for rank, board in enumerate(self.boards)
        ]

    def torchrun(self, ranks: int) -> list[Forked]:
        """As torchrun starts the ranks of one task, which share a board.

        That it is found under the real one is shown on Slurm (tests/slurm/test_end_to_end.py).
        """
        self._new_boards(1)
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "TORCHELASTIC_RUN_ID": "none",
            "SLURM_RESTART_COUNT": str(self._incarnation - 1),
        }
        return [
            self._forks.start(
                [str(PROGRAM), *self._arguments],
                injected(
                    self.boards[0],
                    self._tmp_path / "checkpoints",
                    **{"RANK": str(rank), "LOCAL_RANK": str(rank), **common},
                ),
            )
            for rank in range(ranks)
        ]

    def wait_for_steps(self, steps: int) -> None:
        wait_for(lambda: self.boards[0].read_report().step >= steps, f"step {steps}", 200)

    def samples(self) -> dict[int, Counter[int]]:
        """How often each sample was used, by epoch."""
        seen: dict[int, Counter[int]] = {}
        for path in self._tmp_path.glob("*-of-*.jsonl"):
            for line in path.read_text().splitlines():
                step = json.loads(line)
                seen.setdefault(step["epoch"], Counter()).update(step["samples"])
        return seen


def _stop(job: Job, processes: list[Forked], code: int) -> int:
    with ended(processes), Launchers(job.boards) as launchers:
        results = [finish(process) for process in processes]
    assert [status for status, *_ in results] == [code] * len(processes), results
    reports = [board.read_report() for board in job.boards]
    steps = {report.step for report in reports}
    assert len(steps) == 1 and steps <= set(launchers.stop_steps)
    assert all(report.checkpoint_done for report in reports)
    return steps.pop()


@pytest.mark.slow
def test_ranks_stop_together_and_use_each_sample_once_with_other_rank_counts(
    tmp_path: Path, forks: Forks
) -> None:
    job = Job(tmp_path, forks, epochs=4)
    processes = job.srun(3)
    job.wait_for_steps(2)
    first = _stop(job, processes, 85)
    processes = job.srun(2)
    job.wait_for_steps(first + 2)
    second = _stop(job, processes, 85)
    processes = job.torchrun(2)
    job.wait_for_steps(second + 2)
    third = _stop(job, processes, 0)  # torchrun would restart workers that end otherwise
    assert 2 <= first < second < third
    processes = job.srun(1, paced=False)
    with ended(processes):
        status, _out, err = finish(processes[0])
    assert status == 0, err
    seen = job.samples()
    assert sorted(seen) == [0, 1, 2, 3]
    for epoch, counts in seen.items():
        assert set(counts) == set(range(101)), epoch
        # Only where a step had fewer samples than ranks, one of them is used twice.
        assert sum(counts.values()) - len(counts) <= 2


# -- one rank's part, step by step -----------------------------------------------------------------


class Clock:
    """Time that passes only by sleeping, and what happens meanwhile."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.events: list[Any] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.events:
            self.events.pop(0)()


def _agreement(tmp_path: Path, **identity: int) -> tuple[Agreement, Board, Clock, list[str]]:
    who = Identity(**{"world": 2, "tasks": 2, **identity})
    path = tmp_path / "board"
    if path.exists():
        board = Board.attach(path)
    else:
        board = Board.create(path, rank=who.task, ranks=who.tasks)
    clock, said = Clock(), list[str]()
    return Agreement(board, who, said.append, clock, clock.sleep), board, clock, said


def test_rank_0_proposes_a_step_some_seconds_ahead(tmp_path: Path) -> None:
    agreement, board, _clock, _said = _agreement(tmp_path)
    board.write_lease(LeaseView(stop=True))
    assert agreement.consider(Report(step=10), 0.1) is Verdict.GO_ON
    assert board.read_report().proposed_stop_step == 35
    # Long steps: two ahead are enough.
    other, board, _clock, _said = _agreement(tmp_path / ".." / tmp_path.name)
    assert other.consider(Report(step=10), 60.0) is Verdict.GO_ON
    assert board.read_report().proposed_stop_step == 12


def test_a_passed_proposal_is_followed_by_one_further_ahead(tmp_path: Path) -> None:
    agreement, board, _clock, _said = _agreement(tmp_path)
    board.write_lease(LeaseView(stop=True))
    agreement.consider(Report(step=10), 1.0)
    assert board.read_report().proposed_stop_step == 13
    agreement.consider(Report(step=13), 1.0)  # nobody answered
    assert board.read_report().proposed_stop_step == 19


def test_another_rank_does_not_propose(tmp_path: Path) -> None:
    agreement, board, _clock, _said = _agreement(tmp_path, rank=1, task=1)
    board.write_lease(LeaseView(stop=True))
    agreement.consider(Report(step=10), 0.1)
    assert board.read_report().proposed_stop_step == 0


def test_a_step_ahead_is_accepted_and_a_passed_one_refused(tmp_path: Path) -> None:
    agreement, board, _clock, _said = _agreement(tmp_path, rank=1, task=1)
    board.write_lease(LeaseView(stop=True, stop_step=12))
    assert agreement.consider(Report(step=11), 0.1) is Verdict.GO_ON
    assert board.read_report().accepted_stop_step == 12
    board.write_lease(LeaseView(stop=True, stop_step=10))
    agreement.consider(Report(step=11), 0.1)
    assert board.read_report().refused_stop_step == 10


@pytest.mark.parametrize(
    ("then", "verdict"),
    [
        (LeaseView(stop=True, stop_step=12, stop_committed=True), Verdict.STOP_HERE),
        (LeaseView(stop=True, stop_step=20), Verdict.GO_ON),
        (LeaseView(), Verdict.GO_ON),
    ],
    ids=["committed", "replaced", "withdrawn"],
)
def test_at_the_accepted_step_a_rank_waits_for_the_outcome(
    tmp_path: Path, then: LeaseView, verdict: Verdict
) -> None:
    agreement, board, clock, _said = _agreement(tmp_path, rank=1, task=1)
    board.write_lease(LeaseView(stop=True, stop_step=12))
    clock.events = [lambda: None, lambda: board.write_lease(then)]
    assert agreement.consider(Report(step=12), 0.1) is verdict
    assert clock.events == []
    expected = then.stop_step if then.stop else 0
    assert board.read_report().accepted_stop_step == expected


def test_waiting_is_bounded_by_the_lease(tmp_path: Path) -> None:
    agreement, board, clock, said = _agreement(tmp_path, rank=1, task=1)
    board.write_lease(LeaseView(stop=True, stop_step=12, until_monotonic_s=clock.now_s + 5))
    assert agreement.consider(Report(step=12), 0.1) is Verdict.GO_ON
    assert 34 < clock.now_s - 100 < 36 and len(said) == 1
    # It does not wait again for what did not come.
    assert agreement.consider(Report(step=12), 0.1) is Verdict.GO_ON
    assert clock.now_s - 100 < 36


def test_rank_0_proposes_again_while_it_waits(tmp_path: Path) -> None:
    agreement, board, clock, _said = _agreement(tmp_path)
    board.write_lease(LeaseView(stop=True, stop_step=12))

    def later() -> None:
        proposed = board.read_report().proposed_stop_step
        if proposed > 12:
            board.write_lease(LeaseView(stop=True, stop_step=proposed))

    clock.events = [later] * 1000
    assert agreement.consider(Report(step=12), 0.1) is Verdict.GO_ON
    assert clock.now_s - 100 < 6
    assert board.read_report().accepted_stop_step > 12


def test_alone_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    agreement, board, clock, _said = _agreement(tmp_path, world=1, tasks=1)
    board.write_lease(LeaseView(stop=True))
    assert agreement.consider(Report(step=4), 0.1) is Verdict.STOP_HERE
    assert clock.now_s == 100.0


def test_an_acceptance_of_a_task_is_that_of_all_its_processes(tmp_path: Path) -> None:
    shared = {"world": 2, "tasks": 1, "local_ranks": 2}
    first, board, _clock, _said = _agreement(tmp_path, **shared)
    board.write_lease(LeaseView(stop=True, stop_step=12))
    first.consider(Report(step=8), 1.0)
    assert board.read_report().accepted_stop_step == 0  # the other one is not there yet
    second, *_ = _agreement(tmp_path, rank=1, local_rank=1, **shared)
    second.consider(Report(step=8), 1.0)
    first.consider(Report(step=9), 1.0)
    assert board.read_report().accepted_stop_step == 12
    board.write_lease(LeaseView(stop=True, stop_step=14))
    second.consider(Report(step=15), 1.0)  # out of step, as only a broken program is
    first.consider(Report(step=10), 1.0)
    report = board.read_report()
    assert (report.accepted_stop_step, report.refused_stop_step) == (0, 14)
    assert report.step == 10


INDEPENDENT = """
import sys, time
import slurm_synergy.jobside as synergy
synergy.register()
synergy.resume()
for _ in synergy.epochs(1):
    for item in synergy.iterate(range(400)):
        print(item, flush=True)
        time.sleep(float(sys.argv[1]))
"""


def test_independent_tasks_of_a_step_stop_together_and_keep_checkpoints_of_their_own(
    tmp_path: Path,
) -> None:
    boards = [Board.create(tmp_path / f"board{rank}", rank=rank, ranks=2) for rank in range(2)]
    processes = [
        # Ten seconds in all, however late the stop comes on a busy machine.
        start(["-c", INDEPENDENT, "0.025"], injected(board, tmp_path / "checkpoints"))
        for board in boards
    ]
    with ended(processes):
        wait_for(lambda: all(board.read_report().step >= 3 for board in boards), "step 3")
        with Launchers(boards):
            results = [finish(process) for process in processes]
    assert [status for status, *_ in results] == [85, 85], results
    steps = {board.read_report().step for board in boards}
    assert len(steps) == 1
    last = steps.pop()
    for rank, (_status, out, _err) in enumerate(results):
        assert out.split() == [str(item) for item in range(last)]
        place = tmp_path / "checkpoints" / f"task-0000{rank}" / f"step-{last:012d}"
        assert place.is_dir()
    again = Board.create(tmp_path / "again", rank=1, ranks=2)
    status, out, err = finish(
        start(["-c", INDEPENDENT, "0"], injected(again, tmp_path / "checkpoints"))
    )
    assert status == 0, err
    assert out.split() == [str(item) for item in range(last, 400)]


def test_ranks_without_a_launcher_train_as_usual(tmp_path: Path, forks: Forks) -> None:
    port = free_port()
    processes = [
        forks.start(
            [str(PROGRAM), str(tmp_path), "1", "0"],
            clean_environment(
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="2", RANK=str(rank)
            ),
        )
        for rank in range(2)
    ]
    with ended(processes):
        for process in processes:
            status, _out, err = finish(process)
            assert status == 0, err
    lines = (tmp_path / "0-of-2.jsonl").read_text().splitlines()
    assert len(lines) == 17
