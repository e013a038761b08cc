"""What the tasks of one running job have told us: who registered, how far they are, who ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from slurm_synergy.cluster import StopState
from slurm_synergy.controller.agreement import StopAgreement
from slurm_synergy.controller.learning_points import TrainingReport
from slurm_synergy.controller.probes import Measured, TaskProfiling
from slurm_synergy.controller.stalls import StallWindow
from slurm_synergy.errors import LeaseError
from slurm_synergy.profiler.refining import Sums

__all__ = ["JobTasks", "TaskIdentity", "TaskReport"]

_MAX_RANKS = 1 << 17
_MAX_STEPS = 64
_RATE_WINDOW_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskIdentity:
    """One task of one incarnation of a job. ``step_id`` is Slurm's step. Raises LeaseError."""

    job_id: int
    restart_count: int
    rank: int
    ranks: int
    node: str
    step_id: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.ranks <= _MAX_RANKS or not 0 <= self.rank < self.ranks:
            raise LeaseError(f"rank {self.rank} of {self.ranks} tasks is out of range")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """Progress of one task: totals since the job began, recent means per step, its stop words.

    ``stepped_s`` and ``waited_s`` are sums since its process began, both 0 where it tells none.
    ``profiling`` is None from a launcher that cannot measure, ``training`` from a job that tells
    nothing of its steps on these GPUs.
    """

    step: int = 0
    samples: int = 0
    epoch: int = 0
    step_s: float = 0.0
    wait_s: float = 0.0
    pinned_cpus: int = 0
    proposed_stop_step: int = 0
    accepted_stop_step: int = 0
    refused_stop_step: int = 0
    stepped_s: float = 0.0
    waited_s: float = 0.0
    profiling: TaskProfiling | None = None
    training: TrainingReport | None = None


@dataclass(slots=True)
class _Task:
    node: str
    report: TaskReport = field(default_factory=TaskReport)
    stalls: StallWindow = field(default_factory=StallWindow)
    exit_code: int | None = None
    checkpointed: bool = False


@dataclass(slots=True)
class _Step:
    ranks: int
    agreement: StopAgreement
    tasks: dict[int, _Task] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return len(self.tasks) >= self.ranks and all(
            task.exit_code is not None for task in self.tasks.values()
        )

    @property
    def ended_well(self) -> bool:
        return self.ended and not any(t.exit_code or t.checkpointed for t in self.tasks.values())


class JobTasks:
    """The tasks of one incarnation of a job. Not thread-safe: its keeper holds the lock."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._window: tuple[float, float] | None = None
        self.done_samples = 0.0
        self.samples_per_s = 0.0
        self.step = 0

    def register(self, identity: TaskIdentity) -> bool:
        """Take in a task; True when it is the first of the job. Again is allowed.

        Raises LeaseError when it contradicts its step, or for too many steps at once.
        """
        first = not self._steps
        step = self._steps.get(identity.step_id)
        if step is None:
            # A script that runs several steps one after the other: the ended ones do not matter.
            for step_id in [key for key, old in self._steps.items() if old.ended]:
                del self._steps[step_id]
            if len(self._steps) >= _MAX_STEPS:
                raise LeaseError(f"more than {_MAX_STEPS} steps of one job at a time")
            step = _Step(ranks=identity.ranks, agreement=StopAgreement(identity.ranks))
            self._steps[identity.step_id] = step
        if step.ranks != identity.ranks:
            raise LeaseError(
                f"step {identity.step_id} has {step.ranks} tasks, not {identity.ranks}"
            )
        task = step.tasks.get(identity.rank)
        if task is None or task.exit_code is not None:
            step.tasks[identity.rank] = _Task(node=identity.node)
        return first

    def report(self, identity: TaskIdentity, report: TaskReport, now_s: float) -> bool:
        """Take in progress; True when the agreement on the last step moved."""
        step, task = self._find(identity)
        task.report = report
        task.stalls.note(now_s, report.stepped_s, report.waited_s)
        self._progress(report.samples, report.step, now_s)
        agreement = step.agreement
        before = (agreement.step, agreement.committed)
        if identity.rank == 0 and report.proposed_stop_step:
            agreement.propose(report.proposed_stop_step)
        agreement.accept(identity.rank, report.accepted_stop_step)
        reports = [other.report for other in step.tasks.values()]
        agreement.refuse(
            report.refused_stop_step,
            latest_step=max(other.step for other in reports),
            step_s=max(other.step_s + other.wait_s for other in reports),
        )
        self._settle(step)
        return before != (agreement.step, agreement.committed)

    def finish(
        self, identity: TaskIdentity, *, exit_code: int, checkpointed: bool, report: TaskReport
    ) -> bool:
        """A task has ended; True when the agreement on the last step moved."""
        step, task = self._find(identity)
        task.report, task.exit_code, task.checkpointed = report, exit_code, checkpointed
        self.done_samples = max(self.done_samples, float(report.samples))
        self.step = max(self.step, report.step)
        before = step.agreement.committed
        self._settle(step)
        return before != step.agreement.committed

    def stop_step(self, step_id: int) -> tuple[int, bool]:
        """The last step under discussion (0: none) and whether it is committed."""
        step = self._steps.get(step_id)
        return (step.agreement.step, step.agreement.committed) if step else (0, False)

    def stop_state(self) -> StopState:
        """How far a stop is, apart from its deadline.

        Tasks that all ended well by themselves leave it WAITING: the script ends by itself.
        """
        steps = [step for step in self._steps.values() if not step.ended_well]
        if not steps or not all(step.ended for step in steps):
            return StopState.WAITING
        tasks = [task for step in steps for task in step.tasks.values()]
        saved = all(task.checkpointed for task in tasks)
        return StopState.CHECKPOINTED if saved else StopState.FAILED

    @property
    def data_stall(self) -> float | None:
        """Share of the last minute in which the job waited for data, 0..1; None: not reported.

        Tasks advance in step, so the one that waits most decides.
        """
        live = [
            task.stalls.share
            for step in self._steps.values()
            for task in step.tasks.values()
            if task.exit_code is None
        ]
        return max((share for share in live if share is not None), default=None)

    @property
    def measurable(self) -> bool:
        """All tasks of the one step that runs are here, training, and can measure."""
        live = [step for step in self._steps.values() if not step.ended]
        if len(live) != 1 or len(live[0].tasks) < live[0].ranks:
            return False
        return all(
            task.exit_code is None and task.report.profiling is not None and task.report.step > 0
            for task in live[0].tasks.values()
        )

    def profiling(self) -> tuple[TaskProfiling, ...]:
        """What the running tasks that can measure told last, by rank."""
        return tuple(
            task.report.profiling
            for step in self._steps.values()
            for _, task in sorted(step.tasks.items())
            if task.exit_code is None and task.report.profiling is not None
        )

    @property
    def epoch(self) -> int:
        """Epochs that all running tasks have behind them; 0 where none runs."""
        running = (
            task.report.epoch
            for step in self._steps.values()
            for task in step.tasks.values()
            if task.exit_code is None
        )
        return min(running, default=0)

    def sums(self) -> tuple[Sums, ...]:
        """What the running tasks have done and how long it took them, by rank."""
        return tuple(
            Sums(
                samples=task.report.samples,
                stepped_s=task.report.stepped_s,
                waited_s=task.report.waited_s,
            )
            for step in self._steps.values()
            for _, task in sorted(step.tasks.items())
            if task.exit_code is None
        )

    def answers(self, probe: int) -> tuple[Measured, ...]:
        """The answers to that probe, once all running tasks have given theirs; else none."""
        told = self.profiling()
        found = [one.measured for one in told if one.measured and one.measured.probe == probe]
        return tuple(found) if len(found) == len(told) and self.measurable else ()

    def ended_reports(self) -> tuple[Mapping[str, object], ...]:
        """The ended tasks as JSON objects, for the ledger."""
        return tuple(
            {
                "step_id": step_id,
                "ranks": step.ranks,
                "rank": rank,
                "node": task.node,
                "exit_code": task.exit_code,
                "checkpointed": task.checkpointed,
            }
            for step_id, step in sorted(self._steps.items())
            for rank, task in sorted(step.tasks.items())
            if task.exit_code is not None
        )

    def restore(self, reports: Iterable[Mapping[str, object]]) -> None:
        """Take over what ``ended_reports`` gave before a restart of the controller."""
        for entry in reports:
            ranks = int(str(entry["ranks"]))
            step = self._steps.setdefault(
                int(str(entry["step_id"])), _Step(ranks=ranks, agreement=StopAgreement(ranks))
            )
            step.tasks[int(str(entry["rank"]))] = _Task(
                node=str(entry["node"]),
                exit_code=int(str(entry["exit_code"])),
                checkpointed=entry["checkpointed"] is True,
            )

    def describe(self) -> Mapping[str, object]:
        """Counts and recent means for status output, as JSON values."""
        tasks = [task for step in self._steps.values() for task in step.tasks.values()]
        live = [task.report for task in tasks if task.exit_code is None]
        stall = self.data_stall
        stop_step, committed = max(
            ((step.agreement.step, step.agreement.committed) for step in self._steps.values()),
            default=(0, False),
        )
        return {
            "tasks": sum(step.ranks for step in self._steps.values()),
            "registered": len(tasks),
            "ended": len(tasks) - len(live),
            "step": self.step,
            "done_samples": self.done_samples,
            "samples_per_s": round(self.samples_per_s, 3),
            "step_s": max((report.step_s for report in live), default=0.0),
            "wait_s": max((report.wait_s for report in live), default=0.0),
            "data_stall": None if stall is None else round(stall, 4),
            "pinned_cpus": sum(report.pinned_cpus for report in live),
            "stop_step": stop_step,
            "stop_committed": committed,
        }

    def _find(self, identity: TaskIdentity) -> tuple[_Step, _Task]:
        step = self._steps.get(identity.step_id)
        task = step.tasks.get(identity.rank) if step else None
        if step is None or task is None:
            raise LeaseError(f"rank {identity.rank} of step {identity.step_id} is not registered")
        return step, task

    def _settle(self, step: _Step) -> None:
        step.agreement.settle(_ended_ranks(step))

    def _progress(self, samples: int, step: int, now_s: float) -> None:
        self.step = max(self.step, step)
        self.done_samples = max(self.done_samples, float(samples))
        if self._window is None:
            self._window = (now_s, self.done_samples)
        since_s, before = self._window
        if now_s - since_s >= _RATE_WINDOW_S:
            self.samples_per_s = (self.done_samples - before) / (now_s - since_s)
            self._window = (now_s, self.done_samples)


def _ended_ranks(step: _Step) -> Iterator[int]:
    return (rank for rank, task in step.tasks.items() if task.exit_code is not None)
