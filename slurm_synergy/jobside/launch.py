"""The launcher: parent of one task's training process, holder of its lease.

``python -m slurm_synergy.jobside.launch -- command arguments``; synergy-srun starts it. The
launcher holds the connection to the controller, so that the training process and its forked workers
never meet it, pins the whole process tree, and talks to the training process through the board.
Everything about the controller may fail without harm to the command.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_synergy.errors import LeaseError
from slurm_synergy.jobside import binding, environment, process, trouble
from slurm_synergy.jobside.board import Board, LeaseView, Report
from slurm_synergy.jobside.child_env import Told, child_env
from slurm_synergy.jobside.data_reading import DataReader, DataReading
from slurm_synergy.jobside.environment import ENDPOINT_FILE, LEASE_STOP_EXIT, Task
from slurm_synergy.jobside.lease_client import Grant, LeaseClient, LeaseSource, Update
from slurm_synergy.jobside.minio_place import keep_or_remove
from slurm_synergy.jobside.private import PrivateDir
from slurm_synergy.jobside.profiling_lease import (
    Answer,
    Order,
    OrderKeeper,
    own_memory_mib,
    program_name,
)
from slurm_synergy.jobside.training import Training
from slurm_synergy.jobside.tree_pins import TreePins

__all__ = ["Launcher", "main"]

_FIRST_LEASE_WAIT_S = 3.0
_IDLE_POLL_S = 0.5
_STOPPING_POLL_S = 0.05
_MEASURING_POLL_S = 0.1
_LONGEST_PATIENCE_S = 10.0
_FINISH_TIMEOUT_S = 3.0
_SETTLE_S = 30.0
# Slurm takes 20 s and more to notice that a step daemon died, and then starts the job elsewhere.
_ORPHAN_GRACE_S = 8.0
_USAGE = 2
_WAKE = signal.SIGRTMIN + 1
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


class Launcher:
    """One task: its board, its lease, its child. ``run`` returns the launcher's exit status.

    The lease comes from ``source``; without one from the controller, where there is one.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        task: Task,
        board: Board,
        source: LeaseSource | None = None,
    ) -> None:
        self._command, self._env, self._task, self._board = tuple(command), env, task, board
        self._pins = TreePins(keep_binding="SYNERGY_KEEP_BINDING" in env, say=self._say)
        self._client: LeaseSource | None = source
        self._child = 0
        self._update = Update()
        self._written: LeaseView | None = None
        self._data = DataReader(env, board.path, lambda: binding.process_tree(self._child))
        self._orders = OrderKeeper(self._read_data)
        self._report = Report()
        self._training: Training | None = None
        self._reported_stop: tuple[int, int, int] = (0, 0, 0)
        self._stop_since_s: float | None = None
        self._signalled = False
        self._terminated = False
        self._told: set[str] = set()
        # Outside a job step the parent may end as it likes.
        self._parent = os.getppid() if process.is_slurmstepd(os.getppid()) else 0
        self._orphan_since_s: float | None = None
        self._orphans: list[int] = []

    def run(self) -> int:
        """Start the command and see it through."""
        main_thread = threading.get_ident()
        mask = process.block_signals({_WAKE})
        if self._client is None:
            self._connect(lambda: signal.pthread_kill(main_thread, _WAKE))
        try:
            early = self._await_first_lease()
            if early:
                return self._ended(-early)
            self._obey(self._client.take() if self._client else None)
            try:
                env = child_env(
                    self._env,
                    self._task,
                    self._told_child(),
                    lambda text: self._say(text, rank_zero_only=True),
                )
                self._child = process.spawn_tethered(self._command, env, mask)
            except OSError as err:
                self._say(f"cannot run {self._command[0]}: {err.strerror}", every_rank=True)
                return self._ended(process.spawn_exit_code(err))
            return self._ended(self._watch())
        finally:
            if self._client is not None:
                self._client.close()

    def _await_first_lease(self) -> int:
        """Wait a moment for the lease; a signal that would have ended the command, else 0."""
        deadline_s = time.monotonic() + (_FIRST_LEASE_WAIT_S if self._client else 0.0)
        while True:
            answered = self._client is None or self._client.wait_for_answer(0.0)
            left_s = 0.0 if answered else deadline_s - time.monotonic()
            info = process.fetch_signal(min(left_s, _STOPPING_POLL_S), {_WAKE})
            if info is not None and info.si_signo in _ENDING:
                self._terminated |= info.si_signo == signal.SIGTERM
                return info.si_signo
            if info is None and left_s <= 0:
                return 0

    # -- the controller --------------------------------------------------------------------------

    def _connect(self, notify: object) -> None:
        if not self._task.job_id:
            return
        try:
            text = Path(ENDPOINT_FILE).read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        try:
            endpoint = environment.endpoint_from(self._env, text, ENDPOINT_FILE)
        except LeaseError as err:
            self._say(f"{err}; running without the controller")
            return
        if not endpoint:
            self._say(
                f"no controller is known (SYNERGY_ENDPOINT, {ENDPOINT_FILE}): "
                "running without leases",
                rank_zero_only=True,
            )
            return
        assert callable(notify)
        client = self._client = LeaseClient(
            endpoint,
            self._task,
            os_cpus=tuple(sorted(self._pins.granted)),
            report=self._read_report,
            notify=notify,
            say=self._say,
            munge_socket=self._env.get("SYNERGY_MUNGE_SOCKET", ""),
            program=program_name(self._command, str(Path.cwd())),
            training=self._read_training,
        )
        client.start()

    def _obey(self, update: Update | None) -> None:
        """Put the newest update, or the floor set when the lease has run out, into force."""
        if update is not None:
            self._update = update
        grant = self._update.grant
        if grant is None:
            self._write(self._slurms_own())
            return
        silent = not self._update.gone and time.monotonic() > grant.until_monotonic_s
        if silent and not (self._written and self._written.silent):
            self._say("the controller is silent: falling back to this job's proportional share")
        task = self._task
        cores = binding.task_cores(
            (grant.floor_cores or grant.cores) if silent else grant.cores,
            task.local_rank,
            task.local_ranks,
        )
        self._pins.move(cores, grant.node_cores)
        self._tell_pins()
        self._write(self._view(grant, cores, silent=silent))
        order = None if silent or grant.stop else self._update.order
        possible = order is not None and self._pins.has(cores, grant.node_cores)
        self._answer(self._orders.follow(order, cpus=len(cores), possible=possible))

    def _view(self, grant: Grant, cores: tuple[int, ...], *, silent: bool) -> LeaseView:
        stopping = grant.stop and not silent
        return LeaseView(
            generation=grant.generation,
            until_monotonic_s=grant.until_monotonic_s,
            mem_mib=(grant.floor_mem_mib or grant.mem_mib) if silent else grant.mem_mib,
            batch_size=grant.batch_size,
            stop=stopping,
            stop_step=self._update.stop_step if stopping else 0,
            stop_committed=self._update.stop_committed and stopping,
            silent=silent,
            core_count=len(cores),
            cores=tuple(sorted(self._pins.cpus)),
        )

    def _slurms_own(self) -> LeaseView:
        task = self._task
        count = task.granted_cpus or max(1, len(self._pins.granted) // task.local_ranks)
        return LeaseView(mem_mib=task.granted_mem_mib, core_count=count)

    def _write(self, view: LeaseView) -> None:
        if view == self._written:
            return
        self._board.write_lease(view)
        if view.stop and self._stop_since_s is None:
            self._stop_since_s = time.monotonic()
        elif not view.stop:
            self._stop_since_s = None
        self._written = view

    def _tell_pins(self) -> None:
        if self._client is not None:
            self._client.pinned_cpus = self._pins.pinned

    # -- measuring -------------------------------------------------------------------------------

    def _measure(self) -> None:
        if self._orders.busy:
            self._answer(self._orders.look(self._read_report(), time.monotonic()))

    def _read_data(self, order: Order) -> DataReading | None:
        """One task of the node reads for all."""
        if self._task.local_rank or not self._child:
            return None
        return self._data.begin(readers=max(1, order.readers), most_s=order.read_s)

    def _answer(self, answer: Answer | None) -> None:
        """Tell the controller what came of its order."""
        if answer is None or self._client is None:
            return
        if self._child and answer.found is not None:
            self._data.look()
        had_mib = own_memory_mib(binding.process_tree(self._child)) if self._child else 0
        self._client.own_mem_mib = max(self._client.own_mem_mib, had_mib)
        self._client.answer = answer
        self._client.kick()

    # -- the child -------------------------------------------------------------------------------

    def _told_child(self) -> Told:
        grant = self._update.grant
        return Told(
            board=self._board.path,
            lease=self._written or LeaseView(),
            cpus=len(self._pins.cpus or self._pins.granted),
            endpoint=self._client.endpoint if self._client is not None else None,
            grace_s=grant.grace_s if grant is not None else 0.0,
        )

    def _watch(self) -> int:
        """Until the child ends: signals, leases, stops, pins. Returns its exit status."""
        while True:
            info = process.fetch_signal(self._poll_s(), {_WAKE})
            code = process.reap(self._child)
            if code is not None:
                process.signal_all(self._orphans, signal.SIGKILL)
                return code
            if info is not None:
                self._pass_on(info)
            update = self._client.take() if self._client else None
            if update is not None and update.over:
                self._end_child("Slurm has ended this run of the job: ending what is left of it")
            self._obey(update)
            self._see_to_parent()
            self._pins.keep()
            self._tell_pins()
            self._measure()
            if self._stop_since_s is not None:
                self._see_to_stop(self._stop_since_s)

    def _end_child(self, why: str) -> None:
        """End the whole tree at once: another copy of the job must find nobody here."""
        self._say(why, every_rank=True)
        process.signal_all(reversed(binding.process_tree(self._child)), signal.SIGKILL)

    def _see_to_parent(self) -> None:
        """Do not outlive the step daemon: without it Slurm takes our GPUs for free."""
        if not self._parent or os.getppid() == self._parent:
            return
        now_s = time.monotonic()
        if self._orphan_since_s is None:
            self._orphan_since_s = now_s
            self._say("Slurm's step daemon has died: stopping the program", every_rank=True)
            self._terminated = True
            # As Slurm would: all processes, not the first alone.
            self._orphans = binding.process_tree(self._child)
            process.signal_all(self._orphans, signal.SIGTERM)
        elif now_s - self._orphan_since_s > _ORPHAN_GRACE_S:
            self._end_child("the program did not stop: ending it")

    def _poll_s(self) -> float:
        if self._stop_since_s is not None:
            return _STOPPING_POLL_S
        longest_s = _MEASURING_POLL_S if self._orders.busy else _IDLE_POLL_S
        grant = self._update.grant
        left_s = grant.until_monotonic_s - time.monotonic() if grant else _IDLE_POLL_S
        return min(longest_s, left_s + 0.001) if left_s > 0 else longest_s

    def _pass_on(self, info: signal.struct_siginfo) -> None:
        if info.si_signo not in process.FORWARDED:
            return
        self._terminated |= info.si_signo == signal.SIGTERM
        # Both of these reach the child without us; once more would look like a second request.
        if process.sent_by_terminal(info) or process.sent_by_slurmstepd(info):
            return
        os.kill(self._child, info.si_signo)

    def _see_to_stop(self, since_s: float) -> None:
        report = self._read_report()
        words = (
            report.proposed_stop_step,
            report.accepted_stop_step,
            report.refused_stop_step,
        )
        if words != self._reported_stop and self._client is not None:
            self._reported_stop = words
            self._client.kick()
        grant = self._update.grant
        within_s = grant.stop_within_s if grant else 0.0
        # A program that is still starting gets some time to show whether it knows about us.
        patience_s = 0.0 if report.step else min(_LONGEST_PATIENCE_S, within_s / 3)
        unaware = report.heartbeat_monotonic_s == 0
        if unaware and not self._signalled and time.monotonic() >= since_s + patience_s:
            self._signalled = True
            number = self._stop_signal() or signal.SIGTERM
            self._say(f"stopping the program with {signal.Signals(number).name}")
            os.kill(self._child, number)

    def _stop_signal(self) -> int:
        """The user's SYNERGY_STOP_SIGNAL as a number; 0 when there is none."""
        text = self._env.get("SYNERGY_STOP_SIGNAL", "").strip().upper()
        if not text:
            return 0
        try:
            named = text if text.startswith("SIG") else f"SIG{text}"
            return signal.Signals(int(text)) if text.isdigit() else signal.Signals[named]
        except (KeyError, ValueError):
            self._say(f"SYNERGY_STOP_SIGNAL = {text!r} is no signal; for example USR1. Using TERM")
            return 0

    def _ended(self, code: int) -> int:
        """Report the end; 85 for whatever a stop of the lease has ended."""
        report = self._read_report()
        stopping = self._written is not None and self._written.stop
        if self._signalled:
            checkpointed = bool(self._stop_signal()) and code in (0, LEASE_STOP_EXIT)
        else:
            checkpointed = report.checkpoint_done
        # torchrun's workers end with 0 after their checkpoint, since it restarts them otherwise.
        by_lease = self._signalled or (stopping and report.checkpoint_done and code == 0)
        told = 128 - code if code < 0 else code
        if self._client is not None:
            self._client.finish(
                exit_code=LEASE_STOP_EXIT if by_lease and checkpointed else told,
                checkpointed=checkpointed,
                report=report,
                timeout_s=_FINISH_TIMEOUT_S,
            )
        if by_lease and not checkpointed:
            self._say("stopped without a checkpoint; work since the last one will be repeated")
        if not by_lease and code != LEASE_STOP_EXIT:
            return code
        self._settle()
        return LEASE_STOP_EXIT

    def _settle(self) -> None:
        """Let the other ranks end too: srun would kill them at our non-zero exit status.

        The requeue's TERM ends the wait; it comes as soon as all have told the controller.
        """
        if self._client is None or self._task.ranks == 1 or self._terminated:
            return
        deadline_s = time.monotonic() + _SETTLE_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            info = process.fetch_signal(left_s)
            if info is not None and info.si_signo in (signal.SIGTERM, signal.SIGINT):
                return

    def _read_report(self) -> Report:
        # A writer that died inside leaves half a record: what it said before still holds.
        with contextlib.suppress(LeaseError):
            self._report = self._board.read_report()
        return self._report

    def _read_training(self) -> Training | None:
        """What the training tells of itself; only the first task's word counts."""
        if self._task.rank == 0:
            with contextlib.suppress(LeaseError):
                self._training = self._board.read_training()
        return self._training

    def _say(self, text: str, *, every_rank: bool = False, rank_zero_only: bool = False) -> None:
        """One line on stderr, once; from one task of each node unless told otherwise."""
        speaks = every_rank or (
            self._task.rank == 0 if rank_zero_only else self._task.local_rank == 0
        )
        if not speaks or text in self._told:
            return
        self._told.add(text)
        where = f" [{self._task.node}]" if self._task.nodes > 1 and self._task.node else ""
        sys.stderr.write(f"synergy-srun{where}: {text}\n")
        sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher; returns its exit status, or dies by the signal that ended the command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        sys.stderr.write("usage: python -m slurm_synergy.jobside.launch -- command [arguments]\n")
        return _USAGE
    env = dict(os.environ)
    if trouble.is_slurm_error(trouble.ERROR_EXIT, env):
        del env[trouble.ERROR_EXIT_VARIABLE]  # synergy-srun's, not for an srun of the user's
    task = environment.task_from(env)
    try:
        folder = PrivateDir(env, task)
        board = Board.create(folder.path / "board", rank=task.rank, ranks=task.ranks)
    except LeaseError as err:
        sys.stderr.write(f"synergy-srun: {err}; running without leases\n")
        return _become(words, env)
    try:
        code = Launcher(words, env, task, board).run()
        keep_or_remove(env, continues=code == LEASE_STOP_EXIT)
    finally:
        folder.remove()
    return process.exit_like(code)


def _become(command: Sequence[str], env: Mapping[str, str]) -> int:
    program = process.find_program(command[0], env.get("PATH", os.defpath))
    try:
        os.execve(program, list(command), env)
    except OSError as err:
        sys.stderr.write(f"synergy-srun: cannot run {command[0]}: {err.strerror}\n")
        return process.spawn_exit_code(err)


if __name__ == "__main__":
    sys.exit(main())
