"""What acting would have changed: decisions that were only shown, beside what Slurm did instead.

Computed from the round journal alone. Every figure compares one decision with what was seen next;
none is a forecast of a day under ``act``, since after a first action all later decisions would have
been others. Starts are compared by lower bounds: a job that Slurm started between two rounds
counts as waiting only until the first of them. Speed is estimated from profiles.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path

from slurm_synergy.cluster import Start
from slurm_synergy.controller.rounds import JOURNAL_FILE, Damage, Round, read_rounds
from slurm_synergy.core.elastic import as_placed
from slurm_synergy.core.model import JobPhase, JobStatus, Placement, ReasonCode, Snapshot
from slurm_synergy.core.pipeline import job_rate
from slurm_synergy.core.wording import counted
from slurm_synergy.errors import LedgerError

__all__ = ["JobLine", "Summary", "journal_files", "summarise", "summary_of", "words"]

_JOBS_SHOWN = 50
_NICE = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLine:
    """What would have been otherwise for one job.

    ``earlier_s``: by how much it would have started earlier, at least. ``planned`` and ``seen`` are
    nodes. ``saved_gpu_s`` is the estimate of GPU time less for the same work (negative: more).
    """

    job_id: int
    user: str
    earlier_s: float = 0.0
    planned: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()
    cpus_seen: int = 0
    cpus_planned: int = 0
    stopped: bool = False
    saved_gpu_s: float = 0.0

    @property
    def elsewhere(self) -> bool:
        """Whether Slurm ran it on other nodes than the plan had for it."""
        return bool(self.planned and self.seen and set(self.planned) != set(self.seen))

    @property
    def other_cpus(self) -> bool:
        """Whether it would have had another number of CPUs where it ran."""
        return self.cpus_planned != self.cpus_seen

    @property
    def changed(self) -> bool:
        """Whether acting would have changed anything for it."""
        return self.earlier_s > 0 or self.elsewhere or self.other_cpus or self.stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Totals over a time, in seconds and counts; ``lines`` are the jobs that gain most."""

    from_s: float = 0.0
    to_s: float = 0.0
    rounds: int = 0
    shown_rounds: int = 0
    damaged_lines: int = 0
    jobs: int = 0
    earlier_jobs: int = 0
    earlier_s: float = 0.0
    elsewhere_jobs: int = 0
    other_cpus_jobs: int = 0
    cpus_seen: int = 0
    cpus_planned: int = 0
    stopped_jobs: int = 0
    saved_gpu_s: float = 0.0
    lost_gpu_s: float = 0.0
    known_gpu_s: float = 0.0
    unknown_gpu_s: float = 0.0
    done: Mapping[str, int] = field(default_factory=dict)
    lines: tuple[JobLine, ...] = ()


@dataclass(slots=True)
class _Job:
    user: str
    would_start_s: float | None = None
    last_waited_s: float = 0.0
    planned: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()
    cpus: tuple[int, int] = (0, 0)
    stopped: bool = False
    saved_gpu_s: float = 0.0

    def line(self, job_id: int) -> JobLine:
        start_s = self.would_start_s
        return JobLine(
            job_id=job_id,
            user=self.user,
            earlier_s=max(0.0, self.last_waited_s - start_s) if start_s is not None else 0.0,
            planned=self.planned,
            seen=self.seen,
            cpus_seen=self.cpus[0],
            cpus_planned=self.cpus[1],
            stopped=self.stopped,
            saved_gpu_s=self.saved_gpu_s,
        )


class _Tally:
    """Goes through the rounds once, oldest first."""

    def __init__(self) -> None:
        self.jobs: dict[int, _Job] = {}
        self.done: dict[str, int] = {}
        self.times: list[float] = []
        self.shown = self.damaged = 0
        self.saved_gpu_s = self.lost_gpu_s = self.known_gpu_s = self.unknown_gpu_s = 0.0
        self._last: Round | None = None

    def take(self, item: Round) -> None:
        """One more round; what it decided is held against the time until the next one."""
        if self._last is not None and _is_shown(self._last):
            longest_s = 2 * self._last.snapshot.round_s
            lasted_s = item.snapshot.now_s - self._last.snapshot.now_s
            self._compare(self._last, min(max(0.0, lasted_s), longest_s))
        self._last = item
        self.times.append(item.snapshot.now_s)
        for outcome in item.outcomes:
            if outcome.done:
                self.done[outcome.kind] = self.done.get(outcome.kind, 0) + 1
        if _is_shown(item):
            self.shown += 1
            self._note(item)

    def _note(self, item: Round) -> None:
        now_s = item.snapshot.now_s
        starts = {one.job_id: one.placement for one in item.actions if isinstance(one, Start)}
        for status in item.snapshot.jobs:
            job_id = status.job.job_id
            job = self.jobs.setdefault(job_id, _Job(user=status.job.user))
            if status.lease is None:
                job.last_waited_s = now_s
                if job_id in starts and job.would_start_s is None:
                    job.would_start_s, job.planned = now_s, starts[job_id].nodes
            elif not job.seen:
                job.seen = status.lease.placement.nodes

    def _compare(self, item: Round, lasted_s: float) -> None:
        placements = {one.job_id: one for one in item.plan.placements}
        for status in item.snapshot.jobs:
            if status.phase is JobPhase.RUNNING:
                job = self.jobs[status.job.job_id]
                planned = placements.get(status.job.job_id)
                self._compare_running(job, item.snapshot, status, planned, lasted_s)

    def _compare_running(
        self,
        job: _Job,
        snapshot: Snapshot,
        status: JobStatus,
        planned: Placement | None,
        lasted_s: float,
    ) -> None:
        seen = _as_slurm_gave_it(status)
        if planned is None or planned.gpu_layout != seen.gpu_layout:
            job.stopped = True
            return
        job.cpus = (_cpus(seen), _cpus(planned))
        gpu_s = seen.gpus * lasted_s
        # With one batch for both: more samples of a larger batch need not be more work.
        batch = seen.batch or planned.batch
        profile = as_placed(snapshot, status, replace(seen, batch=batch)).profile
        rates = [
            job_rate(profile, seen.gpu_type, [share for _, share in one.shares])
            for one in (seen, planned)
        ]
        if not rates[0] or not rates[1]:
            self.unknown_gpu_s += gpu_s
            return
        self.known_gpu_s += gpu_s
        saved = gpu_s * (1 - rates[0] / rates[1])
        job.saved_gpu_s += saved
        self.saved_gpu_s += max(0.0, saved)
        self.lost_gpu_s += max(0.0, -saved)


def _as_slurm_gave_it(status: JobStatus) -> Placement:
    """What the job really holds: an adopted lease counts no more than the proportional share."""
    lease = status.lease
    assert lease is not None
    shares = tuple((name, lease.granted.get(name, share)) for name, share in lease.placement.shares)
    return replace(lease.placement, shares=shares)


def _is_shown(item: Round) -> bool:
    shown = [one.reason.code is ReasonCode.ONLY_SHOWN for one in item.outcomes if one.reason]
    return any(shown) or not item.outcomes


def _cpus(placement: Placement) -> int:
    return sum(share.cpus for _, share in placement.shares)


def summarise(items: Iterable[Round | Damage]) -> Summary:
    """The summary of rounds, oldest first."""
    tally = _Tally()
    for item in items:
        if isinstance(item, Damage):
            tally.damaged += 1
        else:
            tally.take(item)
    lines = [job.line(job_id) for job_id, job in sorted(tally.jobs.items())]
    changed = [line for line in lines if line.changed]
    in_place = [line for line in changed if line.other_cpus]
    changed.sort(key=lambda line: (-line.saved_gpu_s, -line.earlier_s, line.job_id))
    return Summary(
        from_s=min(tally.times, default=0.0),
        to_s=max(tally.times, default=0.0),
        rounds=len(tally.times),
        shown_rounds=tally.shown,
        damaged_lines=tally.damaged,
        jobs=len(lines),
        earlier_jobs=sum(line.earlier_s > 0 for line in lines),
        earlier_s=math.fsum(line.earlier_s for line in lines),
        elsewhere_jobs=sum(line.elsewhere for line in lines),
        other_cpus_jobs=len(in_place),
        cpus_seen=sum(line.cpus_seen for line in in_place),
        cpus_planned=sum(line.cpus_planned for line in in_place),
        stopped_jobs=sum(line.stopped for line in lines),
        saved_gpu_s=tally.saved_gpu_s,
        lost_gpu_s=tally.lost_gpu_s,
        known_gpu_s=tally.known_gpu_s,
        unknown_gpu_s=tally.unknown_gpu_s,
        done=dict(sorted(tally.done.items())),
        lines=tuple(changed[:_JOBS_SHOWN]),
    )


def journal_files(state_dir: Path) -> tuple[Path, ...]:
    """The journal's files, oldest first. Raises LedgerError when the directory cannot be read."""
    try:
        names = {path.name for path in state_dir.iterdir()}
    except OSError as err:
        raise LedgerError(
            f"cannot read the state directory {state_dir}: {err.strerror}; run this as the "
            "controller's user or root, on its machine"
        ) from err
    numbers = sorted(
        (
            int(name.split(".")[1])
            for name in names
            if name.startswith("journal.")
            and name.endswith(".jsonl")
            and name.split(".")[1].isdigit()
        ),
        reverse=True,
    )
    found = [f"journal.{number}.jsonl" for number in numbers]
    if JOURNAL_FILE in names:
        found.append(JOURNAL_FILE)
    return tuple(state_dir / name for name in found)


def summary_of(state_dir: Path, *, since_s: float) -> Summary:
    """The summary of the journal's rounds from ``since_s`` (epoch seconds) on.

    Raises LedgerError when the journal cannot be read.
    """

    def rounds() -> Iterator[Round | Damage]:
        for path in journal_files(state_dir):
            if path.stat().st_mtime < since_s:
                continue
            for item in read_rounds(path):
                if isinstance(item, Damage) or item.snapshot.now_s >= since_s:
                    yield item

    return summarise(rounds())


def words(summary: Summary) -> Sequence[str]:
    """The summary as lines for people."""
    if not summary.rounds:
        return ("no round in this time",)
    span = f"{_time(summary.from_s)} to {_time(summary.to_s)}: {counted(summary.rounds, 'round')}"
    if not summary.shown_rounds:
        done = ", ".join(f"{kind} {count}" for kind, count in summary.done.items()) or "none"
        return (f"{span}, all carried out (actions: {done}); nothing was only shown",)
    lines = [
        f"{span}, {summary.shown_rounds} of them only shown; {counted(summary.jobs, 'job')}. "
        "Had the controller acted:",
        f"  {counted(summary.earlier_jobs, 'job')} would have started earlier, by at least "
        f"{_duration(summary.earlier_s)} in all",
        f"  {counted(summary.elsewhere_jobs, 'job')} would have been started on other nodes than "
        "Slurm's",
        f"  {counted(summary.other_cpus_jobs, 'running job')} would have had other numbers of CPUs "
        f"({summary.cpus_seen} became {summary.cpus_planned})",
        f"  {counted(summary.stopped_jobs, 'running job')} would have been stopped for others",
        _saving(summary),
        "Each decision is compared with what Slurm did next; these are no forecast, since after "
        "the first action later decisions would have been others.",
    ]
    if summary.damaged_lines:
        lines.append(
            f"{counted(summary.damaged_lines, 'line')} of the journal cannot be read: missing here"
        )
    return tuple(lines)


def _saving(summary: Summary) -> str:
    unknown = f"{summary.unknown_gpu_s / 3600:.1f} GPU-hours of jobs without a profile"
    if not summary.known_gpu_s:
        return f"  no estimate of GPU time saved: no running job had a profile ({unknown})"
    net_h = (summary.saved_gpu_s - summary.lost_gpu_s) / 3600
    return (
        f"  estimate from profiles: {net_h:.1f} GPU-hours less for the same work (saved "
        f"{summary.saved_gpu_s / 3600:.1f}, lost {summary.lost_gpu_s / 3600:.1f}) of "
        f"{summary.known_gpu_s / 3600:.1f}; not estimated: {unknown}"
    )


def _time(epoch_s: float) -> str:
    return datetime.fromtimestamp(epoch_s).astimezone().isoformat(sep=" ", timespec="minutes")


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def main(argv: Sequence[str]) -> int:
    """``python -m slurm_synergy.controller.summary STATE_DIR SINCE_S``: one JSON object."""
    os.nice(_NICE)
    state_dir, since_s = argv
    summary = summary_of(Path(state_dir), since_s=float(since_s))
    sys.stdout.write(json.dumps({**asdict(summary), "words": list(words(summary))}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
