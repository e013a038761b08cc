"""What the training data come from in a program that uses DALI, and where it stands.

A feed is an iterator of DALI's PyTorch plugin, or one plain pipeline. It fetches batches, tells its
position as plain values, and goes back to such a position:

* with DALI's own checkpoints, where the program built its pipelines with them and they hold all;
* otherwise by what was called on it since it was made: the same calls are made again. That gives
  the same samples as DALI draws nothing but what follows from the seed, and takes as long as it
  took to make these batches.
"""

from __future__ import annotations

import base64
import inspect
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from slurm_synergy.errors import CheckpointError
from slurm_synergy.jobside.dali_pipeline import (
    can_rebuild,
    captures_everything,
    rebuild,
    threads_of,
)
from slurm_synergy.jobside.session import Session, say

__all__ = ["Feed", "IteratorFeed", "PipelineFeed"]


class _Calls:
    """The requests for batches since the beginning, in runs between two resets."""

    __slots__ = ("runs", "since")

    def __init__(self) -> None:
        # [requests, how many such runs in a row]: epochs are alike.
        self.runs: list[list[int]] = []
        self.since = 0

    def reset(self) -> None:
        if self.runs and self.runs[-1][0] == self.since:
            self.runs[-1][1] += 1
        else:
            self.runs.append([self.since, 1])
        self.since = 0

    @property
    def total(self) -> int:
        return sum(requests * times for requests, times in self.runs) + self.since


class Feed(ABC):
    """Common to both kinds. ``busy`` tells that calls on ``owner`` are DALI's or ours.

    It refers to its owner weakly, and to nothing else of DALI. A cycle would leave the end of a
    pipeline to the garbage collector, which may run in a forked child, and crash it.
    """

    kind = ""

    def __init__(self, owner: Any) -> None:
        self._owner = weakref.ref(owner)
        self.busy = False
        self.driver: Any = None
        self.epoch = -1
        self._calls = _Calls()

    @property
    def owner(self) -> Any:
        """The iterator or pipeline that this belongs to."""
        owner = self._owner()
        assert owner is not None  # whoever calls holds it
        return owner

    # What the kinds differ in.

    @property
    @abstractmethod
    def pipes(self) -> list[Any]:
        """The pipelines."""

    @abstractmethod
    def _fetch(self) -> Any: ...

    @abstractmethod
    def _reset(self) -> None: ...

    @abstractmethod
    def _checkpoints(self) -> list[bytes]: ...

    @abstractmethod
    def _renew(self) -> None:
        """The pipelines are as before they were built: begin to use them."""

    @abstractmethod
    def samples(self, batch: Any) -> int:
        """Samples in a batch of this process."""

    @abstractmethod
    def at_end(self) -> bool:
        """It is known that the epoch has no more batches."""

    # -- calls on it -----------------------------------------------------------------------------

    def fetch(self) -> Any:
        """The next batch. Raises StopIteration at the end of an epoch."""
        self._calls.since += 1
        return self.quietly(self._fetch)

    def note_reset(self) -> None:
        """The program itself asked for a reset."""
        if not self.busy:
            self._calls.reset()

    def quietly(self, step: Callable[[], Any]) -> Any:
        """Do something on the object that is neither a step nor the program's own call."""
        before, self.busy = self.busy, True
        try:
            return step()
        finally:
            self.busy = before

    # -- position --------------------------------------------------------------------------------

    def state(self, ranks: int) -> dict[str, Any]:
        """The position after the last batch that was fetched, as JSON values."""
        found: dict[str, Any] = {
            "kind": self.kind,
            "ranks": ranks,
            "ended": self.at_end(),
            "seeds": self._seeds(),
        }
        if all(captures_everything(pipe) and can_rebuild(pipe) for pipe in self.pipes):
            try:
                states = self.quietly(self._checkpoints)
            except RuntimeError as err:
                raise CheckpointError(
                    f"DALI cannot save the state of its pipelines: {err}"
                ) from err
            found["checkpoints"] = [base64.b64encode(each).decode() for each in states]
        else:
            found["runs"] = [list(run) for run in self._calls.runs]
            found["since"] = self._calls.since
        return found

    def _seeds(self) -> list[int | None]:
        return [pipe.__dict__.get("_seed") for pipe in self.pipes]

    def restore(self, session: Session, state: dict[str, Any]) -> None:
        """Go to a position that :meth:`state` told. Raises CheckpointError where it cannot."""
        if state["kind"] != self.kind or len(state["seeds"]) != len(self.pipes):
            raise CheckpointError(
                f"the checkpoint is of {len(state['seeds'])} DALI pipeline(s) used as"
                f" {state['kind']}, and the program trains with {len(self.pipes)} as {self.kind};"
                " use the same ones as the run that wrote it"
            )
        if "checkpoints" in state:
            if not all(captures_everything(pipe) for pipe in self.pipes):
                raise CheckpointError(
                    "the checkpoint holds the state of DALI pipelines built with"
                    " enable_checkpointing=True: build them so again"
                )
            states = [base64.b64decode(each) for each in state["checkpoints"]]
            self._build_at(states, session, state["seeds"])
        else:
            self._replay(session, state)
        if session.epoch_batches == 0 and state["ended"]:
            self.quietly(self._reset)
            self._calls.reset()

    def _build_at(self, checkpoints: list[bytes], session: Session, seeds: list[Any]) -> None:
        if not all(can_rebuild(pipe) for pipe in self.pipes):
            raise CheckpointError(
                "this release of DALI, or a pipeline with forked Python workers beside a GPU,"
                " cannot be taken back to a checkpoint in place; use py_start_method='spawn'"
            )
        for pipe, checkpoint, seed in zip(self.pipes, checkpoints, seeds, strict=True):
            rebuild(pipe, session, checkpoint=checkpoint, seed=seed)
        self.quietly(self._renew)

    def _replay(self, session: Session, state: dict[str, Any]) -> None:
        if all(can_rebuild(pipe) for pipe in self.pipes):
            for pipe, seed in zip(self.pipes, state["seeds"], strict=True):
                rebuild(pipe, session, seed=seed)
            self.quietly(self._renew)
            self._calls = _Calls()
        elif self._calls.total:
            raise CheckpointError(
                "the DALI pipeline was used before the checkpoint was loaded, and its source"
                " cannot be asked again: call resume() before the first batch"
            )
        elif state["seeds"] != self._seeds():
            say("the DALI pipeline has another seed than before: augmentation will differ")
        wanted = _Calls()
        wanted.runs, wanted.since = [list(run) for run in state["runs"]], state["since"]
        if wanted.total:
            say(
                f"continuing epoch {session.epoch}: {wanted.total} requests for DALI's batches are"
                " repeated; pipelines with enable_checkpointing=True continue at once"
            )
        self.quietly(lambda: self._call_again(wanted))
        self._calls = wanted

    def _call_again(self, wanted: _Calls) -> None:
        for requests, times in wanted.runs:
            for _ in range(times):
                self._request(requests)
                self._reset()
        self._request(wanted.since)

    def _request(self, times: int) -> None:
        for _ in range(times):
            try:
                self._fetch()
            except StopIteration:
                continue

    # -- threads ---------------------------------------------------------------------------------

    def follow(self, session: Session, *, factor: float = 1.0) -> None:
        """Build the pipelines again with the lease's threads, if these are off by more than that.

        Only where DALI's checkpoints make that exact; otherwise the next start takes them over.
        """
        off = False
        for pipe in self.pipes:
            now, wanted = pipe.__dict__["_num_threads"], threads_of(pipe, session)
            off = off or (now != wanted and max(now, wanted) > factor * min(now, wanted))
        if not off:
            return
        if all(captures_everything(pipe) and can_rebuild(pipe) for pipe in self.pipes):
            self._build_at(self.quietly(self._checkpoints), session, self._seeds())


class IteratorFeed(Feed):
    """An iterator of DALI's PyTorch plugin, made by ``make(iterator, **arguments)``."""

    kind = "iterator"

    def __init__(
        self,
        iterator: Any,
        arguments: dict[str, Any],
        make: Callable[..., None],
        fetch: Callable[[Any], Any],
        reset: Callable[[Any], None],
    ) -> None:
        super().__init__(iterator)
        self._make, self._plain_fetch, self._plain_reset = make, fetch, reset
        self._arguments = {name: arguments[name] for name in arguments if name != "pipelines"}
        if "prepare_first_batch" in inspect.signature(make).parameters:
            # The end of an epoch, where there is no first batch, is a position as well.
            self._arguments["prepare_first_batch"] = False

    @property
    def pipes(self) -> list[Any]:
        return list(self.owner._pipes)

    def _fetch(self) -> Any:
        return self._plain_fetch(self.owner)

    def _reset(self) -> None:
        self._plain_reset(self.owner)

    def _checkpoints(self) -> list[bytes]:
        return list(self.owner.checkpoints())

    def _renew(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what there was to say was said the first time
            self._make(self.owner, pipelines=self.pipes, **self._arguments)

    def samples(self, batch: Any) -> int:
        return sum(len(next(iter(part.values()))) for part in batch)

    def at_end(self) -> bool:
        iterator = self.owner
        if getattr(iterator, "_first_batch", None) is not None:
            return False
        if iterator._size < 0:
            return all(pipe._last_iter and pipe.empty() for pipe in self.pipes)
        if iterator._counter >= iterator._size:
            return True
        # Only with the policy that drops a batch can there be one that is not to be seen.
        return bool(iterator._advance_and_check_drop_last(dry_run=True, end_iteration=False))


class PipelineFeed(Feed):
    """A plain pipeline that is run by ``run(pipe, ...)``."""

    kind = "pipeline"

    def __init__(self, pipe: Any, run: Callable[..., Any], reset: Callable[[Any], None]) -> None:
        super().__init__(pipe)
        self._run, self._plain_reset = run, reset
        self.run_arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def _fetch(self) -> Any:
        positional, named = self.run_arguments
        return self._run(self.owner, *positional, **named)

    @property
    def pipes(self) -> list[Any]:
        return [self.owner]

    def _reset(self) -> None:
        self._plain_reset(self.owner)

    def _checkpoints(self) -> list[bytes]:
        return [self.owner.checkpoint()]

    def _renew(self) -> None:
        self.owner.build()

    def samples(self, batch: Any) -> int:
        return len(batch[0]) if len(batch) else self.owner.max_batch_size

    def at_end(self) -> bool:
        return bool(self.owner._last_iter and self.owner.empty())
