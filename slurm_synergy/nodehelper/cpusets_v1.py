"""CPUs of jobs on cgroup v1: beside Slurm's cpusets, never in them.

Slurm writes a job's cpuset again for each new step, and on v1 that fails, and the step with it,
while a step has more than the job (``Slurmd could not execve job``). So Slurm's directories stay as
they are. The processes of each step are moved to a cpuset of ours; they go back where they came
from. Whatever becomes of the helper, the name of the cpuset that a process is in tells where that
is.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from slurm_synergy.nodehelper.cgroups import CGROUPS, JobPlace, read_cpus, show_cpus
from slurm_synergy.nodehelper.processes import job_processes, pids_in, set_masks

__all__ = ["CpusetsV1"]

_LOG = logging.getLogger(__name__)
_PASSES = 8
_JOB = re.compile(r"uid_(\d{1,10})/job_(\d{1,10})")
_JOINT = "+"
_OF_A_JOB = ("job_", "step_", "task_")


class CpusetsV1:
    """``root`` is where the hierarchy ``cpuset`` is mounted, ``node`` Slurm's name of this node."""

    def __init__(self, node: str, root: Path = CGROUPS / "cpuset") -> None:
        self._root, self._ours = root, root / f"slurm-synergy_{node}"
        self._places = (root / f"slurm_{node}", root / "slurm")

    @property
    def _slurm(self) -> Path:
        return next((one for one in self._places if one.is_dir()), self._places[-1])

    def machine(self) -> frozenset[int]:
        """All CPUs that Slurm's jobs can have here."""
        return read_cpus((self._slurm / "cpuset.cpus").read_text())

    def jobs(self) -> Mapping[int, JobPlace]:
        """The jobs in Slurm's tree; the owner is part of the path."""
        found: dict[int, JobPlace] = {}
        for place in self._slurm.glob("uid_*/job_*"):
            match = _JOB.fullmatch(f"{place.parent.name}/{place.name}")
            if match is None:
                continue
            uid, job_id = int(match[1]), int(match[2])
            with contextlib.suppress(OSError, ValueError):
                cpus = read_cpus((place / "cpuset.cpus").read_text())
                known = found.get(job_id)
                uid = -1 if known is not None else uid
                found[job_id] = JobPlace(job_id=job_id, uid=uid, cpus=cpus)
        return found

    def held(self) -> Mapping[int, frozenset[int]]:
        """The CPUs of jobs with processes in our cpusets."""
        found: dict[int, frozenset[int]] = {}
        for leaf, origin in self._leaves():
            with contextlib.suppress(OSError, ValueError):
                cpus = read_cpus((leaf / "cpuset.cpus").read_text())
                job_id = _job_of(origin)
                found[job_id] = found.get(job_id, frozenset()) | cpus
        return found

    def confine(self, job: JobPlace, cpus: frozenset[int]) -> bool:
        """Move the job's processes to cpusets with exactly ``cpus``."""
        self._make_ours()
        changed = False
        base = self._slurm / f"uid_{job.uid}" / f"job_{job.job_id}"
        for leaf, origin in self._leaves(job.job_id):
            if not origin.is_dir():
                changed |= self._return(leaf, origin)
        for step in sorted(base.glob("step_*/**/")):
            changed |= self._confine_step(job, step, cpus)
        return changed

    def _confine_step(self, job: JobPlace, step: Path, cpus: frozenset[int]) -> bool:
        leaf = self._ours / _JOINT.join(step.relative_to(self._slurm).parts)
        arrived: set[int] = set()
        if not leaf.exists():
            if next(job_processes(step, job.uid), None) is None:
                return False
            leaf.mkdir()
            (leaf / "cpuset.mems").write_text((step / "cpuset.mems").read_text())
        written = read_cpus((leaf / "cpuset.cpus").read_text()) != cpus
        if written:
            (leaf / "cpuset.cpus").write_text(show_cpus(cpus))
            arrived.update(pids_in(leaf))
        for _ in range(_PASSES):
            moved = [pid for pid in job_processes(step, job.uid) if _move(pid, leaf)]
            arrived.update(moved)
            if not moved:
                break
        if not cpus <= job.cpus:
            set_masks(arrived, cpus)
        return written or bool(arrived)

    def _make_ours(self) -> None:
        self._ours.mkdir(exist_ok=True)
        for name in ("cpuset.mems", "cpuset.cpus"):
            wanted = (self._slurm / name).read_text()
            if (self._ours / name).read_text() != wanted:
                (self._ours / name).write_text(wanted)

    def give_back(self, job_id: int) -> bool:
        """Move its processes back to where Slurm had them."""
        return not [leaf for leaf, origin in self._leaves(job_id) if not self._return(leaf, origin)]

    def give_all_back(self) -> bool:
        """All processes in our cpusets go back; then these are removed."""
        left = [leaf for leaf, origin in self._leaves() if not self._return(leaf, origin)]
        with contextlib.suppress(OSError):
            self._ours.rmdir()
        return not left

    def _leaves(self, job_id: int | None = None) -> Iterator[tuple[Path, Path]]:
        """Our cpusets, of one job or all, each with the one of Slurm's that it stands for."""
        if not self._ours.is_dir():
            return
        for leaf in sorted(self._ours.glob("uid_*")):
            origin = self._slurm.joinpath(*leaf.name.split(_JOINT))
            if job_id is None or _job_of(origin) == job_id:
                yield leaf, origin

    def _return(self, leaf: Path, origin: Path) -> bool:
        try:
            return self._empty(leaf, origin)
        except (OSError, ValueError) as err:
            _LOG.debug("%s: %s", leaf.name, err)
            return False

    def _empty(self, leaf: Path, origin: Path) -> bool:
        # A step may have ended while something of it will not die: then the job's own cpuset.
        own = [one for one in (origin, *origin.parents) if one.name.startswith(_OF_A_JOB)]
        target = next((one for one in own if _usable(one)), None)
        for _ in range(_PASSES):
            pids = pids_in(leaf)
            if not pids:
                break
            if target is None:
                # Slurm has nothing left to go back to: no more than one CPU.
                cpus = read_cpus((leaf / "cpuset.cpus").read_text())
                (leaf / "cpuset.cpus").write_text(str(min(cpus)))
                return False
            for pid in pids:
                _move(pid, target)
        leaf.rmdir()
        return True


def _job_of(origin: Path) -> int:
    name = next((part for part in origin.parts[::-1] if part.startswith("job_")), "job_-1")
    try:
        return int(name.removeprefix("job_"))
    except ValueError:
        return -1


def _usable(place: Path) -> bool:
    with contextlib.suppress(OSError):
        return bool((place / "cpuset.cpus").read_text().strip())
    return False


def _move(pid: int, place: Path) -> bool:
    try:
        (place / "cgroup.procs").write_text(str(pid))
    except ProcessLookupError:
        return False
    return True
