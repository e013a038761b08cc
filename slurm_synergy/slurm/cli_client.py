"""The Slurm client over ``squeue``, ``scontrol`` and ``scancel``; Slurm 22.05 and newer.

Each change follows a recipe that was measured to work on all releases: one update with all
fields, GPUs in the colon form, then read back and compare. Changes of several jobs travel in one
``scontrol`` session. A refused update is not all-or-nothing in Slurm: what it left is put back as
it was before, and where even that fails the error says so (see ``reshaping``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from slurm_synergy.errors import ClusterError, SlurmCommandError
from slurm_synergy.slurm import reshape
from slurm_synergy.slurm.cli_reads import CliReader
from slurm_synergy.slurm.facts import JobFacts, JobShape, JobState
from slurm_synergy.slurm.reshaping import reshape_jobs
from slurm_synergy.slurm.session import fits, run_lines
from slurm_synergy.slurm.words import a_line, a_word, node_words, words

__all__ = ["CliSlurmClient"]

_REVOKED_S = 1.5
# So few jobs are read one by one with less work than with the whole queue.
_FEW = 2
_YEAR_S = 365 * 86_400.0


class CliSlurmClient(CliReader):
    """``SlurmClient`` over the command line; safe to use from several threads.

    All it remembers between calls is what Slurm's commands call the jobs last read, and how much
    was asked of Slurm.
    """

    def hold(self, job_id: int) -> None:
        """See ``SlurmClient``."""
        self._run("scontrol", "hold", self._address(job_id))

    def hold_running(self, job_id: int) -> None:
        """See ``SlurmClient``."""
        self._run("scontrol", "hold", self._address(job_id))

    def hold_all(self, job_ids: Iterable[int]) -> Mapping[int, ClusterError]:
        """See ``SlurmClient``."""
        return self._change({job_id: ("hold", self._address(job_id)) for job_id in job_ids})

    def release(self, job_id: int) -> None:
        """See ``SlurmClient``."""
        job = self._read_pending(job_id, "release")
        if job.priority == 0:
            self._run("scontrol", "release", self._address(job_id))

    def reshape(self, job_id: int, shape: JobShape) -> JobFacts:
        """See ``SlurmClient``."""
        result = reshape_jobs(self, {job_id: shape})[job_id]
        if isinstance(result, ClusterError):
            raise result
        return result

    def prepare_starts(
        self, shapes: Mapping[int, JobShape]
    ) -> Mapping[int, JobFacts | ClusterError]:
        """See ``SlurmClient``. Waits up to 1.5 s when one of them was requeued just now."""
        return reshape_jobs(self, shapes, ("StartTime=now",), self._wait_for_credentials)

    def set_start_now(self, job_id: int) -> None:
        """See ``SlurmClient``. Waits up to 1.5 s when the job was requeued just now."""
        job = self._read_pending(job_id, "start now")
        self._wait_for_credentials((job,))
        self._update_job(job_id, ("StartTime=now",))

    def _wait_for_credentials(self, jobs: Iterable[JobFacts]) -> None:
        # A node refuses a job's credential of the very second in which the job's last run was
        # ended there, and Slurm then books the job as FAILED (seen on 22.05: "Job credential
        # revoked"). A requeue sets the submit time to that second.
        requeued = [job.submit_s for job in jobs if job.restarts]
        if requeued:
            left_s = max(requeued) + _REVOKED_S - self._clock()
            self._sleep(max(0.0, min(_REVOKED_S, left_s)))

    def set_time_limit(self, job_id: int, limit_s: float) -> None:
        """See ``SlurmClient``."""
        self._update_job(job_id, (f"TimeLimit={max(1, math.ceil(limit_s / 60))}",))

    def split(self, job_id: int, tasks: Sequence[int]) -> None:
        """See ``SlurmClient``. Whatever is done to one member of an array splits it off."""
        if tasks:
            self._run("scontrol", "hold", ",".join(f"{job_id}_{task}" for task in tasks))

    def requeue_hold(self, job_id: int) -> None:
        """See ``SlurmClient``.

        Sent as hold, then requeue: what ``scontrol requeuehold`` leaves is a hold that the owner
        can release, even when the running job was held by an admin (measured on 22.05).
        """
        job = self.read_job(job_id)
        if job.completing:
            if job.priority == 0:
                return
            reshape.check_pending(job, "requeue")
        if job.state is JobState.UNKNOWN:
            reshape.check_pending(job, "requeue")
        if job.state.finished:
            text = f"job {job_id} is {job.state.value}, there is nothing to requeue"
            raise SlurmCommandError(("scontrol", "requeue"), 0, text, kind="finished")
        if not job.requeueable and not job.pending:
            self._update_job(job_id, ("Requeue=1",))
        self.hold(job_id)
        if not job.pending:
            try:
                self._run("scontrol", "requeue", self._address(job_id))
            except SlurmCommandError as err:
                # It was requeued in between, and the hold has caught it.
                if err.kind != "pending":
                    raise

    def cancel(self, job_id: int) -> None:
        """See ``SlurmClient``."""
        try:
            self._run("scancel", self._address(job_id))
        except SlurmCommandError as err:
            if err.kind not in ("not_found", "finished"):
                raise

    def set_comment(self, job_id: int, comment: str) -> None:
        """See ``SlurmClient``."""
        self._update_job(job_id, (f"Comment={a_line(comment)}",))

    def set_admin_comment(self, job_id: int, comment: str) -> None:
        """See ``SlurmClient``."""
        self._update_job(job_id, (f"AdminComment={a_line(comment)}",))

    def give_back(self, job_id: int, fields: Sequence[str]) -> None:
        """See ``SlurmClient``."""
        if "ReqNodeList=" in fields and any(one.startswith("NumNodes=") for one in fields):
            # First of all: a node list must never be longer than the number of nodes.
            self._update_job(job_id, ("ReqNodeList=",))
        if fields:
            self._update_job(job_id, fields)
        if self.read_job(job_id).priority == 0:
            self._run("scontrol", "release", self._address(job_id))

    def _update_job(self, job_id: int, fields: Sequence[str]) -> None:
        self._run("scontrol", "update", f"JobId={self._address(job_id)}", *fields)

    def _read_pending(self, job_id: int, wish: str) -> JobFacts:
        job = self.read_job(job_id)
        reshape.check_pending(job, wish)
        return job

    # Several jobs at once

    def read_each(self, job_ids: Iterable[int]) -> Mapping[int, JobFacts | ClusterError]:
        """Each job, or the error of reading it: one by one if few, else from the whole queue."""
        ids = tuple(job_ids)
        if len(ids) > _FEW:
            found = {job.job_id: job for job in self._read_jobs(None)}
            return {job_id: found.get(job_id) or _not_found(job_id) for job_id in ids}
        results: dict[int, JobFacts | ClusterError] = {}
        for job_id in ids:
            try:
                results[job_id] = self.read_job(job_id)
            except SlurmCommandError as err:
                if err.kind == "controller_down":
                    raise
                results[job_id] = err
        return results

    def update_each(self, fields: Mapping[int, Sequence[str]]) -> Mapping[int, ClusterError]:
        """One update per job in one session; the refused ones, by job."""
        lines = {
            job_id: ("update", f"JobId={self._address(job_id)}", *more)
            for job_id, more in fields.items()
        }
        return self._change(lines)

    def _change(self, lines: Mapping[int, Sequence[str]]) -> dict[int, ClusterError]:
        """Commands of scontrol by job: in one session, those that do not fit on their own."""
        errors: dict[int, ClusterError] = {}
        together = {job_id: line for job_id, line in lines.items() if fits(line)}
        if len(together) > 1:
            results = run_lines(self._runner, list(together.values()), timeout_s=self._timeout_s)
            for job_id, result in zip(together, results, strict=True):
                if result.error is not None:
                    errors[job_id] = result.error
        else:
            together = {}
        for job_id, line in lines.items():
            if job_id not in together:
                try:
                    self._run("scontrol", *line)
                except ClusterError as err:
                    errors[job_id] = err
        return errors

    # Reservations

    def create_reservation(
        self,
        name: str,
        nodes: Sequence[str],
        users: Sequence[str],
        window_s: float | None = None,
    ) -> None:
        """See ``SlurmClient``. A reservation of that name with other nodes or users is an error."""
        length = "infinite" if window_s is None else str(_minutes(window_s))
        argv = (
            *(
                "scontrol",
                "create",
                "reservation",
                f"ReservationName={a_word(name, 'reservation')}",
            ),
            # FLEX: without it Slurm ends the jobs of a reservation when that ends.
            *("StartTime=now", f"Duration={length}", "Flags=IGNORE_JOBS,FLEX"),
            f"Users={words(users, 'users')}",
            f"Nodes={node_words(nodes)}",
        )
        # Asked first: Slurm reports one that exists as overlapping with itself.
        for found in self.read_reservations():
            if found.name == name:
                if set(found.nodes) == set(nodes) and set(found.users) == set(users):
                    return
                text = f"it exists with nodes {found.nodes} and users {found.users}; update it"
                raise SlurmCommandError(argv, 0, text, kind="exists")
        self._run(*argv)

    def renew_reservation(self, name: str, window_s: float | None = None) -> None:
        """See ``SlurmClient``."""
        minutes = _minutes(_YEAR_S if window_s is None else window_s)
        self._update_reservation(name, (f"EndTime=now+{minutes}minutes",))

    def update_reservation_nodes(self, name: str, nodes: Sequence[str]) -> None:
        """See ``SlurmClient``."""
        # Always the whole list: 22.05 has no nodes+=, and an empty list picks arbitrary nodes.
        self._update_reservation(name, (f"Nodes={node_words(nodes)}",))

    def update_reservation_users(self, name: str, users: Sequence[str]) -> None:
        """See ``SlurmClient``."""
        self._update_reservation(name, (f"Users={words(users, 'users')}",))

    def _update_reservation(self, name: str, fields: Sequence[str]) -> None:
        word = a_word(name, "reservation")
        self._run("scontrol", "update", f"ReservationName={word}", *fields)

    def delete_reservation(self, name: str) -> None:
        """See ``SlurmClient``."""
        try:
            self._run("scontrol", "delete", f"ReservationName={a_word(name, 'reservation')}")
        except SlurmCommandError as err:
            if err.kind != "not_found":
                raise


def _minutes(window_s: float) -> int:
    return max(1, math.ceil(window_s / 60))


def _not_found(job_id: int) -> SlurmCommandError:
    text = f"job {job_id} not found"
    return SlurmCommandError(("scontrol", "show", "job"), 0, text, kind="not_found")
