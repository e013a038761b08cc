"""The helper's command line, and its parts as the options say."""

from __future__ import annotations

import argparse
import os
import pwd
import socket
from pathlib import Path

from slurm_synergy.errors import ConfigError
from slurm_synergy.nodehelper.cgroups import CGROUPS, is_unified
from slurm_synergy.nodehelper.cpusets_v1 import CpusetsV1
from slurm_synergy.nodehelper.cpusets_v2 import CpusetsV2
from slurm_synergy.nodehelper.enforcer import Enforcer
from slurm_synergy.nodehelper.memory import MemoryLimits, machine_mib
from slurm_synergy.nodehelper.originals import Originals

__all__ = ["argument_parser", "enforcer", "make_run_dir", "user_ids"]

_RUN_DIR = Path("/run/slurm-synergy-node")
_RECORD = "originals.json"


def argument_parser() -> argparse.ArgumentParser:
    """The command line of ``slurm-synergyd --node``."""
    parser = argparse.ArgumentParser(
        prog="slurm-synergyd",
        description="The optional helper on a compute node: sets the cpusets and memory limits of "
        "managed jobs to their leases, where Slurm confines jobs to cores or memory by cgroups.",
        epilog="SIGTERM gives every job back what Slurm gave it, and stops. Exit status: 0 stopped "
        "as told, 1 something could not be done, 2 wrong usage.",
    )
    parser.add_argument(
        "--node", action="store_true", required=True, help="run the helper of a compute node"
    )
    parser.add_argument(
        "--endpoint",
        metavar="HOST:PORT",
        help="the controller (default: SYNERGY_ENDPOINT, else /etc/slurm-synergy/endpoint)",
    )
    parser.add_argument(
        "--node-name",
        metavar="NAME",
        default=socket.gethostname().partition(".")[0],
        help="Slurm's name of this node (default: the host's)",
    )
    parser.add_argument(
        "--controller-user",
        metavar="USER",
        action="append",
        help="account of the controller, whose signature counts; may be repeated "
        "(default: slurm-synergy)",
    )
    parser.add_argument(
        "--munge-socket",
        type=Path,
        metavar="PATH",
        help="socket of munged (default: SYNERGY_MUNGE_SOCKET, else munge's own)",
    )
    parser.add_argument(
        "--keep-memory", action="store_true", help="leave memory limits as Slurm set them"
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIRECTORY",
        default=_RUN_DIR,
        help=f"where it notes what Slurm had set (default: {_RUN_DIR})",
    )
    parser.add_argument(
        "--give-back",
        action="store_true",
        help="give every job back what Slurm gave it, after a helper that was killed, and exit",
    )
    parser.add_argument("--debug", action="store_true", help="say more")
    return parser


def enforcer(options: argparse.Namespace) -> Enforcer:
    """What changes the cgroups of this machine, of the release that it has."""
    originals = Originals(options.run_dir / _RECORD)
    unified = is_unified()
    cpusets = (
        CpusetsV2(options.node_name, originals)
        if unified
        else CpusetsV1(options.node_name, CGROUPS / "cpuset")
    )
    memory = MemoryLimits(options.node_name, originals, unified=unified, total_mib=machine_mib())
    return Enforcer(cpusets, memory, keep_memory=options.keep_memory)


def make_run_dir(path: Path) -> None:
    """Make the directory for root alone. Raises ConfigError for one that others may write to."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat(follow_symlinks=False)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022 or path.is_symlink():
        raise ConfigError(
            "must be a directory of root that nobody else may write to",
            key="--run-dir",
            value=str(path),
            remedy="remove it, or name another one",
        )


def user_ids(names: list[str]) -> frozenset[int]:
    """The user ids of accounts, named or numeric. Raises ConfigError for an unknown one."""
    found = set()
    for name in names:
        try:
            found.add(int(name) if name.isdigit() else pwd.getpwnam(name).pw_uid)
        except KeyError as err:
            raise ConfigError(
                "there is no such account on this node",
                key="--controller-user",
                value=name,
                remedy="name the account that slurm-synergyd runs as, or its numeric user id",
            ) from err
    return frozenset(found)
