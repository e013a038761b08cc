"""One epoch of the training loader of an adaptive job: steps of several passes, of changing size.

The session counts optimizer steps, so a stop or a checkpoint falls between two of them and never
into accumulated gradients. A change of the batch takes effect at the next step on all ranks: what
workers have fetched ahead in the old size is dropped and fetched again in the new one, from the
position that the job has reached, so that no sample is lost or repeated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slurm_synergy.jobside.sampler import EpochSampler, StepSampler
from slurm_synergy.jobside.session import Session
from slurm_synergy.jobside.torch_feed import own_sampler
from slurm_synergy.jobside.torch_pass import Pass

if TYPE_CHECKING:
    from slurm_synergy.jobside.adaptive_training import Adaptive

__all__ = ["AdaptivePass"]


class AdaptivePass(Pass):
    """A pass over the data whose steps are those of ``adaptive``."""

    __slots__ = ("_adaptive", "_passes", "_source", "_steps")

    def __init__(self, loader: Any, session: Session, adaptive: Adaptive) -> None:
        adaptive.begin_epoch()
        self._adaptive, self._passes = adaptive, 0
        super().__init__(loader, session)
        self._source = self.batches()

    @property
    def _in_own_order(self) -> bool:
        return True

    def _own_sampler(self) -> EpochSampler:
        self._steps = own_sampler(self._loader, self._session, self._adaptive.batch)
        return self._steps

    def _first_number(self) -> int:
        # A step of one number has several passes; each has a sample at least.
        return self._session.epoch_samples

    def _usual_step(self) -> tuple[int, int]:
        return 0, -1

    def _samples(self) -> int:
        return 0  # they are counted by steps

    def run(self) -> Iterator[Any]:
        """The batches of all passes, under the lease."""
        steps = self._session.drive(self._first_passes(), self.ended)
        adaptive, clock = self._adaptive, time.monotonic
        try:
            for batch in steps:
                adaptive.begin_pass(0)
                yield batch
                adaptive.end_pass(0)
                for number in range(1, self._passes):
                    waiting_since_s = clock()
                    following, _ = next(self._source)
                    self._session.add_wait(clock() - waiting_since_s)
                    adaptive.begin_pass(number)
                    yield following
                    adaptive.end_pass(number)
        finally:
            adaptive.end_epoch()
            steps.close()  # type: ignore[attr-defined]

    def _first_passes(self) -> Iterator[tuple[Any, int]]:
        """The first batch of each step with the samples of the whole step."""
        steps = self._steps
        try:
            while True:
                if self._adaptive.takes_new_batch(self._session):
                    self._begin_anew()
                steps = self._steps
                assert isinstance(steps, StepSampler)
                samples, self._passes = steps.step_at(self._session.epoch_samples)
                if not samples:
                    # To its end: workers that persist are kept there.
                    next(self._source, None)
                    return
                batch, _ = next(self._source)
                self._adaptive.begin_step(samples, self._passes)
                yield batch, samples
        finally:
            self._source.close()  # type: ignore[attr-defined]

    def _begin_anew(self) -> None:
        """Fetch in the new size from here; drop what was fetched, or is being fetched, in the old.

        Workers go on as they are: they have the new indices behind the old ones.
        """
        stale = sum(_under_way(inner) for inner in (self._draining, self._inner))
        self._sampler = self._own_sampler()
        self._indices = self._index_source()
        key = "batch_sampler" if self._loader._auto_collation else "sampler"
        self._twin.__dict__[key] = self._inner._index_sampler = self._indices
        self._inner._sampler_iter = self._indices
        _fill(self._inner)
        for _ in range(stale):
            next(self._source)


def _under_way(inner: Any) -> int:
    """Batches that workers were told to fetch and that were not delivered yet."""
    return getattr(inner, "_send_idx", 0) - getattr(inner, "_rcvd_idx", 0)


def _fill(inner: Any) -> None:
    """Give workers as much to do as they take: at the end of their indices they had less."""
    put = getattr(inner, "_try_put_index", None)
    if put is None:
        return
    # What has come before its turn is put again when it is delivered: it counts here as well.
    for _ in range(inner._prefetch_factor * inner._num_workers - _under_way(inner)):
        put()
