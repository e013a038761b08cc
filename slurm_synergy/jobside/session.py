"""One training process under a lease: its position in the data, its reports, its stops.

All state of the job side that lives in the training process is in its :class:`Session`, which also
drives each pass over the data; loaders only fetch. What is saved, and where, is the business of
:mod:`slurm_synergy.jobside.training_state`.

Stopping happens inside the call for the next batch, when the previous one has been used up: a
checkpoint is published and :class:`LeaseEnded` raised, a SystemExit with status 85, which the
controller requeues. A process that has registered nothing is not stopped by us: its reports carry
no heartbeat, which tells the launcher to send the user's own signal.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from slurm_synergy.errors import CheckpointError, LeaseError
from slurm_synergy.jobside.agreement import Agreement, Identity, Membership, Verdict
from slurm_synergy.jobside.board import Board, LeaseView, Report
from slurm_synergy.jobside.ending import EXIT_STOPPED, EXIT_TERMINATED, LeaseEnded, TermWatch, say
from slurm_synergy.jobside.position import Position
from slurm_synergy.jobside.rng import capture_rng, restore_rng, seed_rng
from slurm_synergy.jobside.sampler import derive_seed
from slurm_synergy.jobside.save_schedule import SaveSchedule
from slurm_synergy.jobside.step_times import StepTimes
from slurm_synergy.jobside.training_state import TrainingState, positive_number

__all__ = ["EXIT_STOPPED", "EXIT_TERMINATED", "LeaseEnded", "Session", "current", "iterate", "say"]

_LOOK_EVERY_S = 0.01
_REPORT_EVERY_S = 0.1
_RETRY_SAVE_S = 10.0


class Session(Position):
    """The state of one training process. Use :func:`current` to get it."""

    # Slots: a batch costs half as much as with the attributes in a dictionary.
    __slots__ = (
        "_agreement",
        "_attention",
        "_by_hook",
        "_clock",
        "_done",
        "_look_at_s",
        "_pass",
        "_pending_rng",
        "_report_at_s",
        "_retry_at_s",
        "_saves",
        "_state",
        "_stopping",
        "_term",
        "_times",
        "_verdict",
        "_who",
        "board",
        "lease",
        "lease_sequence",
        "looked_at_s",
        "pid",
        "rank_extras",
        "restored_extras",
        "user_state",
    )

    def __init__(
        self,
        board: Board | None,
        checkpoint_dir: Path | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.pid = os.getpid()
        self.board = board
        self.user_state: dict[str, Any] = {}
        # What loaders of this rank save beside the generators (numbers, texts, lists, dicts), and
        # what the checkpoint that was loaded has of them.
        self.rank_extras: dict[str, Callable[[], Any]] = {}
        self.restored_extras: dict[str, Any] = {}
        self._pass: object = None
        self.lease = LeaseView()
        self._clock = clock
        self._who = Membership(board)
        self._state = TrainingState(checkpoint_dir, self._who, clock)
        self._agreement: Agreement | None = None
        self.lease_sequence = -1
        self._pending_rng: Callable[[], None] | None = None
        # What is looked at for every batch.
        self._attention = False
        self._look_at_s = self._report_at_s = self.looked_at_s = 0.0
        self._saves = SaveSchedule()
        self._times = StepTimes()
        self._stopping = self._done = False
        # A framework has its own loop and checkpoints: it tells its steps, and is told when to end.
        self._by_hook, self._verdict = False, 0
        self._retry_at_s = 0.0
        self._term = TermWatch()

    # -- who we are ------------------------------------------------------------------------------

    @property
    def identity(self) -> Identity:
        """Who this process is; fixed at the first use."""
        return self._who.identity

    @property
    def registered(self) -> bool:
        """Something was registered, and there is a place to save it."""
        return self._state.registered

    @property
    def checkpoint_dir(self) -> Path | None:
        """Where checkpoints are kept; None when no place is set."""
        return self._state.directory

    @property
    def by_hook(self) -> bool:
        """The steps are counted by :meth:`step_done`, not by the loader."""
        return self._by_hook

    @property
    def stoppable(self) -> bool:
        """This process saves and ends by itself when its lease ends."""
        return self._by_hook or self.registered

    # -- the user's calls --------------------------------------------------------------------------

    def register(self, **objects: Any) -> None:
        """Add objects to what is saved. Raises CheckpointError for one without the two methods."""
        self._state.add(objects)

    def save_every(self, *, steps: int = 0, seconds: float = 0.0) -> None:
        """Save by itself at batch boundaries; ``seconds`` only where one process trains alone."""
        if steps < 0 or seconds < 0:
            raise CheckpointError("save_every() takes positive numbers, or 0 for never")
        if seconds and self.identity.world > 1:
            raise CheckpointError(
                "save_every(seconds=...) cannot be used by several ranks, whose clocks differ;"
                " use save_every(steps=...) with the same number on all ranks"
            )
        self._saves.steps, self._saves.seconds = steps, seconds
        self._begin_schedule()

    def _begin_schedule(self) -> None:
        self._saves.begin(step=self.step, now_s=self._clock())

    def resume(self) -> bool:
        """Load the newest intact checkpoint into the registered objects; False if there is none.

        Raises CheckpointError when none of the existing ones is intact, or when one does not
        belong to what is registered.
        """
        found = self._state.load()
        if found is None:
            return False
        self.user_state.clear()
        self.user_state.update(found.user_state)
        self.take_position(found.progress)
        self._begin_schedule()
        self._attention = True
        self._take_rank_state(found.rank_state)
        return True

    def _take_rank_state(self, rank_state: Mapping[str, Any] | None) -> None:
        known = ("now", "epoch_start")
        extras = {name: kept for name, kept in (rank_state or {}).items() if name not in known}
        self.restored_extras = extras
        if rank_state is None:
            fresh = derive_seed(self.seed, self.identity.rank, self.step)
            self._pending_rng = lambda: seed_rng(fresh)
            self.epoch_rng = None
        else:
            now = rank_state["now"]
            self._pending_rng = lambda: restore_rng(now)
            self.epoch_rng = rank_state.get("epoch_start")
        self._pending_rng()

    def save(self) -> Path:
        """Publish a checkpoint of this moment; on all ranks, after the last batch was used up.

        Raises CheckpointError when that failed; the previous checkpoint stays.
        """
        return self._state.save(self.progress, self.user_state, self._rank_state)

    def _rank_state(self) -> dict[str, Any]:
        """What this rank alone has: its generators, and what its loaders keep."""
        self._settle_rng()
        kept: dict[str, Any] = {"now": capture_rng()}
        if self.epoch_rng is not None:
            kept["epoch_start"] = self.epoch_rng
        for name, capture in self.rank_extras.items():
            kept[name] = capture()
        return {**kept, **self.restored_extras}  # the latter: nobody has taken them up yet

    # -- the loop over batches ---------------------------------------------------------------------

    def begin_epoch(self) -> bool:
        """A pass over the data begins; True when it continues one that a checkpoint interrupted."""
        if self._who.has_changed:
            raise LeaseError(
                "the number of ranks changed after resume() or save_every():"
                " call torch.distributed.init_process_group() before them"
            )
        self._state.refuse_to_forget()
        self._prepare()
        continued = self.begin_pass()
        self._times.forget()
        self._look_at_s = self._report_at_s = 0.0
        return continued

    def _prepare(self) -> None:
        if self.board is not None and self._agreement is None:
            self._agreement = Agreement(self.board, self.identity, say, self._clock)
        if self.stoppable and self.identity.world == 1:
            self._term.begin()
        if self.registered and self.identity.world == 1:
            interval_s = positive_number("SYNERGY_CHECKPOINT_INTERVAL_S")
            if interval_s and not self._saves.seconds:
                self.save_every(steps=self._saves.steps, seconds=interval_s)

    def drive(self, source: Iterator[tuple[Any, int]], ended: Callable[[], bool]) -> Iterator[Any]:
        """Hand out one pass over the data: the batches of ``source`` under the lease.

        ``source`` yields batches with their samples of all ranks; ``ended`` tells whether it is
        known to have no more. Call :meth:`begin_epoch` before. May raise LeaseEnded. The loop
        does nothing that can be left to one look every 10 ms: it is all that a batch costs.
        """
        clock, times, saves = self._clock, self._times, self._saves
        this_pass = self._pass = object()
        try:
            while True:
                waiting_since_s = clock()
                if self._attention or waiting_since_s >= self._look_at_s:
                    waiting_since_s = self._look(waiting_since_s, ended)
                try:
                    batch, global_samples = next(source)
                except StopIteration:
                    break
                times.waited_s += clock() - waiting_since_s
                self.step += 1
                self.samples += global_samples
                if self.step == saves.at_step:
                    self._attention = True
                yield batch
                if self._pass is not this_pass:
                    # The program began another pass meanwhile: this one no longer counts.
                    yield from (batch for batch, _ in source)
                    return
        finally:
            close = getattr(source, "close", None)
            if close is not None:
                close()
        self.move_to(self.epoch + 1)
        times.count(clock(), self.step)
        self._publish(clock())

    def add_wait(self, seconds: float) -> None:
        """The program waited that long for data within a step."""
        self._times.waited_s += seconds

    def is_registered(self, thing: object) -> bool:
        """``thing`` is one of the objects that are saved."""
        return self._state.holds(thing)

    def _look(self, now_s: float, ended: Callable[[], bool]) -> float:
        """Everything that is not done for every batch. Returns the time after it."""
        if self.board is not None:
            sequence = self.board.lease_sequence()
            if sequence != self.lease_sequence:
                self.lease = self.board.read_lease()
                self.lease_sequence = sequence
                self._stopping = self._stopping or self.lease.stop
                self._attention = True
        self._look_at_s = now_s + _LOOK_EVERY_S
        self.looked_at_s = now_s
        if not (self._attention or self._term.came) and now_s < self._report_at_s:
            return now_s
        self._times.count(now_s, self.step)
        self._publish(now_s)
        self._settle_rng()
        self._attention = False
        if ended():
            self._attention = True  # for the next pass: this one ends in the usual way
        else:
            self._act(now_s)
        # What was done here belongs neither to the program's steps nor to its waiting.
        now_s = self._clock()
        self._times.begin(now_s, self.step)
        self._look_at_s = now_s + _LOOK_EVERY_S
        return now_s

    def _act(self, now_s: float) -> None:
        """Stop or save, where that is wanted."""
        if self._term.came:
            self._term.came = False
            self._stop(EXIT_TERMINATED)
        if self._stopping:
            self._consider_stop()
        if self._saves.is_due(step=self.step, now_s=now_s):
            self._save_by_itself()
        self._attention = self._attention or self._stopping

    def _settle_rng(self) -> None:
        """Before the first batch after a resume: undo what was drawn since it."""
        if self._pending_rng is not None:
            self._pending_rng()
            self._pending_rng = None

    # -- stopping ----------------------------------------------------------------------------------

    def _consider_stop(self) -> None:
        if self._agreement is None or self._clock() < self._retry_at_s:
            return
        if not self.stoppable:
            self._stopping = False  # the launcher sends the user's own signal
            return
        report = self._report(self._clock())
        verdict = self._agreement.consider(report, self._times.period_s)
        if verdict is Verdict.STOP_HERE:
            self._stop(EXIT_STOPPED)
        elif self.board is not None and not self.board.read_lease().stop:
            self._stopping = False

    def _stop(self, code: int) -> None:
        """Save and raise LeaseEnded; if saving fails, say so and let training go on."""
        if self._by_hook:
            self._verdict = code
            return
        try:
            path = self.save()
        except CheckpointError as err:
            say(f"not stopped, training goes on: {err}")
            self._retry_at_s = self._clock() + _RETRY_SAVE_S
            return
        self.end(code, path)

    def end(self, code: int, path: Path) -> NoReturn:
        """Raise LeaseEnded with ``code``: the checkpoint ``path`` is published."""
        self._done = True
        self._publish(self._clock())
        if self.identity.rank == 0:
            say(f"stopped at step {self.step}, epoch {self.epoch}; checkpoint {path}")
        raise LeaseEnded(code)

    # -- frameworks with a loop of their own -------------------------------------------------------

    def count_by_hook(self, *, step: int) -> None:
        """From now on :meth:`step_done` counts the steps, of which ``step`` are done already.

        On all ranks, after ``torch.distributed.init_process_group``.
        """
        self._by_hook, self.step = True, step
        self._times.forget()
        self._prepare()

    def step_done(self, *, samples: int, epoch: int) -> int:
        """A step of ``samples`` samples of all ranks is used up: the status to end with, or 0.

        A status that is not 0 asks the program to save, on all ranks, and to call :meth:`end`.
        """
        self.step += 1
        self.samples += samples
        self.epoch = epoch
        now_s = self._clock()
        if self._attention or now_s >= self._look_at_s:
            self._look(now_s, lambda: False)
        verdict, self._verdict = self._verdict, 0
        return verdict

    def training_over(self) -> None:
        """The loop of a framework has ended, which asks for no batch after the last: report it."""
        now_s = self._clock()
        self._times.count(now_s, self.step)
        self._times.forget()
        self._publish(now_s)

    def hand_out(self, source: Iterator[tuple[Any, int]]) -> Iterator[Any]:
        """One pass over the data, whose steps :meth:`step_done` counts: only waits are measured."""
        clock, times = self._clock, self._times
        try:
            while True:
                waiting_since_s = clock()
                try:
                    batch, _samples = next(source)
                except StopIteration:
                    return
                times.waited_s += clock() - waiting_since_s
                yield batch
        finally:
            close = getattr(source, "close", None)
            if close is not None:
                close()

    def _save_by_itself(self) -> None:
        if not self.registered:
            return
        try:
            self.save()
        except CheckpointError as err:
            say(f"training goes on without this checkpoint: {err}")
        self._begin_schedule()

    def own_sigterm(self) -> None:
        """Leave out the handler that was there before ours: its owner must not act on SIGTERM."""
        self._term.leave_out_previous()

    # -- reports -----------------------------------------------------------------------------------

    def _report(self, now_s: float) -> Report:
        times = self._times
        return Report(
            step=self.step,
            samples=self.samples,
            epoch=self.epoch,
            step_s=times.step_s,
            wait_s=times.wait_s,
            checkpoint_done=self._done,
            heartbeat_monotonic_s=now_s if self.stoppable else 0.0,
            stepped_s=times.stepped_total_s,
            waited_s=times.waited_total_s,
        )

    def _publish(self, now_s: float) -> None:
        self._report_at_s = now_s + _REPORT_EVERY_S
        if self._agreement is not None:
            self._agreement.publish(self._report(now_s))


_session: Session | None = None


def current() -> Session:
    """This process's session, made from the environment at the first call."""
    global _session
    if _session is None or _session.pid != os.getpid():
        board = None
        path = os.environ.get("SYNERGY_BOARD")
        if path:
            try:
                board = Board.attach(Path(path))
            except LeaseError as err:
                say(f"running without a lease: {err}")
        directory = os.environ.get("SYNERGY_CHECKPOINT_DIR")
        _session = Session(board, Path(directory) if directory else None)
    return _session


def iterate(items: Any, *, batch_size: int = 1) -> Iterator[Any]:
    """Go through ``items`` once under the lease, for loops without a PyTorch loader.

    One item counts as one step of ``batch_size`` samples on each rank. A resumed pass skips the
    items that were seen already. May raise LeaseEnded between two items.
    """
    session = current()
    skip = session.epoch_batches if session.begin_epoch() else 0
    if skip:
        say(f"continuing epoch {session.epoch}: skipping {skip} items that were seen already")
    global_samples = batch_size * session.identity.world
    source = ((item, global_samples) for item in islice(items, skip, None))
    return session.drive(source, lambda: False)
