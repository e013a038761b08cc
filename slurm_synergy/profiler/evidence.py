"""A profile with what it was made from."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from slurm_synergy.core.model import Profile, ProfileOrigin
from slurm_synergy.errors import ModelError
from slurm_synergy.profiler.sweep import Confidence, Measurement, SweepResult

__all__ = [
    "KEY_PATTERN",
    "UNTYPED",
    "Evidence",
    "StoredProfile",
    "checked_key",
    "evidence_of",
    "merged",
    "on_type",
]

UNTYPED = "gpu"
"""The type of GPUs to which nobody gave one; nodes whose GPUs have none are of it too."""

KEY_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""What a profile key looks like: that of the hint ``profile=``, at most 100 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a measured profile rests on.

    ``gpus`` of type ``gpu_type`` on one node with up to ``most_cpus`` cores for the job, of which
    ``proportional_cpus`` are its proportional share; ``points`` in the order of measuring.
    ``measured_s`` is when (epoch), ``owner_uid`` whose job it was (-1: not known), ``source`` says
    in words where it ran, ``why`` why confidence is low, ``data`` what the memory side rests on.
    """

    gpu_type: str
    gpus: int
    most_cpus: int
    proportional_cpus: int
    points: tuple[Measurement, ...]
    confidence: Confidence
    measured_s: float
    why: str = ""
    owner_uid: int = -1
    source: str = ""
    data: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProfile:
    """A profile of the store; ``evidence`` is None where it was not measured by us."""

    profile: Profile
    evidence: Evidence | None = None


def evidence_of(
    result: SweepResult,
    *,
    gpu_type: str,
    measured_s: float,
    owner_uid: int,
    source: str,
    data: str = "",
) -> Evidence:
    """What is kept of a sweep beside its profile."""
    return Evidence(
        gpu_type=gpu_type,
        gpus=result.span.gpus,
        most_cpus=result.span.most_cpus,
        proportional_cpus=result.span.proportional,
        points=result.points,
        confidence=result.confidence,
        measured_s=measured_s,
        why=result.why,
        owner_uid=owner_uid,
        source=source,
        data=data,
    )


def merged(new: Profile, old: Profile | None) -> Profile:
    """``new`` with the GPU rates that ``old`` knows of other types: loading does not depend on it.

    Where ``old`` is not measured, nothing of it is taken over.
    """
    if old is None or old.origin is not ProfileOrigin.MEASURED or old.key != new.key:
        return new
    rates = {**old.gpu_rate_per_gpu, **new.gpu_rate_per_gpu}
    return replace(new, gpu_rate_per_gpu=rates)


def on_type(stored: StoredProfile, gpu_type: str) -> StoredProfile:
    """The profile as one that was measured on GPUs of that type, where its own type had no name.

    Raises ModelError for one that was measured on a type with a name, or never.
    """
    evidence = stored.evidence
    if evidence is None or evidence.gpu_type not in (UNTYPED, gpu_type):
        had = "no GPU here" if evidence is None else f"{evidence.gpu_type!r}"
        raise ModelError(f"profile {stored.profile.key!r} was measured on {had}: leave its type")
    rates = {
        gpu_type if kind == UNTYPED else kind: rate
        for kind, rate in stored.profile.gpu_rate_per_gpu.items()
    }
    return StoredProfile(
        profile=replace(stored.profile, gpu_rate_per_gpu=rates),
        evidence=replace(evidence, gpu_type=gpu_type),
    )


def checked_key(key: str) -> str:
    """``key`` if a profile may have it. Raises ModelError."""
    if not re.fullmatch(KEY_PATTERN, key):
        raise ModelError(
            f"{key!r} is no profile key: one has up to 100 letters, digits, '.', '_' and '-', "
            "and begins with a letter or digit"
        )
    return key
