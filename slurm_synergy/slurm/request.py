"""What the user asked for, from a job's record, its hints and the mark of job_submit.lua. Pure.

Starting a job overwrites its record (nodes, cores, memory, GPU type), so the record tells the
user's wish only before the first start. The mark that job_submit.lua leaves in AdminComment, which
the owner cannot change, keeps the wish; without a mark the record does, as first seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from slurm_synergy.core.hints import Hints, parse_hints
from slurm_synergy.core.model import Elasticity, Job, Profile, Reason, ReasonCode
from slurm_synergy.errors import HintError, ModelError
from slurm_synergy.slurm.facts import GpuForm, Hold, JobFacts
from slurm_synergy.slurm.runtime import MINUTE_S, limit_in_record

__all__ = [
    "ANY_TYPE",
    "Request",
    "array_name",
    "build_job",
    "elasticity_of",
    "is_held",
    "is_overdue",
    "is_passed_through",
    "read_mark",
    "request_of_record",
    "unplannable",
    "waits_on",
]

ANY_TYPE = "any"
"""The word in the mark for a GPU request without a type."""

_MARK = re.compile(r"(?:^|\s)synergy:(v=[^\s]*)")
_PASSED = re.compile(r"(?:^|\s)synergy:pass=")
_DEADLINE_MARGIN_S = 5.0  # clocks differ, and a job must not be started by this
_VERSION = 1
_NUMBERS = ("gpn", "nodes", "tpn", "cpt", "mem")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The shape that the user asked for; 0 means that he did not say.

    ``gpus_per_node`` GPUs on each of ``nodes`` nodes, ``gpu_type`` "" for any, and joined with "+"
    when there are several to choose from. ``time_limit_s`` is the limit at submission, None for
    none; it holds for all runs of the job together. ``elastic`` tells that the job was admitted as
    one whose GPUs may change: its tasks are no fixed number per node.
    """

    wrapped: bool
    gpus_per_node: int
    gpu_type: str
    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    mem_mib_per_node: int
    time_limit_s: float | None = None
    elastic: bool = False

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The types to choose from; empty for any."""
        return tuple(self.gpu_type.split("+")) if self.gpu_type else ()

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1 or self.nodes < 1:
            raise ModelError(f"asks for {self.gpus_per_node} GPUs on each of {self.nodes} nodes")
        if min(self.tasks_per_node, self.cpus_per_task, self.mem_mib_per_node) < 0:
            raise ModelError("tasks, CPUs or memory below zero")

    def to_json(self) -> dict[str, object]:
        """For the ledger; ``from_json`` is its inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> Request:
        """What ``to_json`` wrote. Raises ModelError when it is something else."""
        try:
            return cls(**value)  # type: ignore[arg-type]
        except TypeError as err:
            raise ModelError(f"not a request: {dict(value)!r}") from err


def read_mark(admin_comment: str) -> Request | None:
    """The request in a mark; None when there is no mark. Raises ModelError when it is malformed."""
    match = _MARK.search(admin_comment)
    if match is None:
        return None
    pairs = [part.partition("=") for part in match[1].split(",")]
    values = {key: value for key, _, value in pairs}
    if values.get("v") != str(_VERSION):
        raise ModelError(f"mark of version {values.get('v')!r}; this controller knows {_VERSION}")
    try:
        numbers = {key: int(values[key]) for key in _NUMBERS}
        gpu_type, wrapper = values["type"], {"yes": True, "no": False}[values["wrapper"]]
        limit_min = int(values.get("limit", "0"))
    except (KeyError, ValueError) as err:
        raise ModelError(f"mark {match[0].strip()!r} is malformed: {err}") from err
    return Request(
        wrapped=wrapper,
        gpus_per_node=numbers["gpn"],
        gpu_type="" if gpu_type == ANY_TYPE else gpu_type,
        nodes=numbers["nodes"],
        tasks_per_node=numbers["tpn"],
        cpus_per_task=numbers["cpt"],
        mem_mib_per_node=numbers["mem"],
        time_limit_s=limit_min * MINUTE_S or None,
        elastic=values.get("elastic") == "yes",
    )


def request_of_record(facts: JobFacts) -> Request:
    """The request as the record shows it, for a job that was never reshaped.

    Such a job came past job_submit.lua, so nothing is known about its script: it is taken as one
    that does not call the wrapper. Raises ModelError for a request that cannot be planned.
    """
    if facts.gpu_form is not GpuForm.PER_NODE or len(facts.gpus_asked) != 1:
        raise ModelError(
            f"asks for GPUs as {facts.gpu_form.value} {dict(facts.gpus_asked)}; "
            "only --gres=gpu[:TYPE]:N or --gpus-per-node can be planned"
        )
    if facts.num_nodes[0] != facts.num_nodes[1]:
        raise ModelError(f"asks for {facts.num_nodes[0]} to {facts.num_nodes[1]} nodes; give one")
    ((gpu_type, count),) = facts.gpus_asked.items()
    return Request(
        wrapped=False,
        gpus_per_node=count,
        gpu_type=gpu_type,
        nodes=facts.num_nodes[0],
        tasks_per_node=facts.ntasks_per_node or 0,
        cpus_per_task=facts.cpus_per_task if facts.cpus_per_task > 1 else 0,
        mem_mib_per_node=facts.min_mem_node_mib or 0,
        time_limit_s=limit_in_record(facts.time_limit_s),
    )


def build_job(
    facts: JobFacts, request: Request, profile_of: Callable[[str], Profile | None]
) -> tuple[Job, Hints]:
    """The job as the scheduler sees it, with its hints.

    The profile of the hinted name turns a number of epochs into samples. Raises HintError or
    ModelError when the hints are malformed or contradict the request.
    """
    hints = parse_hints(facts.comment)
    samples = float(hints.samples) if hints.samples is not None else None
    profile = profile_of(hints.profile) if hints.profile else None
    if samples is None and hints.epochs is not None and profile and profile.pipeline:
        samples = float(hints.epochs * profile.pipeline.samples_per_epoch)
    types = request.gpu_types or tuple(hints.gpu_types or ())
    least = hints.min_mem_mib if hints.min_mem_mib is not None else request.mem_mib_per_node
    elasticity = elasticity_of(request, hints)
    job = Job(
        job_id=facts.job_id,
        user=facts.user,
        name=facts.name,
        array=array_name(facts),
        submitted_s=facts.submit_s,
        gpus=request.gpus_per_node * request.nodes,
        nodes=request.nodes,
        gpu_types=types,
        tasks_per_node=_tasks_per_node(request, elasticity),
        min_mem_mib_per_node=least,
        elasticity=elasticity,
        min_gpus=hints.min_gpus,
        max_gpus=hints.max_gpus,
        scale_unit=hints.scale_unit or 1,
        batch=hints.batch,
        preemptible=request.wrapped,
        wrapped=request.wrapped,
        total_samples=samples,
        time_limit_s=limit_in_record(facts.time_limit_s),
    )
    return job, hints


def elasticity_of(request: Request, hints: Hints) -> Elasticity:
    """What of the job's GPUs may change: what its hints say, if it was admitted as such a job.

    Others (a hint given too late, a script without the wrapper, an older mark) have tasks that
    Slurm cannot change any more, or nothing that would start others. Without a range of batch sizes
    there is none to choose, so only the GPUs change.
    """
    wish = hints.elastic or Elasticity.RIGID
    if wish is Elasticity.ADAPTIVE and hints.batch is None:
        wish = Elasticity.STRONG_SCALING
    return wish if request.elastic and request.wrapped else Elasticity.RIGID


def _tasks_per_node(request: Request, elasticity: Elasticity) -> int:
    if not request.tasks_per_node and elasticity is not Elasticity.RIGID:
        return request.gpus_per_node  # the number of ranks follows the GPUs
    return max(1, request.tasks_per_node)


def waits_on(facts: JobFacts, now_s: float) -> Reason | None:
    """Why a pending job is not ours to start: het job, dependency, begin time; else None."""
    what = None
    if facts.het_job_id is not None:
        what = "heterogeneous jobs are not scheduled"
    elif not facts.batch:
        what = "only batch jobs are scheduled; use sbatch"
    elif facts.dependency and "(failed)" in facts.dependency:
        what = f"can never start, {facts.dependency}: the job before it ended otherwise; cancel it"
    elif facts.dependency:
        what = f"waits for {facts.dependency}"
    elif facts.restarts == 0 and facts.eligible_s is not None and facts.eligible_s > now_s:
        # After a requeue the time is Slurm's own delay, which a start removes.
        what = f"begins {facts.eligible_s - now_s:.0f} s from now"
    return Reason(code=ReasonCode.NOT_OURS, text=what) if what else None


def unplannable(facts: JobFacts, err: HintError | ModelError) -> tuple[Job, Reason]:
    """A stand-in that keeps a job visible whose request cannot be read, and says why it waits."""
    job = Job(
        job_id=facts.job_id,
        user=facts.user,
        name=facts.name,
        array=array_name(facts),
        submitted_s=facts.submit_s,
        gpus=max(1, facts.gpu_total),
        nodes=None,
        preemptible=False,
        wrapped=False,
    )
    return job, Reason(code=ReasonCode.NOT_OURS, text=f"cannot be planned: {err}")


def array_name(facts: JobFacts) -> str:
    """How users call a member of a job array (``12_3``); empty for other jobs."""
    if facts.array_job_id is None or facts.array_task_id is None:
        return ""
    return f"{facts.array_job_id}_{facts.array_task_id}"


def is_overdue(facts: JobFacts, now_s: float) -> bool:
    """Whether a job that waits, held, has passed its ``--deadline``."""
    late = facts.deadline_s is not None and now_s > facts.deadline_s + _DEADLINE_MARGIN_S
    begun = facts.eligible_s is None or facts.eligible_s <= now_s
    return late and begun and facts.pending and is_held(facts)


def is_passed_through(facts: JobFacts) -> bool:
    """Whether job_submit.lua left the job to Slurm, as the site wished (salloc, srun, het jobs)."""
    # The word first: a queue of thousands is asked at each reading.
    text = facts.admin_comment
    return "synergy:pass=" in text and _PASSED.search(text) is not None


def is_held(facts: JobFacts) -> bool:
    """Whether Slurm will not start the job by itself."""
    return facts.held is not Hold.NONE or facts.priority == 0
