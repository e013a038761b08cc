"""What the scheduler believes of an elastic job, as it is measured (Sia, section 3.3).

Observations are free of noise: where a job ran, the times of its steps and the statistics of its
gradient are known as they are. Three regimes tell what is known before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from slurm_synergy.core.model import Placement, Profile
from slurm_synergy.core.scaling import Scaling, TypeSpeed
from slurm_synergy.simulator.measured import canonical
from slurm_synergy.simulator.training import Observed, Training

__all__ = ["Learning", "Profiling", "Taught"]

_EVERYTHING_GPUS = 1 << 20
_NEAR = 1.1
"""A batch within this factor of one that was seen at the same placement says nothing new."""


class Profiling(Enum):
    """What is known of a job when it arrives (algorithms C.5)."""

    ORACLE = "oracle"  # all that was ever measured, on all types
    BOOTSTRAP = "bootstrap"  # a single GPU of every type with some ten batch sizes
    LEDGER = "ledger"  # that, and what earlier jobs with the same profile key have taught
    NONE = "none"  # nothing


@dataclass(slots=True)
class Taught:
    """What jobs with one profile key have taught, as the controller's ledger keeps it.

    By GPU type: where and with which batches they ran, and on how many GPUs at most.
    """

    observed: dict[str, frozenset[Observed]] = field(default_factory=dict)
    explored: dict[str, int] = field(default_factory=dict)

    def take_in(self, kind: str, observed: frozenset[Observed], explored: int) -> None:
        """A job knows as much of a GPU type by now."""
        self.observed[kind] = self.observed.get(kind, frozenset()) | observed
        self.explored[kind] = max(self.explored.get(kind, 0), explored)


class Learning:
    """The belief about one job; ``belief`` is a new object whenever something was learned.

    Under ``LEDGER`` it begins with what is ``taught`` by then, and teaches what it learns.
    """

    __slots__ = ("_epoch", "_explored", "_observed", "_taught", "_training", "belief")

    def __init__(
        self,
        training: Training,
        profile: Profile,
        kinds: tuple[str, ...],
        regime: Profiling,
        taught: Taught | None = None,
    ) -> None:
        self._training = training
        self._taught = taught if regime is Profiling.LEDGER else None
        self._observed: dict[str, frozenset[Observed]] = {}
        self._explored = dict.fromkeys(kinds, 0)
        for kind in kinds:
            if regime is Profiling.ORACLE:
                self._observed[kind] = training.everything(kind)
                self._explored[kind] = _EVERYTHING_GPUS
            elif regime is not Profiling.NONE:
                self._observed[kind] = training.alone(kind)
            if self._taught is not None and kind in self._taught.observed:
                self._observed[kind] |= self._taught.observed[kind]
                self._explored[kind] = self._taught.explored[kind]
        self._epoch = (0, float(training.model.batch[0]))
        self.belief = self._believe(profile, self._speeds())

    def watch(self, placement: Placement, done: float) -> None:
        """Take in that the job has run there, and got as far as ``done`` useful samples."""
        training, kind = self._training, placement.gpu_type
        pattern = canonical(training.pattern(placement))
        batch = placement.batch or training.batch_on(kind, pattern, wider=True)
        epoch = (training.application.epoch(done / training.model.batch[0]), float(batch.total))
        known = self._observed.get(kind, frozenset())
        is_seen = any(
            one == pattern and 1 / _NEAR < size / batch.local < _NEAR for one, size in known
        )
        grew = placement.gpus > self._explored[kind]
        if is_seen and not grew and self._epoch == epoch:
            return
        self._epoch = epoch
        if not is_seen and training.times(kind, pattern, batch.local) is not None:
            self._observed[kind] = known | {(pattern, batch.local)}
        if kind in self._observed:
            self._explored[kind] = max(self._explored[kind], placement.gpus)
            if self._taught is not None:
                self._taught.take_in(kind, self._observed[kind], self._explored[kind])
        # As the same object while only the statistics are new, so that it need not be looked into.
        before = self.belief.scaling
        is_new = before is None or not is_seen or grew
        speeds = self._speeds() if before is None or is_new else before.speeds
        self.belief = self._believe(self.belief, speeds)

    def _speeds(self) -> dict[str, TypeSpeed]:
        """By GPU type, of all that was observed."""
        training = self._training
        return {
            kind: TypeSpeed(
                model=training.fit(kind, observed),
                local_least=training.model.local_least,
                local_most=training.model.local_most[kind],
                explored_gpus=self._explored[kind],
                gpus_per_replica=training.model.stages.get(kind),
            )
            for kind, observed in self._observed.items()
        }

    def _believe(self, profile: Profile, speeds: Mapping[str, TypeSpeed]) -> Profile:
        statistics = self._training.statistics(*self._epoch)
        return replace(profile, scaling=Scaling(speeds=speeds, statistics=statistics))
