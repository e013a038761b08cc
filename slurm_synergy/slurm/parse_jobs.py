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

_BREAK = "\nJobId="
_HEAD = re.compile(r"(\d+) (?:Array\w+=\S* |HetJob\w+=\S* |SLUID=\S* )*JobName=")
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
    """A record of the last reading, of which nothing has changed."""

    facts: JobFacts
    text: str


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """Where a record may begin: its offset, the end of ``JobName=``, its job, its own text.

    ``text`` goes to the next such place, without the word JobId in front and the running clock.
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
        self._identities: dict[tuple[str, ...], JobIdentity] = {}
        self._facts: dict[str, tuple[JobIdentity, JobFacts]] = {}

    def identities(self, rows: Iterable[tuple[str, ...]]) -> dict[int, JobIdentity]:
        """The identities of rows of cells, by job id."""
        made = {row: self._identities.get(row) or identity_of(row) for row in rows}
        self._identities = made
        return {identity.job_id: identity for identity in made.values()}

    def facts(self, text: str, identity: JobIdentity) -> JobFacts | None:
        """The facts of the record that is all of ``text``, if they are known."""
        known = self._facts.get(text)
        return known[1] if known is not None and known[0] is identity else None

    def keep(self, known: Iterable[tuple[str, JobIdentity, JobFacts]]) -> None:
        """The records of this reading; others are forgotten."""
        self._facts = {text: (identity, facts) for text, identity, facts in known}


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
    return (memory or JobMemory()).identities(identity_rows(text, mark))


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
    starts = _starts(whole(text, "scontrol show job"))
    ids = sorted(identities if wanted is None else wanted)
    memory = memory or JobMemory()
    found = _find_records(text, starts, {job_id: identities[job_id] for job_id in ids}, memory)
    jobs, unresolved, kept = [], [], []
    for job_id in ids:
        records, identity = found.get(job_id, []), identities[job_id]
        if len(records) == 1 or (records and first_only == job_id):
            record = records[0]
            facts = facts_of(record, identity) if isinstance(record, RecordText) else record.facts
            jobs.append(facts)
            if record.text:
                kept.append((record.text, identity, facts))
        else:
            unresolved.append(job_id)
    memory.keep(kept)
    return JobRecords(
        jobs=tuple(jobs),
        unresolved=tuple(unresolved),
        strangers=frozenset(start.job_id for start in starts) - identities.keys(),
    )


def _starts(text: str) -> list[_Start]:
    """All places where a record may begin, in order."""
    if not text.startswith(_BREAK[1:]):
        return []
    starts: list[_Start] = []
    at = 0
    for piece in text[len(_BREAK) - 1 :].split(_BREAK):
        head = _HEAD.match(piece)
        if head is not None:
            name_at = at + len(_BREAK) - 1 + head.end()
            still = _still(piece)
            starts.append(_Start(at=at, name_at=name_at, job_id=int(head[1]), text=still))
        elif starts:
            # A line that only looks like one: part of the record before it.
            last = starts.pop()
            starts.append(replace(last, text=f"{last.text}{_BREAK}{piece}"))
        at += len(_BREAK) + len(piece)
    return starts


def _find_records(
    text: str,
    starts: Sequence[_Start],
    identities: Mapping[int, JobIdentity],
    memory: JobMemory,
) -> dict[int, list[RecordText | _Known]]:
    found: dict[int, list[RecordText | _Known]] = {}
    for number, start in enumerate(starts):
        identity = identities.get(start.job_id)
        if identity is None:
            continue
        facts = memory.facts(start.text, identity)
        if facts is not None:
            found.setdefault(start.job_id, []).append(_Known(facts=facts, text=start.text))
            continue
        # A start within this record's own texts may be anybody's: the next start that counts is
        # one behind the owner part, and a cut that is too early costs the output path at most.
        body = _body(text, start, identity, (other.at for other in starts[number + 1 :]))
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
