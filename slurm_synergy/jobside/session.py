"""One training process under a lease: its position, its checkpoints, its board.

All state of the job side that lives in the training process is in its :class:`Session`, which also
drives each pass over the data; loaders only fetch.

Stopping happens inside the call for the next batch, when the previous one has been used up: a
checkpoint is published and :class:`LeaseEnded` raised, a SystemExit with status 85, which the
controller requeues. SIGTERM ends a process that trains alone the same way with status 143: Slurm
sends it for a requeue, whose exit status it ignores, but also at the time limit and for scancel,
where "stopped by lease" would be untrue. A process that has registered nothing is not stopped by
us: its reports carry no heartbeat, which tells the launcher to send the user's own signal.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from slurm_synergy.errors import CheckpointError, LeaseError
from slurm_synergy.jobside.agreement import Agreement, Identity, Verdict, detect_identity
from slurm_synergy.jobside.board import Board, LeaseView, Report
from slurm_synergy.jobside.checkpoint import CheckpointStore, Progress
from slurm_synergy.jobside.rng import capture_rng, restore_rng, seed_rng
from slurm_synergy.jobside.sampler import derive_seed

__all__ = ["EXIT_STOPPED", "EXIT_TERMINATED", "LeaseEnded", "Session", "current", "iterate", "say"]

EXIT_STOPPED = 85
EXIT_TERMINATED = 128 + signal.SIGTERM

_LOOK_EVERY_S = 0.01
_REPORT_EVERY_S = 0.1
_MEAN_WEIGHT = 0.1
_RETRY_SAVE_S = 10.0
_NEVER_S = float("inf")


class LeaseEnded(SystemExit):
    """Raised from a request for the next batch: a checkpoint is published, the process must end.

    ``code`` is 85 after a stop by lease, 143 after SIGTERM. Under torchrun it is 0: torchrun
    would restart workers that end with any other status; the launcher reads the board instead.
    """

    def __init__(self, code: int) -> None:
        super().__init__(0 if "TORCHELASTIC_RUN_ID" in os.environ else code)


def say(text: str) -> None:
    """One line to the user, on stderr."""
    sys.stderr.write(f"slurm-synergy: {text}\n")
    sys.stderr.flush()


def _env_number(name: str) -> float | None:
    raw = os.environ.get(name, "")
    if not raw:
        return None
    try:
        value = float(raw)
    except ValueError:
        value = -1.0
    if value <= 0:
        raise LeaseError(f"{name} = {raw!r}: expected a positive number")
    return value


def _unwrapped(thing: Any) -> Any:
    """The module inside DistributedDataParallel: its keys do not depend on the wrapper."""
    parallel = sys.modules.get("torch.nn.parallel")
    if parallel is not None and isinstance(thing, parallel.DistributedDataParallel):
        return thing.module
    return thing


def _saves_files(thing: Any) -> bool:
    """It writes its part of a checkpoint itself, on all ranks together."""
    return callable(getattr(thing, "save_files", None)) and callable(
        getattr(thing, "load_files", None)
    )


def _is_sharded(thing: Any) -> bool:
    """Its ``state_dict`` is a collective operation, which one rank alone would wait in for ever."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = tuple(
        kind
        for name in ("FullyShardedDataParallel", "FSDPModule")
        if (kind := getattr(fsdp, name, None)) is not None
    )
    modules = getattr(thing, "modules", None)
    if not kinds or not callable(modules):
        return False
    return any(isinstance(module, kinds) for module in modules())


class Session:
    """The state of one training process. Use :func:`current` to get it."""

    # Slots: a batch costs half as much as with the attributes in a dictionary.
    __slots__ = (
        "_agreement",
        "_attention",
        "_by_hook",
        "_clock",
        "_done",
        "_identity",
        "_in_epoch",
        "_interval_at_s",
        "_interval_step",
        "_look_at_s",
        "_looked_for_checkpoints",
        "_next_save_s",
        "_objects",
        "_pass",
        "_pending_rng",
        "_previous_handler",
        "_report_at_s",
        "_resumed",
        "_retry_at_s",
        "_samples_before",
        "_save_at_step",
        "_save_every_s",
        "_save_every_steps",
        "_step_before",
        "_step_s",
        "_stepped_total_s",
        "_stopping",
        "_store",
        "_terminated",
        "_verdict",
        "_wait_s",
        "_waited_s",
        "_waited_total_s",
        "_warned_of_grace",
        "board",
        "checkpoint_dir",
        "epoch",
        "epoch_rng",
        "lease",
        "lease_sequence",
        "looked_at_s",
        "pid",
        "rank_extras",
        "restored_extras",
        "samples",
        "seed",
        "step",
        "user_state",
    )

    def __init__(
        self,
        board: Board | None,
        checkpoint_dir: Path | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pid = os.getpid()
        self.board, self.checkpoint_dir = board, checkpoint_dir
        self.user_state: dict[str, Any] = {}
        # What loaders of this rank save beside the generators (numbers, texts, lists, dicts), and
        # what the checkpoint that was loaded has of them.
        self.rank_extras: dict[str, Callable[[], Any]] = {}
        self.restored_extras: dict[str, Any] = {}
        self.step = self.samples = 0
        self.epoch = self._samples_before = self._step_before = 0
        self.seed = -1
        self._pass: object = None
        self.epoch_rng: dict[str, Any] | None = None
        self.lease = LeaseView()
        self._clock = clock
        self._objects: dict[str, Any] | None = None
        self._identity: Identity | None = None
        self._store: CheckpointStore | None = None
        self._agreement: Agreement | None = None
        self.lease_sequence = -1
        self._in_epoch = self._resumed = self._looked_for_checkpoints = False
        self._pending_rng: Callable[[], None] | None = None
        # What is looked at for every batch.
        self._attention = False
        self._look_at_s = self._report_at_s = self.looked_at_s = 0.0
        self._save_at_step = -1
        self._waited_s = 0.0
        # Means and sums, and the interval since their last update.
        self._step_s = self._wait_s = 0.0
        self._stepped_total_s = self._waited_total_s = 0.0
        self._interval_at_s, self._interval_step = 0.0, -1
        self._stopping = self._done = self._terminated = False
        # A framework has its own loop and checkpoints: it tells its steps, and is told when to end.
        self._by_hook, self._verdict = False, 0
        self._retry_at_s = 0.0
        self._previous_handler: Any = None
        self._save_every_steps = 0
        self._save_every_s = 0.0
        self._next_save_s = _NEVER_S
        self._warned_of_grace = False

    # -- who we are ------------------------------------------------------------------------------

    @property
    def identity(self) -> Identity:
        """Who this process is; fixed at the first use."""
        if self._identity is None:
            self._identity = detect_identity(self.board)
        return self._identity

    @property
    def registered(self) -> bool:
        """Something was registered, and there is a place to save it."""
        return self._objects is not None and self.checkpoint_dir is not None

    @property
    def by_hook(self) -> bool:
        """The steps are counted by :meth:`step_done`, not by the loader."""
        return self._by_hook

    @property
    def stoppable(self) -> bool:
        """This process saves and ends by itself when its lease ends."""
        return self._by_hook or self.registered

    @property
    def store(self) -> CheckpointStore:
        """The checkpoints of this job. Raises CheckpointError when no place is set."""
        if self.checkpoint_dir is None:
            raise CheckpointError(
                "there is no place for checkpoints: set SYNERGY_CHECKPOINT_DIR to a directory"
                " that all nodes share"
            )
        if self._store is None:
            who = self.identity
            directory = self.checkpoint_dir
            if who.independent:
                directory = directory / f"task-{who.task:05d}"
            self._store = CheckpointStore(
                directory,
                rank=who.rank,
                ranks=who.world,
                restart=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
                wait_s=_env_number("SYNERGY_CHECKPOINT_WAIT_S") or 120.0,
            )
        return self._store

    # -- the user's calls --------------------------------------------------------------------------

    def register(self, **objects: Any) -> None:
        """Add objects to what is saved. Raises CheckpointError for one without the two methods."""
        for name, thing in objects.items():
            if _saves_files(thing):
                continue
            for method in ("state_dict", "load_state_dict"):
                if not callable(getattr(thing, method, None)):
                    raise CheckpointError(
                        f"register({name}=...): a {type(thing).__name__} has no {method}();"
                        " register objects with state_dict() and load_state_dict()"
                    )
            if _is_sharded(thing):
                raise CheckpointError(
                    f"register({name}=...): the parameters of this {type(thing).__name__} are"
                    " sharded over the ranks; register slurm_synergy.jobside.integrations.fsdp"
                    ".ShardedState(model, optimizer) in place of both"
                )
        self._objects = {**(self._objects or {}), **objects}

    def save_every(self, *, steps: int = 0, seconds: float = 0.0) -> None:
        """Save by itself at batch boundaries; ``seconds`` only where one process trains alone."""
        if steps < 0 or seconds < 0:
            raise CheckpointError("save_every() takes positive numbers, or 0 for never")
        if seconds and self.identity.world > 1:
            raise CheckpointError(
                "save_every(seconds=...) cannot be used by several ranks, whose clocks differ;"
                " use save_every(steps=...) with the same number on all ranks"
            )
        self._save_every_steps, self._save_every_s = steps, seconds
        self._next_save_s = self._clock() + seconds if seconds else _NEVER_S
        self._save_at_step = self.step + steps - self.step % steps if steps else -1

    def resume(self) -> bool:
        """Load the newest intact checkpoint into the registered objects; False if there is none.

        Raises CheckpointError when none of the existing ones is intact, or when one does not
        belong to what is registered.
        """
        if self._objects is None:
            raise CheckpointError("resume() has nothing to load into: call register() first")
        self._looked_for_checkpoints = True
        if self.checkpoint_dir is None:
            return False
        found = self.store.load_newest(say)
        self.store.clear_left_overs()
        if found is None:
            return False
        held = found.objects.keys() | found.parts.keys()
        missing = sorted(self._objects.keys() - held)
        if missing:
            raise CheckpointError(
                f"{found.path} has no state of {', '.join(missing)} (it has"
                f" {', '.join(sorted(held)) or 'none'}); register the same objects as"
                " the run that wrote it, or move the directory away"
            )
        for name, thing in self._objects.items():
            try:
                if name in found.parts:
                    thing.load_files(found.parts[name])
                else:
                    _unwrapped(thing).load_state_dict(found.objects[name])
            except CheckpointError:
                raise
            except Exception as err:  # whatever the object raises
                raise CheckpointError(
                    f"{found.path}: the state of {name!r} does not fit: {err}"
                ) from err
        self.user_state.clear()
        self.user_state.update(found.user_state)
        self._compare_with_grace(found.took_s)
        self._take_position(found.progress, found.rank_state)
        return True

    def _take_position(self, progress: Progress, rank_state: Any) -> None:
        self.step, self.samples, self.seed = progress.step, progress.samples, progress.seed
        self.epoch = progress.epoch
        self._samples_before = progress.samples - progress.epoch_samples
        self._step_before = progress.step - progress.epoch_batches
        self._resumed, self._in_epoch = True, False
        self.save_every(steps=self._save_every_steps, seconds=self._save_every_s)
        self._attention = True
        known = ("now", "epoch_start")
        extras = {name: kept for name, kept in (rank_state or {}).items() if name not in known}
        self.restored_extras = extras
        if rank_state is None:
            fresh = derive_seed(progress.seed, self.identity.rank, progress.step)
            self._pending_rng = lambda: seed_rng(fresh)
            self.epoch_rng = None
        else:
            self._pending_rng = lambda: restore_rng(rank_state["now"])
            self.epoch_rng = rank_state.get("epoch_start")
        self._pending_rng()

    def epochs(self, total: int) -> Iterator[int]:
        """The numbers of the epochs still to run, from the resumed one to ``total - 1``."""
        for epoch in range(self.epoch, total):
            if self.epoch != epoch or self._in_epoch:
                self._move_to(epoch)
            yield epoch

    def save(self) -> Path:
        """Publish a checkpoint of this moment; on all ranks, after the last batch was used up.

        Raises CheckpointError when that failed; the previous checkpoint stays.
        """
        if self._objects is None:
            raise CheckpointError("save() has nothing to save: call register() first")
        self._refuse_to_forget()
        self._settle_rng()
        rank_state: dict[str, Any] = {"now": capture_rng()}
        if self.epoch_rng is not None:
            rank_state["epoch_start"] = self.epoch_rng
        for name, capture in self.rank_extras.items():
            rank_state[name] = capture()
        for name, kept in self.restored_extras.items():
            rank_state[name] = kept  # nobody has taken it up yet
        progress = Progress(
            step=self.step,
            samples=self.samples,
            epoch=self.epoch,
            epoch_samples=self.epoch_samples,
            epoch_batches=self.epoch_batches,
            seed=self.seed,
        )
        parts = {name: thing for name, thing in self._objects.items() if _saves_files(thing)}
        plain = {name: thing for name, thing in self._objects.items() if name not in parts}
        began_s = self._clock()
        path = self.store.save(
            progress,
            lambda: {name: _unwrapped(thing).state_dict() for name, thing in plain.items()},
            self.user_state,
            rank_state,
            {name: thing.save_files for name, thing in parts.items()},
        )
        self._compare_with_grace(self._clock() - began_s)
        return path

    def _compare_with_grace(self, took_s: float) -> None:
        """Say once that checkpoints take longer than a stop would wait for one."""
        grace_s = _env_number("SYNERGY_GRACE_S")
        if grace_s is None or took_s < grace_s or self._warned_of_grace:
            return
        self._warned_of_grace = True
        if self.identity.rank == 0:
            wanted_s = math.ceil(2 * took_s)
            say(
                f"a checkpoint takes {took_s:.1f} s, but a stop waits only {grace_s:g} s for one:"
                " work since the last checkpoint would be repeated; ask for more time with the"
                f" hint grace_s={wanted_s}, or save less"
            )

    def _refuse_to_forget(self) -> None:
        """Starting anew beside existing checkpoints would lose the work in them."""
        if not self._looked_for_checkpoints and self.registered:
            self._looked_for_checkpoints = True
            if self.store.exists():
                raise CheckpointError(
                    f"{self.store.directory} holds checkpoints, but resume() was not called:"
                    " call it after register(), or move the directory away to start anew"
                )

    # -- the loop over batches ---------------------------------------------------------------------

    @property
    def epoch_samples(self) -> int:
        """Samples of all ranks since the epoch began."""
        return self.samples - self._samples_before

    @property
    def epoch_batches(self) -> int:
        """Batches since the epoch began."""
        return self.step - self._step_before

    def begin_epoch(self) -> bool:
        """A pass over the data begins; True when it continues one that a checkpoint interrupted."""
        if self._identity is not None and detect_identity(self.board) != self._identity:
            raise LeaseError(
                "the number of ranks changed after resume() or save_every():"
                " call torch.distributed.init_process_group() before them"
            )
        self._refuse_to_forget()
        self._prepare()
        continued = self._resumed
        if not continued:
            self._move_to(self.epoch + self._in_epoch)
        self._resumed, self._in_epoch = False, True
        self._interval_step = -1
        self._look_at_s = self._report_at_s = 0.0
        return continued

    def _move_to(self, epoch: int) -> None:
        self.epoch, self._in_epoch, self._resumed = epoch, False, False
        self._samples_before, self._step_before = self.samples, self.step
        self.epoch_rng = None

    def is_in_epoch(self, epoch: int) -> bool:
        """A pass over that epoch's data goes on."""
        return self._in_epoch and self.epoch == epoch

    def restart_epoch(self) -> None:
        """The position inside the epoch that a checkpoint named cannot be taken up again."""
        self._samples_before, self._step_before = self.samples, self.step

    def _prepare(self) -> None:
        if self.board is not None and self._agreement is None:
            self._agreement = Agreement(self.board, self.identity, say, self._clock)
        if self.stoppable and self.identity.world == 1:
            self._watch_sigterm()
        if self.registered and self.identity.world == 1:
            interval_s = _env_number("SYNERGY_CHECKPOINT_INTERVAL_S")
            if interval_s and not self._save_every_s:
                self.save_every(steps=self._save_every_steps, seconds=interval_s)

    def drive(self, source: Iterator[tuple[Any, int]], ended: Callable[[], bool]) -> Iterator[Any]:
        """Hand out one pass over the data: the batches of ``source`` under the lease.

        ``source`` yields batches with their samples of all ranks; ``ended`` tells whether it is
        known to have no more. Call :meth:`begin_epoch` before. May raise LeaseEnded. The loop
        does nothing that can be left to one look every 10 ms: it is all that a batch costs.
        """
        clock = self._clock
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
                self._waited_s += clock() - waiting_since_s
                self.step += 1
                self.samples += global_samples
                if self.step == self._save_at_step:
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
        self._move_to(self.epoch + 1)
        self._update_means(clock())
        self._publish(clock())

    def add_wait(self, seconds: float) -> None:
        """The program waited that long for data within a step."""
        self._waited_s += seconds

    def is_registered(self, thing: object) -> bool:
        """``thing`` is one of the objects that are saved."""
        return any(one is thing for one in (self._objects or {}).values())

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
        if not self._attention and now_s < self._report_at_s:
            return now_s
        self._update_means(now_s)
        self._publish(now_s)
        self._settle_rng()
        self._attention = False
        if ended():
            self._attention = True  # for the next pass: this one ends in the usual way
        else:
            self._act(now_s)
        # What was done here belongs neither to the program's steps nor to its waiting.
        now_s = self._clock()
        self._begin_interval(now_s)
        self._look_at_s = now_s + _LOOK_EVERY_S
        return now_s

    def _act(self, now_s: float) -> None:
        """Stop or save, where that is wanted."""
        if self._terminated:
            self._terminated = False
            self._stop(EXIT_TERMINATED)
        if self._stopping:
            self._consider_stop()
        if self.step == self._save_at_step or now_s >= self._next_save_s:
            self._save_by_itself()
        self._attention = self._attention or self._stopping

    def _begin_interval(self, now_s: float) -> None:
        self._interval_at_s, self._interval_step, self._waited_s = now_s, self.step, 0.0

    def _update_means(self, now_s: float) -> None:
        steps = self.step - self._interval_step
        if self._interval_step < 0 or steps == 0:
            return
        wait_s = self._waited_s / steps
        step_s = max((now_s - self._interval_at_s) / steps - wait_s, 0.0)
        self._stepped_total_s += step_s * steps
        self._waited_total_s += self._waited_s
        if self._step_s == self._wait_s == 0.0:
            self._step_s, self._wait_s = step_s, wait_s
            return
        weight = 1.0 - (1.0 - _MEAN_WEIGHT) ** steps
        self._step_s += (step_s - self._step_s) * weight
        self._wait_s += (wait_s - self._wait_s) * weight

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
        verdict = self._agreement.consider(report, self._step_s + self._wait_s)
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
        self._by_hook, self.step, self._interval_step = True, step, -1
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

    def hand_out(self, source: Iterator[tuple[Any, int]]) -> Iterator[Any]:
        """One pass over the data, whose steps :meth:`step_done` counts: only waits are measured."""
        clock = self._clock
        try:
            while True:
                waiting_since_s = clock()
                try:
                    batch, _samples = next(source)
                except StopIteration:
                    return
                self._waited_s += clock() - waiting_since_s
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
        self.save_every(steps=self._save_every_steps, seconds=self._save_every_s)

    def _watch_sigterm(self) -> None:
        if self._previous_handler is None and threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, self._on_sigterm) or 0

    def own_sigterm(self) -> None:
        """Leave out the handler that was there before ours: its owner must not act on SIGTERM."""
        if self._previous_handler is not None:
            self._previous_handler = signal.SIG_DFL

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.pid:
            # A forked child inherited this handler and has nothing to save: let it end.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._terminated = self._attention = True
        if callable(self._previous_handler):
            self._previous_handler(number, frame)

    # -- reports -----------------------------------------------------------------------------------

    def _report(self, now_s: float) -> Report:
        return Report(
            step=self.step,
            samples=self.samples,
            epoch=self.epoch,
            step_s=self._step_s,
            wait_s=self._wait_s,
            checkpoint_done=self._done,
            heartbeat_monotonic_s=now_s if self.stoppable else 0.0,
            stepped_s=self._stepped_total_s,
            waited_s=self._waited_total_s,
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
