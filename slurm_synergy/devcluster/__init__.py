"""The embedded Slurm: a whole cluster with pretended GPU nodes on one machine."""

from slurm_synergy.devcluster.accounting import missing_accounting
from slurm_synergy.devcluster.cluster import DevCluster
from slurm_synergy.devcluster.layout import default_state_dir
from slurm_synergy.devcluster.programs import missing_programs, slurm_version
from slurm_synergy.devcluster.shapes import (
    DEFAULT_SHAPES,
    NodeShape,
    load_shapes,
    parse_shape,
    real_shape,
)
from slurm_synergy.devcluster.status import Status

__all__ = [
    "DEFAULT_SHAPES",
    "DevCluster",
    "NodeShape",
    "Status",
    "default_state_dir",
    "load_shapes",
    "missing_accounting",
    "missing_programs",
    "parse_shape",
    "real_shape",
    "slurm_version",
]
