#!/usr/bin/env python3
"""The lock of what CI installs: exact versions, and the sums of the very files.

    lock.py write     from the versions installed here; asks the package index for the sums
    lock.py check     without network: is it whole, does it fit setup.cfg and what is installed
    lock.py fits      whether the lock is for this interpreter and platform (exit status only)
    lock.py audit     check, then known vulnerabilities with pip-audit where it is and can ask

``constraints-hashes.txt`` is for one interpreter and platform, that of CI; elsewhere the ranges of
setup.cfg hold. torch is not in it: whether it is built for CPUs or GPUs is the index's choice.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = ["check", "main"]

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "constraints-hashes.txt"
EXTRAS = ("controller", "solver", "report", "sweep", "torch", "examples", "test")
NOT_LOCKED = {"torch"}
_LINE = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+) --hash=sha256:(?P<sum>\S+)")
_HEADER = "# for {}: written by scripts/lock.py write"


def _here() -> str:
    return f"Python {sys.version_info.major}.{sys.version_info.minor}, {sysconfig.get_platform()}"


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _needed(name: str, extras: tuple[str, ...]) -> Iterator[Requirement]:
    """What a distribution that is installed needs here."""
    # Not at the top: ``fits`` is asked before anything is installed.
    from packaging.requirements import Requirement

    for text in importlib.metadata.requires(name) or ():
        one = Requirement(text)
        if one.marker is None or any(
            one.marker.evaluate({"extra": extra}) for extra in (*extras, "")
        ):
            yield one


def closure() -> Mapping[str, list[Requirement]]:
    """All that the project's extras need, by canonical name; torch's own needs left out."""
    found: dict[str, list[Requirement]] = {}
    todo = list(_needed("slurm-synergy", EXTRAS))
    while todo:
        one = todo.pop()
        name = _canonical(one.name)
        if name in NOT_LOCKED or name == "slurm-synergy":
            continue
        known = name in found
        found.setdefault(name, []).append(one)
        if not known:
            todo += _needed(name, tuple(one.extras))
    return found


def locked() -> Mapping[str, tuple[str, str]]:
    """Version and sum of every distribution of the lock. Raises ValueError for other lines."""
    found: dict[str, tuple[str, str]] = {}
    for number, line in enumerate(LOCK.read_text(encoding="utf-8").splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None or not re.fullmatch(r"[0-9a-f]{64}", match["sum"]):
            raise ValueError(f"{LOCK.name}, line {number}: not NAME==VERSION --hash=sha256:SUM")
        found[_canonical(match["name"])] = (match["version"], match["sum"])
    return found


def fits() -> bool:
    """Whether the lock is for this interpreter and platform."""
    return LOCK.read_text(encoding="utf-8").startswith(_HEADER.format(_here()))


def check() -> list[str]:
    """What is wrong with the lock; empty when nothing is."""
    try:
        lock, needed = locked(), closure()
    except (OSError, ValueError, importlib.metadata.PackageNotFoundError) as err:
        return [str(err)]
    wrong = [f"{name} is locked but not needed" for name in sorted(lock.keys() - needed.keys())]
    for name, requirements in sorted(needed.items()):
        if name not in lock:
            wrong.append(f"{name} is needed but not locked")
            continue
        version = lock[name][0]
        wrong += [
            f"{name} {version} is locked, {one} is needed"
            for one in requirements
            if not one.specifier.contains(version, prereleases=True)
        ]
        installed = importlib.metadata.version(name)
        if installed != version:
            wrong.append(f"{name} {version} is locked, {installed} is installed")
    return wrong


def _sums(wanted: Mapping[str, str]) -> Mapping[str, str]:
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.json"
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"),
                *("--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:"),
                *(f"--report={report}", "--"),
                *(f"{name}=={version}" for name, version in wanted.items()),
            ],
            check=True,
        )
        items = json.loads(report.read_bytes())["install"]
    return {
        _canonical(item["metadata"]["name"]): item["download_info"]["archive_info"]["hashes"][
            "sha256"
        ]
        for item in items
    }


def write() -> None:
    """Write the lock anew from what is installed."""
    wanted = {name: importlib.metadata.version(name) for name in sorted(closure())}
    sums = _sums(wanted)
    lines = [_HEADER.format(_here())]
    lines += [f"{name}=={version} --hash=sha256:{sums[name]}" for name, version in wanted.items()]
    LOCK.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{LOCK.name}: {len(wanted)} distributions")


def _audit() -> int:
    program = shutil.which("pip-audit", path=str(Path(sys.executable).parent))
    if program is None:
        print("NOT looked for known vulnerabilities: pip-audit is not installed (pip install it)")
        return 0
    argv = [program, "--require-hashes", "--disable-pip", f"--requirement={LOCK}"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    print(done.stdout, end="")
    if done.returncode == 0:
        print("no known vulnerabilities")
    elif "ConnectionError" in done.stderr or "Max retries" in done.stderr:
        print("NOT looked for known vulnerabilities: their data base cannot be reached")
        return 0
    else:
        print(done.stderr, end="", file=sys.stderr)
    return done.returncode


def main(argv: list[str]) -> int:
    """Do what the one argument says; the exit status."""
    what = argv[0] if len(argv) == 1 else ""
    if what == "write":
        write()
        return 0
    if what == "fits":
        return 0 if fits() else 1
    if what not in ("check", "audit"):
        print(__doc__, file=sys.stderr)
        return 2
    if not fits():
        print(f"{LOCK.name} is not for {_here()} ({platform.machine()}): not checked here")
        return 0
    wrong = check()
    for line in wrong:
        print(f"{LOCK.name}: {line}", file=sys.stderr)
    if wrong:
        print("scripts/lock.py write makes it anew from what is installed", file=sys.stderr)
        return 1
    print(f"{LOCK.name}: {len(locked())} distributions, as installed")
    return _audit() if what == "audit" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
