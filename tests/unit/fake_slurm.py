"""A Slurm in memory behind ``SlurmClient``: enough of it for the adapter's bookkeeping.

It moves only when told to (``schedule``, ``finish``), and can break any call before or after it
took effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from slurm_synergy.errors import ClusterError, SlurmCommandError
from slurm_synergy.slurm.accounting import AccountingFacts
from slurm_synergy.slurm.facts import (
    ConfigFacts,
    GpuForm,
    Hold,
    JobFacts,
    JobShape,
    JobState,
    NodeAllocation,
    NodeFacts,
    PartitionFacts,
    PingFacts,
    ReservationFacts,
)

__all__ = ["Crash", "FakeSlurm"]

MARK = "synergy:v=1,wrapper={wrapper},gpn={gpn},type={type},nodes={nodes},tpn={tpn},cpt=0,mem={mem}"
YEAR_S = 365 * 86_400.0


class Crash(BaseException):
    """The controller dies here."""


class FakeSlurm:
    """Nodes v100-1.. with 8 GPUs, 24 cores and 500000 MiB each, and one managed partition."""

    def __init__(self, nodes: int = 2, oversubscribe: tuple[str, int] = ("FORCE", 8)) -> None:
        self.jobs: dict[int, JobFacts] = {}
        self.nodes = {f"v100-{i}": _node(f"v100-{i}") for i in range(1, nodes + 1)}
        self.reservations: dict[str, ReservationFacts] = {}
        self.accounting = AccountingFacts()
        self.oversubscribe = oversubscribe
        self.calls: list[str] = []
        self.break_at: dict[int, BaseException] = {}
        self.after = False
        self.foreign: dict[str, int] = {}
        self.now_s: Callable[[], float] = lambda: 1000.0

    # What the test does

    def submit(
        self,
        *,
        gpus: int = 4,
        nodes: int = 1,
        kind: str = "v100",
        tasks: int = 0,
        mem: int = 0,
        wrapped: bool = True,
        marked: bool = True,
        **given: object,
    ) -> int:
        """A held job as job_submit.lua leaves it; its id."""
        job_id = len(self.jobs) + 1
        mark = MARK.format(
            wrapper="yes" if wrapped else "no",
            gpn=gpus,
            type=kind or "any",
            nodes=nodes,
            tpn=tasks,
            mem=mem,
        )
        if wrapped and re.search(r"elastic=(scale|full)", str(given.get("comment", ""))):
            mark += ",elastic=yes"
        facts = JobFacts(
            job_id=job_id,
            user="ann",
            uid=1000,
            name=f"job{job_id}",
            state=JobState.PENDING,
            partition="synergy",
            submit_s=float(job_id),
            held=Hold.USER,
            gpu_form=GpuForm.PER_NODE,
            gpus_asked={kind: gpus},
            num_nodes=(nodes, nodes),
            ntasks_per_node=tasks or None,
            min_mem_node_mib=mem,
            admin_comment=mark if marked else "",
        )
        self.jobs[job_id] = replace(facts, **given)  # type: ignore[arg-type]
        return job_id

    def schedule(self) -> None:
        """Start every released job on the nodes that it asks for, if they are free."""
        for job_id, facts in self.jobs.items():
            if facts.state is not JobState.PENDING or facts.priority == 0:
                continue
            free = {name: self._free_gpus(name) for name in facts.req_nodes}
            count = sum(facts.gpus_asked.values())
            if not free or any(len(ids) < count for ids in free.values()):
                continue
            self.jobs[job_id] = replace(
                facts,
                state=JobState.RUNNING,
                start_s=100.0,
                node_list=facts.req_nodes,
                allocation=tuple(
                    NodeAllocation(
                        node=name,
                        cpu_ids=tuple(range(facts.min_cpus_node)),
                        gpu_ids=free[name][:count],
                        gpu_type="v100",
                        mem_mib=facts.min_mem_node_mib or 0,
                    )
                    for name in facts.req_nodes
                ),
            )

    def settle(self) -> None:
        """Completing jobs get to where they go."""
        for job_id, facts in self.jobs.items():
            if facts.state is JobState.COMPLETING:
                self.jobs[job_id] = replace(
                    facts,
                    state=JobState.PENDING,
                    allocation=(),
                    node_list=(),
                    start_s=None,
                    restarts=facts.restarts + 1,
                )

    def finish(self, job_id: int, state: JobState = JobState.COMPLETED) -> None:
        """The job ends by itself, or is cancelled."""
        self.jobs[job_id] = replace(self.jobs[job_id], state=state, allocation=())

    def change(self, job_id: int, **given: object) -> None:
        """Change a job's record."""
        self.jobs[job_id] = replace(self.jobs[job_id], **given)  # type: ignore[arg-type]

    def _free_gpus(self, node: str) -> tuple[int, ...]:
        used = {
            gpu
            for facts in self.jobs.values()
            for part in facts.allocation
            if part.node == node
            for gpu in part.gpu_ids
        }
        return tuple(gpu for gpu in range(8) if gpu not in used)

    # SlurmClient

    def _call(self, name: str) -> None:
        """Count a changing call, and break it before it takes effect if told so."""
        self.calls.append(name)
        error = self.break_at.get(len(self.calls))
        if error is not None and not self.after:
            raise error

    def _done(self) -> None:
        """Break a call after it took effect, if told so."""
        error = self.break_at.get(len(self.calls))
        if error is not None and self.after:
            raise error

    def read_queue(self, partition: str | None = None) -> tuple[JobFacts, ...]:
        return tuple(self.jobs[job_id] for job_id in sorted(self.jobs))

    def read_job(self, job_id: int) -> JobFacts:
        if job_id not in self.jobs:
            raise SlurmCommandError(("scontrol",), 1, "not found", kind="not_found")
        return self.jobs[job_id]

    def read_nodes(self) -> tuple[NodeFacts, ...]:
        found = []
        for name, facts in self.nodes.items():
            parts = [
                part for job in self.jobs.values() for part in job.allocation if part.node == name
            ]
            foreign = self.foreign.get(name, 0)
            found.append(
                replace(
                    facts,
                    gpus_used={"v100": sum(len(part.gpu_ids) for part in parts) + foreign},
                    alloc_mem_mib=sum(part.mem_mib for part in parts),
                    cpus_alloc=sum(len(part.cpu_ids) for part in parts) + foreign,
                )
            )
        return tuple(found)

    def read_partition(self, name: str) -> PartitionFacts:
        if name != "synergy":
            raise SlurmCommandError(("scontrol",), 1, "not found", kind="not_found")
        return PartitionFacts(
            name=name, nodes=tuple(self.nodes), state="UP", oversubscribe=self.oversubscribe
        )

    def read_reservations(self) -> tuple[ReservationFacts, ...]:
        return tuple(self.reservations.values())

    def read_accounting(self, accounts: Iterable[str]) -> AccountingFacts:
        return replace(self.accounting, accounts=frozenset(accounts))

    def read_config(self) -> ConfigFacts:
        return ConfigFacts(
            version=(22, 5, 8),
            cluster_name="fake",
            select_type="select/cons_tres",
            select_parameters=("CR_CORE_MEMORY",),
            task_plugins=("task/affinity",),
            proctrack="proctrack/cgroup",
            kill_wait_s=30.0,
            slurm_user="slurm",
            job_requeue=True,
        )

    def ping(self) -> PingFacts:
        return PingFacts(up=("here",), down=())

    def hold(self, job_id: int) -> None:
        self._call("hold")
        self.jobs[job_id] = replace(self.read_job(job_id), held=Hold.ADMIN, priority=0)
        self._done()

    def hold_running(self, job_id: int) -> None:
        self.hold(job_id)

    def release(self, job_id: int) -> None:
        self._call("release")
        self.jobs[job_id] = replace(self.read_job(job_id), held=Hold.NONE, priority=1)
        self._done()

    def reshape(self, job_id: int, shape: JobShape) -> JobFacts:
        self._call("reshape")
        self.jobs[job_id] = replace(
            self.read_job(job_id),
            num_nodes=(len(shape.nodes), len(shape.nodes)),
            req_nodes=shape.nodes,
            gpus_asked={shape.gpu_type or "": shape.gpus_per_node},
            min_cpus_node=shape.cpus_per_node,
            cpus_per_task=shape.cpus_per_task,
            min_mem_node_mib=shape.mem_mib_per_node,
            reservation=shape.reservation,
        )
        self._done()
        return self.jobs[job_id]

    def set_start_now(self, job_id: int) -> None:
        self._call("set_start_now")
        self._done()

    def set_time_limit(self, job_id: int, limit_s: float) -> None:
        self._call("set_time_limit")
        self.jobs[job_id] = replace(self.read_job(job_id), time_limit_s=limit_s)
        self._done()

    def split(self, job_id: int, tasks: Sequence[int]) -> None:
        self._call("split")
        whole = self.jobs[job_id]
        left = [int(task) for task in (whole.array_task_id or "").split(",")]
        for task in tasks[: len(left) - 1]:
            left.remove(task)
            new_id = max(self.jobs) + 1
            self.jobs[new_id] = replace(whole, job_id=new_id, array_task_id=str(task))
        words = ",".join(str(task) for task in left)
        self.jobs[job_id] = replace(whole, array_task_id=words)
        self._done()

    def hold_all(self, job_ids: Iterable[int]) -> dict[int, ClusterError]:
        return self._each(job_ids, self.hold)

    def prepare_starts(self, shapes: Mapping[int, JobShape]) -> dict[int, JobFacts | ClusterError]:
        def prepare(job_id: int) -> None:
            self.reshape(job_id, shapes[job_id])
            self.set_start_now(job_id)

        errors = self._each(shapes, prepare)
        return {job_id: errors.get(job_id, self.jobs[job_id]) for job_id in shapes}

    @staticmethod
    def _each(job_ids: Iterable[int], do: Callable[[int], None]) -> dict[int, ClusterError]:
        errors = {}
        for job_id in job_ids:
            try:
                do(job_id)
            except ClusterError as err:
                errors[job_id] = err
        return errors

    def requeue_hold(self, job_id: int) -> None:
        self._call("requeue_hold")
        self.jobs[job_id] = replace(
            self.read_job(job_id),
            state=JobState.COMPLETING,
            held=Hold.USER,
            priority=0,
            reason="job_requeued_in_held_state",
        )
        self._done()

    def cancel(self, job_id: int) -> None:
        self.finish(job_id, JobState.CANCELLED)

    def set_comment(self, job_id: int, comment: str) -> None:
        self.change(job_id, comment=comment)

    def set_admin_comment(self, job_id: int, comment: str) -> None:
        self.change(job_id, admin_comment=comment)

    def give_back(self, job_id: int, fields: Sequence[str]) -> None:
        self._call("give_back")
        job = self.read_job(job_id)
        if "ReservationName=" in fields:
            job = replace(job, reservation=None)
        if "ReqNodeList=" in fields:
            job = replace(job, req_nodes=())
        self.jobs[job_id] = replace(job, held=Hold.NONE, priority=1)
        self._done()

    def create_reservation(
        self,
        name: str,
        nodes: Sequence[str],
        users: Sequence[str],
        window_s: float | None = None,
    ) -> None:
        self._call("create_reservation")
        self.reservations[name] = ReservationFacts(
            name=name,
            nodes=tuple(nodes),
            users=tuple(users),
            state="ACTIVE",
            flags=frozenset({"IGNORE_JOBS", "FLEX", "SPEC_NODES"}),
            start_s=self.now_s(),
            end_s=self.now_s() + (window_s or YEAR_S),
        )
        self._done()

    def renew_reservation(self, name: str, window_s: float | None = None) -> None:
        self._call("renew_reservation")
        self.reservations[name] = replace(
            self.reservations[name], end_s=self.now_s() + (window_s or YEAR_S)
        )
        self._done()

    def update_reservation_nodes(self, name: str, nodes: Sequence[str]) -> None:
        self._call("update_reservation_nodes")
        self.reservations[name] = replace(self.reservations[name], nodes=tuple(nodes))
        self._done()

    def update_reservation_users(self, name: str, users: Sequence[str]) -> None:
        self._call("update_reservation_users")
        self.reservations[name] = replace(self.reservations[name], users=tuple(users))
        self._done()

    def delete_reservation(self, name: str) -> None:
        self.reservations.pop(name, None)


def _node(name: str) -> NodeFacts:
    return NodeFacts(
        name=name,
        state="IDLE",
        real_memory_mib=500_000,
        alloc_mem_mib=0,
        cpus_total=24,
        cpus_alloc=0,
        sockets=2,
        cores_per_socket=12,
        threads_per_core=1,
        gpus={"v100": 8},
        partitions=("synergy",),
    )
