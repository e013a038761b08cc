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
from slurm_synergy.slurm import hostlist
from slurm_synergy.slurm.facts import GpuForm, JobFacts, NodeAllocation
from slurm_synergy.slurm.fields import (
    as_null,
    int_or,
    parse_count_range,
    parse_duration_s,
    parse_gpus,
    parse_gpus_with_ids,
    parse_id_set,
    parse_int,
    parse_mib,
    parse_time_s,
    parse_words,
    required,
    scan_keys,
)
from slurm_synergy.slurm.parse import whole
from slurm_synergy.slurm.states import hold_of, state_of

__all__ = [
    "JobIdentity",
    "JobMemory",
    "JobRecords",
    "identity_format",
    "parse_identities",
    "parse_jobs",
]

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
_BREAK = "\nJobId="
_HEAD = re.compile(r"(\d+) (?:Array\w+=\S* |HetJob\w+=\S* |SLUID=\S* )*JobName=")
_OWNER = re.compile(
    r" (?:HetJobIdSet=\S* |SLUID=\S* )*UserId=(?P<user>[^\n=]+?)\((?P<uid>\d+)\)"
    r" GroupId=[^\n=]*\(\d+\) MCS_label=\S* Priority=(?P<priority>\d+) Nice=-?\d+ Account="
)
_ALLOCATION = re.compile(r" Nodes=(\S+) CPU_IDs=(\S*) Mem=(\d+)(?: GRES=(\S*))?")
_TAIL_KEYS = re.compile(
    r"(?:\s+(?:Power|CpusPerTres|MemPerTres|NtasksPerTRES\S*|Tres\w+|KillO\w+|Mail\w+|SELinux\w*"
    r"|BurstBuffer\w*|OOM\w+|StepMgr\w*|CronJob|Switches|NodeList\w*|TimeMin)=\S*)*\s*\Z"
)
_CLOCK = " RunTime="  # what goes on while nothing happens, and is no part of the facts


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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecords:
    """Parsed jobs in order of their ids, and the ids that need a question of their own.

    ``strangers`` are the ids of what looks like records of jobs that have no identity: they came
    between the two readings, or a user wrote them, or the identities are not complete.
    """

    jobs: tuple[JobFacts, ...]
    unresolved: tuple[int, ...]
    strangers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """One record: the part before the name, who owns it, and the text behind the account.

    ``text`` is what all of it follows from; empty when another record may begin within it.
    """

    head: str
    owner: Mapping[str, str]
    rest: str
    text: str


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
        made = {row: self._identities.get(row) or _identity(row) for row in rows}
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


def identity_format(mark: str) -> str:
    """The ``squeue -O`` format whose fields each end in ``mark``.

    The mark must be hard to guess, and must not begin with a digit or hold ``,`` ``:`` or blanks.
    """
    if not re.fullmatch(r"[^\d\s,:][^\s,:]{7,}", mark):
        raise ValueError(f"mark {mark!r} is not usable in a squeue format")
    return ",".join(f"{field}:{mark}" for field in _IDENTITY_FIELDS)


def parse_identities(
    text: str, mark: str, memory: JobMemory | None = None
) -> dict[int, JobIdentity]:
    """``squeue -h -a -t all -O <identity_format(mark)>`` to identities by job id."""
    if not whole(text, "squeue").strip():
        return {}
    cells = text.split(mark)
    width = len(_IDENTITY_FIELDS)
    if cells.pop().strip() or len(cells) % width:
        raise SlurmParseError(f"squeue: {len(cells)} fields, expected a multiple of {width}", text)
    rows = (tuple(cells[start : start + width]) for start in range(0, len(cells), width))
    return (memory or JobMemory()).identities(rows)


def _identity(cells: Sequence[str]) -> JobIdentity:
    values = dict(zip(_IDENTITY_FIELDS, cells, strict=True))
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
            facts = _job(record, identity) if isinstance(record, _Body) else record.facts
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
) -> dict[int, list[_Body | _Known]]:
    found: dict[int, list[_Body | _Known]] = {}
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


def _body(text: str, start: _Start, identity: JobIdentity, later: Iterable[int]) -> _Body | None:
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
    return _Body(
        head=text[start.at : start.name_at],
        owner=owner.groupdict(),
        rest=text[rest_at:end].removesuffix("\n"),
        text=start.text if end == first and rest_at + len(" QOS=") <= end else "",
    )


def _job(body: _Body, identity: JobIdentity) -> JobFacts:
    rest = body.rest
    wckey = f" WCKey={identity.wckey} JobState="
    if wckey in rest:
        rest = rest.replace(wckey, " JobState=", 1)
    header, _, tail = rest.partition(" Command=")
    keys = scan_keys(header) | {f"{key}": value for key, value in scan_keys(body.head).items()}
    record = f"job {identity.job_id}"

    def word(key: str) -> str:
        return required(keys, key, record)

    state, flags = state_of(re.split(r"[+,]", word("JobState")))
    priority = int(body.owner["priority"])
    least, most = parse_count_range(word("NumNodes"), f"{record} NumNodes")
    num_tasks = keys.get("NumTasks", "")
    mem_node, mem_cpu = keys.get("MinMemoryNode"), keys.get("MinMemoryCPU")
    per_node = re.match(r"\d+", keys.get("NtasksPerN:B:S:C", ""))
    submit_s = parse_time_s(word("SubmitTime"), f"{record} SubmitTime")
    return JobFacts(
        job_id=identity.job_id,
        user=body.owner["user"],
        uid=identity.uid,
        name=identity.name,
        state=state,
        flags=flags,
        partition=word("Partition"),
        submit_s=submit_s or 0.0,
        reason=as_null(word("Reason")) or "",
        array_job_id=int(keys["ArrayJobId"]) if "ArrayJobId" in keys else None,
        array_task_id=keys.get("ArrayTaskId"),
        array_limit=int_or(keys.get("ArrayTaskThrottle", ""), 0) or None,
        het_job_id=int(keys["HetJobId"]) if "HetJobId" in keys else None,
        het_offset=int(keys["HetJobOffset"]) if "HetJobOffset" in keys else None,
        eligible_s=parse_time_s(word("EligibleTime"), f"{record} EligibleTime"),
        start_s=parse_time_s(word("StartTime"), f"{record} StartTime"),
        end_s=parse_time_s(word("EndTime"), f"{record} EndTime"),
        time_limit_s=parse_duration_s(word("TimeLimit"), f"{record} TimeLimit"),
        deadline_s=parse_time_s(keys.get("Deadline", ""), f"{record} Deadline"),
        restarts=parse_int(word("Restarts"), f"{record} Restarts"),
        reservation=as_null(keys.get("Reservation", "")),
        comment=identity.comment,
        admin_comment=identity.admin_comment,
        gpu_form=identity.gpu_form,
        gpus_asked=identity.gpus_asked,
        num_nodes=(least, most),
        num_tasks=int(num_tasks) if num_tasks.isdigit() else least,
        ntasks_per_node=int(per_node[0]) or None if per_node else None,
        cpus_per_task=int_or(keys.get("CPUs/Task", ""), 1),
        num_cpus=parse_count_range(word("NumCPUs"), f"{record} NumCPUs")[0],
        min_cpus_node=int_or(keys.get("MinCPUsNode", ""), 1),
        min_mem_node_mib=None if mem_node is None else parse_mib(mem_node, "MinMemoryNode"),
        min_mem_cpu_mib=None if mem_cpu is None else parse_mib(mem_cpu, "MinMemoryCPU"),
        held=hold_of(priority, word("Reason")),
        priority=priority,
        requeueable=word("Requeue") == "1",
        dependency=as_null(keys.get("Dependency", "")),
        req_nodes=hostlist.expand(keys.get("ReqNodeList", "")),
        node_list=hostlist.expand(keys.get("NodeList", "")),
        features=as_null(keys.get("Features", "")),
        batch_host=as_null(keys.get("BatchHost", "")),
        batch=keys.get("BatchFlag", "1") != "0",
        account=as_null(identity.account),
        work_dir=identity.work_dir,
        command=identity.command,
        std_out=_std_out(tail),
        exit_code=_exit_code(word("ExitCode"), record),
        allocation=_allocation(header, record),
    )


def _exit_code(text: str, record: str) -> tuple[int, int]:
    status, _, signal = text.partition(":")
    return parse_int(status, f"{record} ExitCode"), parse_int(signal or "0", f"{record} ExitCode")


def _std_out(tail: str) -> str:
    _, found, text = tail.rpartition(" StdOut=")
    return _TAIL_KEYS.sub("", text) if found else ""


def _allocation(header: str, record: str) -> tuple[NodeAllocation, ...]:
    allocation = []
    for nodes, cpus, mem, gres in _ALLOCATION.findall(header):
        gpus = parse_gpus_with_ids(gres, f"{record} GRES")
        types = [kind for kind, _, _ in gpus if kind]
        for node in hostlist.expand(nodes):
            allocation.append(
                NodeAllocation(
                    node=node,
                    cpu_ids=parse_id_set(cpus, f"{record} CPU_IDs"),
                    gpu_ids=tuple(sorted(index for _, _, ids in gpus for index in ids)),
                    gpu_type=types[0] if types else None,
                    mem_mib=int(mem),
                )
            )
    return tuple(allocation)
