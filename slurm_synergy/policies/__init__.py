"""Policies: who runs. Register a new one here; the conformance tests then cover it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from slurm_synergy.core.decide import Policy
from slurm_synergy.policies.fifo import FIFO
from slurm_synergy.policies.ftf import FTF, FTF_ASCENDING
from slurm_synergy.policies.las import LAS
from slurm_synergy.policies.srtf import SRTF

__all__ = ["POLICIES"]

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {policy.name: policy for policy in (FIFO, SRTF, LAS, FTF, FTF_ASCENDING)}
)
"""Policies by name."""
