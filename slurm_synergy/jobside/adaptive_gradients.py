"""Squared norms of gradients, as cheaply as they can be had from PyTorch.

With several ranks the parts of a batch are the ranks' own gradients, met in the buckets of
DistributedDataParallel just before they are averaged: one norm for each bucket. With one rank they
are the passes of a step: the first one's gradient is a part. Adam and its kin follow the gradient
divided by the root of its second moment, so it is the noise of that which counts.

Nothing here imports torch: all of it runs in programs that did so themselves.
"""

from __future__ import annotations

import sys
from typing import Any

from slurm_synergy.errors import ConfigError
from slurm_synergy.jobside.adaptive_times import SyncTimer

__all__ = ["Gradients"]

_WARM_STEPS = 5
_MOMENTS_AGE = 5


def _torch() -> Any:
    return sys.modules["torch"]


class Gradients:
    """The gradients of ``optimizer``'s parameters, which ``model`` averages over the ranks.

    ``measuring`` makes the next backward pass that synchronises measure its local gradients, and
    ``sync`` how long it is held up by the other ranks.
    Raises ConfigError for a model whose ranks cannot be told apart.
    """

    def __init__(self, model: Any, optimizer: Any, ranks: int) -> None:
        self._optimizer, self._ranks = optimizer, ranks
        self.measuring = False
        self._local: list[Any] = []
        self._previous: list[Any] | None = None
        self.sync = SyncTimer(next(iter(optimizer.param_groups[0]["params"])).device)
        self._parallel: Any = self._watch(model) if ranks > 1 else None

    def _watch(self, model: Any) -> Any:
        torch = _torch()
        parallel = torch.nn.parallel.DistributedDataParallel
        if not isinstance(model, parallel):
            raise ConfigError(
                "the gradients of its ranks cannot be measured",
                key="adaptive(model=...)",
                value=type(model).__name__,
                remedy="give the DistributedDataParallel that wraps your model",
            )
        try:
            model.register_comm_hook(self, _on_bucket)
        except RuntimeError as err:
            raise ConfigError(
                f"its gradients are synchronised in a way of their own ({err})",
                key="adaptive(model=...)",
                remedy="do without register_comm_hook()",
            ) from err
        return model

    def average(self, bucket: Any) -> Any:
        """Average a bucket over the ranks, as DistributedDataParallel would, and measure it."""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        if self.measuring:
            if self._second_moments_known():
                parts = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
                self._local.append(self._squared([own for own, _ in parts], [g for _, g in parts]))
            else:
                self._local.append(_squared_norm([bucket.buffer()]))
            if bucket.is_last():
                self.sync.ready()
        return allreduce_hook(self._parallel.process_group, bucket)

    def prepare(self, *, measuring: bool) -> None:
        """A step begins."""
        self.measuring = measuring and self.measurable
        self._local.clear()

    def synchronise(self, wanted: bool) -> None:
        """Whether the next backward pass averages over the ranks."""
        if self._parallel is not None:
            self._parallel.require_backward_grad_sync = wanted

    # -- norms -----------------------------------------------------------------------------------

    def _with_gradient(self) -> tuple[list[Any], list[Any]]:
        own = [
            parameter
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and not parameter.grad.is_sparse
        ]
        return own, [parameter.grad for parameter in own]

    def local_of_buckets(self, passes: int) -> Any:
        """What the last backward pass measured of this rank, for the mean of its passes."""
        parts, self._local = self._local, []
        return sum(parts) / passes**2 if parts else None

    def squared(self) -> Any:
        """The squared norm of the gradient as it is now, a tensor; None when there is none."""
        own, gradients = self._with_gradient()
        return self._squared(own, gradients) if own else None

    def divide(self, passes: int) -> None:
        """Turn the sum over ``passes`` into their mean."""
        gradients = self._with_gradient()[1]
        if gradients:
            _torch()._foreach_div_(gradients, float(passes))

    def keep(self) -> None:
        """Remember the gradient for the next step, as the first of two parts."""
        self._previous = [gradient.clone() for gradient in self._with_gradient()[1]]

    def parts_with_previous(self) -> tuple[Any, Any] | None:
        """(mean squared norm of the two, that of their mean) of this step and the one kept."""
        previous, self._previous = self._previous, None
        own, gradients = self._with_gradient()
        if not previous or [one.shape for one in previous] != [one.shape for one in gradients]:
            return None
        torch = _torch()
        before, now = self._squared(own, previous), self._squared(own, gradients)
        mean = torch._foreach_add(previous, gradients)
        torch._foreach_div_(mean, 2.0)
        return (before + now) / 2, self._squared(own, mean)

    def _squared(self, own: list[Any], gradients: list[Any]) -> Any:
        if not self._second_moments_known():
            return _squared_norm(gradients)
        return _squared_norm(
            [
                gradient / self._root(parameter)
                for parameter, gradient in zip(own, gradients, strict=True)
            ]
        )

    # -- adaptive optimisers ---------------------------------------------------------------------

    @property
    def measurable(self) -> bool:
        """Norms taken now are of the kind that this optimizer follows."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter)
                if state:
                    return "exp_avg_sq" not in state or float(state["step"]) >= _WARM_STEPS
        return "betas" not in self._optimizer.defaults

    def _second_moments_known(self) -> bool:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter)
                if state:
                    return "exp_avg_sq" in state
        return False

    def _root(self, parameter: Any) -> Any:
        state = self._optimizer.state.get(parameter)
        group = next(iter(self._optimizer.param_groups))
        if not state or "exp_avg_sq" not in state:
            return 1.0
        seen = 1 - group["betas"][1] ** float(state["step"])
        return (state["exp_avg_sq"] / seen).sqrt_().add_(group["eps"])

    def age_moments(self) -> None:
        """After a change of the batch: the moments keep their values, but soon give way to new.

        They are those of a gradient with another noise. Adam's correction for the start makes the
        estimates count as those of a few steps only.
        """
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter)
                if not state or "exp_avg_sq" not in state or "exp_avg" not in state:
                    continue
                step = float(state["step"])
                if step <= _MOMENTS_AGE:
                    continue
                for name, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True):
                    state[name].mul_((1 - beta**_MOMENTS_AGE) / (1 - beta**step))
                if isinstance(state["step"], _torch().Tensor):
                    state["step"].fill_(_MOMENTS_AGE)
                else:
                    state["step"] = _MOMENTS_AGE


def _squared_norm(gradients: list[Any]) -> Any:
    torch = _torch()
    norms = torch._foreach_norm([gradient.detach() for gradient in gradients])
    device = norms[0].device
    return torch.stack([norm.to(device, torch.float32) for norm in norms]).square_().sum()


# Without annotations: PyTorch compares them with its own types.
def _on_bucket(state, bucket):  # type: ignore[no-untyped-def]
    return state.average(bucket)
