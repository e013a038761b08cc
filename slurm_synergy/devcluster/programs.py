"""The programs of Slurm and munge on this machine, and what they say about it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from slurm_synergy.errors import DevClusterError

__all__ = [
    "clean_environment",
    "find",
    "hardware",
    "job_submit_source",
    "missing_programs",
    "need",
    "slurm_version",
    "slurm_version_text",
    "tail",
]

_SBIN = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "scontrol")
_FOREIGN = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_")


def find(name: str) -> str | None:
    """The path of a program; None when it is not installed."""
    # Daemons live in sbin, which an ordinary user's PATH often lacks.
    return shutil.which(name) or shutil.which(name, path=_SBIN)


def missing_programs() -> tuple[str, ...]:
    """The programs of Slurm and munge that this machine lacks."""
    return tuple(name for name in _PROGRAMS if find(name) is None)


def need(name: str) -> str:
    """The path of a program. Raises DevClusterError when it is not installed."""
    found = find(name)
    if found is None:
        raise DevClusterError(f"{name} is not installed; run scripts/install-slurm.sh")
    return found


def _output(argv: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=20, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise DevClusterError(f"{' '.join(argv)}: {err}") from err
    return done.stdout + done.stderr


def slurm_version_text() -> str:
    """What ``slurmd -V`` prints, for instance ``slurm-wlm 22.05.8``."""
    return _output([need("slurmd"), "-V"]).strip()


def slurm_version() -> tuple[int, int]:
    """(major, minor) of the installed Slurm. Raises DevClusterError when it does not tell."""
    text = slurm_version_text()
    found = re.search(r"(\d+)\.(\d+)", text)
    if found is None:
        raise DevClusterError(f"slurmd -V does not tell its version: {text!r}")
    return int(found[1]), int(found[2])


def hardware() -> dict[str, int]:
    """What ``slurmd -C`` finds: CPUs, Boards, SocketsPerBoard, ThreadsPerCore, ..."""
    found = re.findall(r"(\w+)=(\d+)\b", _output([need("slurmd"), "-C"]))
    return {key: int(value) for key, value in found}


def clean_environment() -> dict[str, str]:
    """This process's environment without another Slurm's variables, sbin on the PATH."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
    kept["PATH"] = f"{kept.get('PATH', '')}:{_SBIN}".lstrip(":")
    return kept


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log."""
    try:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"


def job_submit_source() -> Path:
    """job_submit.lua: beside the package in a checkout, or where the installation put it.

    Raises DevClusterError when it is in neither place.
    """
    package = Path(__file__).resolve().parents[1]
    for place in (package.parent / "etc", Path(sys.prefix) / "share" / "slurm-synergy"):
        if (place / "job_submit.lua").is_file():
            return place / "job_submit.lua"
    raise DevClusterError("job_submit.lua is not in this installation; reinstall slurm-synergy")
