"""Which settings of an experiment's cell mean something there: many are of some policies only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from slurm_synergy.simulator.experiment import Settings

__all__ = ["OF_POLICIES", "means_something"]

_SHARED_TIME = {"quantum_s": "quantum_s", "fills": "fills"}

OF_POLICIES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "sia": {
            "power": "power",
            "restart_weight": "restart_weight",
            "moves_between_rounds": "moves_between_rounds",
        },
        "pollux": {
            "power": "power",
            "generations": "generations",
            "patience": "patience",
            "avoid_interference": "avoid_interference",
            "mixes": "mixes",
        },
        "gavel": _SHARED_TIME,
        "themis": _SHARED_TIME,
        "shockwave": {
            **_SHARED_TIME,
            "window": "rounds",
            "makespan": "makespan",
            "unfair_power": "power",
            "fair_ratio": "most_ratio",
        },
    }
)
"""Settings of an experiment that are a policy's own, and what the policy calls them."""

_OF_SOME_POLICIES = frozenset(key for names in OF_POLICIES.values() for key in names)
_OF_GENERATED_JOBS = frozenset({"split", "sizes", "arrivals"})
_OF_EQUAL_NODES = frozenset({"nodes", "gpu_type", "gpus_per_node", "mem_gib"})
_OF_ELASTIC_JOBS = frozenset({"rigid", "scale", "profiling", "pipelines", "tuned"})


def means_something(cell: Settings, key: str) -> bool:
    """Whether another value of that setting could change what is simulated."""
    if key in _OF_SOME_POLICIES:
        return key in OF_POLICIES.get(cell.policy, ())
    if key in _OF_GENERATED_JOBS:
        return cell.trace is None
    if key in _OF_EQUAL_NODES:
        return cell.cluster is None
    if key in _OF_ELASTIC_JOBS:
        return cell.elastic
    if key == "load":
        return cell.trace is None or "{load}" in cell.trace
    # What a restart costs is measured for each application of elastic jobs.
    return key != "restart_s" or not cell.elastic
