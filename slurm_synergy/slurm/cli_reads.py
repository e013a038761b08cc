"""Reading Slurm over ``squeue``, ``scontrol`` and ``sdiag``; Slurm 22.05 and newer.

**What is trusted.** An answer counts when the command succeeded, when it is whole (every row ends
in its mark, the last line in a line break), when ``squeue`` knew every field that it was asked for
(it exits 0 and leaves the column empty otherwise), and when the two readings of the queue agree:
jobs that only ``scontrol`` shows make ``squeue`` be asked again, and a queue of which ``scontrol``
shows hardly a job is an error. Slurm's own words for "nothing there" are the only empty answer.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from string import ascii_uppercase

from slurm_synergy.core.wording import counted
from slurm_synergy.errors import SlurmCommandError, SlurmParseError, SlurmTimeout
from slurm_synergy.slurm import parse
from slurm_synergy.slurm.accounting import AccountingFacts, parse_accounting
from slurm_synergy.slurm.budget import CallMeter, MeteredRunner, RpcBudget
from slurm_synergy.slurm.commands import CommandResult, CommandRunner
from slurm_synergy.slurm.facts import (
    ConfigFacts,
    JobFacts,
    NodeFacts,
    PartitionFacts,
    PingFacts,
    ReservationFacts,
)
from slurm_synergy.slurm.json_jobs import parse_json_jobs
from slurm_synergy.slurm.parse_jobs import (
    JobIdentity,
    JobMemory,
    JobRecords,
    identity_format,
    parse_identities,
    parse_jobs,
)
from slurm_synergy.slurm.sdiag import DiagFacts, parse_diag
from slurm_synergy.slurm.words import a_word, is_word

__all__ = ["CliReader"]

_LOG = logging.getLogger(__name__)

_SHOW_JOBS = ("scontrol", "-a", "-d", "-o", "show", "job")
# That many jobs are asked for alone without suspicion: forged texts, and jobs that just went.
_FEW = 20


class CliReader:
    """The reading half of ``SlurmClient``. Safe to use from several threads.

    Between calls it remembers what Slurm's commands call the jobs last read, and what was asked.

    A command that found no controller is repeated up to ``tries`` times in all, ``retry_delay_s``
    apart, as long as a ping says that the controller is up.
    """

    def __init__(
        self,
        runner: CommandRunner,
        *,
        timeout_s: float = 30.0,
        tries: int = 3,
        retry_delay_s: float = 0.5,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._meter = CallMeter()
        self._runner, self._timeout_s = MeteredRunner(runner, self._meter), timeout_s
        self._tries, self._retry_delay_s, self._sleep = tries, retry_delay_s, sleep
        self._clock = clock
        self._addresses: dict[int, str] = {}
        self._memory, self._nodes = JobMemory(), parse.NodeTexts()

    def budget(self) -> RpcBudget:
        """What was asked of Slurm so far, by kind of call."""
        return self._meter.budget()

    def read_queue(self, partition: str | None = None) -> tuple[JobFacts, ...]:
        """See ``SlurmClient``. Two commands; one more for each job whose text looks forged."""
        self._meter.begin_turn()
        return self._read_jobs(partition)

    def _read_jobs(self, partition: str | None) -> tuple[JobFacts, ...]:
        known = set(self._addresses)
        identities, text = self._read_both()
        records = self._records(text, identities, partition)
        if records.strangers:
            # Written by a user or submitted in between, or squeue's answer was not whole, or it
            # has merged waiting members of an array, which -r tells apart.
            again = self._read_identities(("-r",))
            if again.keys() - identities.keys():
                identities = identities | again
                records = self._records(text, identities, partition)
            if not identities:
                raise SlurmParseError("squeue names no job, but scontrol shows some", text)
        missing = len(records.unresolved)
        if missing > max(_FEW, len(records.jobs)):
            what = f"scontrol shows no record of {counted(missing, 'job')} that squeue names"
            raise SlurmParseError(f"{what}, and of {len(records.jobs)} it does", text)
        for job_id in known - identities.keys():
            self._addresses.pop(job_id, None)
        return self._with_single(records)

    def _records(
        self, text: str, identities: Mapping[int, JobIdentity], partition: str | None
    ) -> JobRecords:
        wanted = [
            job_id
            for job_id, identity in identities.items()
            if partition is None or partition in identity.partitions
        ]
        return parse_jobs(text, identities, wanted, memory=self._memory)

    def _with_single(self, records: JobRecords) -> tuple[JobFacts, ...]:
        jobs = list(records.jobs)
        for job_id in records.unresolved:
            try:
                jobs.append(self.read_job(job_id))
            except SlurmCommandError as err:
                # Slurm forgot it between the two commands (MinJobAge).
                if err.kind != "not_found":
                    raise
        self._note_addresses(jobs)
        if records.unresolved:
            jobs.sort(key=lambda job: job.job_id)
        return tuple(jobs)

    def _note_addresses(self, jobs: Iterable[JobFacts]) -> None:
        for job in jobs:
            # Only members of arrays are called otherwise than by their id.
            if job.array_job_id is not None and job.address != str(job.job_id):
                self._addresses[job.job_id] = job.address
            elif job.job_id in self._addresses:
                del self._addresses[job.job_id]

    def _address(self, job_id: int) -> str:
        """What Slurm's commands call the job, as last read."""
        return self._addresses.get(job_id, str(job_id))

    def read_job(self, job_id: int) -> JobFacts:
        """See ``SlurmClient``."""
        for _ in range(2):
            # A second look when a text of the job was changed between the two commands.
            identities = self._read_identities(("-j", str(job_id)))
            if job_id not in identities:
                # squeue -j takes the id of an array or het job, not that of each of its records.
                identities = self._read_identities(())
            argv = (*_SHOW_JOBS, str(job_id))
            text = self._run(*argv).stdout
            if job_id in identities:
                records = parse_jobs(text, identities, (job_id,), first_only=job_id)
                if records.jobs:
                    self._note_addresses(records.jobs)
                    return records.jobs[0]
        if job_id not in identities:
            raise SlurmCommandError(argv, 0, f"job {job_id} not found", kind="not_found")
        return self._read_json(job_id)

    def _read_json(self, job_id: int) -> JobFacts:
        """The last resort for a job whose texts hide its record: seconds, but not to be forged."""
        _LOG.info("job %d: its text hides its record; asking for JSON", job_id)
        argv = ("squeue", "-a", "-t", "all", "-j", str(job_id), "--json")
        nodes = {node.name: node for node in self.read_nodes()}
        jobs = parse_json_jobs(self._run(*argv).stdout, nodes, job_id)
        if jobs:
            self._note_addresses(jobs)
            return jobs[0]
        raise SlurmCommandError(argv, 0, f"job {job_id} not found", kind="not_found")

    def _read_both(self) -> tuple[dict[int, JobIdentity], str]:
        """The identities of all jobs and their records, asked for at once.

        A job that only one of the answers shows is asked for again.
        """
        records = self._runner.begin(_SHOW_JOBS, timeout_s=self._timeout_s)
        mark, argv = _identity_query(())
        told, tries = self._tried(argv)
        identities = _identities(told, mark, self._memory)
        # What was begun before a pause is no reading of now.
        return identities, self._tried(_SHOW_JOBS, records if tries == 1 else None)[0].stdout

    def _read_identities(self, select: Sequence[str]) -> dict[int, JobIdentity]:
        mark, argv = _identity_query(select)
        return _identities(self._run(*argv), mark)

    def read_nodes(self) -> tuple[NodeFacts, ...]:
        """See ``SlurmClient``."""
        text = self._run("scontrol", "-a", "-d", "-o", "show", "node").stdout
        return parse.parse_nodes(text, self._nodes)

    def read_partition(self, name: str) -> PartitionFacts:
        """See ``SlurmClient``."""
        argv = ("scontrol", "-a", "-o", "show", "partition", a_word(name, "partition"))
        for partition in parse.parse_partitions(self._run(*argv).stdout):
            if partition.name == name:
                return partition
        raise SlurmCommandError(argv, 0, f"Partition {name} not found", kind="not_found")

    def read_reservations(self) -> tuple[ReservationFacts, ...]:
        """See ``SlurmClient``."""
        return parse.parse_reservations(self._run("scontrol", "-o", "show", "reservation").stdout)

    def read_accounting(self, accounts: Iterable[str]) -> AccountingFacts:
        """See ``SlurmClient``. Names that Slurm's accounts cannot have are passed over."""
        names = sorted(name for name in set(accounts) if is_word(name))
        about = ("flags=assoc,qos", f"accounts={','.join(names)}") if names else ("flags=qos",)
        return parse_accounting(self._run("scontrol", "show", "assoc_mgr", *about).stdout, names)

    def read_config(self) -> ConfigFacts:
        """See ``SlurmClient``."""
        return parse.parse_config(self._run("scontrol", "show", "config").stdout)

    def ping(self) -> PingFacts:
        """See ``SlurmClient``."""
        result = self._runner.run(("scontrol", "ping"), timeout_s=self._timeout_s)
        if "Slurmctld(" not in result.stdout:
            result.check()
        return parse.parse_ping(result.stdout)

    def diagnose(self) -> DiagFacts:
        """Slurmctld's load, from ``sdiag``. Raises ClusterError."""
        return parse_diag(self._run("sdiag").stdout)

    def _run(self, *argv: str) -> CommandResult:
        return self._tried(argv)[0]

    def _tried(
        self, argv: Sequence[str], begun: Callable[[], CommandResult] | None = None
    ) -> tuple[CommandResult, int]:
        """What the command answered, and at which try. ``begun`` has the first one's result."""
        for number in range(1, self._tries + 1):
            is_last = number == self._tries
            try:
                if begun is not None and number == 1:
                    return begun().check(), number
                return self._runner.run(argv, timeout_s=self._timeout_s).check(), number
            except SlurmTimeout:
                if is_last or not self.ping().up:
                    raise
            except SlurmCommandError as err:
                if err.kind != "controller_down" or is_last or not self.ping().up:
                    raise
            self._sleep(self._retry_delay_s)
        raise AssertionError("at least one try")


def _identity_query(select: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """A mark, and the command whose answer has it behind each field."""
    # Letters that texts seldom hold make it quick to find.
    mark = f"|{''.join(secrets.choice(ascii_uppercase) for _ in range(20))}|"
    return mark, ("squeue", "-h", "-a", "-t", "all", *select, "-O", identity_format(mark))


def _identities(
    told: CommandResult, mark: str, memory: JobMemory | None = None
) -> dict[int, JobIdentity]:
    if "Invalid job format specification" in told.stderr:
        raise SlurmParseError("squeue does not know a field any more", told.stderr)
    return parse_identities(told.stdout, mark, memory)
