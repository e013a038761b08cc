"""Whether a step failed through no fault of its own: what Slurm's commands tell the wrapper.

Asked only after a failure. Standard library only, as the wrapper.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

__all__ = [
    "ERROR_EXIT",
    "ERROR_EXIT_VARIABLE",
    "answers",
    "has_steps",
    "is_launch_error",
    "is_slurm_error",
    "lacks_gpus",
    "show_job",
]

# srun(1): the exit status of srun's own errors, which is 1 otherwise, as many programs' is.
ERROR_EXIT_VARIABLE = "SLURM_EXIT_ERROR"
ERROR_EXIT = 211
_TIMEOUT_S = 60.0
# "Application launch failed" ends srun with the low byte of Slurm's error number. These are of the
# communication with a slurmd, which may be there again soon (seen: 1001, 1013, of one that had just
# died); a wrong version or plugin would stay wrong.
_COMMUNICATION = frozenset(
    number & 0xFF for number in (1000, 1001, 1002, 1003, 1004, 1007, 1008, 1013)
)
_GPUS_ASKED = re.compile(r" Tres(?:PerNode|PerJob|PerTask|PerSocket)=\S*gpu")
_STEP = re.compile(r"^\d+\.\d+$", re.MULTILINE)


def show_job(env: Mapping[str, str]) -> str | None:
    """This job's record; None when Slurm does not answer. Raises OSError without scontrol."""
    return _ask(("scontrol", "-o", "show", "job", env.get("SLURM_JOB_ID", "")), env)


def lacks_gpus(env: Mapping[str, str]) -> bool:
    """Whether this batch job asked for GPUs and was started without them."""
    if env.get("ENVIRONMENT") != "BATCH" or env.get("SLURM_JOB_GPUS"):
        return False
    try:
        return _GPUS_ASKED.search(show_job(env) or "") is not None
    except OSError:
        return False


def is_launch_error(code: int) -> bool:
    """Whether srun's exit status says that it could not launch the tasks."""
    return code in _COMMUNICATION


def is_slurm_error(code: int, env: Mapping[str, str]) -> bool:
    """Whether srun failed before it had a step, as it does while slurmctld is down.

    Not known, so False, where the user chose that exit status.
    """
    return code == ERROR_EXIT and env.get(ERROR_EXIT_VARIABLE) == str(ERROR_EXIT)


def answers(env: Mapping[str, str]) -> bool:
    """Whether Slurm tells of this job; True where there is no scontrol to ask."""
    try:
        return show_job(env) is not None
    except OSError:
        return True


def has_steps(env: Mapping[str, str]) -> bool:
    """Whether any step of this job runs, the batch script aside; True when it is not known."""
    try:
        shown = _ask(("squeue", "-h", "-s", "-j", env.get("SLURM_JOB_ID", ""), "-o", "%i"), env)
    except OSError:
        return True
    return shown is None or _STEP.search(shown) is not None


def _ask(argv: Sequence[str], env: Mapping[str, str]) -> str | None:
    try:
        done = subprocess.run(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return None
    return None if done.returncode else done.stdout
