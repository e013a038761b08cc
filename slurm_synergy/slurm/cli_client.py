"""The Slurm client over ``squeue``, ``scontrol`` and ``scancel``; Slurm 22.05 and newer.

Each change follows a recipe that was measured to work on all releases: one update with all
fields, GPUs in the colon form, then read back and compare. A refused update is not all-or-nothing
in Slurm: after an error from ``reshape`` the job may hold a mixture, so do not release it before
a later ``reshape`` has succeeded.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from slurm_synergy.errors import (
    SlurmCommandError,
    SlurmParseError,
    SlurmReadBackError,
    SlurmTimeout,
)
from slurm_synergy.slurm import hostlist, parse
from slurm_synergy.slurm.commands import CommandResult, CommandRunner
from slurm_synergy.slurm.facts import (
    ConfigFacts,
    GpuForm,
    JobFacts,
    JobShape,
    NodeFacts,
    PartitionFacts,
    PingFacts,
    ReservationFacts,
)

__all__ = ["CliSlurmClient"]

_SHOW_JOBS = ("scontrol", "-a", "-d", "-o", "show", "job")
_REVOKED_S = 1.5
_CAN_RETYPE = (23, 2)
_WORD = re.compile(r"[A-Za-z0-9_.@+-]+")


class CliSlurmClient:
    """``SlurmClient`` over the command line. Stateless; safe to use from several threads.

    A command that found no controller is repeated up to ``tries`` times in all, ``retry_delay_s``
    apart, as long as a ping says that the controller is up; every change is idempotent.
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
        self._runner, self._timeout_s = runner, timeout_s
        self._tries, self._retry_delay_s, self._sleep = tries, retry_delay_s, sleep
        self._clock = clock

    # Reading

    def read_queue(self, partition: str | None = None) -> tuple[JobFacts, ...]:
        """See ``SlurmClient``. Two commands; one more for each job whose text looks forged."""
        identities = self._read_identities(())
        text = self._run(*_SHOW_JOBS).stdout
        wanted = [
            job_id
            for job_id, identity in identities.items()
            if partition is None or partition in identity.partitions
        ]
        records = parse.parse_jobs(text, identities, wanted)
        jobs = list(records.jobs)
        for job_id in records.unresolved:
            try:
                jobs.append(self.read_job(job_id))
            except SlurmCommandError as err:
                # Slurm forgot it between the two commands (MinJobAge).
                if err.kind != "not_found":
                    raise
        return tuple(sorted(jobs, key=lambda job: job.job_id))

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
                records = parse.parse_jobs(text, identities, (job_id,), first_only=job_id)
                if records.jobs:
                    return records.jobs[0]
        if job_id not in identities:
            raise SlurmCommandError(argv, 0, f"job {job_id} not found", kind="not_found")
        raise SlurmParseError(f"scontrol show job: no record of job {job_id}", text)

    def _read_identities(self, select: Sequence[str]) -> dict[int, parse.JobIdentity]:
        mark = f"|{secrets.token_hex(12)}|"
        argv = ("squeue", "-h", "-a", "-t", "all", *select, "-O", parse.identity_format(mark))
        return parse.parse_identities(self._run(*argv).stdout, mark)

    def read_nodes(self) -> tuple[NodeFacts, ...]:
        """See ``SlurmClient``."""
        return parse.parse_nodes(self._run("scontrol", "-a", "-d", "-o", "show", "node").stdout)

    def read_partition(self, name: str) -> PartitionFacts:
        """See ``SlurmClient``."""
        argv = ("scontrol", "-a", "-o", "show", "partition", _word(name, "partition"))
        for partition in parse.parse_partitions(self._run(*argv).stdout):
            if partition.name == name:
                return partition
        raise SlurmCommandError(argv, 0, f"Partition {name} not found", kind="not_found")

    def read_reservations(self) -> tuple[ReservationFacts, ...]:
        """See ``SlurmClient``."""
        return parse.parse_reservations(self._run("scontrol", "-o", "show", "reservation").stdout)

    def read_config(self) -> ConfigFacts:
        """See ``SlurmClient``."""
        return parse.parse_config(self._run("scontrol", "show", "config").stdout)

    def ping(self) -> PingFacts:
        """See ``SlurmClient``."""
        result = self._runner.run(("scontrol", "ping"), timeout_s=self._timeout_s)
        if "Slurmctld(" not in result.stdout:
            result.check()
        return parse.parse_ping(result.stdout)

    # Changing jobs

    def hold(self, job_id: int) -> None:
        """See ``SlurmClient``."""
        self._run("scontrol", "hold", str(job_id))

    def hold_running(self, job_id: int) -> None:
        """See ``SlurmClient``."""
        self._run("scontrol", "hold", str(job_id))

    def release(self, job_id: int) -> None:
        """See ``SlurmClient``."""
        job = self._read_pending(job_id, "release")
        if job.priority == 0:
            self._run("scontrol", "release", str(job_id))

    def reshape(self, job_id: int, shape: JobShape) -> JobFacts:
        """See ``SlurmClient``."""
        job = self._read_pending(job_id, "reshape")
        _check_shape(job, shape)
        gpus = self._gpus_to_write(job, shape)
        if _kinds(job) - gpus.keys():
            # 22.05 refuses "with and without type" unless the untyped request is cleared first.
            self._update_job(job_id, ("TresPerNode=",))
        self._update_job(job_id, _shape_fields(job, shape, gpus))
        after = self.read_job(job_id)
        wrong = _differences(after, shape, gpus)
        if wrong:
            raise SlurmReadBackError(f"job {job_id} after an update: {'; '.join(wrong)}")
        return after

    def _gpus_to_write(self, job: JobFacts, shape: JobShape) -> dict[str, int]:
        """The GPU request to send: typed as the job asked, and untyped where the nodes decide.

        On 22.05 a type once asked for can never be taken back (the job waits with BadConstraints
        on nodes of another type), so an untyped request stays untyped as long as no node of the
        shape carries GPUs of two types: the node list gives it its type.
        """
        if not shape.gpus_per_node:
            return {}
        if shape.gpu_type is None or _kinds(job) == {shape.gpu_type}:
            wanted = shape.gpu_type or ""
        else:
            nodes = {node.name: node for node in self.read_nodes()}
            kinds = {kind for name in shape.nodes if name in nodes for kind in nodes[name].gpus}
            settled = kinds <= {shape.gpu_type} and _kinds(job) <= {""}
            wanted = "" if settled else shape.gpu_type
        stuck = _kinds(job) - {"", wanted}
        if stuck and self.read_config().version < _CAN_RETYPE:
            raise SlurmCommandError(
                ("scontrol", "update", f"JobId={job.job_id}"),
                0,
                f"job {job.job_id} asked for gpu:{'+'.join(sorted(stuck))}, and this Slurm cannot "
                f"change a job's GPU type to {wanted or 'any'}; submit it with --gres=gpu:N",
                kind="invalid",
            )
        return {wanted: shape.gpus_per_node}

    def set_start_now(self, job_id: int) -> None:
        """See ``SlurmClient``. Waits up to 1.5 s when the job was requeued just now."""
        job = self._read_pending(job_id, "start now")
        if job.restarts:
            # A node refuses a job's credential of the very second in which the job's last run was
            # ended there, and Slurm then books the job as FAILED (seen on 22.05: "Job credential
            # revoked"). A requeue sets the submit time to that second.
            self._sleep(max(0.0, min(_REVOKED_S, job.submit_s + _REVOKED_S - self._clock())))
        self._update_job(job_id, ("StartTime=now",))

    def requeue_hold(self, job_id: int) -> None:
        """See ``SlurmClient``.

        Sent as hold, then requeue: what ``scontrol requeuehold`` leaves is a hold that the owner
        can release, even when the running job was held by an admin (measured on 22.05).
        """
        job = self.read_job(job_id)
        if job.completing:
            if job.priority == 0:
                return
            self._read_pending(job_id, "requeue")
        if job.state.finished:
            text = f"job {job_id} is {job.state.value}, there is nothing to requeue"
            raise SlurmCommandError(("scontrol", "requeue"), 0, text, kind="finished")
        if not job.requeueable and not job.pending:
            self._update_job(job_id, ("Requeue=1",))
        self.hold(job_id)
        if not job.pending:
            try:
                self._run("scontrol", "requeue", str(job_id))
            except SlurmCommandError as err:
                # It was requeued in between, and the hold has caught it.
                if err.kind != "pending":
                    raise

    def cancel(self, job_id: int) -> None:
        """See ``SlurmClient``."""
        try:
            self._run("scancel", str(job_id))
        except SlurmCommandError as err:
            if err.kind not in ("not_found", "finished"):
                raise

    def set_comment(self, job_id: int, comment: str) -> None:
        """See ``SlurmClient``."""
        self._update_job(job_id, (f"Comment={_line(comment)}",))

    def set_admin_comment(self, job_id: int, comment: str) -> None:
        """See ``SlurmClient``."""
        self._update_job(job_id, (f"AdminComment={_line(comment)}",))

    def _update_job(self, job_id: int, fields: Sequence[str]) -> None:
        self._run("scontrol", "update", f"JobId={job_id}", *fields)

    def _read_pending(self, job_id: int, wish: str) -> JobFacts:
        job = self.read_job(job_id)
        if not job.pending:
            state = "COMPLETING" if job.completing else job.state.value
            raise SlurmCommandError(
                ("scontrol", "show", "job", str(job_id)),
                0,
                f"cannot {wish}: job {job_id} is {state}, not PENDING; wait and try again",
                kind="finished" if job.state.finished and not job.completing else "not_pending",
            )
        return job

    # Reservations

    def create_reservation(self, name: str, nodes: Sequence[str], users: Sequence[str]) -> None:
        """See ``SlurmClient``. A reservation of that name with other nodes or users is an error."""
        argv = (
            *("scontrol", "create", "reservation", f"ReservationName={_word(name, 'reservation')}"),
            *("StartTime=now", "Duration=infinite", "Flags=IGNORE_JOBS"),
            f"Users={_words(users, 'users')}",
            f"Nodes={_nodes(nodes)}",
        )
        # Asked first: Slurm reports one that exists as overlapping with itself.
        for found in self.read_reservations():
            if found.name == name:
                if set(found.nodes) == set(nodes) and set(found.users) == set(users):
                    return
                text = f"it exists with nodes {found.nodes} and users {found.users}; update it"
                raise SlurmCommandError(argv, 0, text, kind="exists")
        self._run(*argv)

    def update_reservation_nodes(self, name: str, nodes: Sequence[str]) -> None:
        """See ``SlurmClient``."""
        # Always the whole list: 22.05 has no nodes+=, and an empty list picks arbitrary nodes.
        self._update_reservation(name, (f"Nodes={_nodes(nodes)}",))

    def update_reservation_users(self, name: str, users: Sequence[str]) -> None:
        """See ``SlurmClient``."""
        self._update_reservation(name, (f"Users={_words(users, 'users')}",))

    def _update_reservation(self, name: str, fields: Sequence[str]) -> None:
        word = _word(name, "reservation")
        self._run("scontrol", "update", f"ReservationName={word}", *fields)

    def delete_reservation(self, name: str) -> None:
        """See ``SlurmClient``."""
        try:
            self._run("scontrol", "delete", f"ReservationName={_word(name, 'reservation')}")
        except SlurmCommandError as err:
            if err.kind != "not_found":
                raise

    def _run(self, *argv: str) -> CommandResult:
        for left in reversed(range(self._tries)):
            try:
                return self._runner.run(argv, timeout_s=self._timeout_s).check()
            except SlurmTimeout:
                if not left or not self.ping().up:
                    raise
            except SlurmCommandError as err:
                if err.kind != "controller_down" or not left or not self.ping().up:
                    raise
            self._sleep(self._retry_delay_s)
        raise AssertionError("at least one try")


def _word(text: str, what: str) -> str:
    if not _WORD.fullmatch(text):
        raise ValueError(f"{what}: {text!r} is not a name (letters, digits and _ . @ + -)")
    return text


def _words(texts: Sequence[str], what: str) -> str:
    if not texts:
        raise ValueError(f"{what}: give at least one")
    return ",".join(_word(text, what) for text in texts)


def _nodes(names: Sequence[str]) -> str:
    if not names:
        raise ValueError("nodes: give at least one; Slurm would pick arbitrary ones")
    return hostlist.compress(names)


def _line(text: str) -> str:
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise ValueError(f"comment {text!r}: control characters would forge Slurm's records")
    return text


def _kinds(job: JobFacts) -> set[str]:
    """The GPU types that the job asks for now, in whatever form."""
    return set(job.gpus_asked)


def _check_shape(job: JobFacts, shape: JobShape) -> None:
    """Refuse what Slurm would accept and then never start, or start differently."""
    per_node, tasks = job.ntasks_per_node, shape.tasks_per_node
    problem = ""
    if per_node is not None and per_node != tasks:
        problem = (
            f"it was submitted with --ntasks-per-node={per_node}, which Slurm cannot change: "
            f"{tasks} tasks per node would never start"
        )
    elif per_node is not None and shape.cpus_per_node != tasks * shape.cpus_per_task:
        problem = (
            f"with --ntasks-per-node={tasks} it gets {tasks * shape.cpus_per_task} CPUs per "
            f"node, never {shape.cpus_per_node}"
        )
    elif job.gpu_form is GpuForm.PER_TASK and (
        len(job.gpus_asked) > 1
        or sum(job.gpus_asked.values()) * tasks != shape.gpus_per_node
        or (_kinds(job) - {"", shape.gpu_type})
    ):
        problem = "it was submitted with --gpus-per-task, whose GPU count Slurm cannot change"
    if problem:
        argv = ("scontrol", "update", f"JobId={job.job_id}")
        raise SlurmCommandError(argv, 0, f"job {job.job_id}: {problem}", kind="invalid")


def _shape_fields(job: JobFacts, shape: JobShape, gpus: Mapping[str, int]) -> tuple[str, ...]:
    count = len(shape.nodes)
    fields = [
        f"NumNodes={count}-{count}",
        f"NumTasks={count * shape.tasks_per_node}",
        f"NumCPUs={count * shape.cpus_per_node}",
        f"CPUsPerTask={shape.cpus_per_task}",
        f"MinCPUsNode={shape.cpus_per_node}",
        f"MinMemoryNode={shape.mem_mib_per_node}",
        f"ReqNodeList={hostlist.compress(shape.nodes)}",
        f"ReservationName={shape.reservation or ''}",
    ]
    if job.gpu_form is GpuForm.PER_JOB:
        fields.append("TresPerJob=")
    elif job.gpu_form is GpuForm.PER_SOCKET:
        fields.append("TresPerSocket=")
    if job.gpu_form is not GpuForm.PER_TASK:
        # The colon form: 22.05 takes gres/gpu:N, shows it, and ignores it.
        words = (f"gres:gpu:{kind}:{n}" if kind else f"gres:gpu:{n}" for kind, n in gpus.items())
        fields.append(f"TresPerNode={','.join(words)}")
    return tuple(fields)


def _differences(job: JobFacts, shape: JobShape, gpus: Mapping[str, int]) -> list[str]:
    count = len(shape.nodes)
    checks: list[tuple[str, object, object]] = [
        ("NumNodes", (count, count), job.num_nodes),
        ("NumTasks", count * shape.tasks_per_node, job.num_tasks),
        ("NumCPUs", count * shape.cpus_per_node, job.num_cpus),
        ("CPUs/Task", shape.cpus_per_task, job.cpus_per_task),
        ("MinCPUsNode", shape.cpus_per_node, job.min_cpus_node),
        ("MinMemoryNode (MiB)", shape.mem_mib_per_node, job.min_mem_node_mib),
        ("ReqNodeList", set(shape.nodes), set(job.req_nodes)),
        ("Reservation", shape.reservation, job.reservation),
        *_gpu_checks(job, gpus),
    ]
    return [f"{name} is {got}, wanted {want}" for name, want, got in checks if got != want]


def _gpu_checks(job: JobFacts, gpus: Mapping[str, int]) -> list[tuple[str, object, object]]:
    if job.gpu_form is GpuForm.PER_TASK:
        return [("GPUs per node", sum(gpus.values()), sum(job.gpus_per_node.values()))]
    form = GpuForm.PER_NODE if gpus else GpuForm.NONE
    return [("GPUs", (form, dict(gpus)), (job.gpu_form, dict(job.gpus_asked)))]
