"""slurm-synergy: resource-sensitive scheduling of deep-learning jobs on stock Slurm."""

__version__ = "0.1.0"
