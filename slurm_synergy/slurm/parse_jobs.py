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
from dataclasses import dataclass

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
_RECORD = re.compile(
    r"^JobId=(\d+) (?:Array\w+=\S* |HetJob\w+=\S* |SLUID=\S* )*JobName=", re.MULTILINE
)
_OWNER = re.compile(
    r" (?:HetJobIdSet=\S* |SLUID=\S* )*UserId=(?P<user>[^\n=]+?)\((?P<uid>\d+)\)"
    r" GroupId=[^\n=]*\(\d+\) MCS_label=\S* Priority=(?P<priority>\d+) Nice=-?\d+ Account="
)
_ALLOCATION = re.compile(r" Nodes=(\S+) CPU_IDs=(\S*) Mem=(\d+)(?: GRES=(\S*))?")
_TAIL_KEYS = re.compile(
    r"(?:\s+(?:Power|CpusPerTres|MemPerTres|NtasksPerTRES\S*|Tres\w+|KillO\w+|Mail\w+|SELinux\w*"
    r"|BurstBuffer\w*|OOM\w+|StepMgr\w*|CronJob|Switches|NodeList\w*|TimeMin)=\S*)*\s*\Z"
)


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
    """One record: the part before the name, who owns it, and the text behind the account."""

    head: str
    owner: Mapping[str, str]
    rest: str


class JobMemory:
    """What was made of the texts of the last reading: most records are the same in the next one.

    Safe to use from several threads: what is kept belongs to the text that it was made of.
    """

    def __init__(self) -> None:
        self._identities: dict[tuple[str, ...], JobIdentity] = {}
        self._facts: dict[int, tuple[_Body, JobIdentity, JobFacts]] = {}

    def identities(self, rows: Iterable[tuple[str, ...]]) -> dict[int, JobIdentity]:
        """The identities of rows of cells, by job id."""
        made = {row: self._identities.get(row) or _identity(row) for row in rows}
        self._identities = made
        return {identity.job_id: identity for identity in made.values()}

    def facts(self, body: _Body, identity: JobIdentity) -> JobFacts:
        """The facts of a record."""
        known = self._facts.get(identity.job_id)
        if known is not None and known[0] == body and known[1] == identity:
            return known[2]
        facts = _job(body, identity)
        self._facts[identity.job_id] = (body, identity, facts)
        return facts

    def forget_all_but(self, known: Iterable[int]) -> None:
        """Drop jobs that are not shown any more."""
        facts = self._facts
        self._facts = {job_id: facts[job_id] for job_id in known if job_id in facts}


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
    starts = list(_RECORD.finditer(whole(text, "scontrol show job")))
    ids = sorted(identities if wanted is None else wanted)
    bodies = _find_records(text, starts, {job_id: identities[job_id] for job_id in ids})
    jobs, unresolved, memory = [], [], memory or JobMemory()
    for job_id in ids:
        found = bodies.get(job_id, [])
        if len(found) == 1 or (found and first_only == job_id):
            jobs.append(memory.facts(found[0], identities[job_id]))
        else:
            unresolved.append(job_id)
    return JobRecords(
        jobs=tuple(jobs),
        unresolved=tuple(unresolved),
        strangers=frozenset(int(match[1]) for match in starts) - identities.keys(),
    )


def _find_records(
    text: str, starts: Sequence[re.Match[str]], identities: Mapping[int, JobIdentity]
) -> dict[int, list[_Body]]:
    bodies: dict[int, list[_Body]] = {}
    for number, match in enumerate(starts):
        identity = identities.get(int(match[1]))
        if identity is None or not text.startswith(identity.name, match.end()):
            continue
        owner = _OWNER.match(text, match.end() + len(identity.name))
        if owner is None or int(owner["uid"]) != identity.uid:
            continue
        if not text.startswith(f"{identity.account} QOS=", owner.end()):
            continue
        # A start within this record's own texts may be anybody's: the next start that counts is
        # one behind the owner part, and a cut that is too early costs the output path at most.
        later = (other.start() for other in starts[number + 1 :] if other.start() > owner.end())
        rest = text[owner.end() + len(identity.account) : next(later, len(text))]
        bodies.setdefault(identity.job_id, []).append(
            _Body(head=match[0], owner=owner.groupdict(), rest=rest.removesuffix("\n"))
        )
    return bodies


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
