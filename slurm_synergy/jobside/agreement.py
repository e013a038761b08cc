"""How the ranks of a job agree on one last step, without a collective operation per batch.

Rank 0 proposes a step some seconds ahead, the launchers carry it to the controller, which offers
it to all ranks. A rank that has not passed the step accepts it, which is a promise not to pass it
until the stop is committed, replaced by a later step, or withdrawn. A rank that has passed it
refuses, and rank 0 proposes a later one.

Several processes of one task (torchrun) share the task's board. The first of them writes it; each
of the others has a small board of its own beside it (``<board>.r<local rank>``), and the first
passes on an acceptance only when all of them gave it.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from slurm_synergy.errors import LeaseError
from slurm_synergy.jobside.board import Board, LeaseView, Report

__all__ = ["Agreement", "Identity", "Membership", "Verdict", "detect_identity"]

_AHEAD_S = 2.5
_MIN_AHEAD_STEPS = 2
_MAX_AHEAD_STEPS = 100_000
_POLL_S = 0.02
_PROPOSE_AGAIN_S = 5.0
_GIVE_UP_AFTER_LEASE_S = 30.0
_WAIT_WITHOUT_LEASE_END_S = 60.0


class Verdict(Enum):
    """What to do at this batch boundary."""

    GO_ON = "go on"
    STOP_HERE = "stop here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this process is.

    ``rank`` of ``world`` processes train one model together; ``task`` of ``tasks`` are the tasks
    of the job step; ``local_rank`` of ``local_ranks`` processes share this task's board.
    """

    rank: int = 0
    world: int = 1
    task: int = 0
    tasks: int = 1
    local_rank: int = 0
    local_ranks: int = 1

    @property
    def alone(self) -> bool:
        """No other process takes part in the decision to stop."""
        return self.world == 1 and self.tasks == 1

    @property
    def independent(self) -> bool:
        """One of several tasks that each train a model of their own."""
        return self.world == 1 and self.tasks > 1

    @property
    def proposes(self) -> bool:
        """This process proposes the last step."""
        return self.task == 0 and self.local_rank == 0


def _world() -> tuple[int, int]:
    """(rank, world) of joint training.

    From torch.distributed if it is initialised, else from RANK and WORLD_SIZE. Slurm's own
    variables do not count: several tasks of a step may well be independent of each other.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    return (rank, world) if 0 <= rank < world else (0, 1)


def detect_identity(board: Board | None) -> Identity:
    """Find out who this process is, from torch.distributed, the environment and the board."""
    rank, world = _world()
    task, tasks = (board.rank, board.ranks) if board is not None else (0, 1)
    if board is None or world <= tasks:
        return Identity(rank=rank, world=world, task=task, tasks=tasks)
    try:
        local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
        local_rank = int(os.environ["LOCAL_RANK"])
    except (KeyError, ValueError):
        local_ranks = max(world // tasks, 1)
        local_rank = rank % local_ranks
    return Identity(
        rank=rank,
        world=world,
        task=task,
        tasks=tasks,
        local_rank=local_rank,
        local_ranks=local_ranks,
    )


class Membership:
    """Who this process is: asked at the first use, as ranks may meet late, and fixed from then."""

    __slots__ = ("_board", "_identity")

    def __init__(self, board: Board | None) -> None:
        self._board = board
        self._identity: Identity | None = None

    @property
    def identity(self) -> Identity:
        """The answer of the first use."""
        if self._identity is None:
            self._identity = detect_identity(self._board)
        return self._identity

    @property
    def has_changed(self) -> bool:
        """The answer would be another one now."""
        return self._identity is not None and detect_identity(self._board) != self._identity


class Agreement:
    """One process's part in agreeing on the last step; also the writer of its reports."""

    def __init__(
        self,
        board: Board,
        identity: Identity,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._board, self._identity, self._say = board, identity, say
        self._clock, self._sleep = clock, sleep
        self._own = self._open_own(board, identity)
        self._proposed = self._accepted = self._refused = 0
        self._ahead = 1
        self._abandoned = 0

    @staticmethod
    def _side_path(board: Board, local_rank: int) -> Path:
        return board.path.with_name(f"{board.path.name}.r{local_rank}")

    def _open_own(self, board: Board, identity: Identity) -> Board:
        if identity.local_rank == 0:
            return board
        path = self._side_path(board, identity.local_rank)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # of an earlier set of workers that torchrun restarted
        return Board.create(path, rank=identity.task, ranks=identity.tasks)

    def publish(self, report: Report) -> None:
        """Write the report, with the state of the agreement, for whom it concerns."""
        accepted, refused = self._accepted, self._refused
        if self._identity.local_rank == 0 and self._identity.local_ranks > 1:
            accepted, refused = self._of_all_local_ranks()
        self._own.write_report(
            replace(
                report,
                proposed_stop_step=self._proposed,
                accepted_stop_step=accepted,
                refused_stop_step=refused,
            )
        )

    def _of_all_local_ranks(self) -> tuple[int, int]:
        accepted, refused = self._accepted, self._refused
        for local_rank in range(1, self._identity.local_ranks):
            try:
                side = Board.attach(self._side_path(self._board, local_rank))
            except LeaseError:
                return 0, refused  # not there yet: nobody may say that all accepted
            theirs = side.read_report()
            side.close()
            refused = max(refused, theirs.refused_stop_step)
            accepted = min(accepted, theirs.accepted_stop_step)
        return (0 if refused >= accepted else accepted), refused

    def withdraw(self) -> None:
        """Forget everything about a stop that is no longer wanted."""
        self._proposed = self._accepted = self._refused = 0
        self._ahead, self._abandoned = 1, 0

    def consider(self, report: Report, period_s: float) -> Verdict:
        """Decide at the boundary after ``report.step`` batches; may block at the last step.

        ``period_s`` is the recent mean time of a step, waiting included.
        """
        lease = self._board.read_lease()
        if not lease.stop:
            self.withdraw()
            self.publish(report)
            return Verdict.GO_ON
        step = report.step
        if self._identity.alone:
            self._proposed = self._accepted = step
            self.publish(report)
            return Verdict.STOP_HERE
        self._maybe_propose(lease, step, period_s)
        self._answer(lease, step)
        self.publish(report)
        if self._accepted and self._accepted == step != self._abandoned:
            return self._wait_for_commit(report, lease, period_s)
        return Verdict.GO_ON

    def _maybe_propose(self, lease: LeaseView, step: int, period_s: float) -> None:
        if not self._identity.proposes or lease.stop_committed:
            return
        # The controller may itself offer a later step after a refusal: then there is one ahead.
        offered = lease.stop_step > 0 and lease.stop_step >= step
        if not offered and self._proposed <= step:
            self._propose(step, period_s)

    def _propose(self, step: int, period_s: float) -> None:
        ahead = math.ceil(_AHEAD_S / period_s) if period_s > 0 else _MIN_AHEAD_STEPS
        ahead = min(max(ahead, _MIN_AHEAD_STEPS) * self._ahead, _MAX_AHEAD_STEPS)
        self._proposed = max(step, self._proposed) + ahead
        self._ahead *= 2  # should this one be too near as well

    def _answer(self, lease: LeaseView, step: int) -> None:
        offered = lease.stop_step
        if offered and offered not in (self._accepted, self._refused):
            if step <= offered:
                self._accepted = offered
            else:
                self._refused = offered

    def _wait_for_commit(self, report: Report, lease: LeaseView, period_s: float) -> Verdict:
        """Block at the accepted step until it is committed, replaced, withdrawn, or too late."""
        started_s = self._clock()
        proposed_s = started_s
        end_s = lease.until_monotonic_s + _GIVE_UP_AFTER_LEASE_S
        if lease.until_monotonic_s <= started_s:
            end_s = started_s + _WAIT_WITHOUT_LEASE_END_S
        while True:
            now_s = self._clock()
            lease = self._board.read_lease()
            if not lease.stop:
                self.withdraw()
                self.publish(report)
                return Verdict.GO_ON
            if lease.stop_step == report.step and lease.stop_committed:
                self.publish(report)
                return Verdict.STOP_HERE
            if lease.stop_step > report.step:
                self._answer(lease, report.step)
                self.publish(report)
                return Verdict.GO_ON
            if now_s > end_s:
                self._abandoned = report.step
                self._say(f"no agreement on stopping at step {report.step}; training goes on")
                return Verdict.GO_ON
            if self._identity.proposes and now_s - proposed_s > _PROPOSE_AGAIN_S:
                self._propose(report.step, period_s)
                proposed_s = now_s
            self.publish(replace(report, heartbeat_monotonic_s=now_s))
            self._sleep(_POLL_S)
