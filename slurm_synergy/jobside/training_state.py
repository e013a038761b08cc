"""What a training process has registered, and the checkpoints that hold it."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurm_synergy.errors import CheckpointError, LeaseError
from slurm_synergy.jobside.agreement import Membership
from slurm_synergy.jobside.checkpoint import Checkpoint, CheckpointStore, Progress
from slurm_synergy.jobside.ending import say

__all__ = ["TrainingState", "positive_number"]


def positive_number(name: str) -> float | None:
    """The environment variable ``name``; None where it is unset. Raises LeaseError otherwise."""
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


def _refuse_what_cannot_be_saved(name: str, thing: Any) -> None:
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


class TrainingState:
    """The registered objects, saved to and loaded from the checkpoints below ``directory``.

    ``who`` is asked at the first use of the checkpoints: ranks may meet after the objects were
    registered. ``directory`` None: there is no place, and nothing can be saved.
    """

    __slots__ = ("_clock", "_looked", "_objects", "_store", "_warned", "_who", "directory")

    def __init__(
        self,
        directory: Path | None,
        who: Membership,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self._who, self._clock = who, clock
        self._objects: dict[str, Any] | None = None
        self._store: CheckpointStore | None = None
        self._looked = self._warned = False

    @property
    def registered(self) -> bool:
        """Something was registered, and there is a place to save it."""
        return self._objects is not None and self.directory is not None

    def holds(self, thing: object) -> bool:
        """``thing`` is one of the objects that are saved."""
        return any(one is thing for one in (self._objects or {}).values())

    def add(self, objects: Mapping[str, Any]) -> None:
        """Add objects to what is saved. Raises CheckpointError for one without the two methods."""
        for name, thing in objects.items():
            if not _saves_files(thing):
                _refuse_what_cannot_be_saved(name, thing)
        self._objects = {**(self._objects or {}), **objects}

    @property
    def store(self) -> CheckpointStore:
        """The checkpoints of this job. Raises CheckpointError when no place is set."""
        if self.directory is None:
            raise CheckpointError(
                "there is no place for checkpoints: set SYNERGY_CHECKPOINT_DIR to a directory"
                " that all nodes share"
            )
        if self._store is None:
            who = self._who.identity
            directory = self.directory
            if who.independent:
                directory = directory / f"task-{who.task:05d}"
            self._store = CheckpointStore(
                directory,
                rank=who.rank,
                ranks=who.world,
                restart=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
                wait_s=positive_number("SYNERGY_CHECKPOINT_WAIT_S") or 120.0,
            )
        return self._store

    # -- loading ---------------------------------------------------------------------------------

    def load(self) -> Checkpoint | None:
        """Load the newest intact checkpoint into the objects and return it; None: there is none.

        Raises CheckpointError when none of the existing ones is intact, or when one does not
        belong to what is registered.
        """
        if self._objects is None:
            raise CheckpointError("resume() has nothing to load into: call register() first")
        self._looked = True
        if self.directory is None:
            return None
        found = self.store.load_newest(say)
        self.store.clear_left_overs()
        if found is None:
            return None
        held = found.objects.keys() | found.parts.keys()
        missing = sorted(self._objects.keys() - held)
        if missing:
            raise CheckpointError(
                f"{found.path} has no state of {', '.join(missing)} (it has"
                f" {', '.join(sorted(held)) or 'none'}); register the same objects as"
                " the run that wrote it, or move the directory away"
            )
        for name, thing in self._objects.items():
            self._load_one(found, name, thing)
        self._compare_with_grace(found.took_s)
        return found

    @staticmethod
    def _load_one(found: Checkpoint, name: str, thing: Any) -> None:
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

    def refuse_to_forget(self) -> None:
        """Starting anew beside existing checkpoints would lose the work in them."""
        if not self._looked and self.registered:
            self._looked = True
            if self.store.exists():
                raise CheckpointError(
                    f"{self.store.directory} holds checkpoints, but resume() was not called:"
                    " call it after register(), or move the directory away to start anew"
                )

    # -- saving ----------------------------------------------------------------------------------

    def save(
        self,
        progress: Progress,
        user_state: Mapping[str, Any],
        rank_state: Callable[[], Mapping[str, Any]],
    ) -> Path:
        """Publish a checkpoint; on all ranks. ``rank_state`` is what this rank alone has.

        Raises CheckpointError when that failed; the previous checkpoint stays.
        """
        if self._objects is None:
            raise CheckpointError("save() has nothing to save: call register() first")
        self.refuse_to_forget()
        parts = {name: thing for name, thing in self._objects.items() if _saves_files(thing)}
        plain = {name: thing for name, thing in self._objects.items() if name not in parts}
        began_s = self._clock()
        path = self.store.save(
            progress,
            lambda: {name: _unwrapped(thing).state_dict() for name, thing in plain.items()},
            user_state,
            rank_state(),
            {name: thing.save_files for name, thing in parts.items()},
        )
        self._compare_with_grace(self._clock() - began_s)
        return path

    def _compare_with_grace(self, took_s: float) -> None:
        """Say once that checkpoints take longer than a stop would wait for one."""
        grace_s = positive_number("SYNERGY_GRACE_S")
        if grace_s is None or took_s < grace_s or self._warned:
            return
        self._warned = True
        if self._who.identity.rank == 0:
            wanted_s = math.ceil(2 * took_s)
            say(
                f"a checkpoint takes {took_s:.1f} s, but a stop waits only {grace_s:g} s for one:"
                " work since the last checkpoint would be repeated; ask for more time with the"
                f" hint grace_s={wanted_s}, or save less"
            )
