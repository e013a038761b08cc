"""An elastic job on a configuration is a rigid job of that shape, with the speed that it has there.

So packing, mechanisms and checks need to know nothing of elasticity: they look at the job as it is
granted, or placed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from operator import attrgetter

from slurm_synergy.core.goodput import ThroughputModel
from slurm_synergy.core.model import (
    Configuration,
    Elasticity,
    Job,
    JobPhase,
    JobStatus,
    Placement,
    Profile,
    Snapshot,
)
from slurm_synergy.core.request import Request
from slurm_synergy.core.scaling import BatchSize, Scaling, TypeSpeed

__all__ = [
    "Shape",
    "Shapes",
    "as_granted",
    "as_placed",
    "as_shaped",
    "configuration_of",
    "gpus_per_replica",
    "model_on",
    "models_of",
    "objection",
    "reshaped",
]

# Until Python 3.12, looking up a member of an enumeration takes longer than comparing it.
_RIGID = Elasticity.RIGID
_FORGOTTEN_AT_LEAST = 1000
# Fits to published measurements are mostly within 5 % where a job has run, and up to 18 % off.
_FIT_ERROR = 0.2
_BUT_SCALING = attrgetter(*[one.name for one in fields(Profile) if one.name != "scaling"])


def gpus_per_replica(job: Job, scaling: Scaling | None, gpu_type: str) -> int:
    """Over how many GPUs of that type one copy of the job's model is split."""
    speed = scaling.speeds.get(gpu_type) if scaling else None
    own = speed.gpus_per_replica if speed else None
    return own or job.scale_unit


def model_on(scaling: Scaling, gpu_type: str) -> ThroughputModel | None:
    """The throughput model to use for GPUs of ``gpu_type`` (algorithms C.5); None if not known.

    Where the job ran on several GPUs of another type only, it scales as there: with the largest
    batch that both types take, the same part of a step is synchronisation. Passes take what they
    were measured to take on a single GPU, at every batch. Without any such run the model of
    single-GPU profiles says that scaling is perfect.
    """
    own = scaling.speeds.get(gpu_type)
    return None if own is None else _taught(own, _teacher(scaling))


def models_of(snapshot: Snapshot, job_id: int, scaling: Scaling) -> Mapping[str, ThroughputModel]:
    """``model_on`` for all types of which something is known.

    The same object in all rounds with the same nodes, as long as the job's speeds are the same.
    """
    return Shapes.of_snapshot(snapshot).models(job_id, scaling)


def _teacher(scaling: Scaling) -> TypeSpeed | None:
    """The type from which others learn how the job scales: the one on which it ran largest."""
    # Of equal ones the first by name.
    other: TypeSpeed | None = None
    for kind in sorted(scaling.speeds):
        one = scaling.speeds[kind]
        if _has_scaled(one) and (other is None or one.explored_gpus > other.explored_gpus):
            other = one
    return other


def _taught(own: TypeSpeed, other: TypeSpeed | None) -> ThroughputModel:
    if other is None or _has_scaled(own):
        return own.model
    passes, its = own.model, other.model
    local = min(own.local_most, other.local_most)
    factor = _pass_s(passes, local) / _pass_s(its, local)
    return ThroughputModel(
        compute_s=passes.compute_s,
        compute_s_per_sample=passes.compute_s_per_sample,
        node_sync_s=its.node_sync_s * factor,
        node_sync_s_per_replica=its.node_sync_s_per_replica * factor,
        network_sync_s=its.network_sync_s * factor,
        network_sync_s_per_replica=its.network_sync_s_per_replica * factor,
        overlap=its.overlap,
    )


def _has_scaled(speed: TypeSpeed) -> bool:
    return speed.explored_gpus > (speed.gpus_per_replica or 1)


def _pass_s(model: ThroughputModel, local: int) -> float:
    return model.compute_s + model.compute_s_per_sample * local


def reshaped(job: Job, configuration: Configuration) -> Job:
    """The job as a rigid one of that shape.

    Each of its nodes has as many tasks per GPU as the user asked for. The memory that its processes
    need on a node grows with its GPUs there, but is never taken to shrink (promise P7).
    """
    gpus, nodes = configuration.gpus, configuration.nodes
    only = configuration.gpu_type
    asked = max(job.gpus // (job.nodes or 1), 1)
    each = gpus // (nodes or 1)
    return replace(
        job,
        elasticity=_RIGID,
        gpus=gpus,
        nodes=nodes,
        gpu_types=(only,) if only else job.gpu_types,
        tasks_per_node=max(job.tasks_per_node * each // asked, 1),
        min_mem_mib_per_node=-(-job.min_mem_mib_per_node * max(each, asked) // asked),
    )


def as_granted(snapshot: Snapshot, status: JobStatus, configuration: Configuration) -> JobStatus:
    """The job as it is on ``configuration``: ``status`` itself unless that changes an elastic job.

    The same job, speed and configuration give the same job and profile, as objects, in all rounds
    with the same nodes; that profile has no scaling, since the job is no longer elastic.
    """
    found = Shapes.of_snapshot(snapshot).of(status, configuration)
    return status if found is None else found.granted(status)


def as_placed(snapshot: Snapshot, status: JobStatus, placement: Placement) -> JobStatus:
    """``as_granted`` on the configuration of ``placement``."""
    if status.job.elasticity is _RIGID:
        return status
    configuration = configuration_of(placement)
    return status if configuration is None else as_granted(snapshot, status, configuration)


def as_shaped(job: Job, placement: Placement) -> Job:
    """The job alone as a rigid one of the shape of ``placement``; itself when it is rigid."""
    if job.elasticity is _RIGID:
        return job
    configuration = configuration_of(placement)
    if configuration is None or _is_own(job, configuration):
        return job
    return reshaped(job, configuration)


def configuration_of(placement: Placement) -> Configuration | None:
    """The configuration that a placement is one of; None where its nodes have unlike GPU counts."""
    counts = {share.gpus for _, share in placement.shares}
    if len(counts) > 1:
        return None
    return Configuration(
        gpus=placement.gpus,
        nodes=len(placement.shares),
        gpu_type=placement.gpu_type,
        batch=placement.batch,
    )


def _is_own(job: Job, configuration: Configuration) -> bool:
    """Whether it is just what the user asked for."""
    only = configuration.gpu_type
    return (
        configuration.batch is None
        and configuration.gpus == job.gpus
        and (job.nodes is None or configuration.nodes == job.nodes)
        and (only is None or not job.gpu_types or only in job.gpu_types)
    )


class Shape:
    """An elastic job on one configuration, with what it was made from.

    ``asked`` is for whoever asks for room for it: what follows from it and from what the job holds
    on these nodes, with the latter.
    """

    __slots__ = (
        *("_configuration", "_granted", "_job", "_models", "_profile"),
        *("asked", "job", "profile"),
    )

    def __init__(
        self,
        known: Shapes,
        status: JobStatus,
        configuration: Configuration,
        before: Shape | None,
    ) -> None:
        self._job, self._profile = status.job, status.profile
        self._configuration = configuration
        scaling = status.profile.scaling
        self._models = known.models(status.job.job_id, scaling) if scaling else None
        self.job: Job
        if before is not None and before.has_shape(status, configuration):
            self.job = before.job
        else:
            self.job = reshaped(status.job, configuration)
        self.profile = _profile_on(status.profile, self._models, configuration)
        # The job of the last question, and the answer: policy, mechanism and check ask in turn.
        self._granted: tuple[JobStatus | None, JobStatus | None] = (None, None)
        self.asked: tuple[Placement | None, JobPhase, Request] | None = None

    def granted(self, status: JobStatus) -> JobStatus:
        """``status`` as it is there: the same object when it is the same."""
        asked, found = self._granted
        if asked is not status or found is None:
            found = JobStatus(  # a replace() would take three times as long
                job=self.job,
                profile=self.profile,
                phase=status.phase,
                lease=status.lease,
                done_samples=status.done_samples,
                attained_service_gpu_s=status.attained_service_gpu_s,
                restarts=status.restarts,
                blocked=status.blocked,
                held_by_us=status.held_by_us,
                held_s=status.held_s,
            )
            self._granted = status, found
        return found

    def has_shape(self, status: JobStatus, configuration: Configuration) -> bool:
        """Whether it is this very job in that shape, with whatever batch and speed."""
        own = self._configuration
        return (
            self._job is status.job
            and own.gpus == configuration.gpus
            and own.nodes == configuration.nodes
            and own.gpu_type == configuration.gpu_type
        )

    def serves(self, known: Shapes, status: JobStatus, configuration: Configuration) -> bool:
        """Whether it is this very job on that configuration, as fast as before."""
        own = self._configuration
        if self._job is not status.job or (own is not configuration and own != configuration):
            return False
        if self._profile is status.profile:
            return True
        # The noise of its gradient alone, which is new all the time, makes it no faster.
        if _BUT_SCALING(self._profile) != _BUT_SCALING(status.profile):
            return False
        scaling = status.profile.scaling
        now = known.models(status.job.job_id, scaling) if scaling else None
        if self._models is not now:
            return False
        self._profile = status.profile
        return True


class Shapes:
    """What is made of elastic jobs, by job id; kept with the nodes."""

    __slots__ = ("_models", "_shapes")

    def __init__(self) -> None:
        # The last two of each job: as its batch is hoped to be, and as it is.
        self._shapes: dict[int, tuple[Shape, Shape | None]] = {}
        self._models: dict[
            int, tuple[Mapping[str, TypeSpeed] | None, Mapping[str, ThroughputModel]]
        ] = {}

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> Shapes:
        """What there is for the nodes of ``snapshot``."""
        found = snapshot.of_nodes.get(cls)
        most = 2 * len(snapshot.jobs) + _FORGOTTEN_AT_LEAST
        if not isinstance(found, cls) or max(len(found._shapes), len(found._models)) > most:
            found = snapshot.of_nodes[cls] = cls()
        return found

    def of(self, status: JobStatus, configuration: Configuration) -> Shape | None:
        """The job in that shape; None where that changes nothing of it."""
        job = status.job
        if job.elasticity is _RIGID or _is_own(job, configuration):
            return None
        found, other = self._shapes.get(job.job_id, (None, None))
        if found is None or not found.serves(self, status, configuration):
            if other is not None and other.serves(self, status, configuration):
                found, other = other, found
            else:
                found, other = Shape(self, status, configuration, found), found
            self._shapes[job.job_id] = found, other
        return found

    def models(self, job_id: int, scaling: Scaling) -> Mapping[str, ThroughputModel]:
        """``models_of``."""
        speeds, models = self._models.get(job_id, _NOTHING)
        if speeds is not scaling.speeds:
            if speeds != scaling.speeds:
                teacher = _teacher(scaling)
                models = {kind: _taught(own, teacher) for kind, own in scaling.speeds.items()}
            self._models[job_id] = scaling.speeds, models
        return models


_NOTHING: tuple[None, Mapping[str, ThroughputModel]] = (None, {})


def _profile_on(
    profile: Profile,
    models: Mapping[str, ThroughputModel] | None,
    configuration: Configuration,
) -> Profile:
    """The profile whose rate per GPU is that of the whole configuration, shared by its GPUs."""
    kind, batch = configuration.gpu_type, configuration.batch
    if models is None:
        return profile
    model = None if kind is None else models.get(kind)
    if kind is None or batch is None or model is None:
        return replace(profile, scaling=None)
    rate = model.rate(configuration.nodes or 1, batch.replicas, batch.local, batch.accumulation)
    rates = {kind: rate / configuration.gpus}
    seen = _is_seen(profile.scaling, kind, configuration.gpus)
    # A model is fitted to steps of one pass; of several it is up to a third off (record 051).
    certain = profile.confident and seen and not batch.accumulation
    return replace(
        profile, gpu_rate_per_gpu=rates, rate_error=_FIT_ERROR, scaling=None, confident=certain
    )


def _is_seen(scaling: Scaling | None, kind: str, gpus: int) -> bool:
    """Whether the job has run on as many GPUs of the type, or it was profiled on so few.

    What is believed of more is a guess, by which nothing of its share may be taken from a job.
    """
    speed = scaling.speeds.get(kind) if scaling else None
    return speed is not None and gpus <= max(speed.explored_gpus, speed.gpus_per_replica or 1)


def objection(status: JobStatus, placement: Placement) -> str | None:
    """Why an elastic job must not be placed like that; None if it may, or if it is rigid."""
    job = status.job
    if job.elasticity is _RIGID:
        return None
    configuration = configuration_of(placement)
    if configuration is None:
        return None if placement.gpus == job.gpus else "its nodes have unlike numbers of GPUs"
    if _is_own(job, configuration):
        return None
    unit = gpus_per_replica(job, status.profile.scaling, placement.gpu_type)
    gpus = placement.gpus
    if not job.least_gpus <= gpus <= job.most_gpus or gpus % unit:
        return f"it may run on {job.least_gpus} to {job.most_gpus} GPUs in multiples of {unit}"
    return _objection_to_batch(job, placement.batch, gpus // unit)


def _objection_to_batch(job: Job, batch: BatchSize | None, replicas: int) -> str | None:
    if batch is None:
        return None
    if job.batch is None or batch.replicas != replicas:
        return f"its batch of {batch.total} is not one that it may have"
    least, most = job.batch
    if job.elasticity is Elasticity.STRONG_SCALING:
        most = least
    # Whole samples per replica may round a total up by less than one sample for each pass.
    if not least <= batch.total < most + replicas * (batch.accumulation + 1):
        return f"its batch may be {least} to {most}, not {batch.total}"
    return None
