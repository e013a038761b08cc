"""``synergyctl simulate``: what would it bring, on a pool and a workload of one's own."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from slurm_synergy.cli.number_options import FiniteRange
from slurm_synergy.cli.tables import print_table
from slurm_synergy.config import SchedulingSettings
from slurm_synergy.errors import ConfigError

__all__ = ["simulate"]

_S_PER_H = 3600.0
_MOST_S, _MOST_ERROR = 1e9, 100.0
_LONGEST_ID = 18


@click.command()
@click.option(
    "--cluster",
    "cluster_path",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML file with the nodes (groups of name, count, gpu_type, gpus, cpus, mem_gib).",
)
@click.option(
    "--trace",
    "trace_name",
    metavar="TRACE",
    help="FILE (job_id,model,arrival_s,gpus and iterations or duration_s), sacct:FILE "
    "(sacct -P -o JobID,User,Submit,Elapsed,AllocTRES), "
    "philly:FILE[,from_h=H][,to_h=H][,jobs=N] or sia:FILE,profiles=DIR (rigid jobs, or elastic "
    "ones with elastic=full).",
)
@click.option(
    "--generate",
    "recipe",
    metavar="RECIPE",
    help="Make a trace, e.g. philly-derived:load=9,split=20/70/10,gpus=single,jobs=6000,seed=1 "
    "(gpus: single or philly; arrivals: poisson or static).",
)
@click.option("--policy", "policy_name", default="fifo", show_default=True, help="Who runs.")
@click.option(
    "--mechanism",
    "mechanism_name",
    default="tune",
    show_default=True,
    help="Where, and with how much CPU and memory.",
)
@click.option(
    "--round",
    "round_s",
    type=FiniteRange(min=1, max=_MOST_S),
    default=300.0,
    show_default=True,
    help="Seconds between periodic rounds.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of all randomness.")
@click.option(
    "--measure",
    "measure",
    metavar="FROM:TO",
    help="Count only the jobs with these ids (TO excluded); stop when they are done.",
)
@click.option(
    "--split",
    default="20/70/10",
    show_default=True,
    help="Image/language/speech models for jobs whose trace names no model.",
)
@click.option(
    "--reference-semantics",
    is_flag=True,
    help="Progress and completion at round ends, in whole iterations, every round planned anew, "
    "as Synergy's own simulator does. Implies --ideal.",
)
@click.option("--ideal", is_flag=True, help="Restarts, checkpoints and profiling cost nothing.")
@click.option(
    "--restart-cost",
    type=FiniteRange(min=0, max=_MOST_S),
    default=30.0,
    show_default=True,
    help="Seconds without progress after a restart.",
)
@click.option(
    "--checkpoint-cost",
    type=FiniteRange(min=0, max=_MOST_S),
    default=10.0,
    show_default=True,
    help="Seconds that a stop takes.",
)
@click.option(
    "--profiling-cost",
    type=FiniteRange(min=0, max=_MOST_S),
    default=0.0,
    show_default=True,
    help="Seconds of profiling before a job may run.",
)
@click.option(
    "--profile-error",
    type=FiniteRange(min=0, max=_MOST_ERROR),
    default=0.0,
    show_default=True,
    help="How wrong profiles may be: 0.1 is up to 10 % either way.",
)
@click.option(
    "--jobs-out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write one line per job: CSV, or Parquet if FILE ends in .parquet.",
)
@click.option(
    "--timeline-out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write one line per round, jobs and what they hold: CSV or Parquet as above.",
)
@click.option(
    "--report",
    "report",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write an HTML page, complete in one file, that compares with a baseline.",
)
@click.option(
    "--baseline",
    "baseline_name",
    metavar="MECHANISM",
    help="Play the jobs under this mechanism too and compare.  [default: proportional, "
    "with --report]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate(
    cluster_path: Path,
    trace_name: str | None,
    recipe: str | None,
    policy_name: str,
    mechanism_name: str,
    round_s: float,
    seed: int,
    measure: str | None,
    split: str,
    reference_semantics: bool,
    ideal: bool,
    restart_cost: float,
    checkpoint_cost: float,
    profiling_cost: float,
    profile_error: float,
    jobs_out: Path | None,
    timeline_out: Path | None,
    report: Path | None,
    baseline_name: str | None,
    as_json: bool,
) -> None:
    """Play a workload on a virtual clock with the controller's own rounds.

    The policy and the mechanism are the ones that the controller runs. Fields of the result end in
    their unit; utilisations are what leases hold, over the whole simulation.
    """
    from slurm_synergy.mechanisms import MECHANISMS
    from slurm_synergy.policies import POLICIES
    from slurm_synergy.simulator.cluster import Costs
    from slurm_synergy.simulator.engine import Moment
    from slurm_synergy.simulator.generate import generate
    from slurm_synergy.simulator.metrics import JobResult
    from slurm_synergy.simulator.pool import read_nodes
    from slurm_synergy.simulator.rows import check_rows_path, write_rows
    from slurm_synergy.simulator.study import Semantics, Study, run_study
    from slurm_synergy.simulator.traces import read_trace

    if (trace_name is None) == (recipe is None):
        raise click.UsageError("give one of --trace and --generate")
    for path in filter(None, (jobs_out, timeline_out, report)):
        check_rows_path(path)
    if report and baseline_name is None:
        baseline_name = "proportional"
    free = ideal or reference_semantics
    costs = Costs(restart_s=restart_cost, checkpoint_s=checkpoint_cost, profiling_s=profiling_cost)
    study = Study(
        nodes=read_nodes(cluster_path),
        trace=read_trace(trace_name) if trace_name else generate(recipe or "", seed),
        policy=_pick("policy", policy_name, POLICIES),
        mechanism=_pick("mechanism", mechanism_name, MECHANISMS),
        round_s=round_s,
        event_delay_s=SchedulingSettings().debounce_s,
        semantics=Semantics.REFERENCE if reference_semantics else Semantics.EXACT,
        costs=Costs() if free else costs,
        split=split,
        measured=_ids(measure),
        profile_error=profile_error,
        seed=seed,
        stopwatch=time.perf_counter,
    )
    other = _pick("baseline", baseline_name, MECHANISMS) if baseline_name else None
    result = run_study(study)
    baseline = run_study(replace(study, mechanism=other)) if other else None
    if jobs_out:
        write_rows(jobs_out, JobResult, result.jobs)
    if timeline_out:
        write_rows(timeline_out, Moment, result.played.moments)
    if report:
        from slurm_synergy.cli.simulate_report import write_report

        write_report(report, study, result, baseline, trace_name or recipe or "")
    if as_json:
        more: dict[str, Any] = {"baseline": baseline.summary} if baseline else {}
        if result.assumptions:
            more["assumptions"] = list(result.assumptions)
        click.echo(json.dumps({**result.summary, **more}))
    else:
        _show(result.summary, *([baseline.summary] if baseline else []))
        for text in result.assumptions:
            click.echo(f"assumed: {text}", err=True)


def _pick(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise ConfigError(
            f"there is no such {kind}",
            key=f"--{kind}",
            value=name,
            remedy=f"choose one of {', '.join(sorted(known))}",
        )
    return known[name]


def _ids(text: str | None) -> Collection[int]:
    if text is None:
        return ()
    low, _, high = text.partition(":")
    numbers = low.isdecimal() and high.isdecimal() and max(len(low), len(high)) <= _LONGEST_ID
    if numbers and int(low) < int(high):
        return range(int(low), int(high))
    raise ConfigError(
        "is not a range of job ids", key="--measure", value=text, remedy="give one like 4000:5000"
    )


def _show(*summaries: Mapping[str, Any]) -> None:
    """The summaries for people, side by side: hours and percent."""
    columns = [_lines(summary) for summary in summaries]
    rows = [(lines[0][0], *(value for _, value in lines)) for lines in zip(*columns, strict=True)]
    print_table(("quantity", *(["value", "baseline"][: len(summaries)])), rows)


def _floor(floor: Mapping[str, Any]) -> str:
    if not floor["judged"]:
        return "not known of any job"
    return (
        f"{floor['below']} of {floor['judged']} shares given, the least at {floor['worst']:.3f} "
        "times its speed"
    )


def _lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    jobs, took = summary["contention"], summary["round_ms"]
    return [
        ("policy, mechanism", f"{summary['policy']}, {summary['mechanism']}"),
        ("jobs", f"{summary['jobs']}"),
        ("average JCT", f"{summary['avg_jct_s'] / _S_PER_H:.3f} h"),
        ("p99 JCT", f"{summary['p99_jct_s'] / _S_PER_H:.3f} h"),
        ("makespan", f"{summary['makespan_s'] / _S_PER_H:.3f} h"),
        ("GPU hours per job", f"{summary['gpu_hours_per_job']:.3f}"),
        ("restarts per job", f"{summary['restarts_per_job']:.2f}"),
        ("GPUs leased", f"{summary['gpu_util']:.1%}"),
        ("CPUs leased", f"{summary['cpu_util']:.1%}"),
        ("memory leased", f"{summary['mem_util']:.1%}"),
        (
            "jobs in the system",
            f"{jobs['mean']:.1f} on average, {jobs['max']} at most",
        ),
        (
            "finish-time fairness",
            f"worst {summary['ftf']['worst']:.2f}, {summary['ftf']['unfair_fraction']:.1%} of "
            "jobs above 1",
        ),
        ("slower than with its share", _floor(summary["floor"])),
        (
            "time per round",
            f"median {took['median']:.1f} ms, p95 {took['p95']:.1f} ms",
        ),
        ("time in all", f"{summary['wall_s']:.1f} s"),
    ]
