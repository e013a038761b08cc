"""What a policy offered a job in a round, and what that would have cost others, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Choice", "Market", "amount", "market_in_words"]

_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One configuration that a job may have.

    ``speedup`` is how fast it learns there over its slowest configuration, ``gain`` what the policy
    counts for it over waiting, restarts discounted, and ``price`` what the GPUs are worth to the
    other jobs.
    """

    gpu_type: str
    gpus: int
    nodes: int | None
    speedup: float
    gain: float
    price: float

    @property
    def surplus(self) -> float:
        """Gain less price: the policy gives a job where this is most."""
        return self.gain - self.price


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """A job's row of the matrix, ``prices`` of one GPU by type, and what the job was given.

    ``between``: the round was between two plans, and the job kept what it had without being asked.
    """

    choices: tuple[Choice, ...] = ()
    prices: Mapping[str, float] = field(default_factory=dict)
    chosen: Choice | None = None
    between: bool = False


def amount(gpus: int, gpu_type: str, nodes: int | None) -> str:
    """``16 a100 GPUs on 2 nodes``."""
    what = f"{gpus} {gpu_type} GPU{'s' if gpus > 1 else ''}"
    return f"{what} on {nodes} nodes" if nodes and nodes > 1 else what


def market_in_words(market: Market) -> tuple[str, ...]:
    """One line for the row, one for the prices, and what more or less would have been."""
    lines = [f"could run on: {'; '.join(_row(market.choices))}"] if market.choices else []
    if market.between:
        lines.append(
            "between two plans jobs that run are moved only where another one would wait otherwise"
        )
    if market.prices:
        said = ", ".join(f"{kind} {price:.2f}" for kind, price in sorted(market.prices.items()))
        lines.append(f"worth of a GPU to the other jobs in that round: {said}")
    if market.chosen is not None:
        lines += _beside(market.choices, market.chosen, between=market.between)
    elif market.choices:
        best = max(market.choices, key=lambda one: one.surplus)
        lines.append(
            f"nearest to being given: {_amount(best)}, which would bring it {best.gain:.2f} and "
            f"{_is_or_are(best)} worth {best.price:.2f} to others"
        )
    return tuple(lines)


def _amount(one: Choice) -> str:
    return amount(one.gpus, one.gpu_type, one.nodes)


def _is_or_are(one: Choice) -> str:
    return "are" if one.gpus > 1 else "is"


def _row(choices: Sequence[Choice]) -> list[str]:
    """By type: ``a100 1, 2 or 4 GPUs, 1.0, 1.9 and 3.5 times as fast as the least``."""
    found = []
    for kind in sorted({one.gpu_type for one in choices}):
        ours = sorted(
            (one for one in choices if one.gpu_type == kind),
            key=lambda one: (one.gpus, one.speedup),
        )
        shown = ", ".join(
            f"{one.gpus} GPU{'s' if one.gpus > 1 else ''} at {one.speedup:.1f} times its least"
            for one in ours[:_SHOWN]
        )
        rest = f" and {len(ours) - _SHOWN} more" if len(ours) > _SHOWN else ""
        found.append(f"{kind}: {shown}{rest}")
    return found


def _beside(choices: Sequence[Choice], chosen: Choice, *, between: bool) -> list[str]:
    """What the next larger and the next smaller request of the same type would have got."""
    got = "kept" if between else "was given"
    lines = [
        f"{got} {_amount(chosen)}, which {_counts(chosen)} {chosen.gain:.2f} for it and "
        f"{_is_or_are(chosen)} worth {chosen.price:.2f} to others"
    ]
    same = [one for one in choices if one.gpu_type == chosen.gpu_type]
    larger = [one for one in same if one.gpus > chosen.gpus]
    smaller = [one for one in same if one.gpus < chosen.gpus]
    nearest = [min(larger, key=lambda one: one.gpus)] if larger else []
    nearest += [max(smaller, key=lambda one: one.gpus)] if smaller else []
    other = [one for one in choices if one.gpu_type != chosen.gpu_type]
    if other:
        nearest.append(max(other, key=lambda one: one.surplus))
    for one in nearest:
        brings, costs = one.gain - chosen.gain, one.price - chosen.price
        lines.append(
            f"{_amount(one)} instead would bring it {_more(brings)}, and take from the others "
            f"{_more(costs)}"
        )
    return lines


def _more(amount_: float) -> str:
    return f"{abs(amount_):.2f} {'more' if amount_ >= 0 else 'less'}"


def _counts(one: Choice) -> str:
    return "count" if one.gpus > 1 else "counts"
