"""The controller's figures as OpenMetrics, computed when they are asked for.

Only what Slurm's own metrics do not have: plans, leases, the floor promise, rounds, solver, the
calls made to Slurm. Names follow the Prometheus conventions (base units, ``_total`` for counters).
Labels have few values; figures of single jobs are those of the jobs worst off, at most
``job_labels`` of them. ``prometheus_client`` is imported here only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

import slurm_synergy
from slurm_synergy.config import Mode
from slurm_synergy.controller.figures import Figures, FloorFigure, Live
from slurm_synergy.core.model import JobPhase, Plan, Snapshot

__all__ = ["ControllerCollector", "registry"]

# Rates are quotients of floats: what is below its floor by less than this is not.
_TOLERANCE = 1e-9


def registry(figures: Figures, live: Live, *, job_labels: int) -> CollectorRegistry:
    """A registry with the controller's figures and those of its process."""
    made = CollectorRegistry()
    made.register(ControllerCollector(figures, live, job_labels=job_labels))
    ProcessCollector(registry=made)
    return made


class ControllerCollector(Collector):
    """Turns what is known into metric families, at the moment of the scrape."""

    def __init__(self, figures: Figures, live: Live, *, job_labels: int) -> None:
        self._figures, self._live, self._job_labels = figures, live, job_labels

    def collect(self) -> Iterator[Metric]:
        """All families; a part that fails leaves itself out and is counted."""
        errors = 0
        for part in (self._state, self._work, self._plan, self._leases, self._floors, self._rpc):
            try:
                yield from list(part())
            except Exception:  # noqa: BLE001 - a scrape shows what there is, the count what not
                errors += 1
        yield _gauge(
            "synergy_scrape_errors", "Parts of this scrape that could not be computed.", errors
        )

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not compute the figures."""
        return []

    def _state(self) -> Iterator[Metric]:
        yield InfoMetricFamily(
            "synergy_build", "The release.", value={"version": slurm_synergy.__version__}
        )
        mode = self._live.mode()
        yield _gauges(
            "synergy_mode",
            "1 for the mode in force.",
            "mode",
            {one.value: float(one is mode) for one in Mode},
        )
        yield _gauge("synergy_draining", "1 while nothing is started.", self._live.draining())
        yield _gauge(
            "synergy_trouble", "1 while the controller cannot do its work.", self._figures.trouble
        )
        yield _gauge(
            "synergy_unattended_jobs",
            "Held jobs that nobody will start in this mode.",
            self._live.unattended(),
        )
        totals = self._figures.totals()
        yield CounterMetricFamily(
            "synergy_troubles", "Times that the controller came into trouble.", totals.troubles
        )
        yield CounterMetricFamily(
            "synergy_ledger_errors",
            "Uses of ledger or journal that failed.",
            self._live.ledger_errors(),
        )

    def _work(self) -> Iterator[Metric]:
        totals, last = self._figures.totals(), self._figures.last_round
        yield CounterMetricFamily("synergy_rounds", "Rounds that were run.", totals.rounds)
        steps = SummaryMetricFamily(
            "synergy_round_step_seconds", "Time of the steps of all rounds.", labels=["step"]
        )
        for step, seconds in sorted(totals.step_s.items()):
            steps.add_metric([step], totals.rounds, seconds)
        yield steps
        yield _gauges(
            "synergy_round_last_step_seconds",
            "Time of the steps of the last round.",
            "step",
            last[2] if last else {},
        )
        actions = CounterMetricFamily(
            "synergy_actions",
            "Actions of rounds, and what became of them.",
            labels=["action", "outcome"],
        )
        for (action, outcome), count in sorted(totals.actions.items()):
            actions.add_metric([action, outcome], count)
        yield actions
        stops = CounterMetricFamily(
            "synergy_stops",
            "Stops that came to their end, by how far the job had come.",
            labels=["outcome"],
        )
        for state, count in sorted(totals.stops.items()):
            stops.add_metric([state], count)
        yield stops
        yield CounterMetricFamily(
            "synergy_advice_written", "AdminComments that got other advice.", totals.advice
        )

    def _plan(self) -> Iterator[Metric]:
        seen, last = self._figures.observation, self._figures.last_round
        if seen is not None:
            yield _gauge("synergy_slurm_read_timestamp_seconds", "When Slurm was read.", seen[1])
            phases = Counter(job.phase.value for job in seen[0].jobs)
            yield _gauges(
                "synergy_jobs",
                "Managed jobs as last read, by phase.",
                "phase",
                {phase.value: phases[phase.value] for phase in JobPhase},
            )
        if last is None:
            return
        snapshot, plan, _ = last
        yield _gauge("synergy_round_timestamp_seconds", "Time of the last round.", snapshot.now_s)
        yield _gauge("synergy_plan_placed_jobs", "Jobs placed by the plan.", len(plan.placements))
        waiting = Counter(reason.code.value for reason in plan.waiting.values())
        yield _gauges(
            "synergy_plan_waiting_jobs", "Jobs that the plan lets wait.", "reason", waiting
        )
        yield from _gpus(snapshot, plan)
        yield from _solver(plan)

    def _leases(self) -> Iterator[Metric]:
        leases = self._live.leases()
        stopping = sum(lease.get("stop") is not None for lease in leases.values())
        yield _gauges(
            "synergy_leases",
            "Leases in force.",
            "state",
            {"held": len(leases) - stopping, "stopping": stopping},
        )
        yield from _stalls(leases, self._job_labels)

    def _floors(self) -> Iterator[Metric]:
        floors = self._figures.floors()
        known = [one for one in floors if one.ratio is not None]
        below = sum((one.ratio or 0.0) < 1 - _TOLERANCE for one in known)
        yield _gauges(
            "synergy_floor_jobs",
            "Running jobs, by whether their lease keeps the rate of their proportional share.",
            "state",
            {"kept": len(known) - below, "below": below, "unknown": len(floors) - len(known)},
        )
        measured = [one.measured for one in floors if one.measured is not None]
        if known:
            yield _gauge(
                "synergy_floor_worst_ratio",
                "Least modelled rate of a running job over that of its proportional share.",
                min(one.ratio or 0.0 for one in known),
            )
        if measured:
            yield _gauge(
                "synergy_floor_worst_measured_ratio",
                "Least reported rate of a running job over the modelled one of its proportional "
                "share.",
                min(measured),
            )
        worst = sorted(known, key=_worst_first)[: self._job_labels]
        yield _gauges(
            "synergy_job_floor_ratio",
            "The same for single jobs: those worst off.",
            "job_id",
            {str(one.job_id): one.ratio or 0.0 for one in worst},
        )

    def _rpc(self) -> Iterator[Metric]:
        use = self._live.rpc_use()
        if use is None:
            return
        families: tuple[tuple[str, str, Mapping[str, float]], ...] = (
            ("synergy_slurm_calls", "Calls of Slurm.", use.calls),
            ("synergy_slurm_call_seconds", "Time that calls of Slurm took.", use.seconds),
            ("synergy_slurm_call_failures", "Calls of Slurm that failed.", use.failed),
        )
        for name, text, values in families:
            family = CounterMetricFamily(name, text, labels=["kind"])
            for kind, number in sorted(values.items()):
                family.add_metric([kind], number)
            yield family
        yield CounterMetricFamily(
            "synergy_slurm_budget_exceeded",
            "Turns that read Slurm with more calls than the budget allows.",
            use.exceeded,
        )


def _stalls(leases: Mapping[int, Mapping[str, Any]], job_labels: int) -> Iterator[Metric]:
    stalls: dict[int, float] = {}
    waiting_gpus = 0.0
    for job_id, lease in leases.items():
        share = lease.get("progress", {}).get("data_stall")
        if share is not None:
            stalls[job_id] = share
            waiting_gpus += share * sum(part["gpus"] for part in lease["nodes"])
    yield _gauge(
        "synergy_data_stall_gpus",
        "GPUs' worth of time that jobs waited for data in the last minute.",
        waiting_gpus,
    )
    yield _gauge(
        "synergy_data_stall_known_jobs", "Running jobs that tell their waits.", len(stalls)
    )
    worst = sorted(stalls, key=lambda job_id: (-stalls[job_id], job_id))[:job_labels]
    yield _gauges(
        "synergy_job_data_stall_ratio",
        "Share of the last minute in which a job waited for data: those worst off.",
        "job_id",
        {str(job_id): stalls[job_id] for job_id in worst},
    )


def _worst_first(one: FloorFigure) -> tuple[float, int]:
    return (one.ratio or 0.0, one.job_id)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, number in sorted(values.items()):
        family.add_metric([value], float(number))
    return family


def _gpus(snapshot: Snapshot, plan: Plan) -> Iterator[Metric]:
    total: Counter[str] = Counter()
    usable: Counter[str] = Counter()
    for node in snapshot.nodes:
        total[node.gpu_type] += node.total.gpus
        usable[node.gpu_type] += node.capacity.gpus
    held: Counter[str] = Counter(dict.fromkeys(total, 0))
    for status in snapshot.jobs:
        if status.lease is not None:
            held[status.lease.placement.gpu_type] += status.lease.placement.gpus
    planned: Counter[str] = Counter(dict.fromkeys(total, 0))
    for placement in plan.placements:
        planned[placement.gpu_type] += placement.gpus
    families: tuple[tuple[str, str, Counter[str]], ...] = (
        ("synergy_pool_gpus", "GPUs of the pool.", total),
        ("synergy_usable_gpus", "GPUs on which something may be started.", usable),
        ("synergy_held_gpus", "GPUs held by managed jobs at the last round.", held),
        ("synergy_planned_gpus", "GPUs that the plan gives to jobs.", planned),
    )
    for name, text, counts in families:
        yield _gauges(name, text, "gpu_type", counts)


def _solver(plan: Plan) -> Iterator[Metric]:
    report: Mapping[str, Any] = plan.solver
    if not report:
        return
    readers: tuple[tuple[str, str, Callable[[], float]], ...] = (
        ("synergy_solver_seconds", "Time of the last solution.", lambda: report["ms"] / 1000.0),
        (
            "synergy_solver_gap_ratio",
            "Gap of the last solution to its bound.",
            lambda: float(report["gap"]),
        ),
    )
    for name, text, read in readers:
        try:
            yield _gauge(name, text, read())
        except (KeyError, TypeError, ValueError):
            continue  # this solver does not report it
