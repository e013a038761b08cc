"""Slurm's text to facts of jobs. Pure functions, tolerant of the releases from 22.05 on.

**Hostile text.** Slurm prints user text raw: a line break in a comment can fake a whole record, a
job name can hold `` JobState=COMPLETED UserId=root(0)``. Two outputs are therefore read together.
``squeue -O`` gives, per job, its id, its owner and every user-written text, each ended by a random
mark that a user cannot guess (``identity_format``, ``parse_identities``). ``scontrol -d show job
-o`` gives the rest. With the texts known, a record of job N can only begin at
``JobId=N … JobName=<exactly its name> … UserId=<its owner>``; name and account are cut out before
keys are searched, up to `` Command=``, behind which nothing but the output path is taken. A job
with no such place, or with two (somebody copied its record into a comment), is *unresolved* and
has to be asked for alone: then the first record is Slurm's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_synergy.core.values import quick
from slurm_synergy.errors import SlurmParseError
from slurm_synergy.slurm.facts import JobFacts
from slurm_synergy.slurm.job_identities import (
    JobIdentity,
    identity_format,
    identity_of,
    identity_rows,
)
from slurm_synergy.slurm.job_records import RecordText, facts_of
from slurm_synergy.slurm.parse import whole

__all__ = [
    "JobIdentity",
    "JobMemory",
    "JobRecords",
    "identity_format",
    "parse_identities",
    "parse_jobs",
]

_FIRST = "JobId="
_HEAD = re.compile(r"JobId=(\d+) (?:Array\w+=\S* |HetJob\w+=\S* |SLUID=\S* )*JobName=")
_OWNER = re.compile(
    r" (?:HetJobIdSet=\S* |SLUID=\S* )*UserId=(?P<user>[^\n=]+?)\((?P<uid>\d+)\)"
    r" GroupId=[^\n=]*\(\d+\) MCS_label=\S* Priority=(?P<priority>\d+) Nice=-?\d+ Account="
)
_CLOCK = " RunTime="  # what goes on while nothing happens, and is no part of the facts


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecords:
    """Parsed jobs in order of their ids, and the ids that need a question of their own.

    ``strangers`` are the ids of what looks like records of jobs that have no identity: they came
    between the two readings, or a user wrote them, or the identities are not complete.
    """

    jobs: tuple[JobFacts, ...]
    unresolved: tuple[int, ...]
    strangers: frozenset[int] = frozenset()


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A record of the last reading: all of its text, whose it is, and what was made of it."""

    job_id: int
    text: str
    identity: JobIdentity
    facts: JobFacts


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """Where a record may begin: its offset, the end of ``JobName=``, its job, its own text.

    ``text`` goes to the next such place, without the running clock.
    """

    at: int
    name_at: int
    job_id: int
    text: str


class JobMemory:
    """What was made of the texts of the last reading: most records are the same in the next one.

    Facts belong to the whole text of a record together with the identity of its job: where both
    are what they were, so are the facts. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._identities: dict[str, JobIdentity] = {}
        self._known: dict[str, _Known] = {}

    def identities(self, text: str, mark: str) -> dict[int, JobIdentity]:
        """The identities of the rows in ``text``, by job id."""
        before = self._identities
        rows = identity_rows(text, mark, before)
        made = {row: before.get(row) or identity_of(row) for row in rows}
        self._identities = made
        return {identity.job_id: identity for identity in made.values()}

    def records(self) -> Mapping[str, _Known]:
        """The records of the last reading by their texts."""
        return self._known

    def keep(self, known: Iterable[_Known]) -> None:
        """The records of this reading; others are forgotten."""
        self._known = {one.text: one for one in known}


def _still(text: str) -> str:
    """The text of a record without the running clock of a job that runs.

    A user may write the word as well; then the identity tells such texts apart, or the clock stays.
    """
    at = text.find(_CLOCK)
    end = text.find(" ", at + len(_CLOCK))
    if at < 0 or end < 0 or text.startswith("00:00:00 ", at + len(_CLOCK)):
        return text
    return text[:at] + text[end:]


def parse_identities(
    text: str, mark: str, memory: JobMemory | None = None
) -> dict[int, JobIdentity]:
    """``squeue -h -a -t all -O <identity_format(mark)>`` to identities by job id."""
    return (memory or JobMemory()).identities(text, mark)


def parse_jobs(
    text: str,
    identities: Mapping[int, JobIdentity],
    wanted: Iterable[int] | None = None,
    *,
    first_only: int | None = None,
    memory: JobMemory | None = None,
) -> JobRecords:
    """``scontrol -a -d show job -o`` to facts of the jobs ``wanted`` (default: all identities).

    ``first_only`` names the one job that was asked for: of several records of it the first counts.
    Raises ``SlurmParseError`` when the text is neither records nor Slurm's "No jobs".
    """
    if not text.startswith("JobId=") and not text.startswith("No jobs in the system"):
        raise SlurmParseError("scontrol show job: neither records nor 'No jobs'", text)
    memory = memory or JobMemory()
    known = memory.records()
    starts, offsets = _starts(whole(text, "scontrol show job"), known)
    ids = sorted(identities if wanted is None else wanted)
    asked = {job_id: identities[job_id] for job_id in ids}
    found = _find_records(text, starts, offsets, asked, known)
    jobs, unresolved, kept = [], [], []
    for job_id in ids:
        records = found.get(job_id, ())
        if len(records) == 1 or (records and first_only == job_id):
            record = records[0]
            if isinstance(record, RecordText):
                record = _made(record, asked[job_id])
            jobs.append(record.facts)
            if record.text:
                kept.append(record)
        else:
            unresolved.append(job_id)
    memory.keep(kept)
    return JobRecords(
        jobs=tuple(jobs),
        unresolved=tuple(unresolved),
        strangers=frozenset([start.job_id for start in starts]) - identities.keys(),
    )


def _made(body: RecordText, identity: JobIdentity) -> _Known:
    facts = facts_of(body, identity)
    return _Known(job_id=identity.job_id, text=body.text, identity=identity, facts=facts)


def _starts(text: str, known: Mapping[str, _Known]) -> tuple[list[_Start | _Known], Sequence[int]]:
    """All places where a record may begin, in order, and their offsets.

    In place of one at which all is as it was, what is known of it.
    """
    starts: list[_Start | _Known] = []
    offsets: list[int] = []
    if not text.startswith(_FIRST):
        return starts, offsets
    at, more = 0, list[str]()
    lines = text.split("\n")
    lines.pop()
    for line in lines:
        start = known.get(line) or _start(at, line)
        if start is None:
            more.append(line)  # of the record before it
        else:
            if more and starts:
                starts[-1] = _and_more(starts[-1], offsets[-1], more)
                more = []
            starts.append(start)
            offsets.append(at)
        at += len(line) + 1
    if more and starts:
        starts[-1] = _and_more(starts[-1], offsets[-1], more)
    return starts, offsets


def _start(at: int, line: str) -> _Start | None:
    head = _HEAD.match(line)
    if head is None:
        return None
    return _Start(at=at, name_at=at + head.end(), job_id=int(head[1]), text=_still(line))


def _and_more(start: _Start | _Known, at: int, lines: Sequence[str]) -> _Start:
    first = _anew(start, at)
    return replace(first, text="\n".join((first.text, *lines)))


def _anew(start: _Start | _Known, at: int) -> _Start:
    """The same place, nothing being known of it."""
    if isinstance(start, _Start):
        return start
    found = _start(at, start.text)
    assert found is not None
    return found


def _find_records(
    text: str,
    starts: Sequence[_Start | _Known],
    offsets: Sequence[int],
    identities: Mapping[int, JobIdentity],
    known: Mapping[str, _Known],
) -> dict[int, list[RecordText | _Known]]:
    found: dict[int, list[RecordText | _Known]] = {}
    for number, start in enumerate(starts):
        identity = identities.get(start.job_id)
        if identity is None:
            continue
        record = start if isinstance(start, _Known) else known.get(start.text)
        if record is not None and record.identity is identity:
            found.setdefault(start.job_id, []).append(record)
            continue
        # A start within this record's own texts may be anybody's: the next start that counts is
        # one behind the owner part, and a cut that is too early costs the output path at most.
        first = _anew(start, offsets[number])
        later = map(offsets.__getitem__, range(number + 1, len(offsets)))
        body = _body(text, first, identity, later)
        if body is not None:
            found.setdefault(start.job_id, []).append(body)
    return found


def _body(
    text: str, start: _Start, identity: JobIdentity, later: Iterable[int]
) -> RecordText | None:
    """The record that begins at ``start``, if it is one of ``identity``."""
    if not text.startswith(identity.name, start.name_at):
        return None
    owner = _OWNER.match(text, start.name_at + len(identity.name))
    if owner is None or int(owner["uid"]) != identity.uid:
        return None
    rest_at = owner.end() + len(identity.account)
    if not text.startswith(f"{identity.account} QOS=", owner.end()):
        return None
    ends = iter(later)
    first = end = next(ends, len(text))
    while end <= owner.end():
        end = next(ends, len(text))
    return RecordText(
        head=text[start.at : start.name_at],
        owner=owner.groupdict(),
        rest=text[rest_at:end].removesuffix("\n"),
        text=start.text if end == first and rest_at + len(" QOS=") <= end else "",
    )
