"""The launcher's line to the controller: registers a task, then keeps its lease renewed.

One thread of the launcher waits in ``Renew`` calls; the launcher fetches what they brought with
:meth:`LeaseClient.take`. Losing the controller is never an error here: the thread tries again for
as long as the task lives, and the launcher falls back to the floor set when the lease runs out.
"""

from __future__ import annotations

import os
import random
import secrets
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from slurm_synergy.errors import LeaseError
from slurm_synergy.jobside.board import Report
from slurm_synergy.jobside.data_reading import DataFound
from slurm_synergy.jobside.environment import Task
from slurm_synergy.jobside.profiling_lease import Answer, Order
from slurm_synergy.jobside.training import Training
from slurm_synergy.proto import lease_pb2 as pb
from slurm_synergy.proto import lease_pb2_grpc as pb_grpc

__all__ = [
    "PROTOCOL",
    "Grant",
    "LeaseClient",
    "LeaseSource",
    "Update",
    "munge_credential",
    "update_of",
]

PROTOCOL = 1
_LONGEST_WAIT_S = 10.0
_CALL_MARGIN_S = 5.0
_FIRST_BACKOFF_S = 0.2
_LONGEST_BACKOFF_S = 5.0
_GONE_RETRY_S = 30.0
_LOCAL_RETRY_S = 10.0
_MUNGE_TIMEOUT_S = 10.0
_LONGEST_HOW = 200
_CHANNEL_OPTIONS = (
    # Compute nodes often have a proxy set for the web; the controller is not behind it.
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5000),
    # Channels of one process share connections unless told otherwise; a task has one of each.
    ("grpc.use_local_subchannel_pool", 1),
)
_REFUSED = frozenset(
    {
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A lease as the controller gave it; ``until_monotonic_s`` is on this machine's clock."""

    generation: int
    until_monotonic_s: float
    cores: tuple[int, ...]
    floor_cores: tuple[int, ...]
    mem_mib: int
    floor_mem_mib: int
    stop: bool
    stop_within_s: float
    node_cores: int
    batch_size: int
    grace_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What the controller last said.

    ``gone``: it does not schedule this incarnation any more. ``over``: Slurm has ended it, and
    the job starts anew elsewhere. ``order``: what it wants measured with these cores.
    """

    grant: Grant | None = None
    stop_step: int = 0
    stop_committed: bool = False
    gone: bool = False
    over: bool = False
    order: Order | None = None


class LeaseSource(Protocol):
    """Where a launcher has its lease from: the controller, or this machine alone.

    The attributes are what the launcher tells; see :class:`LeaseClient`.
    """

    endpoint: str
    pinned_cpus: int
    own_mem_mib: int
    answer: Answer | None

    def wait_for_answer(self, timeout_s: float) -> bool:
        """Whether there is a first word within ``timeout_s``."""
        ...

    def take(self) -> Update | None:
        """What is new since the last call; None when nothing is."""
        ...

    def kick(self) -> None:
        """There is something new to report."""
        ...

    def finish(
        self, *, exit_code: int, checkpointed: bool, report: Report, timeout_s: float
    ) -> bool:
        """The task has ended."""
        ...

    def close(self) -> None:
        """Nothing more is asked."""
        ...


def munge_credential(payload: str, socket: str = "") -> str:
    """A credential over ``payload`` from munged (behind ``socket`` unless empty).

    Raises LeaseError when munge is missing or munged does not answer.
    """
    argv = ["munge", "-s", payload, *(["-S", socket] if socket else [])]
    # munge must see no more of the job than it needs, above all no LD_PRELOAD meant for training.
    env = {"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/bin:/usr/local/bin", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_MUNGE_TIMEOUT_S,
            check=False,
            env=env,
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise LeaseError(f"cannot run munge: {err}") from err
    if done.returncode != 0:
        raise LeaseError(f"munge made no credential: {done.stderr.strip()}")
    return done.stdout.strip()


class LeaseClient:
    """Keeps one task's lease.

    ``report`` reads the board, ``notify`` wakes the launcher after each update, ``say`` tells the
    user one line. ``pinned_cpus`` is what the launcher has pinned the task to, ``answer`` what it
    has measured last, ``own_mem_mib`` the memory that the task's processes had for themselves;
    ``program`` names what is run. ``training`` reads what an adaptive training tells of itself; it
    is told again with every renewal, as calls may fail.
    """

    def __init__(
        self,
        endpoint: str,
        task: Task,
        *,
        os_cpus: tuple[int, ...],
        report: Callable[[], Report],
        notify: Callable[[], None],
        say: Callable[[str], None],
        munge_socket: str = "",
        program: str = "",
        training: Callable[[], Training | None] = lambda: None,
    ) -> None:
        self.endpoint = endpoint
        self.pinned_cpus = self.own_mem_mib = 0
        self.answer: Answer | None = None
        self._program = program
        self._task = task
        self._os_cpus, self._munge_socket = os_cpus, munge_socket
        self._report, self._notify, self._say = report, notify, say
        self._training = training
        self._channel = grpc.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)
        self._stub = pb_grpc.LeaseServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._ended = threading.Event()
        self._answered = threading.Event()
        self._lock = threading.Lock()
        self._update: Update | None = None
        self._known = Update()
        self._call: Any = None
        self._kicked = False
        self._token = ""
        self._told: set[str] = set()
        self._failures = 0

    # -- the launcher's side ---------------------------------------------------------------------

    def start(self) -> None:
        """Begin to register and renew, in a thread of its own."""
        self._thread.start()

    def wait_for_answer(self, timeout_s: float) -> bool:
        """Whether the controller has answered, or refused for good, within ``timeout_s``."""
        return self._answered.wait(timeout_s)

    def take(self) -> Update | None:
        """What is new since the last call; None when nothing is."""
        with self._lock:
            update, self._update = self._update, None
        return update

    def kick(self) -> None:
        """Report now: a call that waits for news is broken off and made again."""
        with self._lock:
            self._kicked = True
            call = self._call
        if call is not None:
            call.cancel()

    def finish(
        self, *, exit_code: int, checkpointed: bool, report: Report, timeout_s: float
    ) -> bool:
        """Tell how the task ended; False when the controller could not be told in time."""
        self._stop_renewing()
        if self._known.gone or not (self._token or self._known.grant):
            return False
        deadline_s = time.monotonic() + timeout_s
        pause_s = _FIRST_BACKOFF_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            request = pb.FinishRequest(
                token=self._token,
                task=self._task_id(),
                exit_code=exit_code,
                checkpointed=checkpointed,
                step=report.step,
                samples=report.samples,
            )
            try:
                return bool(self._stub.Finish(request, timeout=left_s).known)
            except grpc.RpcError as err:
                if _code(err) in _REFUSED - {grpc.StatusCode.UNAUTHENTICATED}:
                    return False
                if _code(err) is grpc.StatusCode.UNAUTHENTICATED:
                    self._register_again(left_s)
                time.sleep(min(pause_s, max(0.0, deadline_s - time.monotonic())))
                pause_s *= 2
        return False

    def close(self) -> None:
        """End the thread and the channel."""
        self._stop_renewing()
        self._channel.close()

    def _stop_renewing(self) -> None:
        self._ended.set()
        self.kick()
        if self._thread.is_alive():
            self._thread.join(_MUNGE_TIMEOUT_S + 1)

    def _register_again(self, timeout_s: float) -> None:
        try:
            self._register(timeout_s)
        except (LeaseError, grpc.RpcError):
            return

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                update = self._renew() if self._token else self._register(_LONGEST_WAIT_S)
            except LeaseError as err:
                self._tell_once(f"{err}; running on without the controller")
                self._answered.set()
                self._ended.wait(_LOCAL_RETRY_S)
                continue
            except grpc.RpcError as err:
                if self._failed(err):
                    return
                continue
            self._failures = 0
            if update is not None:
                self._publish(update)

    def _register(self, timeout_s: float) -> Update:
        nonce = secrets.token_hex(16)
        task = self._task
        payload = f"synergy-register:{task.job_id}:{task.restart_count}:{task.rank}:{nonce}"
        request = pb.RegisterRequest(
            protocol=PROTOCOL,
            task=self._task_id(),
            credential=munge_credential(payload, self._munge_socket),
            nonce=nonce,
            os_cpus=self._os_cpus,
            step_id=task.step_id,
        )
        reply = self._stub.Register(request, timeout=timeout_s)
        self._token = reply.token
        return update_of(reply)

    def _renew(self) -> Update | None:
        report, known = self._report(), self._known
        grant = known.grant
        left_s = grant.until_monotonic_s - time.monotonic() if grant else _LONGEST_WAIT_S
        wait_s = min(_LONGEST_WAIT_S, max(0.5, left_s / 3))
        request = pb.RenewRequest(
            token=self._token,
            task=self._task_id(),
            known_generation=grant.generation if grant else 0,
            progress=pb.Progress(
                step=report.step,
                samples=report.samples,
                epoch=report.epoch,
                step_s=report.step_s,
                wait_s=report.wait_s,
                pinned_cpus=self.pinned_cpus,
                stepped_s=report.stepped_s,
                waited_s=report.waited_s,
            ),
            proposed_stop_step=report.proposed_stop_step,
            accepted_stop_step=report.accepted_stop_step,
            refused_stop_step=report.refused_stop_step,
            wait_s=wait_s,
            known_stop=pb.StopStep(step=known.stop_step, committed=known.stop_committed),
            profiling=self._profiling(known.order),
            training=_training(self._training()),
        )
        call = self._stub.Renew.future(request, timeout=wait_s + _CALL_MARGIN_S)
        with self._lock:
            self._call = call
            kicked, self._kicked = self._kicked, False
        if kicked:
            # The kick came between the reading of the board and the call: read it again.
            call.cancel()
        try:
            return update_of(call.result())
        except grpc.FutureCancelledError:
            return None
        finally:
            with self._lock:
                self._call = None

    def _profiling(self, order: Order | None) -> pb.Profiling:
        answer, measured = self.answer, None
        if answer is not None:
            measured = pb.Measured(probe=answer.number, data=_data(answer.data))
            if answer.found is not None:
                found = answer.found
                waits_known = found.wait_share is not None
                measured = pb.Measured(
                    probe=answer.number,
                    steps=found.iterations,
                    samples_per_s=found.samples_per_s,
                    waits_known=waits_known,
                    wait_share=found.wait_share or 0.0,
                    busy_samples_per_s=found.busy_samples_per_s or 0.0,
                )
        return pb.Profiling(
            known_probe=order.number if order else 0,
            measured=measured,
            own_mem_mib=self.own_mem_mib,
            program=self._program,
        )

    def _publish(self, update: Update) -> None:
        if update.gone:
            if not update.over:
                self._tell_once("the controller does not schedule this job (any more); running on")
            self._token = ""
            # Nothing to take from it: the launcher leaves everything as it is.
            update = Update(grant=self._known.grant, gone=True, over=update.over)
        with self._lock:
            self._update = self._known = update
        self._answered.set()
        self._notify()
        if update.gone:
            self._ended.wait(_GONE_RETRY_S)

    def _failed(self, err: grpc.RpcError) -> bool:
        """Prepare the next try; True when the controller has refused and there is none."""
        code, details = _code(err), _details(err)
        if self._token and code is grpc.StatusCode.UNAUTHENTICATED:
            # A restarted controller does not know the session: introduce this task again.
            self._token = ""
            return False
        if code in _REFUSED:
            self._tell_once(f"the controller at {self.endpoint} refuses this task: {details}")
            self._answered.set()
            self._notify()
            # A credential is for one call: the next may pass, once a clock is set right, say.
            return code is not grpc.StatusCode.UNAUTHENTICATED or self._ended.wait(_LOCAL_RETRY_S)
        if self._failures >= 2:
            self._tell_once(f"no answer from the controller at {self.endpoint}; trying on")
        self._pause()
        return False

    def _pause(self) -> None:
        ceiling_s = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(self._failures, 10))
        self._failures += 1
        self._ended.wait(ceiling_s * random.uniform(0.5, 1.0))

    def _tell_once(self, text: str) -> None:
        if text not in self._told and not self._ended.is_set():
            self._told.add(text)
            self._say(text)

    def _task_id(self) -> pb.TaskId:
        task = self._task
        return pb.TaskId(
            job_id=task.job_id,
            restart_count=task.restart_count,
            rank=task.rank,
            ranks=task.ranks,
            local_rank=task.local_rank,
            local_ranks=task.local_ranks,
            node=task.node,
        )


def update_of(reply: pb.LeaseReply) -> Update:
    """What an answer of the controller says; its times count from now."""
    if reply.gone:
        return Update(gone=True, over=reply.over)
    grant = None
    if reply.HasField("lease"):
        lease = reply.lease
        grant = Grant(
            generation=lease.generation,
            until_monotonic_s=time.monotonic() + max(0.0, lease.expires_in_s),
            cores=tuple(sorted(set(lease.cores))),
            floor_cores=tuple(sorted(set(lease.floor_cores))),
            mem_mib=lease.mem_mib,
            floor_mem_mib=lease.floor_mem_mib,
            stop=lease.stop,
            stop_within_s=lease.stop_within_s,
            node_cores=lease.node_cores,
            batch_size=lease.batch_size,
            grace_s=lease.grace_s,
        )
    return Update(
        grant=grant,
        stop_step=reply.stop_step.step,
        stop_committed=reply.stop_step.committed,
        order=_order(reply.probe),
    )


def _training(told: Training | None) -> pb.Training | None:
    if told is None:
        return None
    return pb.Training(
        times=[
            pb.StepTimes(
                local_batch=one.local_batch,
                accumulation=one.accumulation,
                replicas=one.replicas,
                steps=one.steps,
                gradient_s=one.gradient_s,
                step_s=one.step_s,
            )
            for one in told.times
        ],
        gradient_square=told.square,
        gradient_variance=told.variance,
        initial_batch=told.initial_batch,
        local_most=told.local_most,
        progress=told.progress,
    )


def _data(found: DataFound | None) -> pb.DataRead | None:
    if found is None:
        return None
    return pb.DataRead(
        dataset_mib=found.dataset_mib,
        samples=found.samples,
        storage_mib_s=found.storage_mib_s,
        read_mib=found.read_mib,
        in_memory=found.in_memory,
        cached=found.cached,
        how=found.how.encode("ascii", "replace").decode("ascii")[:_LONGEST_HOW],
    )


def _order(probe: pb.Probe) -> Order | None:
    if not probe.number:
        return None
    return Order(
        number=probe.number,
        warmup_steps=probe.warmup_steps,
        steps=probe.steps,
        longest_s=probe.longest_s,
        read_s=probe.read_s,
        readers=probe.readers,
    )


def _code(err: grpc.RpcError) -> grpc.StatusCode:
    code = getattr(err, "code", None)
    return code() if callable(code) else grpc.StatusCode.UNKNOWN


def _details(err: grpc.RpcError) -> str:
    details = getattr(err, "details", None)
    return str(details()) if callable(details) else str(err)
