"""How fast the simulator is, and how it compares with the reference simulator's numbers.

Without data: the generated trace of 9 jobs/h on 128 GPUs, first 1,000 jobs (FIFO and PROPORTIONAL,
reference semantics). With ``--data DIR`` (the Synergy artifact's recorded traces, see
``docs/reproduction.md``): every recorded run, ours beside the reference's; ``--derived`` adds the
long one, ``--exact`` the recorded ones with exact semantics, without and with the cost of restarts.
``--philly FILE`` adds 8,000 jobs of the public Philly list on 512 GPUs. ``--only long`` leaves out
all but the last two. ``--json`` prints one object.

Each run tells its CPU seconds besides the wall time, and how often a fixed piece of plain Python
could have been done in them, measured right before it: on a busy machine that is what compares.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES
from slurm_synergy.simulator.cluster import Costs
from slurm_synergy.simulator.generate import generate
from slurm_synergy.simulator.pool import make_nodes
from slurm_synergy.simulator.study import Semantics, Study, StudyResult, run_study
from slurm_synergy.simulator.traces import Trace, read_trace

# (trace, nodes, policy, mechanism) -> average JCT, interpolated p99 JCT, makespan, in hours, of
# runs of the artifact's own simulator.
REFERENCE: dict[tuple[str, int, str, str], tuple[float, float, float]] = {
    ("static_100jobs", 4, "fifo", "proportional"): (5.6311, 12.9403, 15.2503),
    ("static_100jobs", 4, "fifo", "tune"): (5.0828, 10.5878, 11.0003),
    ("static_100jobs", 4, "srtf", "proportional"): (4.4119, 13.0936, 14.0836),
    ("static_100jobs", 4, "srtf", "tune"): (4.1069, 12.3394, 12.9169),
    ("static_100jobs", 4, "las", "proportional"): (5.6253, 11.1694, 11.4169),
    ("static_100jobs", 4, "las", "tune"): (5.1711, 10.4194, 10.6669),
    ("static_100jobs", 4, "ftf_ascending", "proportional"): (7.9828, 9.7503, 9.7503),
    ("static_100jobs", 4, "ftf_ascending", "tune"): (7.7778, 9.4169, 9.4169),
    ("static_100jobs", 4, "fifo", "greedy"): (5.4944, 11.7561, 12.3336),
    ("static_100jobs", 4, "srtf", "greedy"): (4.3078, 14.5019, 14.6669),
    ("dynamic_100jobs", 4, "fifo", "proportional"): (4.6226, 12.4282, 16.75),
    ("dynamic_100jobs", 4, "fifo", "tune"): (3.6751, 9.5774, 14.8333),
    ("dynamic_100jobs", 4, "srtf", "proportional"): (3.9067, 14.1915, 19.5),
    ("dynamic_100jobs", 4, "srtf", "tune"): (3.1884, 10.2678, 13.25),
    ("dynamic_100jobs", 4, "fifo", "greedy"): (3.8817, 10.4065, 15.25),
    ("dynamic_100jobs", 4, "srtf", "greedy"): (3.2326, 11.5752, 13.9167),
}
DERIVED = "derived_9jph_single_gpu"
# 620 hours of the list with about the load of the paper's window, which lies beyond its end.
PHILLY_WINDOW = "from_h=1000,jobs=8000"
LIMITS_S = {"derived": 10.0, "philly": 60.0}
LIMIT_MIB = 1024.0
YARDSTICK_STEPS = 200_000
DERIVED_REFERENCE: dict[str, tuple[float, float]] = {
    "proportional": (78.962, 213.553),
    "tune": (19.505, 154.955),
}
COSTS = Costs(restart_s=30.0, checkpoint_s=10.0)
_S_PER_H = 3600.0


def yardstick_s() -> float:
    """CPU seconds of a fixed piece of plain Python: the best of three."""
    best = math.inf
    for _ in range(3):
        began_s = time.process_time()
        kept: dict[int, tuple[int, str]] = {}
        for number in range(YARDSTICK_STEPS):
            kept[number & 1023] = (number, "")
        best = min(best, time.process_time() - began_s)
    return best


def study(
    trace: Trace,
    nodes: int,
    policy: str,
    mechanism: str,
    measured: Collection[int] = (),
    semantics: Semantics = Semantics.REFERENCE,
    costs: Costs | None = None,
) -> tuple[StudyResult, dict[str, float]]:
    """A run with the paper's nodes, by default with the reference's semantics, and its cost."""
    unit_s = yardstick_s()
    began_s = time.process_time()
    shape = make_nodes(name="v100", count=nodes, gpu_type="v100", gpus=8, cpus=24, mem_gib=500)
    result = run_study(
        Study(
            nodes=tuple(shape),
            trace=trace,
            policy=POLICIES[policy],
            mechanism=MECHANISMS[mechanism],
            semantics=semantics,
            costs=costs or Costs(),
            measured=measured,
            stopwatch=time.perf_counter,
        )
    )
    cpu_s = time.process_time() - began_s
    rounds = len(result.played.round_ms)
    return result, {
        "rounds": rounds,
        "cpu_s": round(cpu_s, 2),
        "cpu_ms_per_round": round(cpu_s / rounds * 1e3, 3),
        "yardsticks": round(cpu_s / unit_s, 1),
        "wall_s": round(result.summary["wall_s"], 2),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def interpolated(values: Sequence[float], fraction: float) -> float:
    """The percentile between elements, as the reference's numbers are."""
    ordered = sorted(values)
    at = fraction * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def figures(result: StudyResult) -> tuple[float, float, float]:
    """Average JCT, p99 JCT, makespan, in hours."""
    jcts_h = [one.jct_s / _S_PER_H for one in result.jobs]
    mean = sum(jcts_h) / len(jcts_h)
    return mean, interpolated(jcts_h, 0.99), float(result.summary["makespan_s"]) / _S_PER_H


def record(
    name: str, run: tuple[StudyResult, dict[str, float]], reference: Iterable[float] = ()
) -> dict[str, Any]:
    """One line of the outcome."""
    result, cost = run
    ours = figures(result)
    return {
        "trace": name,
        "policy": result.summary["policy"],
        "mechanism": result.summary["mechanism"],
        "hours": [round(one, 4) for one in ours],
        "reference_hours": list(reference),
        "ratio": [round(o / r, 4) for o, r in zip(ours, reference, strict=False)],
        "round_ms_median": round(result.summary["round_ms"]["median"], 3),
        **cost,
    }


def exact_runs(data: Path) -> list[dict[str, Any]]:
    """The recorded traces with exact semantics, ideal and with costs."""
    lines = []
    for name in ("static_100jobs", "dynamic_100jobs"):
        trace = read_trace(str(data / f"{name}.csv"))
        for policy in ("fifo", "srtf"):
            for mechanism in ("proportional", "tune"):
                for costs, word in ((Costs(), "exact, ideal"), (COSTS, "exact, with costs")):
                    run = study(trace, 4, policy, mechanism, (), Semantics.EXACT, costs)
                    line = record(f"{name} ({word})", run)
                    restarts = round(run[0].summary["restarts_per_job"], 3)
                    lines.append({**line, "restarts_per_job": restarts})
    return lines


def long_runs(data: Path | None, philly: Path | None) -> list[dict[str, Any]]:
    """The runs that have a limit: the derived trace and the Philly list."""
    lines = []
    if data is not None:
        trace = read_trace(str(data / f"{DERIVED}.csv"))
        for mechanism, pair in DERIVED_REFERENCE.items():
            line = record(DERIVED, study(trace, 16, "fifo", mechanism, range(4000, 5000)), pair)
            limit_s = LIMITS_S["derived"] if mechanism == "proportional" else None
            lines.append({**line, "limit_s": limit_s})
    if philly is not None:
        trace = read_trace(f"philly:{philly},{PHILLY_WINDOW}")
        for mechanism in ("proportional", "tune"):
            line = record("philly, 512 GPUs, 8,000 jobs", study(trace, 64, "fifo", mechanism))
            limit_s = LIMITS_S["philly"] if mechanism == "proportional" else None
            lines.append({**line, "limit_s": limit_s})
    return lines


def short_runs(data: Path | None, exact: bool) -> list[dict[str, Any]]:
    """The generated trace, and with data the recorded ones."""
    made = generate("philly-derived:load=9,jobs=1000,seed=42", 42)
    lines = [record("generated 9 jobs/h, 128 GPUs", study(made, 16, "fifo", "proportional"))]
    if data is None:
        return lines
    for (name, nodes, policy, mechanism), reference in REFERENCE.items():
        run = study(read_trace(str(data / f"{name}.csv")), nodes, policy, mechanism)
        lines.append(record(name, run, reference))
    return lines + (exact_runs(data) if exact else [])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="directory with the recorded traces")
    parser.add_argument("--derived", action="store_true", help="also the long derived trace")
    parser.add_argument("--exact", action="store_true", help="also with exact semantics")
    parser.add_argument("--philly", type=Path, help="the public Philly list as CSV")
    parser.add_argument("--only", choices=["long"], help="only the runs that have a limit")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if (args.derived or args.exact) and not args.data:
        parser.error("--derived and --exact need --data")
    lines = [] if args.only else short_runs(args.data, args.exact)
    lines += long_runs(args.data if args.derived else None, args.philly)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if args.json:
        print(json.dumps({"runs": lines, "peak_mib": round(peak_mib, 1)}))
        return
    for line in lines:
        ours = " / ".join(f"{one:.4f}" for one in line["hours"])
        theirs = " / ".join(f"{one:.4f}" for one in line["reference_hours"]) or "-"
        ratio = " / ".join(f"{one:.3f}" for one in line["ratio"]) or "-"
        print(
            f"{line['trace']:28} {line['policy']:5} {line['mechanism']:13} ours {ours}  "
            f"reference {theirs}  ratio {ratio}  ({line['rounds']} rounds, "
            f"{line['cpu_ms_per_round']} ms of CPU each, {line['cpu_s']} s CPU = "
            f"{line['yardsticks']} yardsticks, {line['wall_s']} s{_verdict(line)})"
        )
    print(f"peak memory {peak_mib:.0f} MiB (limit {LIMIT_MIB:.0f})")


def _verdict(line: dict[str, Any]) -> str:
    limit_s = line.get("limit_s")
    if limit_s is None:
        return ""
    return f"; limit {limit_s:g} s {'kept' if line['wall_s'] < limit_s else 'NOT kept'}"


if __name__ == "__main__":
    main()
