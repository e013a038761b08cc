"""What tasks tell and are told, as messages of the protocol and as values of ours.

What a task tells is bounded here; a number that makes no sense counts as not told.
"""

from __future__ import annotations

from slurm_synergy.controller.call_guard import bounded, short_text
from slurm_synergy.controller.learning_points import MOST_TIMES, StepTime, TrainingReport
from slurm_synergy.controller.leases import TaskView
from slurm_synergy.controller.probes import DataRead, Measured, TaskProfiling
from slurm_synergy.controller.tasks import TaskReport
from slurm_synergy.proto import lease_pb2 as pb

__all__ = ["reply_of", "report_of_renewal"]

_MAX_PROGRAM = 64
_MAX_HOW = 200
_MOST_MIB = 1e12  # of a data set
_LONGEST_SUM_S = 1e10  # of seconds since a process began
_LEAST_RATE, _MOST_RATE = 1e-6, 1e9  # samples/s of a whole job


def report_of_renewal(request: pb.RenewRequest) -> TaskReport:
    """What a task tells with a renewal. Raises what ``bounded`` and ``short_text`` do."""
    progress = request.progress
    return TaskReport(
        step=bounded(progress.step, "step"),
        samples=bounded(progress.samples, "samples"),
        epoch=bounded(progress.epoch, "epoch"),
        step_s=_sane(progress.step_s),
        wait_s=_sane(progress.wait_s),
        pinned_cpus=bounded(progress.pinned_cpus, "pinned_cpus"),
        proposed_stop_step=bounded(request.proposed_stop_step, "stop step"),
        accepted_stop_step=bounded(request.accepted_stop_step, "stop step"),
        refused_stop_step=bounded(request.refused_stop_step, "stop step"),
        stepped_s=_sane(progress.stepped_s, _LONGEST_SUM_S),
        waited_s=_sane(progress.waited_s, _LONGEST_SUM_S),
        profiling=_profiling(request.profiling) if request.HasField("profiling") else None,
        training=_training(request.training) if request.HasField("training") else None,
    )


def _training(told: pb.Training) -> TrainingReport:
    """As it was told: whoever learns from it refuses it in words, and the lease is renewed."""
    return TrainingReport(
        times=tuple(
            StepTime(
                local_batch=one.local_batch,
                accumulation=one.accumulation,
                replicas=one.replicas,
                steps=one.steps,
                gradient_s=one.gradient_s,
                step_s=one.step_s,
            )
            # One too many is enough to be refused.
            for one in told.times[: MOST_TIMES + 1]
        ),
        square=told.gradient_square,
        variance=told.gradient_variance,
        initial_batch=told.initial_batch,
        local_most=told.local_most,
        progress=told.progress,
    )


def _profiling(told: pb.Profiling) -> TaskProfiling:
    return TaskProfiling(
        known_probe=bounded(told.known_probe, "probe"),
        measured=_measured(told.measured) if told.HasField("measured") else None,
        own_mem_mib=bounded(told.own_mem_mib, "own_mem_mib"),
        program=short_text(told.program, _MAX_PROGRAM, "the name of a program"),
    )


def _measured(told: pb.Measured) -> Measured:
    rate, busy = _sane(told.samples_per_s, _MOST_RATE), _sane(told.busy_samples_per_s, _MOST_RATE)
    share = told.wait_share if 0 <= told.wait_share <= 1 else None
    return Measured(
        probe=bounded(told.probe, "probe"),
        steps=bounded(told.steps, "steps") if rate >= _LEAST_RATE else 0,
        samples_per_s=rate,
        wait_share=share if told.waits_known else None,
        busy_samples_per_s=busy if told.waits_known and busy >= _LEAST_RATE else None,
        data=_data_read(told.data) if told.HasField("data") else None,
    )


def _data_read(told: pb.DataRead) -> DataRead:
    size_mib, samples = _sane(told.dataset_mib, _MOST_MIB), bounded(told.samples, "samples")
    known = size_mib > 0 and samples > 0
    return DataRead(
        dataset_mib=size_mib if known else 0.0,
        samples=samples if known else 0,
        storage_mib_s=_sane(told.storage_mib_s, _MOST_MIB),
        read_mib=_sane(told.read_mib, _MOST_MIB),
        in_memory=told.in_memory,
        cached=told.cached,
        how=short_text(told.how, _MAX_HOW, "what was read"),
    )


def _sane(seconds: float, most_s: float = 1e6) -> float:
    # Also turns NaN into 0, which would poison means and JSON.
    return seconds if 0 <= seconds < most_s else 0.0


def reply_of(view: TaskView, *, token: str = "") -> pb.LeaseReply:
    """What a task is told; ``token`` only when it registers."""
    probe = view.probe
    return pb.LeaseReply(
        token=token,
        probe=None
        if probe is None
        else pb.Probe(
            number=probe.number,
            warmup_steps=probe.warmup_steps,
            steps=probe.steps,
            longest_s=probe.longest_s,
            read_s=probe.read_s,
            readers=probe.readers,
        ),
        lease=pb.Lease(
            generation=view.generation,
            expires_in_s=view.expires_in_s,
            cores=view.cores,
            floor_cores=view.floor_cores,
            mem_mib=view.mem_mib,
            floor_mem_mib=view.floor_mem_mib,
            stop=view.stop,
            stop_within_s=view.stop_within_s,
            node_cores=view.node_cores,
            grace_s=view.grace_s,
            batch_size=view.batch_size,
        ),
        stop_step=pb.StopStep(step=view.stop_step, committed=view.stop_committed),
    )
