"""CPUs of jobs on cgroup v2, where Slurm's own cgroups must be changed.

A process has one cgroup for everything there, by which Slurm finds and ends it, so it cannot be put
elsewhere. Slurm limits the job and the part of each step in which its tasks are; both get the CPUs.
A new step makes Slurm write the job's again: the next look at it notices.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from slurm_synergy.nodehelper.cgroups import CGROUPS, JobPlace, read_cpus, show_cpus
from slurm_synergy.nodehelper.originals import Originals
from slurm_synergy.nodehelper.processes import owners, pids_in, set_masks

__all__ = ["CpusetsV2", "slurm_scope"]

_LOG = logging.getLogger(__name__)
_JOB = re.compile(r"job_(\d{1,10})")
_CPUS = "cpuset.cpus"


def slurm_scope(root: Path, node: str) -> Path | None:
    """The cgroup below which Slurm has the jobs of ``node``; None while it has none."""
    for name in (f"{node}_slurmstepd.scope", "slurmstepd.scope"):
        found = next(iter(sorted(root.glob(f"*.slice/{name}"))), None)
        if found is not None:
            return found
    return None


class CpusetsV2:
    """``root`` is where cgroup v2 is mounted; ``originals`` remembers what Slurm had written."""

    def __init__(self, node: str, originals: Originals, root: Path = CGROUPS) -> None:
        self._node, self._originals, self._root = node, originals, root

    def machine(self) -> frozenset[int]:
        """All CPUs that Slurm's jobs can have here."""
        scope = slurm_scope(self._root, self._node) or self._root
        return read_cpus((scope / "cpuset.cpus.effective").read_text())

    def jobs(self) -> Mapping[int, JobPlace]:
        """The jobs in Slurm's scope; the owner is that of all their tasks."""
        found: dict[int, JobPlace] = {}
        scope = slurm_scope(self._root, self._node)
        for place in scope.glob("job_*") if scope is not None else ():
            match = _JOB.fullmatch(place.name)
            if match is None:
                continue
            with contextlib.suppress(OSError, ValueError):
                file = place / _CPUS
                given = self._originals.slurms(file, _same)
                if not given:
                    continue  # Slurm does not confine it
                found[int(match[1])] = JobPlace(
                    job_id=int(match[1]), uid=_owner(place), cpus=read_cpus(given)
                )
        return found

    def held(self) -> Mapping[int, frozenset[int]]:
        """The CPUs of jobs whose files we have changed."""
        self._originals.forget_gone()
        found: dict[int, frozenset[int]] = {}
        for file in self._changed():
            with contextlib.suppress(OSError, ValueError):
                cpus = read_cpus(file.read_text())
                job_id = _job_of(file)
                found[job_id] = found.get(job_id, frozenset()) | cpus
        return found

    def confine(self, job: JobPlace, cpus: frozenset[int]) -> bool:
        """Write ``cpus`` where Slurm has written its own."""
        scope = slurm_scope(self._root, self._node)
        if scope is None:
            return False
        place = scope / f"job_{job.job_id}"
        written = False
        # What a step has beyond its job counts for nothing: the job's is last to grow.
        for file in (*sorted(place.glob(f"step_*/user/{_CPUS}")), place / _CPUS):
            if file.read_text().strip():
                written |= self._originals.write(file, show_cpus(cpus), _same)
        if written and not cpus <= job.cpus:
            for tasks in place.glob("step_*/user/**/"):
                set_masks(pids_in(tasks), cpus)
        return written

    def give_back(self, job_id: int) -> bool:
        """Write what Slurm had written."""
        mine = [file for file in self._changed() if _job_of(file) == job_id]
        return not [file for file in mine if not self._restore(file)]

    def give_all_back(self) -> bool:
        """The same for every file that was ever changed."""
        return not [file for file in self._changed() if not self._restore(file)]

    def _changed(self) -> Iterator[Path]:
        """Our files, the jobs' before those of steps: nothing gets wider meanwhile."""
        files = (file for file in self._originals.files() if file.name == _CPUS)
        return iter(sorted(files, key=lambda file: (len(file.parts), file)))

    def _restore(self, file: Path) -> bool:
        try:
            self._originals.restore(file, _same)
        except OSError as err:
            _LOG.debug("%s: %s", file, err)
            return False
        return True


def _owner(place: Path) -> int:
    users = owners(pid for tasks in place.glob("step_*/user/**/") for pid in pids_in(tasks))
    if len(users) > 1:
        users.discard(0)  # what Slurm itself keeps in the job
    return users.pop() if len(users) == 1 else -1


def _same(one: str, other: str) -> bool:
    try:
        return read_cpus(one) == read_cpus(other)
    except ValueError:
        return one == other


def _job_of(file: Path) -> int:
    return next(
        (int(match[1]) for part in file.parts if (match := _JOB.fullmatch(part)) is not None), -1
    )
