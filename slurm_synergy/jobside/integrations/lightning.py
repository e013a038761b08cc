"""Lightning: one callback, and the Trainer stops with its lease and continues at the exact batch.

::

    lease = LeaseCallback()
    trainer = Trainer(max_epochs=90, callbacks=[lease])
    trainer.fit(model, data, ckpt_path=lease.ckpt_path())

The training loader is followed as in any program (its order depends on seed and epoch alone, its
workers on the lease), and a stop is between two batches. The checkpoint is Lightning's own, with
loops, optimizers and callbacks, inside one of ours, which adds the position in the data and the
random number generators. Works with one training DataLoader that has a length.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import slurm_synergy.jobside as synergy
from slurm_synergy.errors import CheckpointError
from slurm_synergy.jobside import torch_loader
from slurm_synergy.jobside.checkpoint import CheckpointStore
from slurm_synergy.jobside.session import current, say

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback

__all__ = ["LeaseCallback"]

_PART = "lightning"
_FILE = "trainer.ckpt"
_GRADIENTS = "lightning_gradients"


class LeaseCallback(Callback):  # type: ignore[misc]
    """Stops and continues a Trainer with the lease. Give the same object to both calls above."""

    def ckpt_path(self) -> str | None:
        """Lightning's file in the newest intact checkpoint of this job; None when there is none.

        Raises CheckpointError when there are checkpoints and none is intact.
        """
        directory = current().checkpoint_dir
        if directory is None:
            return None
        # Before the ranks know each other, so without the session's own store.
        found = CheckpointStore(directory).load_newest(say)
        if found is None:
            return None
        if _PART not in found.parts:
            raise CheckpointError(
                f"{found.path} was not written by a Lightning Trainer with this callback;"
                " move the directory away to start anew"
            )
        return str(found.parts[_PART] / _FILE)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Register the Trainer and take up the position of the checkpoint that it will load."""
        if stage != "fit":
            return
        self._files = _TrainerFiles(trainer)
        synergy.register(**{_PART: self._files})
        session = current()
        session.rank_extras[_GRADIENTS] = lambda: _gradients(trainer, pl_module)
        if session.checkpoint_dir is None:
            say("Lightning will not be stopped with its lease: SYNERGY_CHECKPOINT_DIR is not set")
        else:
            synergy.resume()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse loaders that could not be continued exactly; restore half an accumulation."""
        session = current()
        if not session.registered:
            return
        self._files.check_given()
        session.own_sigterm()  # Lightning's handler would end training before we could save
        loader = trainer.train_dataloader
        if torch_loader.primary_loader() is not loader or not _has_length(trainer):
            raise CheckpointError(
                "LeaseCallback continues one training DataLoader that has a length and shuffles, or"
                f" that synergy.primary(loader) has named, and this Trainer has {loader!r};"
                " change the loader, or train without the callback"
            )
        saved = session.restored_extras.pop(_GRADIENTS, [])
        parameters = [each for each in pl_module.parameters() if each.requires_grad]
        if len(saved) == len(parameters):
            for parameter, gradient in zip(parameters, saved, strict=True):
                if gradient is not None and gradient.shape == parameter.shape:
                    parameter.grad = gradient.to(parameter.device)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the last step: Lightning asks for no batch after it."""
        current().training_over()


class _TrainerFiles:
    """Lightning's own checkpoint as a part of ours."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._wanted: Path | None = None

    def save_files(self, directory: Path) -> None:
        self._trainer.save_checkpoint(directory / _FILE)

    def load_files(self, directory: Path) -> None:
        self._wanted = directory / _FILE  # which the Trainer loads itself

    def check_given(self) -> None:
        """The Trainer was given the checkpoint whose position we have taken up."""
        given = self._trainer.ckpt_path
        if self._wanted is None:
            if given is not None:
                say(f"the order of samples begins anew: {given} is not of this job")
        elif given is None or Path(given).resolve() != self._wanted.resolve():
            raise CheckpointError(
                f"the Trainer continues from {given}, but this job's checkpoint is {self._wanted}:"
                " call trainer.fit(..., ckpt_path=lease.ckpt_path())"
            )


def _has_length(trainer: Trainer) -> bool:
    return bool(trainer.num_training_batches != float("inf"))


def _gradients(trainer: Trainer, module: LightningModule) -> list[Any]:
    """What has been accumulated for the next step of the optimizer; empty between two steps."""
    batches = trainer.fit_loop.batch_idx + 1
    if batches % trainer.accumulate_grad_batches == 0:
        return []
    return [
        None if each.grad is None else each.grad.detach().cpu()
        for each in module.parameters()
        if each.requires_grad
    ]
