"""What a training whose batch may change tells of itself, as it stands on the board.

The training process writes it, its launcher sends it on with the renewals of the lease: neither
the connection to the controller nor its library is ever met by the program.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = ["MOST_TIMES", "TRAINING_BYTES", "StepMeans", "Training", "packed", "unpacked"]

MOST_TIMES = 16
"""Step times that one report may have."""

_LARGEST = 2**32 - 1
# count, initial batch, local most, (unused), square, variance, progress
_FIXED = struct.Struct("<IIIIddd")
# local batch, accumulation, replicas, (unused), steps, gradient_s, step_s
_ONE = struct.Struct("<IIIIQdd")
TRAINING_BYTES = _FIXED.size + MOST_TIMES * _ONE.size
"""How long a report is, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeans:
    """Means over ``steps`` optimiser steps of one batch, without waiting for data.

    ``gradient_s`` is a pass without synchronisation, ``step_s`` the last pass, with it;
    ``accumulation`` counts the passes before the last.
    """

    local_batch: int
    accumulation: int
    replicas: int
    steps: int
    gradient_s: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A report: ``times`` since the one before, at most ``MOST_TIMES``, and what holds now.

    ``square`` and ``variance`` are of the gradient at ``initial_batch`` samples, both 0 where they
    are not known yet. ``local_most`` is the most samples that a GPU has room for in a pass,
    ``progress`` in samples at the initial batch.
    """

    times: tuple[StepMeans, ...]
    square: float
    variance: float
    initial_batch: int
    local_most: int
    progress: float


def packed(training: Training) -> bytes:
    """``training`` as the bytes of the board; times beyond the most are left out."""
    times = training.times[:MOST_TIMES]
    fixed = _FIXED.pack(
        len(times),
        min(training.initial_batch, _LARGEST),
        min(training.local_most, _LARGEST),
        0,
        training.square,
        training.variance,
        training.progress,
    )
    rows = (
        _ONE.pack(
            min(one.local_batch, _LARGEST),
            min(one.accumulation, _LARGEST),
            min(one.replicas, _LARGEST),
            0,
            one.steps,
            one.gradient_s,
            one.step_s,
        )
        for one in times
    )
    return b"".join((fixed, *rows)).ljust(TRAINING_BYTES, b"\0")


def unpacked(raw: bytes) -> Training | None:
    """The report in the bytes of the board; None where there is none yet."""
    count, initial, most, _, square, variance, progress = _FIXED.unpack_from(raw)
    times = []
    for number in range(min(count, MOST_TIMES)):
        row = _ONE.unpack_from(raw, _FIXED.size + number * _ONE.size)
        local, accumulation, replicas, _, steps, gradient_s, step_s = row
        times.append(
            StepMeans(
                local_batch=local,
                accumulation=accumulation,
                replicas=replicas,
                steps=steps,
                gradient_s=gradient_s,
                step_s=step_s,
            )
        )
    if not times:
        return None
    return Training(
        times=tuple(times),
        square=square,
        variance=variance,
        initial_batch=initial,
        local_most=most,
        progress=progress,
    )
