#!/usr/bin/env python3
"""How well a measured profile predicts, and how fast a resize in place takes effect.

Without further options, on two real cores: a loop that only the CPU time of its loader limits is
profiled, and its epochs under leases of one and of two cores are timed and compared with what the
profile says; then it is moved from one core to two while it runs, and the time until it has the
new pace is measured. Profiles and epochs take turns, epochs before and after each profile, so that
a machine that becomes slower or faster steadily is in both alike; the error is the median of the
profiles' own, and all of them are told. Run it on a quiet machine: everything else that wants the
cores is in the figures. How quiet it was is told too: between all parts a loop of fixed work runs
on both cores, and at the end stands what other processes and the host have taken. Nothing is
corrected by that.

With ``--grid`` a job whose pipeline is emulated is profiled at few core counts with its data set
cached, and the prediction ``min(gpu_rate, loader_rate(c, m))`` is compared with a run of every cell
of a grid of cores and cache sizes; this needs little CPU. With ``--search`` the search over core
counts itself is compared with plain halving, over random pipelines, without running anything.

    python benchmarks/profiler.py --json
    python benchmarks/profiler.py --grid --markdown
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from slurm_synergy.core.pipeline import job_rate
from slurm_synergy.core.resources import Resources
from slurm_synergy.jobside.board import Board, Report
from slurm_synergy.jobside.environment import task_from
from slurm_synergy.jobside.launch import Launcher
from slurm_synergy.jobside.lease_client import Grant, Update
from slurm_synergy.jobside.profiling_lease import Answer
from slurm_synergy.profiler.documents import from_document
from slurm_synergy.profiler.evidence import StoredProfile
from slurm_synergy.profiler.filling import DataFacts, filled
from slurm_synergy.profiler.points import Meter, MeterState
from slurm_synergy.profiler.sweep import PLATEAU, Measurement, Sweep, SweepSpan

sys.path.insert(0, str(Path(__file__).parent / "support"))

from emulated_job import GPU_TYPE, EmulatedJob, Pace

PROGRAM = Path(__file__).resolve().parent / "support" / "cpu_bound_train.py"
EPOCH_ERROR_LIMIT = 0.05
RESIZE_LIMIT_S = 2.0
WINDOW_S = 0.5
REACHED = 0.9
GRID_CPUS = (1, 2, 4, 6, 8, 12)
GRID_CACHED = (0.0, 0.25, 0.5, 0.75, 1.0)


def command(samples: int, epochs: int, workers: int = 2) -> list[str]:
    """The CPU-bound loop."""
    return [sys.executable, str(PROGRAM), str(samples), str(epochs), str(workers)]


# -- real cores ------------------------------------------------------------------------------------


def profiled(samples: int) -> StoredProfile:
    """The loop measured on two cores of this machine by synergy-profile."""
    words = ("--json", "--no-store", "--cpus=2", "--iterations=600", "--point-seconds=60")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "slurm_synergy.profiler.command", *words, "--"),
            *("sh", "-c", 'exec "$@" >/dev/null', "sh", *command(samples, 1000)),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=False,  # 1 for a profile of low confidence, whose figures are wanted too
    )
    return from_document(json.loads(done.stdout)["profile"])


def epoch_s(samples: int, cpus: int) -> float:
    """Seconds of an epoch of the loop under a lease of ``cpus`` cores from the start.

    The mean of those after the first, in which workers start.
    """
    done = subprocess.run(
        [sys.executable, __file__, f"--epochs-with={cpus}", f"--samples={samples}"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return statistics.fmean(float(word) for word in done.stdout.split()[1:])


class Leased:
    """A lease of so many cores of two, which does not change."""

    def __init__(self, cores: int) -> None:
        self.endpoint = ""
        self.pinned_cpus = self.own_mem_mib = 0
        self.answer: Answer | None = None
        self._left: Update | None = Update(grant=_grant(cores, time.monotonic()))

    def wait_for_answer(self, timeout_s: float) -> bool:
        """There is nobody to wait for."""
        return True

    def take(self) -> Update | None:
        """The cores, at the first call."""
        update, self._left = self._left, None
        return update

    def kick(self) -> None:
        """Nothing is asked."""

    def finish(
        self, *, exit_code: int, checkpointed: bool, report: Report, timeout_s: float
    ) -> bool:
        """The loop has ended."""
        return True

    def close(self) -> None:
        """Nothing is open."""


def leased(samples: int, cpus: int) -> int:
    """Run an epoch and ``cpus`` more under a lease of so many cores; the exit status."""
    with tempfile.TemporaryDirectory() as place:
        board = Board.create(Path(place) / "board", rank=0, ranks=1)
        env = {**os.environ, "SYNERGY_CHECKPOINT_DIR": place}
        return Launcher(command(samples, 1 + cpus), env, task_from({}), board, Leased(cpus)).run()


def _grant(cores: int, now_s: float) -> Grant:
    return Grant(
        generation=cores,
        until_monotonic_s=now_s + 1e6,
        cores=tuple(range(cores)),
        floor_cores=(),
        mem_mib=0,
        floor_mem_mib=0,
        stop=False,
        stop_within_s=0.0,
        node_cores=2,
        batch_size=0,
    )


class Resized(Leased):
    """A lease of one core that becomes two after ``settle_s`` of training, and later ends it."""

    def __init__(self, report: Callable[[], Report], settle_s: float, run_s: float) -> None:
        super().__init__(1)
        self._report, self._settle_s, self._run_s = report, settle_s, run_s
        self._first_step_s: float | None = None
        self._cores = 0
        self.resized_s = 0.0
        self._ended = False

    def take(self) -> Update | None:
        """The cores for now."""
        now_s = time.monotonic()
        if self._first_step_s is None and self._report().step:
            self._first_step_s = now_s
        trained_s = now_s - self._first_step_s if self._first_step_s is not None else 0.0
        cores = 2 if trained_s > self._settle_s else 1
        if trained_s > self._settle_s + self._run_s and not self._ended:
            self._ended = True
            os.kill(os.getpid(), signal.SIGTERM)
        if cores == self._cores:
            return None
        self._cores = cores
        if cores == 2:
            self.resized_s = time.monotonic()
        return Update(grant=_grant(cores, now_s))


def resize_s(samples: int, settle_s: float = 4.0, run_s: float = 8.0) -> dict[str, float]:
    """Seconds from the resize to the new pace, and the paces (batches/s) before and after."""
    with tempfile.TemporaryDirectory() as place:
        trace = Path(place) / "trace"
        board = Board.create(Path(place) / "board", rank=0, ranks=1)
        source = Resized(board.read_report, settle_s, run_s)
        env = {**os.environ, "BENCH_TRACE": str(trace), "SYNERGY_CHECKPOINT_DIR": place}
        Launcher(command(samples, 1000), env, task_from({}), board, source).run()
        times = [float(line) for line in trace.read_text(encoding="ascii").split()]
    at = source.resized_s
    after = _pace(times, times[-1] - run_s / 2, times[-1])
    starts = [at + 0.05 * step for step in range(int((run_s - WINDOW_S) / 0.05))]
    reached = [s for s in starts if _pace(times, s, s + WINDOW_S) >= REACHED * after]
    return {
        "before_per_s": round(_pace(times, at - settle_s / 2, at), 2),
        "after_per_s": round(after, 2),
        "reached_after_s": round(reached[0] - at, 2) if reached else float("inf"),
    }


def _pace(times: Sequence[float], low_s: float, high_s: float) -> float:
    return sum(low_s <= one < high_s for one in times) / (high_s - low_s)


def pace_of_machine(cpu_s: float = 0.25) -> dict[str, float]:
    """A loop on each of two cores at once: rounds per second by the clock, and by CPU time."""
    made = [os.pipe() for _ in range(2)]
    cpus = sorted(os.sched_getaffinity(0))[:2]
    for cpu, (_, write) in zip(cpus, made, strict=True):
        if os.fork() == 0:
            os.sched_setaffinity(0, {cpu})
            rounds, began_s, cpu_began_s = 0, time.monotonic(), time.thread_time()
            while time.thread_time() < cpu_began_s + cpu_s:
                rounds += 1
            took_s, cpu_took_s = time.monotonic() - began_s, time.thread_time() - cpu_began_s
            os.write(write, f"{rounds / took_s} {rounds / cpu_took_s}".encode())
            os._exit(0)
    found = []
    for read, write in made:
        os.close(write)
        with os.fdopen(read) as told:
            found.append([float(word) for word in told.read().split()])
    for _ in made:
        os.wait()
    return {
        "per_s": statistics.fmean(wall for wall, _ in found),
        "per_cpu_s": statistics.fmean(cpu for _, cpu in found),
    }


class Quiet:
    """How quiet the machine was, and how steady."""

    def __init__(self) -> None:
        self._paces = [pace_of_machine()]
        self._began = self._counters()

    def look(self) -> None:
        """Between two parts of the benchmark."""
        self._paces.append(pace_of_machine())

    def _counters(self) -> tuple[float, float, float, float]:
        words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
        ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in words]
        busy_s, stolen_s = sum(ticks[:3]) + sum(ticks[5:7]), ticks[7]
        ours = os.times()
        ours_s = ours.user + ours.system + ours.children_user + ours.children_system
        return time.monotonic(), busy_s, stolen_s, ours_s

    def told(self) -> dict[str, Any]:
        """Shares of the cores' time, and the spread of the loop's paces."""
        passed = [now - then for now, then in zip(self._counters(), self._began, strict=True)]
        all_s = passed[0] * (os.cpu_count() or 1)
        spread = {}
        for name in ("per_s", "per_cpu_s"):
            rates = [one[name] for one in self._paces]
            spread[name] = round(max(rates) / min(rates) - 1, 4)
        return {
            "others_share": round(max(0.0, passed[1] - passed[3]) / all_s, 4),
            "stolen_share": round(passed[2] / all_s, 4),
            "pace_spread": spread["per_s"],
            "clock_spread": spread["per_cpu_s"],
            "paces": [round(one["per_s"]) for one in self._paces],
        }


def predicted_s(stored: StoredProfile, samples: int, cpus: int) -> float:
    """Seconds of an epoch by the profile."""
    rate = job_rate(stored.profile, "gpu", (Resources(gpus=1, cpus=cpus, mem_mib=1),))
    assert rate is not None
    return samples / rate


def interleaved(samples: int, repeats: int, quiet: Quiet) -> list[dict[str, Any]]:
    """Profiles and epochs in turns: one row for one and for two cores."""
    measured: dict[int, list[float]] = {1: [], 2: []}
    stored = []
    for number in range(repeats + 1):
        for cpus in (1, 2) if number % 2 == 0 else (2, 1):
            measured[cpus].append(epoch_s(samples, cpus))
            quiet.look()
        if number < repeats:
            stored.append(profiled(samples))
            quiet.look()
    rows = []
    for cpus, times in measured.items():
        predicted = [predicted_s(one, samples, cpus) for one in stored]
        errors = [
            said / statistics.fmean(around) - 1
            for said, around in zip(predicted, pairwise(times), strict=True)
        ]
        rows.append(
            {
                "cpus": cpus,
                "predicted_s": round(statistics.median(predicted), 3),
                "measured_s": round(statistics.median(times), 3),
                "spread": round((max(times) - min(times)) / statistics.median(times), 3),
                "error": round(statistics.median(errors), 4),
                "errors": [round(one, 4) for one in errors],
                "epochs_s": [round(one, 3) for one in times],
                "profiles_s": [round(one, 3) for one in predicted],
                "confident": all(one.profile.confident for one in stored),
            }
        )
    return rows


def real(samples: int, repeats: int) -> dict[str, Any]:
    """Predicted and measured epoch times at one and two cores, and the time of a resize."""
    quiet = Quiet()
    rows = interleaved(samples, repeats, quiet)
    # A launcher blocks signals and pins its process: it gets one of its own.
    done = subprocess.run(
        [sys.executable, __file__, "--resize", f"--samples={samples}"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    quiet.look()
    return {
        "epochs": rows,
        "resize": json.loads(done.stdout.splitlines()[-1]),
        "machine": quiet.told(),
        "load_average": os.getloadavg()[0],
    }


# -- the emulated job ------------------------------------------------------------------------------


def point(pace: Pace, cpus: int, cache_mib: float, iterations: int) -> Measurement:
    """One cell, measured by the meter that measures real jobs."""
    job = EmulatedJob(pace, cpus=cpus, cache_mib=cache_mib)
    meter = Meter(cpus=cpus, warmup=2 * cpus + 5, iterations=iterations, most_s=60.0)
    readings = job.readings()
    try:
        while meter.state in (MeterState.WARMING, MeterState.COUNTING):
            meter = meter.seen(next(readings))
    finally:
        readings.close()
    assert meter.measurement is not None
    return meter.measurement


def grid(pace: Pace, repeats: int) -> dict[str, Any]:
    """Prediction, and the median of ``repeats`` measurements, of every cell."""
    sweep = Sweep(span=SweepSpan(gpus=1, most_cpus=max(GRID_CPUS), proportional_cpus=2))
    while (cpus := sweep.next_cpus) is not None:
        sweep = sweep.fed(point(pace, cpus, pace.dataset_mib, 50))
    result = sweep.result()
    facts = DataFacts(
        dataset_mib=pace.dataset_mib,
        samples_per_epoch=pace.items,
        storage_mib_s=pace.storage_mib_s,
    )
    profile = filled(result, key="emulated", gpu_type=GPU_TYPE, facts=facts)
    cells = []
    for cpus in GRID_CPUS:
        for part in GRID_CACHED:
            cache_mib = int(part * pace.dataset_mib)
            share = Resources(gpus=1, cpus=cpus, mem_mib=cache_mib)
            predicted = job_rate(profile, GPU_TYPE, (share,))
            assert predicted is not None
            steps = pace.items // pace.batch
            found = statistics.median(
                point(pace, cpus, cache_mib, steps).samples_per_s for _ in range(repeats)
            )
            cells.append(
                {
                    "cpus": cpus,
                    "cached": part,
                    "predicted": round(predicted, 1),
                    "measured": round(found, 1),
                    "error": round(predicted / found - 1, 4),
                }
            )
    worst = max(cells, key=lambda cell: abs(cell["error"]))
    return {
        "points": [one.cpus for one in result.points],
        "knee_cpus": result.knee_cpus,
        "true_knee_cpus": _true_knee(lambda c: min(pace.gpu_rate, c * pace.core_rate), GRID_CPUS),
        "cells": cells,
        "worst": worst,
    }


# -- the search ------------------------------------------------------------------------------------


def halving(truth: Callable[[int], float], span: SweepSpan) -> dict[int, float]:
    """Plain halving with a threshold of 10 % and the same budget: what it measures.

    What is left of the budget halves the widest gap below the knee.
    """
    counts = span.counts
    known = {cpus: truth(cpus) for cpus in (counts[-1], span.proportional)}
    low, high = -1, len(counts) - 1
    while high - low > 1 and len(known) < 8:
        middle = (low + high) // 2 if low >= 0 or high > 1 else 0
        rate = known.setdefault(counts[middle], truth(counts[middle]))
        if known[counts[high]] < 1.1 * rate:
            high = middle
        else:
            low = middle
    while len(known) < 8:
        below = sorted(cpus for cpus in known if cpus <= counts[high])
        gaps = [(b / a, a, b) for a, b in pairwise([counts[0] - 0.5, *below]) if b - a > 1]
        if not gaps:
            break
        _, a, b = max(gaps)
        cpus = min(counts, key=lambda one: abs(one - math.sqrt(a * b)))
        if cpus in known:
            break
        known[cpus] = truth(cpus)
    return known


def _interpolated(known: dict[int, float], cpus: int) -> float:
    points = sorted(known.items())
    if cpus <= points[0][0]:
        return points[0][1] * cpus / points[0][0]
    for (a, a_rate), (b, b_rate) in pairwise(points):
        if cpus <= b:
            return a_rate + (b_rate - a_rate) * (cpus - a) / (b - a)
    return points[-1][1]


def _true_knee(truth: Callable[[int], float], counts: Sequence[int]) -> int:
    return next(cpus for cpus in counts if truth(cpus) >= PLATEAU * truth(counts[-1]))


def search(pipelines: int) -> dict[str, Any]:
    """Errors and points of our search and of plain halving over random pipelines."""
    ours: list[tuple[float, int]] = []
    plain: list[tuple[float, int]] = []
    for seed in range(pipelines):
        draw = random.Random(seed)
        most = draw.choice([16, 24, 32, 48, 64, 96, 128])
        span = SweepSpan(gpus=1, most_cpus=most, proportional_cpus=most // 8)
        gpu, serial = draw.uniform(1, 1.2 * most), draw.choice([0.0, 0.0, draw.uniform(0, 0.05)])
        truth = _pipeline(gpu, serial)
        sweep = Sweep(span=span)
        while (cpus := sweep.next_cpus) is not None:
            sweep = sweep.fed(Measurement(cpus=cpus, samples_per_s=truth(cpus), iterations=50))
        result = sweep.result()
        known = halving(truth, span)
        ours.append((_worst(result.rate, truth, span), len(sweep.points)))
        plain.append((_worst(functools.partial(_interpolated, known), truth, span), len(known)))
    return {"pipelines": pipelines, "ours": _summary(ours), "halving": _summary(plain)}


def _pipeline(gpu: float, serial: float) -> Callable[[int], float]:
    return lambda cpus: min(gpu, cpus / (1 + serial * (cpus - 1)))


def _worst(rate: Callable[[int], float], truth: Callable[[int], float], span: SweepSpan) -> float:
    return max(abs(rate(cpus) / truth(cpus) - 1) for cpus in span.counts)


def _summary(found: Sequence[tuple[float, int]]) -> dict[str, float]:
    errors = sorted(error for error, _ in found)
    return {
        "worst_error": round(errors[-1], 4),
        "error_p95": round(errors[int(0.95 * (len(errors) - 1))], 4),
        "mean_points": round(statistics.fmean(count for _, count in found), 2),
    }


# -- the command -----------------------------------------------------------------------------------


def _markdown(found: dict[str, Any]) -> str:
    lines = [
        "| cores \\ cached | " + " | ".join(f"{part:.0%}" for part in GRID_CACHED) + " |",
        "|" + "---|" * (len(GRID_CACHED) + 1),
    ]
    cells = {(one["cpus"], one["cached"]): one for one in found["cells"]}
    for cpus in GRID_CPUS:
        row = [cells[cpus, part] for part in GRID_CACHED]
        texts = [
            f"{one['predicted']:.0f} / {one['measured']:.0f} ({one['error']:+.1%})" for one in row
        ]
        lines.append(f"| {cpus} | " + " | ".join(texts) + " |")
    worst = found["worst"]
    lines.append("")
    lines.append(
        f"Measured at {len(found['points'])} core counts ({', '.join(map(str, found['points']))}); "
        f"worst error {worst['error']:+.1%} at {worst['cpus']} cores with {worst['cached']:.0%} "
        "cached."
    )
    return "\n".join(lines)


def main() -> int:
    """Measure and print; status 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--grid", action="store_true", help="cores and cache sizes, emulated")
    parser.add_argument("--own-reads", action="store_true", help="with --grid: workers read")
    parser.add_argument("--markdown", action="store_true", help="with --grid: as a table")
    parser.add_argument(
        "--epochs-with", type=int, metavar="CPUS", help="only some epochs under such a lease"
    )
    parser.add_argument("--resize", action="store_true", help="only the resize in place")
    parser.add_argument("--search", action="store_true", help="the search against plain halving")
    parser.add_argument("--samples", type=int, default=4000, help="samples of an epoch")
    parser.add_argument(
        "--repeats", type=int, help="measurements, of which the median (default 3; --grid: 5)"
    )
    parser.add_argument("--pipelines", type=int, default=2000, help="with --search")
    options = parser.parse_args()
    if options.search:
        print(json.dumps(search(options.pipelines), indent=None if options.json else 2))
        return 0
    if options.grid:
        found = grid(Pace(own_reads=options.own_reads), options.repeats or 5)
        print(_markdown(found) if options.markdown else json.dumps(found))
        return 0
    if options.epochs_with:
        return leased(options.samples, options.epochs_with)
    if options.resize:
        print(json.dumps(resize_s(options.samples)))
        return 0
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are needed")
    found = real(options.samples, options.repeats or 3)
    if options.json:
        print(json.dumps(found))
    else:
        for row in found["epochs"]:
            print(
                f"{row['cpus']} cores: epoch predicted {row['predicted_s']:.2f} s, measured "
                f"{row['measured_s']:.2f} s: {row['error']:+.1%} (limit {EPOCH_ERROR_LIMIT:.0%}); "
                f"profiles one by one: {', '.join(f'{one:+.1%}' for one in row['errors'])}"
            )
        print(
            f"resize in place: the new pace after {found['resize']['reached_after_s']:.2f} s "
            f"(limit {RESIZE_LIMIT_S:g} s); load average {found['load_average']:.1f}"
        )
        machine = found["machine"]
        print(
            f"machine: others had {machine['others_share']:.1%} of the cores' time, the host took "
            f"{machine['stolen_share']:.1%}; its pace varied by {machine['pace_spread']:.1%}"
        )
    missed = any(abs(row["error"]) > EPOCH_ERROR_LIMIT for row in found["epochs"])
    return 1 if missed or found["resize"]["reached_after_s"] > RESIZE_LIMIT_S else 0


if __name__ == "__main__":
    sys.exit(main())
