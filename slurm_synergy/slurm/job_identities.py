"""Who a job is by ``squeue``: its owner and its user-written texts. Pure.

Every field ends in a mark that no user can guess, so that no text can fake a field; see
``parse_jobs`` for why that is needed.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from slurm_synergy.errors import SlurmParseError
from slurm_synergy.slurm.facts import GpuForm
from slurm_synergy.slurm.fields import as_null, parse_gpus, parse_int, parse_words
from slurm_synergy.slurm.parse import whole

__all__ = ["JobIdentity", "identity_format", "identity_of", "identity_rows"]

_IDENTITY_FIELDS = (
    "JobId",
    "UserId",
    "Partition",
    "Name",
    "Account",
    "WCKey",
    "Comment",
    "admin_comment",
    "Command",
    "WorkDir",
    "tres-per-node",
    "tres-per-job",
    "tres-per-task",
    "tres-per-socket",
)


_END = "\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """What ``squeue`` says of a job: its owner and its user-written texts, beyond doubt."""

    job_id: int
    uid: int
    partitions: tuple[str, ...]
    name: str
    account: str
    wckey: str
    comment: str
    admin_comment: str
    command: str
    work_dir: str
    gpu_form: GpuForm
    gpus_asked: Mapping[str, int]


def identity_format(mark: str) -> str:
    """The ``squeue -O`` format whose fields each end in ``mark``.

    The mark must be hard to guess, and must not begin with a digit or hold ``,`` ``:`` or blanks.
    """
    if not re.fullmatch(r"[^\d\s,:][^\s,:]{7,}", mark):
        raise ValueError(f"mark {mark!r} is not usable in a squeue format")
    return ",".join(f"{field}:{mark}" for field in _IDENTITY_FIELDS)


def identity_rows(text: str, mark: str, known: Container[str] = ()) -> Iterable[str]:
    """The row of each job in ``squeue -h -a -t all -O <identity_format(mark)>``.

    Its cells are parted by NUL in place of the mark: no text of Slurm's holds that, so rows of
    two readings can be compared. ``known`` are rows of an earlier one. Raises SlurmParseError for
    output that is not whole.
    """
    if not whole(text, "squeue").strip():
        return ()
    width = len(_IDENTITY_FIELDS)
    # Row by row: to look for a word in a text of megabytes, Python prepares anew at each place.
    rows = [row.replace(mark, _END) for row in text.split(f"{mark}\n")]
    if rows.pop() == "" and all([row in known or row.count(_END) == width - 1 for row in rows]):  # noqa: C419 - quicker
        return rows
    # A text that begins with a line break, or output that is not whole.
    cells = text.split(mark)
    if cells.pop().strip() or len(cells) % width:
        raise SlurmParseError(f"squeue: {len(cells)} fields, expected a multiple of {width}", text)
    return [_END.join(cells[start : start + width]) for start in range(0, len(cells), width)]


def identity_of(row: str) -> JobIdentity:
    """The job that a row is about. Raises SlurmParseError."""
    values = dict(zip(_IDENTITY_FIELDS, row.split(_END), strict=True))
    form, gpus = _gpus_asked(values)
    return JobIdentity(
        job_id=parse_int(values["JobId"].strip(), "squeue JobId"),
        uid=parse_int(values["UserId"].strip(), "squeue UserId"),
        partitions=parse_words(values["Partition"]),
        name=values["Name"],
        account=values["Account"],
        wckey=values["WCKey"],
        comment=as_null(values["Comment"]) or "",
        admin_comment=as_null(values["admin_comment"]) or "",
        command=as_null(values["Command"]) or "",
        work_dir=as_null(values["WorkDir"]) or "",
        gpu_form=form,
        gpus_asked=gpus,
    )


def _gpus_asked(values: Mapping[str, str]) -> tuple[GpuForm, dict[str, int]]:
    # Per node first: that is the form every job has that was reshaped by us.
    for form, field in (
        (GpuForm.PER_NODE, "tres-per-node"),
        (GpuForm.PER_TASK, "tres-per-task"),
        (GpuForm.PER_JOB, "tres-per-job"),
        (GpuForm.PER_SOCKET, "tres-per-socket"),
    ):
        gpus = parse_gpus(values[field], field)
        if gpus:
            return form, gpus
    return GpuForm.NONE, {}
