"""What the programs say when a package that they need is not installed. Imports nothing of it."""

from __future__ import annotations

__all__ = ["missing_package"]


def missing_package(error: ModuleNotFoundError) -> str:
    """What is missing and the remedy, in words. Raises the error again if a module of ours is."""
    name = (error.name or "").partition(".")[0]
    if not name or name == "slurm_synergy":
        raise error
    return (
        f"the Python package {name} is not installed here; training environments have the base "
        "installation only: run this where pip install 'slurm-synergy[controller]' was done"
    )
