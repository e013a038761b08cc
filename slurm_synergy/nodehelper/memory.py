"""The memory limit of jobs: raised to what their lease says, never below what Slurm had granted.

Taking memory away from a running job by its limit ends processes (or, on v1, fails). A limit goes
back towards Slurm's only as far as the job's use allows, and the next look tries again.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_synergy.nodehelper.cgroups import CGROUPS
from slurm_synergy.nodehelper.cpusets_v2 import slurm_scope
from slurm_synergy.nodehelper.originals import Originals

__all__ = ["MemoryLimits", "machine_mib"]

_LOG = logging.getLogger(__name__)
_MIB = 1024**2
_UNLIMITED = 2**60
_MARGIN = 64 * _MIB
_MEMINFO = Path("/proc/meminfo")
_JOB = re.compile(r"job_(\d{1,10})")


def machine_mib() -> int:
    """The memory of this machine in MiB."""
    found = re.search(r"^MemTotal:\s*(\d+) kB", _MEMINFO.read_text(encoding="ascii"), re.M)
    return int(found[1]) // 1024 if found is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """How one release of cgroups calls things, and what is limited of a step."""

    limit: str
    use: str
    step: str
    cache: str
    shared: str

    def kept(self, place: Path) -> int:
        """What of a cgroup's memory the kernel cannot free by itself, in bytes."""
        words = (line.split() for line in (place / "memory.stat").read_text().splitlines())
        stat = {word[0]: int(word[1]) for word in words if len(word) == 2}
        freed = stat.get(self.cache, 0) - stat.get(self.shared, 0)
        return int((place / self.use).read_text()) - max(0, freed)


_V1 = _Names(
    limit="memory.limit_in_bytes",
    use="memory.usage_in_bytes",
    step="step_*",
    cache="total_cache",
    shared="total_shmem",
)
_V2 = _Names(
    limit="memory.max", use="memory.current", step="step_*/user", cache="file", shared="shmem"
)


class MemoryLimits:
    """``total_mib`` is what all limits together must not exceed.

    ``unified``: cgroup v2. ``root`` is where the cgroups are mounted.
    """

    def __init__(
        self,
        node: str,
        originals: Originals,
        *,
        unified: bool,
        total_mib: int,
        root: Path = CGROUPS,
    ) -> None:
        self._node, self._originals, self._total = node, originals, total_mib * _MIB
        self._unified, self._root = unified, root if unified else root / "memory"
        self._names = _V2 if unified else _V1

    def set_to(self, job_id: int, wanted_mib: Mapping[int, int]) -> bool:
        """Let the job use ``wanted_mib[job_id]``; whether its limit was raised. Raises OSError.

        Slurm's limit stays (or comes back) where that is more, where there is none, and where the
        other jobs' limits, or what ``wanted_mib`` says of them if more, leave too little of the
        machine.
        """
        places = self._places()
        place = places.get(job_id)
        if place is None:
            return False
        limits = {one: self._granted(path) for one, path in places.items()}
        granted = limits.pop(job_id)
        wanted = wanted_mib[job_id] * _MIB
        others = sum(max(one, wanted_mib.get(job, 0) * _MIB) for job, one in limits.items())
        if granted >= _UNLIMITED or wanted <= granted or wanted + others > self._total:
            self.give_back(job_id)
            return False
        raised = False
        for file in self._files(place):
            if _bytes(file.read_text()) > wanted:
                self._lower(file, wanted)
            else:
                raised |= self._originals.write(file, str(wanted), _same)
        return raised

    def give_back(self, job_id: int) -> bool:
        """Lower the job's limits towards Slurm's; False while its use does not allow that."""
        mine = [file for file in self._changed() if _job_of(file) == job_id]
        return not [file for file in mine if not self._lower(file)]

    def give_all_back(self) -> bool:
        """The same for every limit that was ever changed."""
        return not [file for file in self._changed() if not self._lower(file)]

    def held(self) -> frozenset[int]:
        """Jobs whose limits are not Slurm's because of us. Raises OSError."""
        self._originals.forget_gone()
        return frozenset(map(_job_of, self._changed()))

    def _lower(self, file: Path, wanted: int = 0) -> bool:
        """Lower a limit to ``wanted`` bytes, or what the job uses, or what Slurm had granted."""
        try:
            slurms = _bytes(self._originals.slurms(file, _same))
            kept = self._names.kept(file.parent)
            least = max(wanted, (kept + _MARGIN) // _MIB * _MIB)
            if least <= slurms:
                self._originals.restore(file, _same)
                return True
            if least < _bytes(file.read_text()):
                self._originals.write(file, str(least), _same)
        except FileNotFoundError:
            self._originals.restore(file, _same)
            return True
        except (OSError, ValueError) as err:
            _LOG.debug("%s: %s", file, err)
        return False

    def _granted(self, place: Path) -> int:
        try:
            return _bytes(self._originals.slurms(place / self._names.limit, _same))
        except (OSError, ValueError):
            return _UNLIMITED

    def _files(self, place: Path) -> list[Path]:
        """The limits of a job: its own first, which bounds those of its steps."""
        name = self._names.limit
        steps = sorted(place.glob(f"{self._names.step}/{name}"))
        return [place / name, *(one for one in steps if _bytes(one.read_text()) < _UNLIMITED)]

    def _changed(self) -> list[Path]:
        """The limits that we have changed: those of steps first, to be lowered first."""
        files = (one for one in self._originals.files() if one.name == self._names.limit)
        return sorted(files, key=lambda file: (-len(file.parts), file))

    def _places(self) -> dict[int, Path]:
        if self._unified:
            scope = slurm_scope(self._root, self._node)
            found = scope.glob("job_*") if scope is not None else iter(())
        else:
            tree = self._root / f"slurm_{self._node}"
            tree = tree if tree.is_dir() else self._root / "slurm"
            found = tree.glob("uid_*/job_*")
        with contextlib.suppress(OSError):
            return {_job_of(place): place for place in found if _JOB.fullmatch(place.name)}
        return {}


def _job_of(file: Path) -> int:
    return next(
        (int(match[1]) for part in file.parts if (match := _JOB.fullmatch(part)) is not None), -1
    )


def _bytes(text: str) -> int:
    text = text.strip()
    return _UNLIMITED if text == "max" else min(int(text), _UNLIMITED)


def _same(one: str, other: str) -> bool:
    try:
        return _bytes(one) == _bytes(other)
    except ValueError:
        return one == other
