"""Give several pending jobs other shapes: read, send everything in one session, read back.

A refused update is not all-or-nothing in Slurm, and an accepted one need not take effect. So
every job is compared with what was wanted, and one that is not exactly that is put back to what it
asked for before; ``PUT_BACK`` and ``MIXED`` end the error's text and say whether that worked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slurm_synergy.errors import ClusterError, SlurmCommandError, SlurmReadBackError
from slurm_synergy.slurm import reshape
from slurm_synergy.slurm.facts import ConfigFacts, JobFacts, JobShape, NodeFacts

__all__ = ["MIXED", "PUT_BACK", "Changes", "reshape_jobs"]

PUT_BACK = "its earlier request was put back"
MIXED = "it holds a mixture now: do not release it before another shape was accepted"


class Changes(Protocol):
    """What a client offers for it."""

    def read_each(self, job_ids: Iterable[int]) -> Mapping[int, JobFacts | ClusterError]:
        """The jobs as they are, or why one cannot be read. Raises ClusterError for all."""
        ...

    def read_nodes(self) -> tuple[NodeFacts, ...]:
        """See ``SlurmClient``."""
        ...

    def read_config(self) -> ConfigFacts:
        """See ``SlurmClient``."""
        ...

    def update_each(self, fields: Mapping[int, Sequence[str]]) -> Mapping[int, ClusterError]:
        """Send one update per job, in order; the refused ones, by job."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    job: JobFacts
    shape: JobShape
    gpus: Mapping[str, int]


def reshape_jobs(
    client: Changes,
    shapes: Mapping[int, JobShape],
    more: Sequence[str] = (),
    wait_for: Callable[[Iterable[JobFacts]], None] = lambda jobs: None,
) -> dict[int, JobFacts | ClusterError]:
    """Each job as read back with exactly its shape, or why not. ``more`` fields go along.

    ``wait_for`` is given the jobs as they were read, before anything is changed. Raises
    ClusterError when Slurm cannot be read at all; then nothing was changed.
    """
    results: dict[int, JobFacts | ClusterError] = {}
    wishes = _wishes(client, shapes, results)
    wait_for(wish.job for wish in wishes.values())
    clears = {
        job_id: ("TresPerNode=",)
        for job_id, wish in wishes.items()
        if reshape.clear_first(wish.job, wish.gpus)
    }
    updates = {
        job_id: (*reshape.shape_fields(wish.job, wish.shape, wish.gpus), *more)
        for job_id, wish in wishes.items()
    }
    refused = dict(client.update_each(clears)) if clears else {}
    refused |= client.update_each(updates) if updates else {}
    wrong: dict[int, ClusterError] = {}
    for job_id, after in client.read_each(wishes).items():
        error = refused.get(job_id) or _unlike(after, wishes[job_id])
        if error is None:
            results[job_id] = after
        else:
            wrong[job_id] = error
    if wrong:
        results |= _put_back(client, {job_id: wishes[job_id].job for job_id in wrong}, wrong)
    return results


def _wishes(
    client: Changes,
    shapes: Mapping[int, JobShape],
    results: dict[int, JobFacts | ClusterError],
) -> dict[int, _Wish]:
    """What is to be sent; jobs that must not be touched go to ``results`` with the reason."""
    wishes: dict[int, _Wish] = {}
    jobs: dict[int, JobFacts] = {}
    for job_id, found in client.read_each(shapes).items():
        try:
            if isinstance(found, ClusterError):
                raise found
            reshape.check_pending(found, "reshape")
            reshape.check_shape(found, shapes[job_id])
            jobs[job_id] = found
        except ClusterError as err:
            results[job_id] = err
    nodes: Mapping[str, NodeFacts] = {}
    if any(reshape.needs_nodes(job, shapes[job_id]) for job_id, job in jobs.items()):
        nodes = {node.name: node for node in client.read_nodes()}
    version: tuple[int, ...] | None = None
    for job_id, job in jobs.items():
        gpus = reshape.gpus_to_write(job, shapes[job_id], nodes)
        if reshape.retypes(job, gpus) and version is None:
            version = client.read_config().version
        try:
            reshape.check_type(job, gpus, version or reshape.CAN_RETYPE)
            wishes[job_id] = _Wish(job=job, shape=shapes[job_id], gpus=gpus)
        except ClusterError as err:
            results[job_id] = err
    return wishes


def _unlike(after: JobFacts | ClusterError, wish: _Wish) -> ClusterError | None:
    if isinstance(after, ClusterError):
        return after
    wrong = reshape.differences(after, wish.shape, wish.gpus)
    if not wrong:
        return None
    return SlurmReadBackError(f"job {after.job_id} after an update: {'; '.join(wrong)}")


def _put_back(
    client: Changes, before: Mapping[int, JobFacts], wrong: Mapping[int, ClusterError]
) -> dict[int, JobFacts | ClusterError]:
    """Give the jobs back what they asked for before; their errors, with what became of it."""
    try:
        # A node list must never be longer than the number of nodes.
        client.update_each(dict.fromkeys(before, ("ReqNodeList=",)))
        client.update_each({job_id: reshape.restore_fields(job) for job_id, job in before.items()})
        afterwards = client.read_each(before)
    except ClusterError:
        afterwards = {}  # Slurm went away, as the errors tell
    told: dict[int, JobFacts | ClusterError] = {}
    for job_id, job in before.items():
        after = afterwards.get(job_id)
        same = isinstance(after, JobFacts) and reshape.same_request(job, after)
        told[job_id] = _with_note(wrong[job_id], PUT_BACK if same else MIXED)
    return told


def _with_note(error: ClusterError, note: str) -> ClusterError:
    if isinstance(error, SlurmCommandError):
        text = f"{error.stderr.strip()} ({note})"
        return SlurmCommandError(error.argv, error.rc, text, kind=error.kind)
    return SlurmReadBackError(f"{error} ({note})")
