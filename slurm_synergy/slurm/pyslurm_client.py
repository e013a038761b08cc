"""The Slurm client on pyslurm: the queue without a process and without text.

pyslurm is GPL-2.0 and bound to one Slurm release at build time. It is an optional extra, imported
only when ``slurm.client: pyslurm`` asks for it, and never before a child process has shown that it
can be: ``import pyslurm`` ends the process when it finds no slurm.conf that it can use.

The queue, single jobs, hold and cancel go through pyslurm. Everything else is the command line
client's: pyslurm has no way to send the node range, total CPUs and node list that
a reshape needs, shows no GPUs in use on nodes, and no GPUs of some requests (``pyslurm_facts``).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from slurm_synergy.errors import (
    ClusterError,
    ConfigError,
    SlurmCommandError,
    SlurmTimeout,
)
from slurm_synergy.slurm.cli_client import CliSlurmClient
from slurm_synergy.slurm.commands import CommandRunner, classify
from slurm_synergy.slurm.facts import GpuForm, JobFacts
from slurm_synergy.slurm.pyslurm_facts import CutOff, Gpus, gpus_shown, job_facts

__all__ = ["PyslurmClient", "import_pyslurm"]

_T = TypeVar("_T")

_PROBE = "import pyslurm; print(pyslurm.__version__)"
_PROBE_S = 20.0
_REMEDY = "install the pyslurm of that release ('slurm-synergy[pyslurm]'), or set slurm.client: cli"


def import_pyslurm(
    runner: CommandRunner, slurm_conf: str | None, *, timeout_s: float = _PROBE_S
) -> Any:
    """The module ``pyslurm``, after a child process has imported it without harm.

    ``slurm_conf`` becomes ``SLURM_CONF`` of this process: pyslurm reads nothing else. Raises
    ``ConfigError`` that names the Slurm release pyslurm was built for and the one that runs here.
    """
    try:
        built = importlib.metadata.version("pyslurm")
    except importlib.metadata.PackageNotFoundError:
        raise _refusal("pyslurm is not installed") from None
    here = _release(runner)
    about = f"pyslurm {built} was built for Slurm {_minor(built)}, and Slurm {here or '?'} is here"
    if here and _minor(here) != _minor(built):
        raise _refusal(about)
    env = dict(os.environ) | ({"SLURM_CONF": slurm_conf} if slurm_conf else {})
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _refusal(f"importing pyslurm takes more than {timeout_s:g} s; {about}") from None
    if probe.returncode != 0:
        said = (probe.stderr.strip().splitlines() or ["(no message)"])[-1]
        raise _refusal(f"importing pyslurm fails: {said}; {about}")
    if slurm_conf:
        os.environ["SLURM_CONF"] = slurm_conf
    return importlib.import_module("pyslurm")


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
    """``25.11`` of ``25.11.2``; Slurm's numbers carry a zero that Python's versions drop."""
    year, _, rest = version.partition(".")
    return f"{year}.{int(rest.partition('.')[0] or 0):02}"


class PyslurmClient(CliSlurmClient):
    """``SlurmClient`` on the module ``pyslurm``; the rest of it is the command line client.

    Calls of pyslurm block for as long as Slurm's own ``MessageTimeout`` lets them.
    """

    def __init__(self, runner: CommandRunner, module: Any, **given: Any) -> None:
        super().__init__(runner, **given)
        self._pyslurm = module

    # Reading

    def _read_jobs(self, partition: str | None) -> tuple[JobFacts, ...]:
        loaded = self._call("pyslurm jobs", lambda: list(self._pyslurm.Jobs.load().values()))
        jobs = [job for job in loaded if partition is None or partition in job.partition.split(",")]
        given = self._gpus_of(jobs)
        facts = [self._facts(job, given.get(int(job.id))) for job in jobs]
        self._note_addresses(facts)
        return tuple(sorted(facts, key=lambda job: job.job_id))

    def read_job(self, job_id: int) -> JobFacts:
        """See ``SlurmClient``. pyslurm's answer for an array's id is its waiting record."""
        job = self._call("pyslurm job", lambda: self._pyslurm.Job.load(job_id))
        if int(job.id) != job_id:
            return super().read_job(job_id)
        facts = self._facts(job, self._gpus_of([job]).get(job_id))
        self._note_addresses((facts,))
        return facts

    def _gpus_of(self, jobs: list[Any]) -> Mapping[int, Gpus]:
        """The GPU requests of jobs that show none, by command: one for all of them."""
        bare = {int(job.id) for job in jobs if gpus_shown(job)[0] is GpuForm.NONE}
        if not bare:
            return {}
        known = self._read_identities(())
        return {
            job_id: (known[job_id].gpu_form, known[job_id].gpus_asked)
            for job_id in bare
            if job_id in known
        }

    def _facts(self, job: Any, given: Gpus | None) -> JobFacts:
        try:
            return job_facts(job, given)
        except CutOff:
            return super().read_job(int(job.id))

    # Changing

    def hold(self, job_id: int) -> None:
        """See ``SlurmClient``."""
        if self._is_plain(job_id):
            self._call("pyslurm hold", self._pyslurm.Job(job_id).hold)
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
            self._call("pyslurm cancel", self._pyslurm.Job(job_id).cancel)
        except SlurmCommandError as err:
            if err.kind not in ("not_found", "finished"):
                raise

    def _is_plain(self, job_id: int) -> bool:
        # A member of an array may need an address that pyslurm, which takes ids, cannot send.
        return self._address(job_id) == str(job_id)

    def _call(self, kind: str, ask: Callable[[], _T]) -> _T:
        """Ask through pyslurm: counted, repeated and failing as a command is."""
        for left in reversed(range(self._tries)):
            try:
                with self._meter.call(kind):
                    return ask()
            except self._pyslurm.RPCError as err:
                said = str(err)
                failed = SlurmCommandError((kind,), 1, said, kind=classify(said))
                if failed.kind != "controller_down" or not left or not self._is_up():
                    raise failed from err
            self._sleep(self._retry_delay_s)
        raise AssertionError("at least one try")

    def _is_up(self) -> bool:
        try:
            return bool(self.ping().up)
        except (SlurmCommandError, SlurmTimeout):
            return False
