"""Job records as the scheduler sees them, remembered as long as the record stays the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Protocol

from slurm_synergy.core.hints import Hints
from slurm_synergy.core.model import Elasticity, Job, Profile, Reason
from slurm_synergy.errors import HintError, ModelError
from slurm_synergy.slurm.access import Access
from slurm_synergy.slurm.facts import JobFacts, NodeFacts
from slurm_synergy.slurm.request import (
    Request,
    build_job,
    is_passed_through,
    read_mark,
    request_of_record,
    unplannable,
)
from slurm_synergy.slurm.runtime import RunTime, Served

__all__ = ["JobView", "JobViews", "RequestMemory"]

_LOG = logging.getLogger(__name__)


class RequestMemory(Protocol):
    """Durable memory of what the user asked for, where Slurm forgets it."""

    def request(self, job_id: int) -> Mapping[str, object] | None:
        """What was remembered for the job, or None."""
        ...

    def remember_requests(self, requests: Mapping[int, Mapping[str, object]]) -> None:
        """Remember the requests of jobs, durably, all or none."""
        ...

    def update_request(self, job_id: int, changes: Mapping[str, object]) -> None:
        """Put entries into what is remembered of the job, durably."""
        ...

    def forget_job(self, job_id: int) -> None:
        """Slurm does not know the job any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job record as read: what the scheduler sees, and why it may not be planned."""

    job: Job
    hints: Hints
    problem: Reason | None


class JobViews:
    """Views by job id. ``memory`` keeps what starts and requeues overwrite in the records."""

    def __init__(
        self,
        memory: RequestMemory,
        profile_of: Callable[[str], Profile | None],
        access: Access | None = None,
    ) -> None:
        self._memory, self._profile_of = memory, profile_of
        self._access = access or Access()
        # With what each was made from; what is not known any more is None.
        self._views: dict[int, tuple[tuple[object, ...] | None, JobView, JobFacts | None]] = {}
        # Jobs that are to train epochs of which it is not known how long they are.
        self._unmeasured: set[int] = set()

    def on(self, nodes: Iterable[NodeFacts]) -> None:
        """The pool as it is now: what GPUs a job may have depends on it."""
        access = self._access.on(nodes)
        if access is not self._access:
            self._access = access
            self._views = {
                job_id: (None, view, None) for job_id, (_, view, _) in self._views.items()
            }

    def view(self, facts: JobFacts) -> JobView:
        """The view of a record; a record that cannot be read has a ``problem``, never an error."""
        known = self._views.get(facts.job_id)
        if known is not None and facts.job_id in self._unmeasured and self._is_measured(known[1]):
            known = (None, known[1], None)
        if known is not None and known[2] is facts:
            return known[1]
        key = (
            *(facts.comment, facts.admin_comment, facts.name, facts.time_limit_s, facts.account),
            # The last member of an array takes the record over that stood for the waiting ones.
            facts.array_task_id,
        )
        if known is not None and known[0] == key and known[1].problem is None:
            self._views[facts.job_id] = (key, known[1], facts)
            return known[1]
        view = self._make_view(facts)
        if known is not None and known[1] == view:
            view = known[1]  # by which others know that nothing has changed
        elif view.problem:
            _LOG.warning("job %d: %s", facts.job_id, view.problem.text)
        self._views[facts.job_id] = (key, view, facts)
        lacks = view.hints.epochs is not None and view.job.total_samples is None
        (self._unmeasured.add if lacks else self._unmeasured.discard)(facts.job_id)
        return view

    def _is_measured(self, view: JobView) -> bool:
        """Whether it is known now how long the job's epochs are."""
        profile = self._profile_of(view.hints.profile) if view.hints.profile else None
        return profile is not None and profile.pipeline is not None

    def _make_view(self, facts: JobFacts) -> JobView:
        memory = self._remembered(facts)
        # A requeue sets Slurm's submit time anew; the order of the queue is that of the first one.
        submitted_s = memory.get("submitted_s")
        if isinstance(submitted_s, float):
            facts = replace(facts, submit_s=submitted_s)
        whole_s = RunTime.from_memory(memory).whole_s(facts.time_limit_s)
        facts = replace(facts, time_limit_s=whole_s)
        try:
            request = read_mark(facts.admin_comment)
            if request is None:
                shape = memory.get("shape")
                if not isinstance(shape, Mapping):
                    request = request_of_record(facts)  # its owner has put it right since
                    self._memory.update_request(facts.job_id, {"shape": request.to_json()})
                else:
                    request = Request.from_json(shape)
            job, hints = build_job(facts, request, self._profile_of)
            job = self._access.bounded(job, facts)
        except (HintError, ModelError) as err:
            job, problem = unplannable(facts, err)
            return JobView(job=job, hints=Hints(), problem=problem)
        return JobView(job=job, hints=hints, problem=None)

    def strangers(self, jobs: Mapping[int, JobFacts]) -> tuple[int, ...]:
        """Ids that are remembered for another job than the one that has them now.

        slurmctld counts anew after a cold start, or when its ids are used up. A job that was never
        requeued keeps its submit time.
        """
        views = self._views
        looked_at = (
            facts
            for job_id, facts in jobs.items()
            if facts.restarts == 0
            and ((known := views.get(job_id)) is None or known[2] is not facts)
        )
        return tuple(facts.job_id for facts in looked_at if self._is_of_another(facts))

    def _is_of_another(self, facts: JobFacts) -> bool:
        submitted_s = (self._memory.request(facts.job_id) or {}).get("submitted_s")
        return isinstance(submitted_s, float) and submitted_s < facts.submit_s

    def forget(self, job_id: int) -> None:
        """Drop the view and the memory of a job that had this id."""
        self._memory.forget_job(job_id)
        self._views.pop(job_id, None)
        self._unmeasured.discard(job_id)

    def meet(self, jobs: Mapping[int, JobFacts]) -> None:
        """Remember the records of jobs that are new here, thousands of them at once.

        Raises LedgerError. Without it each is remembered when its view is asked for.
        """
        new = (jobs[job_id] for job_id in sorted(jobs.keys() - self._views.keys()))
        strangers = {
            facts.job_id: _at_first_sight(facts)
            for facts in new
            if not facts.state.finished
            and not is_passed_through(facts)
            and self._memory.request(facts.job_id) is None
        }
        if strangers:
            self._memory.remember_requests(strangers)

    def _remembered(self, facts: JobFacts) -> Mapping[str, object]:
        """What the record said at first sight."""
        memory = self._memory.request(facts.job_id)
        if memory is None:
            memory = _at_first_sight(facts)
            self._memory.remember_requests({facts.job_id: memory})
        return memory

    def ran_s(self, job: Job, service_gpu_s: float) -> float:
        """For how long the job ran so far, over all its runs, in seconds."""
        if job.elasticity is Elasticity.RIGID:
            return service_gpu_s / job.gpus
        return self._served(job).ran_until_s(service_gpu_s)

    def starts_on(self, job: Job, gpus: int, service_gpu_s: float) -> None:
        """An elastic job is about to start on ``gpus`` GPUs: see that ``ran_s`` stays right."""
        if job.elasticity is Elasticity.RIGID:
            return
        before = self._served(job)
        served = before.restart(service_gpu_s, gpus)
        if served != before:
            self._memory.update_request(job.job_id, {"served": served.to_memory()})

    def _served(self, job: Job) -> Served:
        return Served.from_memory(self._memory.request(job.job_id) or {}, job.gpus)

    def limit_next_run(self, facts: JobFacts, ran_s: float) -> float | None:
        """The limit to set for the job's next run, after ``ran_s`` seconds of earlier ones.

        None when the record needs no change. It is remembered before it is set.
        """
        memory = self._remembered(facts)
        run_time, limit_s = RunTime.from_memory(memory).restart(facts.time_limit_s, ran_s)
        if run_time is not None:
            self._memory.update_request(facts.job_id, {"run_time": run_time.to_memory()})
        return limit_s

    def last(self, job_id: int) -> JobView | None:
        """The view of the job as last asked for, None when nobody has. Any thread may ask."""
        known = self._views.get(job_id)
        return None if known is None else known[1]

    def forget_all_but(self, known: Set[int]) -> None:
        """Drop the views of jobs that are not in ``known``."""
        for job_id in self._views.keys() - known:
            del self._views[job_id]
        self._unmeasured &= known


def _at_first_sight(facts: JobFacts) -> Mapping[str, object]:
    """What starts and requeues overwrite in a record."""
    try:
        shape = request_of_record(facts).to_json()
    except ModelError:
        shape = None
    return {"submitted_s": facts.submit_s, "shape": shape}
