"""The Slurm client on pyslurm: the queue without commands and without text.

pyslurm is GPL-2.0 and bound to one Slurm release at build time. It is an optional extra, used only
when ``slurm.client: pyslurm`` asks for it, and never in this process: Slurm's library ends the
process that it is in when it finds no slurm.conf that it can use, and lets no other thread run
while it waits for slurmctld (``pyslurm_worker``).

The queue, single jobs, hold and cancel go through pyslurm. Everything else is the command line
client's: pyslurm has no way to send the node range, total CPUs and node list that
a reshape needs, shows no GPUs in use on nodes, and no GPUs of some requests (``pyslurm_facts``).
"""

from __future__ import annotations

import importlib.metadata
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurm_synergy.errors import (
    ClusterError,
    ConfigError,
    SlurmCommandError,
    SlurmTimeout,
)
from slurm_synergy.slurm.cli_client import CliSlurmClient
from slurm_synergy.slurm.commands import CommandRunner
from slurm_synergy.slurm.facts import GpuForm, JobFacts, NodeFacts
from slurm_synergy.slurm.pyslurm_facts import CutOff, Gpus, job_facts, with_gpus, with_threads
from slurm_synergy.slurm.pyslurm_process import Asked, PyslurmProcess

__all__ = ["PyslurmClient", "open_pyslurm"]

_START_S = 20.0
# So few jobs are read one by one with less work than with the whole queue.
_FEW = 2
_REMEDY = "install the pyslurm of that release ('slurm-synergy[pyslurm]'), or set slurm.client: cli"


def open_pyslurm(
    runner: CommandRunner, slurm_conf: str | None, *, timeout_s: float = _START_S
) -> PyslurmProcess:
    """A process that has imported pyslurm, with ``slurm_conf`` as its ``SLURM_CONF``.

    Raises ``ConfigError`` that names the Slurm release pyslurm was built for and the one that runs
    here. Another release than that is refused before anything is imported.
    """
    try:
        built = importlib.metadata.version("pyslurm")
    except importlib.metadata.PackageNotFoundError:
        raise _refusal("pyslurm is not installed") from None
    here = _release(runner)
    about = f"pyslurm {built} was built for Slurm {_minor(built)}, and Slurm {here or '?'} is here"
    if here and _minor(here) != _minor(built):
        raise _refusal(about)
    process = PyslurmProcess(slurm_conf)
    try:
        process.start(timeout_s)
    except SlurmTimeout:
        raise _refusal(f"importing pyslurm takes more than {timeout_s:g} s; {about}") from None
    except SlurmCommandError as err:
        raise _refusal(f"importing pyslurm fails: {err.stderr}; {about}") from None
    return process


def _refusal(what: str) -> ConfigError:
    return ConfigError(what, key="slurm.client", value="pyslurm", remedy=_REMEDY)


def _release(runner: CommandRunner) -> str:
    """Slurm's release by its own commands, which need no slurmctld; empty when not told."""
    try:
        said = runner.run(("scontrol", "--version"), timeout_s=10).check().stdout
    except ClusterError:
        return ""
    found = re.search(r"\d+\.\d+(?:\.\d+)?", said)
    return found[0] if found else ""


def _minor(version: str) -> str:
    """``25.11`` of ``25.11.2``; Slurm's numbers carry a zero that Python's versions drop.

    Whatever follows is passed over: a site that builds its own pyslurm may call it ``25.11+site``.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    return f"{found[1]}.{int(found[2]):02}" if found else version


class PyslurmClient(CliSlurmClient):
    """``SlurmClient`` on a process with pyslurm; the rest of it is the command line client.

    Facts of a job are kept for as long as pyslurm shows the same.
    """

    def __init__(self, runner: CommandRunner, process: Asked, **given: Any) -> None:
        super().__init__(runner, **given)
        self._process = process
        self._knowing = threading.Lock()
        # What pyslurm shows; None: read this job by command.
        self._known: dict[int, JobFacts | None] = {}
        # What became of that with the command line's word on GPUs and threads.
        self._made: dict[int, tuple[JobFacts, Gpus | None, JobFacts]] = {}
        self._threads: dict[str, int] = {}

    # Reading

    def _read_jobs(self, partition: str | None) -> tuple[JobFacts, ...]:
        shown, odd = self._read_shown(partition)
        facts = [*self._completed(shown), *self._by_command(odd, partition)]
        self._note_addresses(facts)
        return tuple(sorted(facts, key=lambda job: job.job_id))

    def _read_shown(self, partition: str | None) -> tuple[list[JobFacts], list[int]]:
        """The jobs as pyslurm shows them, and those that it cannot show."""
        with self._knowing:
            told = self._call("jobs", partition=partition)
            try:
                return self._take_in(told)
            except BaseException:
                self._process.close()  # what it believes that we know
                raise

    def _take_in(self, told: Mapping[str, Any]) -> tuple[list[JobFacts], list[int]]:
        if told["fresh"]:
            self._known.clear()
            self._made.clear()
        for job_id in told["gone"]:
            for memory in (self._known, self._made, self._addresses):
                memory.pop(job_id, None)
        for job_id, shown in told["changed"].items():
            self._known[int(job_id)] = _facts_or_none(shown)
        odd = set(told["odd"])
        found = {job_id: None if job_id in odd else self._known[job_id] for job_id in told["ids"]}
        return (
            [job for job in found.values() if job is not None],
            [job_id for job_id, job in found.items() if job is None],
        )

    def _completed(self, jobs: Sequence[JobFacts]) -> list[JobFacts]:
        """The jobs with what pyslurm does not show of them: one command for all that lack it."""
        given = self._gpus_of(jobs)
        self._learn_threads(jobs)
        facts = []
        for job in jobs:
            gpus, made = given.get(job.job_id), self._made.get(job.job_id)
            if made is None or made[0] is not job or made[1] != gpus:
                whole = with_threads(job if gpus is None else with_gpus(job, gpus), self._threads)
                made = self._made[job.job_id] = (job, gpus, whole)
            facts.append(made[2])
        return facts

    def _by_command(self, job_ids: Sequence[int], partition: str | None) -> list[JobFacts]:
        """Jobs that pyslurm cannot show."""
        if len(job_ids) > _FEW:
            wanted = set(job_ids)
            return [job for job in super()._read_jobs(partition) if job.job_id in wanted]
        jobs = []
        for job_id in job_ids:
            try:
                jobs.append(super().read_job(job_id))
            except SlurmCommandError as err:
                # Slurm forgot it in between (MinJobAge).
                if err.kind != "not_found":
                    raise
        return jobs

    def read_job(self, job_id: int) -> JobFacts:
        """See ``SlurmClient``. pyslurm's answer for an array's id is its waiting record."""
        shown = self._call("job", id=job_id)
        job = _facts_or_none(shown) if shown is not None else None
        if job is None or job.job_id != job_id:
            return super().read_job(job_id)
        given = self._gpus_of((job,)).get(job_id)
        self._learn_threads((job,))
        job = with_threads(job if given is None else with_gpus(job, given), self._threads)
        self._note_addresses((job,))
        return job

    def _gpus_of(self, jobs: Iterable[JobFacts]) -> Mapping[int, Gpus]:
        """The GPU requests of jobs that show none, by command: one for all of them."""
        bare = [job.job_id for job in jobs if job.gpu_form is GpuForm.NONE]
        if not bare:
            return {}
        known = self._read_identities(())
        return {
            job_id: (known[job_id].gpu_form, known[job_id].gpus_asked)
            for job_id in bare
            if job_id in known
        }

    def read_nodes(self) -> tuple[NodeFacts, ...]:
        """See ``SlurmClient``."""
        nodes = super().read_nodes()
        self._threads = {node.name: node.threads_per_core for node in nodes}
        return nodes

    def _learn_threads(self, jobs: Iterable[JobFacts]) -> None:
        if any(part.node not in self._threads for job in jobs for part in job.allocation):
            self.read_nodes()

    # Changing

    def hold(self, job_id: int) -> None:
        """See ``SlurmClient``."""
        if self._is_plain(job_id):
            self._call("hold", id=job_id)
        else:
            super().hold(job_id)

    def hold_running(self, job_id: int) -> None:
        """See ``SlurmClient``."""
        self.hold(job_id)

    def cancel(self, job_id: int) -> None:
        """See ``SlurmClient``."""
        if not self._is_plain(job_id):
            super().cancel(job_id)
            return
        try:
            self._call("cancel", id=job_id)
        except SlurmCommandError as err:
            if err.kind not in ("not_found", "finished"):
                raise

    def _is_plain(self, job_id: int) -> bool:
        # A member of an array may need an address that pyslurm, which takes ids, cannot send.
        return self._address(job_id) == str(job_id)

    def _call(self, what: str, **more: Any) -> Any:
        """Ask through pyslurm: counted, repeated and failing as a command is."""
        for left in reversed(range(self._tries)):
            try:
                with self._meter.call(f"pyslurm {what}"):
                    return self._process.ask({"do": what, **more}, timeout_s=self._timeout_s)
            except SlurmTimeout:
                if not left or not self._is_up():
                    raise
            except SlurmCommandError as err:
                if err.kind != "controller_down" or not left or not self._is_up():
                    raise
                # The commands find a slurmctld: it may be elsewhere than when pyslurm looked.
                self._process.close()
            self._sleep(self._retry_delay_s)
        raise AssertionError("at least one try")

    def _is_up(self) -> bool:
        try:
            return bool(self.ping().up)
        except (SlurmCommandError, SlurmTimeout):
            return False


def _facts_or_none(shown: list[Any]) -> JobFacts | None:
    """Facts, or None for a job that has to be read by command."""
    try:
        return job_facts(shown)
    except CutOff:
        return None
