"""Mechanisms: where jobs run, and with how much CPU and memory. Register a new one here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from slurm_synergy.core.decide import Mechanism
from slurm_synergy.mechanisms.drf import DRF
from slurm_synergy.mechanisms.greedy import GREEDY
from slurm_synergy.mechanisms.opt import OPT
from slurm_synergy.mechanisms.proportional import PROPORTIONAL
from slurm_synergy.mechanisms.tetris import TETRIS, TETRIS_ALIGN
from slurm_synergy.mechanisms.tune import TUNE

__all__ = ["MECHANISMS"]

MECHANISMS: Mapping[str, Mechanism] = MappingProxyType(
    {
        mechanism.name: mechanism
        for mechanism in (PROPORTIONAL, GREEDY, TUNE, OPT, DRF, TETRIS, TETRIS_ALIGN)
    }
)
"""Mechanisms by name."""
