"""Policies: who runs. Register a new one here; the conformance tests then cover it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from slurm_synergy.core.decide import Policy
from slurm_synergy.core.model import Plan
from slurm_synergy.policies.fifo import FIFO
from slurm_synergy.policies.ftf import FTF, FTF_ASCENDING
from slurm_synergy.policies.gavel import GAVEL
from slurm_synergy.policies.las import LAS
from slurm_synergy.policies.pollux import POLLUX
from slurm_synergy.policies.shockwave import SHOCKWAVE
from slurm_synergy.policies.sia import SIA
from slurm_synergy.policies.srtf import SRTF
from slurm_synergy.policies.themis import THEMIS

__all__ = ["POLICIES", "policy_of_plan"]

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        policy.name: policy
        for policy in (FIFO, SRTF, LAS, FTF, FTF_ASCENDING, SIA, POLLUX, GAVEL, THEMIS, SHOCKWAVE)
    }
)
"""Policies by name."""


def policy_of_plan(plan: Plan) -> Policy | None:
    """The policy that made a plan, with the settings that it had then; None for an unknown one."""
    policy = POLICIES.get(plan.policy)
    as_reported = getattr(policy, "as_reported", None)
    return policy if as_reported is None else as_reported(plan.solver)
