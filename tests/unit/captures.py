"""The captured answers of three Slurm releases, by release and name."""

from __future__ import annotations

import functools
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

from slurm_synergy.slurm.commands import CommandResult
from slurm_synergy.slurm.fields import parse_int
from slurm_synergy.slurm.parse_jobs import JobIdentity, parse_identities

__all__ = ["VERSIONS", "answer", "identities_in", "names"]

FIXTURES = Path(__file__).parent.parent / "fixtures" / "slurm"
VERSIONS = ("22.05.8", "24.11.5", "25.11.2")

_RECORD = re.compile(
    r"^JobId=(\d+) .*?JobName=(\S+)(?: \w+=\S+)?? UserId=(\w+)\((\d+)\) .*? Account=(\S+) ", re.M
)


@functools.cache
def _files(version: str) -> Mapping[str, bytes]:
    with zipfile.ZipFile(FIXTURES / version / "captures.zip") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def names(version: str) -> list[str]:
    """The names of all captures of a release."""
    return sorted(name.removesuffix(".rc") for name in _files(version) if name.endswith(".rc"))


def answer(version: str, name: str) -> CommandResult:
    """A capture as the command's result."""
    files = _files(version)
    out, err, status = (files[f"{name}.{end}"] for end in ("out", "err", "rc"))
    return CommandResult(
        argv=(name,),
        rc=parse_int(status.decode().strip(), "rc"),
        stdout=out.decode("utf-8", "surrogateescape"),
        stderr=err.decode("utf-8", "surrogateescape"),
    )


def identities_in(text: str) -> dict[int, JobIdentity]:
    """Identities of the jobs of a text whose names hold no blanks, as squeue would give them."""
    rows = []
    for job_id, name, _, uid, account in _RECORD.findall(text):
        values = (job_id, uid, "synergy", name, account, *["(null)"] * 9)
        rows.append("|mark-mark|".join(values) + "|mark-mark|\n")
    return parse_identities("".join(rows), "|mark-mark|")
