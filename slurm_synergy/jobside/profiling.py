"""Profiling a command on this machine: a lease source that steps through core counts by itself.

The launcher that runs jobs under Slurm runs the command here too, with this module in the place of
the controller: the same board, the same pinning in place, the same counting of steps.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slurm_synergy.jobside import binding, process
from slurm_synergy.jobside.board import Board, Report
from slurm_synergy.jobside.data_told import DataTold, read_told
from slurm_synergy.jobside.environment import task_from
from slurm_synergy.jobside.launch import Launcher
from slurm_synergy.jobside.lease_client import Grant, Update
from slurm_synergy.jobside.private import PrivateDir
from slurm_synergy.jobside.profiling_lease import Answer, Order
from slurm_synergy.profiler.sweep import Measurement, Sweep

__all__ = ["Limits", "Profiled", "SweepSource", "profile_command"]

_FOREVER_S = 1e9
# The looks of ``watch`` run on the job's own cores: they may take this much of one.
_WATCH_SHARE = 0.005
# What each worker of before had fetched ahead, as under the controller.
_AHEAD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one profiling run may take.

    ``iterations`` steps are measured per point, for at most ``point_s`` seconds. Before them
    ``warmup`` steps are left out, and what the loader's workers had fetched ahead. The first step
    must come within ``start_s``, and the whole sweep end within ``sweep_s``. A command that was
    asked to end has ``end_s`` for it.
    """

    iterations: int = 50
    warmup: int = 5
    point_s: float = 75.0
    start_s: float = 600.0
    sweep_s: float = 600.0
    end_s: float = 20.0


class SweepSource:
    """A lease whose cores are those that the sweep asks for.

    ``report`` reads the board, ``watch`` is called as often as half a percent of a core allows,
    ``ends`` says that the command is not needed any longer once the sweep is over: it is told with
    SIGTERM, and killed if it does not listen. Everything happens in the launcher's own loop.
    """

    def __init__(
        self,
        sweep: Sweep,
        *,
        report: Callable[[], Report],
        limits: Limits,
        told: Callable[[Measurement], None] = lambda point: None,
        watch: Callable[[], None] = lambda: None,
        ends: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoint = ""
        self.pinned_cpus = self.own_mem_mib = 0
        self.answer: Answer | None = None
        self.sweep = sweep
        self._report, self._limits, self._told, self._watch = report, limits, told, watch
        self._ends, self._clock = ends, clock
        self._began_s = clock()
        self._first_step_s: float | None = None
        self._answers = 0
        self._cpus_before = sweep.span.most_cpus
        self._watch_again_s = 0.0
        self._given: Update | None = None
        self._term_s: float | None = None

    @property
    def ended_by_us(self) -> bool:
        """The command was told to end, since it had done its part."""
        return self._term_s is not None

    # -- what the launcher asks ------------------------------------------------------------------

    def wait_for_answer(self, timeout_s: float) -> bool:
        """There is nobody to wait for."""
        return True

    def take(self) -> Update | None:
        """The cores to have now, and what to measure with them."""
        self._look_at_processes()
        if not self.sweep.done:
            self._look_at_time()
        if self.sweep.done and self._ends:
            self._end_command()
        update = self._wanted()
        if update == self._given:
            return None
        self._given = update
        return update

    def kick(self) -> None:
        """An order was answered."""
        answer, self.answer = self.answer, None
        if answer is None or answer.number != self._answers + 1 or self.sweep.done:
            return
        self._answers += 1
        if answer.found is None:
            self.sweep = self.sweep.cut(
                f"with {self.sweep.next_cpus} cores the command made too few steps in "
                f"{self._limits.point_s:g} s, or the cores could not be had"
            )
            return
        self._cpus_before = answer.found.cpus
        self.sweep = self.sweep.fed(answer.found)
        self._told(answer.found)

    def finish(
        self, *, exit_code: int, checkpointed: bool, report: Report, timeout_s: float
    ) -> bool:
        """The command has ended."""
        self.sweep = self.sweep.cut(f"the command ended before that, with status {exit_code}")
        return True

    def close(self) -> None:
        """Nothing is open."""

    # -- inside ----------------------------------------------------------------------------------

    def _look_at_processes(self) -> None:
        if self._clock() < self._watch_again_s:
            return
        began_s = time.thread_time()
        self._watch()
        took_s = time.thread_time() - began_s
        self._watch_again_s = self._clock() + took_s / _WATCH_SHARE

    def _look_at_time(self) -> None:
        now_s = self._clock()
        if self._first_step_s is None:
            if self._report().step:
                self._first_step_s = now_s
            elif now_s - self._began_s > self._limits.start_s:
                self.sweep = self.sweep.cut(
                    f"the command told no step within {self._limits.start_s:g} s: it has to fetch "
                    "its batches from a shuffling PyTorch DataLoader or from synergy.iterate()"
                )
        elif now_s - self._first_step_s > self._limits.sweep_s:
            self.sweep = self.sweep.cut(f"{self._limits.sweep_s:g} s were over")

    def _wanted(self) -> Update:
        most = self.sweep.span.most_cpus
        cpus = self.sweep.next_cpus or most
        order = None
        if self._first_step_s is not None and not self.sweep.done:
            order = Order(
                number=self._answers + 1,
                warmup_steps=self._limits.warmup + _AHEAD * self._cpus_before + cpus,
                steps=self._limits.iterations,
                longest_s=self._limits.point_s,
            )
        grant = Grant(
            generation=self._answers + 1,
            until_monotonic_s=self._began_s + _FOREVER_S,
            cores=tuple(range(cpus)),
            floor_cores=(),
            mem_mib=0,
            floor_mem_mib=0,
            stop=False,
            stop_within_s=0.0,
            node_cores=most,
            batch_size=0,
        )
        return Update(grant=grant, order=order)

    def _end_command(self) -> None:
        """Tell the command to end, as the launcher passes it on; kill what does not listen."""
        now_s = self._clock()
        if self._term_s is None:
            self._term_s = now_s
            os.kill(os.getpid(), signal.SIGTERM)
        elif now_s - self._term_s > self._limits.end_s:
            process.signal_all(binding.process_tree(os.getpid())[1:], signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """What became of a command that was profiled.

    ``sweep`` is over; ``own_mem_mib`` is what the processes had for themselves, ``exit_code`` the
    command's, negative for a signal, and ``ended_by_us`` whether it had to end then. ``told`` is
    what it told of its data set, if anything.
    """

    sweep: Sweep
    own_mem_mib: int
    exit_code: int
    ended_by_us: bool
    told: DataTold | None = None


def profile_command(
    command: Sequence[str],
    env: Mapping[str, str],
    sweep: Sweep,
    *,
    limits: Limits,
    told: Callable[[Measurement], None] = lambda point: None,
    watch: Callable[[], None] = lambda: None,
    ends: bool = True,
) -> Profiled:
    """Run ``command`` on this machine and measure it; call it from the main thread.

    ``told`` is called after every point, ``watch`` every now and then; without ``ends``
    the command runs on to its own end. It begins anew: where SYNERGY_CHECKPOINT_DIR is unset, its
    checkpoints are thrown away. Raises LeaseError where no private directory can be made.
    """
    task = task_from({})
    folder = PrivateDir(env, task)
    checkpoints = str(folder.path / "checkpoints")
    own_env = {"SYNERGY_CHECKPOINT_DIR": checkpoints, **env}
    mask, cpus = signal.pthread_sigmask(signal.SIG_BLOCK, ()), os.sched_getaffinity(0)
    try:
        board = Board.create(folder.path / "board", rank=task.rank, ranks=task.ranks)
        source = SweepSource(
            sweep, report=board.read_report, limits=limits, told=told, watch=watch, ends=ends
        )
        code = Launcher(command, own_env, task, board, source).run()
        told_of_data = read_told(board.path)
    finally:
        # The launcher is made to be a process of its own: leave this one as it was.
        while process.fetch_signal(0.0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.sched_setaffinity(0, cpus)
        folder.remove()
    return Profiled(
        sweep=source.sweep,
        own_mem_mib=source.own_mem_mib,
        exit_code=code,
        ended_by_us=source.ended_by_us,
        told=told_of_data,
    )
