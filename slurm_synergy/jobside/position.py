"""Where a training stands in its data: steps, samples, epoch, and where the epoch began."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slurm_synergy.jobside.checkpoint import Progress

__all__ = ["Position"]


class Position:
    """Steps and samples (of all ranks) since the job began, and the epoch that they are in.

    ``epoch_rng`` are the generators as they were when the epoch began, where its order comes from
    them; ``seed`` is that of our own order (-1: not chosen yet). One pass over the data is one
    epoch.
    """

    __slots__ = (
        "_in_epoch",
        "_resumed",
        "_samples_before",
        "_step_before",
        "epoch",
        "epoch_rng",
        "samples",
        "seed",
        "step",
    )

    def __init__(self) -> None:
        self.step = self.samples = self.epoch = 0
        self.seed = -1
        self.epoch_rng: dict[str, Any] | None = None
        self._samples_before = self._step_before = 0
        self._in_epoch = self._resumed = False

    @property
    def epoch_samples(self) -> int:
        """Samples of all ranks since the epoch began."""
        return self.samples - self._samples_before

    @property
    def epoch_batches(self) -> int:
        """Batches since the epoch began."""
        return self.step - self._step_before

    @property
    def progress(self) -> Progress:
        """The position as checkpoints have it."""
        return Progress(
            step=self.step,
            samples=self.samples,
            epoch=self.epoch,
            epoch_samples=self.epoch_samples,
            epoch_batches=self.epoch_batches,
            seed=self.seed,
        )

    def take_position(self, progress: Progress) -> None:
        """Stand where a checkpoint says; the next pass continues its epoch."""
        self.step, self.samples, self.seed = progress.step, progress.samples, progress.seed
        self.epoch = progress.epoch
        self._samples_before = progress.samples - progress.epoch_samples
        self._step_before = progress.step - progress.epoch_batches
        self._resumed, self._in_epoch = True, False

    def epochs(self, total: int) -> Iterator[int]:
        """The numbers of the epochs still to run, from the resumed one to ``total - 1``."""
        for epoch in range(self.epoch, total):
            if self.epoch != epoch or self._in_epoch:
                self.move_to(epoch)
            yield epoch

    def move_to(self, epoch: int) -> None:
        """Stand at the beginning of an epoch."""
        self.epoch, self._in_epoch, self._resumed = epoch, False, False
        self._samples_before, self._step_before = self.samples, self.step
        self.epoch_rng = None

    def begin_pass(self) -> bool:
        """A pass over the data begins; True when it continues one that a checkpoint interrupted."""
        continued = self._resumed
        if not continued:
            self.move_to(self.epoch + self._in_epoch)
        self._resumed, self._in_epoch = False, True
        return continued

    def is_in_epoch(self, epoch: int) -> bool:
        """A pass over that epoch's data goes on."""
        return self._in_epoch and self.epoch == epoch

    def restart_epoch(self) -> None:
        """The position inside the epoch that a checkpoint named cannot be taken up again."""
        self._samples_before, self._step_before = self.samples, self.step
