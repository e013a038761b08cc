"""The adaptive executor: the batch of a training follows the lease, the learning rate the batch.

``synergy.adaptive(model, optimizer, loader, batch=(lo, hi))`` is the user's word that the batch may
change; without it nothing here is loaded. The program's loop stays as it is: one batch, forward,
backward, ``optimizer.step()``. Where a step of the lease's batch takes several passes, the loader
gives each of them as a batch, and ``zero_grad`` and ``step`` do nothing between them.

All ranks follow the same numbers: see :mod:`slurm_synergy.jobside.adaptive_exchange`.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from slurm_synergy.core.goodput import GradientStatistics
from slurm_synergy.core.scaling import BatchSize
from slurm_synergy.errors import ConfigError
from slurm_synergy.jobside.adaptive_batch import BatchRange, gain_at, rate_factor
from slurm_synergy.jobside.adaptive_exchange import Exchange, Shared
from slurm_synergy.jobside.adaptive_gradients import Gradients
from slurm_synergy.jobside.adaptive_noise import NoiseMeter, Norms
from slurm_synergy.jobside.adaptive_times import StepMeter
from slurm_synergy.jobside.session import Session, say
from slurm_synergy.jobside.torch_feed import has_plain_order, ranks_of_data
from slurm_synergy.jobside.training import Training

__all__ = ["Adaptive", "make_adaptive"]

_ADAPTIVE = "_synergy_adaptive"
_AT_FIRST_STEPS = 20  # each of which is measured
_EVERY_STEPS = 10
_SLACK = 1e-6


def make_adaptive(
    model: Any,
    optimizer: Any,
    loader: Any,
    session: Session,
    *,
    batch: tuple[int, int],
    local_batch: int | None,
    scaling: str | None,
    clip_norm: float | None,
) -> Adaptive:
    """See ``synergy.adaptive``, whose defaults are filled in here."""
    _check_loader(loader, session)
    limits = BatchRange(
        initial=batch[0], largest=batch[1], local_most=local_batch or loader.batch_size
    )
    if scaling is None:
        scaling = "sqrt" if "betas" in optimizer.defaults else "adascale"
    return Adaptive(
        model, optimizer, loader, session, limits=limits, scaling=scaling, clip_norm=clip_norm
    )


class Adaptive:
    """One training whose batch may change. Made by ``synergy.adaptive``.

    To be registered with the model and the optimizer: the gradient's statistics and the progress
    belong to the state of the training.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        loader: Any,
        session: Session,
        *,
        limits: BatchRange,
        scaling: str,
        clip_norm: float | None = None,
    ) -> None:
        rate_factor(scaling, None, 1.0)  # is it one?
        self.limits, self.scaling = limits, scaling
        self._session, self._optimizer, self._clip_norm = session, optimizer, clip_norm
        self._loader = loader
        ranks = session.identity.world
        self.batch = limits.batch_of(0, ranks)
        self._meter, self._times = NoiseMeter(limits.initial), StepMeter()
        self._gradients = Gradients(model, optimizer, ranks)
        device = next(iter(optimizer.param_groups[0]["params"])).device
        group = getattr(model, "process_group", None)
        self._exchange = Exchange(device, group, ranks)
        self.steps, self.progress = 0, 0.0
        self._wanted, self._measured_at, self._next_at = 0, -1, 0
        self._shared: Shared | None = None
        self._shared_as: dict[str, Any] = {}
        self._restored: list[list[float]] | None = None
        self._passes, self._pass, self._samples = 1, 0, self.batch.total
        self._first_pass: Any = None
        self._schedules: list[tuple[Any, float]] = []
        self._scheduled: list[int] = []
        loader.__dict__[_ADAPTIVE] = self
        self._wrap(model)

    # -- what the program may ask ------------------------------------------------------------------

    @property
    def statistics(self) -> GradientStatistics | None:
        """The noise of the gradient at the initial batch size; None before it was measured."""
        return self._meter.statistics

    @property
    def noise_scale(self) -> float | None:
        """The batch size, in samples, at which a sample is worth half of one in a tiny batch."""
        known = self.statistics
        if known is None:
            return None
        return self.limits.initial * known.variance / known.square if known.square else math.inf

    @property
    def epochs_done(self) -> float:
        """The progress in epochs at the initial batch size."""
        return self.progress * self.limits.initial / max(len(self._loader.dataset), 1)

    def epochs(self, total: int) -> Iterator[int]:
        """Epochs until the progress is that of ``total`` epochs at the initial batch size.

        A larger batch needs more epochs for it, each of which takes less time. The last one is
        finished even if less would do.
        """
        for epoch in self._session.epochs(sys.maxsize):
            if self.epochs_done >= total - _SLACK:
                return
            yield epoch

    def schedule(self, scheduler: Any, *, per: str = "step") -> Any:
        """Let ``scheduler`` follow the progress: do not call its ``step()``; returns it.

        It is stepped when the progress has grown by one step (or epoch) of the initial batch size.
        Register it, as always. Raises ConfigError for another ``per`` than step or epoch.
        """
        units = {"step": 1.0, "epoch": max(len(self._loader.dataset), 1) / self.limits.initial}
        if per not in units:
            raise ConfigError("not a pace", key="per", value=per, remedy="step or epoch")
        self._schedules.append((scheduler, units[per]))
        if len(self._scheduled) < len(self._schedules):
            self._scheduled.append(0)
        return scheduler

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Numbers only; what ranks have shared and not yet looked at is part of it."""
        return {
            "meter": self._meter.state_dict(),
            "steps": self.steps,
            "progress": self.progress,
            "batch": self.batch.total,
            "next_at": self._next_at,
            "measured_at": self._measured_at,
            "scheduled": list(self._scheduled),
            "shared": self._restored if self._shared is None else self._shared.take(),
            "shared_as": dict(self._shared_as),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there, with whatever number of ranks."""
        before = self._meter.initial == state["meter"]["initial"]
        if not before:
            say(
                f"the initial batch size is {self.limits.initial} now and was"
                f" {state['meter']['initial']}: the noise of the gradient is measured anew"
            )
        self._meter.load_state_dict(state["meter"])
        scale = 1.0 if before else state["meter"]["initial"] / self.limits.initial
        self.steps, self.progress = state["steps"], state["progress"] * scale
        self._next_at, self._measured_at = state["next_at"], state["measured_at"]
        self._scheduled = list(state["scheduled"])
        self._shared, self._restored = None, state["shared"] if before else None
        self._shared_as = dict(state["shared_as"])
        self.batch = self.limits.batch_of(state["batch"], self.batch.replicas)

    # -- the loader's calls ------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """All ranks take the batch of rank 0's lease, exactly."""
        session = self._session
        if session.registered and not session.is_registered(self):
            raise ConfigError(
                "what adaptive() returned is not registered",
                remedy="register(model=model, optimizer=optimizer, adaptive=adaptive)",
            )
        self._wanted = int(self._exchange.share([self._wanted_by_lease()]).take()[0][0])
        self._take(self.limits.batch_of(self._wanted, self.batch.replicas))

    def takes_new_batch(self, session: Session) -> bool:
        """Between two steps: whether the next one has another batch than the last."""
        if self.batch.replicas == 1:
            self._wanted = session.lease.batch_size
        if not self.limits.worth_a_change(self.batch, self._wanted):
            return False
        return self._take(self.limits.batch_of(self._wanted, self.batch.replicas))

    def begin_step(self, samples: int, passes: int) -> None:
        """A step of so many samples of all ranks, in so many passes, begins."""
        self._samples, self._passes, self._pass = samples, passes, 0
        self._first_pass = None
        self._gradients.prepare(measuring=self.steps >= self._next_at)
        self._times.begin_step(self.batch if samples == self.batch.total else None)

    def begin_pass(self, number: int) -> None:
        """The program gets the batch of that pass, from 0 on."""
        self._gradients.synchronise(number == self._passes - 1)
        self._times.begin_pass()

    def end_pass(self, number: int) -> None:
        """The program asks for what follows it."""
        self._times.end_pass()
        if number == self._passes - 1:
            self._times.end_step(self._gradients.sync)
            self._tell()

    def end_epoch(self) -> None:
        """No step is under way: what the program does now is its own."""
        if self._shared is not None:
            self._shared.take()  # nothing is under way when the program ends its process group
        self._gradients.synchronise(True)
        self._gradients.prepare(measuring=False)
        self._passes, self._pass = 1, 0

    def _wanted_by_lease(self) -> int:
        board = self._session.board
        return board.read_lease().batch_size if board is not None else 0

    def _take(self, batch: BatchSize) -> bool:
        if batch == self.batch:
            return False
        if batch.total != self.batch.total:
            self._gradients.age_moments()
        self.batch = batch
        return True

    # -- the optimizer's calls ---------------------------------------------------------------------

    def _wrap(self, model: Any) -> None:
        optimizer = self._optimizer
        self._plain_step = optimizer.step
        plain_zero = {id(one): one.zero_grad for one in (optimizer, model)}

        def step(_optimizer: Any, closure: Any = None) -> Any:
            return self._step(closure)

        def zero_grad(owner: Any, set_to_none: bool = True) -> None:
            if not 0 < self._pass < self._passes:
                plain_zero[id(owner)](set_to_none=set_to_none)

        # As schedulers of PyTorch want it: they wrap bound methods, and look for their own mark.
        if hasattr(self._plain_step, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(step, optimizer)
        for one in (optimizer, model):
            one.zero_grad = types.MethodType(zero_grad, one)

    def _step(self, closure: Any) -> Any:
        if closure is not None:
            raise ConfigError(
                "optimizer.step(closure) evaluates the model again",
                key="adaptive(optimizer=...)",
                remedy="use an optimizer that takes one gradient a step",
            )
        self._pass += 1
        if self._pass < self._passes:
            if self._pass == 1 and self._gradients.measuring and self.batch.replicas == 1:
                self._first_pass = self._gradients.squared()
            return None
        return self._whole_step()

    def _whole_step(self) -> Any:
        if self._gradients.measuring:
            self._gradients.sync.done()
        self._look_at_shared()
        if self._passes > 1:
            self._gradients.divide(self._passes)
        scale = self._samples / self.limits.initial
        if self._gradients.measuring:
            self._measure(scale)
        if self._clip_norm is not None:
            own = [one for group in self._optimizer.param_groups for one in group["params"]]
            sys.modules["torch"].nn.utils.clip_grad_norm_(own, self._clip_norm)
        result = self._step_at(rate_factor(self.scaling, self.statistics, scale))
        self.steps += 1
        self.progress += gain_at(self.statistics, scale)
        self._follow_progress()
        return result

    def _step_at(self, factor: float) -> Any:
        """The optimizer's own step, with its learning rates times ``factor``."""
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor
        try:
            return self._plain_step()
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _follow_progress(self) -> None:
        for number, (scheduler, unit) in enumerate(self._schedules):
            reached = int(self.progress / unit + _SLACK)
            while self._scheduled[number] < reached:
                self._scheduled[number] += 1
                scheduler.step()

    # -- measuring ---------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Leave on the board, from time to time, what the controller may learn from."""
        board, who = self._session.board, self._session.identity
        if board is None or who.rank or who.independent:
            return
        times = self._times.due()
        if not times:
            return
        known = self.statistics
        board.write_training(
            Training(
                times=times,
                square=known.square if known else 0.0,
                variance=known.variance if known else 0.0,
                initial_batch=self.limits.initial,
                local_most=self.limits.local_most,
                progress=self.progress * self.limits.initial,
            )
        )

    def _measure(self, scale: float) -> None:
        """Share the squared norms of this step's gradient and its parts."""
        gradients, ranks = self._gradients, self.batch.replicas
        count, differenced = (ranks if ranks > 1 else self._passes), False
        if ranks > 1:
            parts = gradients.local_of_buckets(self._passes), gradients.squared()
        elif self._passes > 1:
            parts = self._first_pass, gradients.squared()
        else:
            found = gradients.parts_with_previous()
            if found is None:
                gradients.keep()  # the next step has the other part
                return
            parts, count, scale, differenced = found, 2, 2 * scale, True
        local, total = (math.nan if one is None else one for one in parts)
        self._shared = self._exchange.share([local, total, self._wanted_by_lease()])
        since = self.steps - self._measured_at if self._measured_at >= 0 else 1
        self._shared_as = {
            "count": count,
            "scale": scale,
            "steps": since,
            "differenced": differenced,
        }
        self._measured_at = self.steps
        self._next_at = self.steps + (1 if self.steps < _AT_FIRST_STEPS else _EVERY_STEPS)

    def _look_at_shared(self) -> None:
        """What was shared at an earlier step; on all ranks at the same one."""
        rows = self._restored if self._shared is None else self._shared.take()
        self._shared = self._restored = None
        if rows is None:
            return
        local, total = (sum(row[column] for row in rows) / len(rows) for column in (0, 1))
        self._meter.add(Norms(local=local, total=total, **self._shared_as))
        self._wanted = int(rows[0][2])


def _check_loader(loader: Any, session: Session) -> None:
    """Raises ConfigError for a loader whose batches cannot be divided anew."""
    problem = ""
    if not has_plain_order(loader) or loader.batch_size is None:
        problem = "its batches come from a sampler or data set of its own"
    elif ranks_of_data(loader, session) != (session.identity.rank, session.identity.world):
        problem = "its ranks are not those of torch.distributed"
    elif session.by_hook:
        problem = "a framework with a loop of its own counts the steps"
    if problem:
        raise ConfigError(
            problem,
            key="adaptive(loader=...)",
            remedy="give a DataLoader with shuffle=True or a DistributedSampler, and a batch_size,"
            " after torch.distributed.init_process_group()",
        )
