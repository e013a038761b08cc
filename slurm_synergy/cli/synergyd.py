"""``slurm-synergyd``: the controller, or with ``--node`` the helper of a compute node.

Which one is decided before anything of either is imported: a compute node has the base
installation only, without what the controller needs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slurm_synergy.cli.loading import missing_package

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; the process's exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if "--node" in arguments:
        from slurm_synergy.nodehelper.main import main as helper

        return helper(arguments)
    try:
        from slurm_synergy.controller.daemon import main as controller
    except ModuleNotFoundError as err:
        sys.stderr.write(f"slurm-synergyd: {missing_package(err)}\n")
        return 1
    except KeyboardInterrupt:  # nothing has begun yet
        return 1
    return controller(arguments)
