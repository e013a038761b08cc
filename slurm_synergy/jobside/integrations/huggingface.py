"""Hugging Face transformers: one callback, and the Trainer stops with its lease.

::

    lease = LeaseCallback()
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[lease])
    trainer.train(resume_from_checkpoint=lease.checkpoint(args))

The checkpoints are the Trainer's own, in its ``output_dir``, and so is the order of samples; the
callback adds sums of all their files, so that one that was cut short is never loaded. A stop is
between two steps of the optimizer, on all ranks at the same one. Loader workers follow the lease as
in any program.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.utils.data
from transformers import TrainerCallback

from slurm_synergy.errors import CheckpointError
from slurm_synergy.jobside.checkpoint_files import (
    check_sums,
    sums_of,
    sync_dir,
    sync_tree,
    write_file,
)
from slurm_synergy.jobside.session import current, say
from slurm_synergy.jobside.torch_loader import install

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["LeaseCallback"]

_MANIFEST = "synergy-manifest.json"
_VERSION = 1
# The last file of a checkpoint that the Trainer writes.
_STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")


class LeaseCallback(TrainerCallback):  # type: ignore[misc]
    """Stops a Trainer with the lease, and finds the checkpoint to continue from."""

    def __init__(self) -> None:
        install(torch.utils.data)
        self._code = 0

    def checkpoint(self, args: TrainingArguments) -> str | None:
        """The newest intact checkpoint in ``args.output_dir``; None when there is none.

        One without sums (made without this callback) is taken when the Trainer finished it. Raises
        CheckpointError when there are some with sums and none is intact.
        """
        problems = []
        for path in _checkpoints(Path(args.output_dir)):
            if not (path / _MANIFEST).exists():
                if (path / _STATE).exists():
                    return str(path)
                continue  # cut short while it was written
            try:
                manifest = json.loads((path / _MANIFEST).read_bytes())
                check_sums(path, manifest["files"])
            except (
                CheckpointError,
                OSError,
                ValueError,
                KeyError,
                TypeError,
                AttributeError,
            ) as err:
                problems.append(f"{path}: {err}")
                say(f"checkpoint {path} is damaged and skipped: {err}")
                continue
            return str(path)
        if problems:
            raise CheckpointError(
                f"none of {len(problems)} checkpoints is intact ({problems[0]}); restore a copy, or"
                " move the directory away to start from the beginning"
            )
        return None

    # -- called by the Trainer -------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_more: Any
    ) -> None:
        """Count from the step at which this run begins. Raises CheckpointError for bad settings."""
        if args.save_only_model:
            raise CheckpointError(
                "save_only_model=True saves nothing to continue from: leave it out with"
                " LeaseCallback"
            )
        if args.ignore_data_skip:
            raise CheckpointError(
                "ignore_data_skip=True would repeat samples after a stop: leave it out with"
                " LeaseCallback"
            )
        current().count_by_hook(step=state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_more: Any
    ) -> TrainerControl:
        """At a stop, ask the Trainer for a checkpoint; :meth:`on_save` then ends the process."""
        per_rank = (state.train_batch_size or 1) * args.gradient_accumulation_steps
        code = current().step_done(samples=per_rank * args.world_size, epoch=int(state.epoch or 0))
        if code and state.global_step < state.max_steps:  # else training is over in any case
            self._code = code
            control.should_save = True
        return control

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_more: Any
    ) -> None:
        """Report the last step."""
        current().training_over()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_more: Any
    ) -> None:
        """Add the sums, and end the process where that is what the checkpoint was for."""
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        _barrier()  # each rank has its own files in it
        if args.should_save:
            _add_sums(path)
        _barrier()
        if self._code:
            current().end(self._code, path)


def _checkpoints(directory: Path) -> list[Path]:
    """Newest first."""
    if not directory.is_dir():
        return []
    found = [
        (int(match[1]), path)
        for path in directory.iterdir()
        if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    ]
    return [path for _step, path in sorted(found, reverse=True)]


def _add_sums(path: Path) -> None:
    sync_tree(path)
    manifest = {"version": _VERSION, "files": sums_of(path, leave_out=_MANIFEST)}
    text = json.dumps(manifest, indent=1).encode()
    write_file(path / _MANIFEST, lambda file: file.write(text))
    sync_dir(path)


def _barrier() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
