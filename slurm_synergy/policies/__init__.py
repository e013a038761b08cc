"""Policies: who runs. Register a new one here; the conformance tests then cover it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from slurm_synergy.core.decide import Policy
from slurm_synergy.core.model import Plan
from slurm_synergy.policies.fifo import FIFO
from slurm_synergy.policies.ftf import FTF, FTF_ASCENDING
from slurm_synergy.policies.las import LAS
from slurm_synergy.policies.sia import SIA, Sia
from slurm_synergy.policies.srtf import SRTF

__all__ = ["POLICIES", "policy_of_plan"]

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {policy.name: policy for policy in (FIFO, SRTF, LAS, FTF, FTF_ASCENDING, SIA)}
)
"""Policies by name."""


def policy_of_plan(plan: Plan) -> Policy | None:
    """The policy that made a plan, with the settings that it had then; None for an unknown one."""
    policy = POLICIES.get(plan.policy)
    return policy.as_reported(plan.solver) if isinstance(policy, Sia) else policy
