"""The demonstration's workload on a real Slurm and in the simulator, side by side.

The four jobs of ``make demo`` (docs/demo.md) run on the embedded Slurm, under PROPORTIONAL and
under TUNE. The simulator plays the same jobs, submitted at the same moments, with the catalogue's
rates and the controller's rounds: when a round comes, who gets what, how fast each job is with it,
and what changes when another one ends are the simulator's own.

What no catalogue knows is what starting and ending a job costs on this machine. As for any
simulation these are settings, and here they are measured, for each job: the start from the
controller's decision (its journal) until the training loop begins with its workers running (the
job's output), and the end from the last batch until Slurm has the job as ended. ``--costs same``
takes them from the compared run itself, so that the comparison says nothing about them; ``--costs
calibrated`` from runs of their own before and after it, with jobs a tenth as long, which on a busy
machine are not what the compared run sees. A table tells where each job's time went.

What the simulator has no setting for stays in the difference: the rounds of the controller take
time themselves, and a job that is given more cores while it trains starts new workers and ends its
old ones.

Slurm's records are in whole seconds and taken at their middle. ``--json`` prints one object. With
``--limit 0.05`` the exit status is 1 when a difference exceeds 5 %; it is 2 when the runs failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from slurm_synergy.cli.demo_acts import MOTIVATING_JOBS, Submitted, Watch, all_completed
from slurm_synergy.cli.demo_screen import Screen
from slurm_synergy.cli.demo_stage import MOTIVATING_NODES, SHAPES, Stage, last_json_line
from slurm_synergy.cli.tables import print_table
from slurm_synergy.cluster import Start
from slurm_synergy.controller.rounds import Round, read_rounds
from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.model import Job, JobStatus, Node
from slurm_synergy.core.pipeline import reference_rate
from slurm_synergy.core.resources import Resources
from slurm_synergy.devcluster import DevCluster
from slurm_synergy.errors import DemoError, SynergyError
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES
from slurm_synergy.simulator.engine import Outline, play
from slurm_synergy.simulator.running import Running
from slurm_synergy.simulator.truth import SimulatedJob
from slurm_synergy.slurm.facts import JobFacts

MECHANISM_NAMES = ("proportional", "tune")
CALIBRATION_SCALE = 0.1
# As the demonstration sets its controller: the simulator must play the same rounds.
ROUND_S, POLL_S, DEBOUNCE_S = 30.0, 0.5, 0.5
# What happens is seen by the next poll, half a period later on average.
EVENT_DELAY_S = POLL_S / 2 + DEBOUNCE_S
HALF_S = 0.5  # Slurm's whole seconds at their middle
COSTS = ("same", "calibrated")
SCRIPTS = Path(__file__).resolve().parents[1] / "examples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a script of the demonstration trains: from its own command line."""

    name: str
    model: str
    gpus: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a machine costs a job, in seconds: its start and its end."""

    start_s: float = 0.0
    end_s: float = 0.0


NO_COSTS = Costs()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Where the time of a job went, in seconds.

    ``submitted_s`` is since the first submission. Then come ``wait_s`` until a round decides to
    start it, ``start_s`` until its training loop begins (of which Slurm took ``slurm_s`` until the
    job's start), ``train_s`` until its last batch, and ``end_s`` until Slurm has it as ended.
    ``workers_s`` of ``start_s`` went into starting its workers; ``shares`` are the cores that it
    had, one lease after the other.
    """

    name: str
    submitted_s: float
    wait_s: float
    start_s: float
    train_s: float
    end_s: float
    slurm_s: float = 0.0
    workers_s: float = 0.0
    shares: tuple[int, ...] = ()

    @property
    def jct_s(self) -> float:
        """Submission to end."""
        return self.wait_s + self.start_s + self.train_s + self.end_s

    @property
    def ended_s(self) -> float:
        """Since the first submission."""
        return self.submitted_s + self.jct_s

    @property
    def costs(self) -> Costs:
        """What it cost to start and to end it."""
        return Costs(start_s=self.start_s, end_s=self.end_s)


def read_work(name: str) -> Work:
    """What ``examples/NAME.sbatch`` trains."""
    text = (SCRIPTS / f"{name}.sbatch").read_text(encoding="utf-8")

    def option(key: str) -> str:
        found = re.search(rf"--{key} (\S+)", text)
        if found is None:
            raise SystemExit(f"{name}.sbatch does not say --{key}")
        return found.group(1)

    return Work(
        name=name,
        model=option("model"),
        gpus=int(option("gpus")),
        samples=int(option("samples")),
    )


# live ------------------------------------------------------------------------------------------


def run_live(stage: Stage, screen: Screen, mechanism: str, scale: float) -> list[Ran]:
    """The four jobs under ``mechanism`` on the embedded Slurm, ``scale`` times as long."""
    directory = stage.directory(mechanism)
    moments: dict[int, float] = {}
    with stage.controller(
        directory, policy="fifo", mechanism=mechanism, nodes=MOTIVATING_NODES
    ) as controller:
        watch = Watch(stage, controller, screen)
        env = {"EMULATED_TIME_SCALE": str(scale)}
        jobs = []
        for name in MOTIVATING_JOBS:
            asked_s = time.time()
            job = watch.submit(directory, f"examples/{name}.sbatch", env=env)
            # Slurm has the second, and we the moment: within it, and not before we asked.
            moments[job.job_id] = min(max(asked_s, job.submitted_s), job.submitted_s + 1)
            jobs.append(job)
        facts = watch.until(all_completed, what="all jobs complete", within_s=120 + 180 * scale)
    decided = decisions(directory / "controller" / "journal.jsonl")
    first_s = min(moments.values())
    return [
        ran(job, facts[job.job_id], moments[job.job_id], decided, first_s, watch) for job in jobs
    ]


def decisions(journal: Path) -> dict[int, float]:
    """When a round decided to start each job, as a Unix time."""
    found: dict[int, float] = {}
    for one in read_rounds(journal):
        if isinstance(one, Round):
            for action in one.actions:
                if isinstance(action, Start):
                    found.setdefault(action.job_id, one.snapshot.now_s)
    return found


def ran(
    job: Submitted,
    facts: JobFacts,
    submitted_s: float,
    decided: Mapping[int, float],
    first_s: float,
    watch: Watch,
) -> Ran:
    """Where the job's time went, from Slurm, the journal and its own output. Raises DemoError."""
    said = last_json_line(job.progress_in)
    at_s, seconds = said.get("at_s"), said.get("seconds")
    workers_s = said.get("workers_s")
    numbers = all(isinstance(one, float) for one in (at_s, seconds, workers_s))
    if (
        not numbers
        or said.get("finished") is not True
        or facts.start_s is None
        or facts.end_s is None
        or job.job_id not in decided
    ):
        raise DemoError(f"job {job.job_id} ({job.name}) does not tell when it trained: {said}")
    assert isinstance(at_s, float) and isinstance(seconds, float) and isinstance(workers_s, float)
    return Ran(
        name=job.name,
        submitted_s=submitted_s - first_s,
        wait_s=decided[job.job_id] - submitted_s,
        slurm_s=facts.start_s + HALF_S - decided[job.job_id],
        start_s=at_s - seconds - decided[job.job_id],
        train_s=seconds,
        end_s=facts.end_s + HALF_S - at_s,
        workers_s=workers_s,
        shares=tuple(cpus for cpus, _ in watch.shares(job.job_id)),
    )


@contextlib.contextmanager
def embedded_slurm() -> Iterator[tuple[Path, DevCluster]]:
    """A Slurm of its own in a directory of its own; both are gone afterwards."""
    work = Path(tempfile.mkdtemp(prefix="synergy-live-"))
    work.chmod(0o755)
    cluster = DevCluster(dir=work / "slurm", nodes=SHAPES, real_node=False)
    try:
        cluster.up()
        yield work, cluster
    finally:
        cluster.down(keep=True)
        shutil.rmtree(work, ignore_errors=True)


# simulated -------------------------------------------------------------------------------------


def nodes() -> tuple[Node, ...]:
    """The two nodes of the act as the controller sees them."""
    shape = SHAPES[0]
    total = Resources(gpus=shape.gpus, cpus=shape.cores, mem_mib=shape.mem_mib)
    return tuple(
        Node(
            name=f"v100-{index}",
            gpu_type=shape.gpu_type,
            total=total,
            capacity=total,
            sockets=shape.sockets,
        )
        for index in (1, 2)
    )


def simulated_job(
    index: int, work: Work, scale: float, submitted_s: float, costs: Costs
) -> SimulatedJob:
    """The job with the catalogue's profile as its truth and as what is believed."""
    profile = CATALOGUE[work.model]
    samples = float(max(1, round(work.samples * scale)))
    job = Job(
        job_id=index,
        user="demo",
        submitted_s=submitted_s,
        gpus=work.gpus,
        nodes=1,
        name=work.name,
        total_samples=samples,
    )
    rate = reference_rate(JobStatus(job=job, profile=profile), nodes())
    assert rate
    return SimulatedJob(
        job=job,
        truth=profile,
        belief=profile,
        samples=samples,
        iteration_samples=1.0,
        share_s=samples / rate,
        model=work.model,
        # The job holds its resources while it ends as while it starts.
        start_s=costs.start_s + costs.end_s,
    )


def run_simulated(
    mechanism: str,
    scale: float,
    live: Sequence[Ran],
    costs: Mapping[str, Costs],
) -> list[Ran]:
    """The jobs submitted when they were in ``live``, in the simulator; ``costs`` of each job."""
    submitted = {one.name: one.submitted_s for one in live}
    played = play(
        Outline(
            nodes=nodes(),
            jobs=tuple(
                simulated_job(
                    index, read_work(name), scale, submitted[name], costs.get(name, NO_COSTS)
                )
                for index, name in enumerate(MOTIVATING_JOBS, start=1)
            ),
            policy=POLICIES["fifo"],
            mechanism=MECHANISMS[mechanism],
            round_s=ROUND_S,
            event_delay_s=EVENT_DELAY_S,
        )
    )
    found = [
        simulated(one, costs.get(one.spec.job.name, NO_COSTS)) for one in played.world.finished
    ]
    return sorted(found, key=lambda one: MOTIVATING_JOBS.index(one.name))


def simulated(one: Running, costs: Costs) -> Ran:
    """Where the time of a simulated job went."""
    assert one.started_s is not None and one.completed_s is not None
    return Ran(
        name=one.spec.job.name,
        submitted_s=one.arrived_s,
        wait_s=one.started_s - one.arrived_s,
        start_s=costs.start_s,
        train_s=one.completed_s - one.started_s - costs.start_s - costs.end_s,
        end_s=costs.end_s,
    )


# comparison ------------------------------------------------------------------------------------


def average_s(ran: Sequence[Ran]) -> float:
    """Average completion time."""
    return sum(one.jct_s for one in ran) / len(ran)


def makespan_s(ran: Sequence[Ran]) -> float:
    """First submission to last end."""
    return max(one.ended_s for one in ran) - min(one.submitted_s for one in ran)


def mean_costs(*runs: Sequence[Ran]) -> dict[str, Costs]:
    """What each job cost, the mean of the runs."""

    def mean(name: str, key: str) -> float:
        named = [one.costs for run in runs for one in run if one.name == name]
        values: list[float] = [getattr(one, key) for one in named]
        return sum(values) / len(values)

    keys = ("start_s", "end_s")
    return {one.name: Costs(**{key: mean(one.name, key) for key in keys}) for one in runs[0]}


def compare(mechanism: str, live: Sequence[Ran], played: Sequence[Ran]) -> dict[str, object]:
    """One mechanism's outcome."""
    pairs = {
        "avg_jct_s": (average_s(live), average_s(played)),
        "makespan_s": (makespan_s(live), makespan_s(played)),
    }
    return {
        "mechanism": mechanism,
        **{
            key: {
                "live": round(measured, 2),
                "simulated": round(expected, 2),
                "difference": round(expected / measured - 1, 4),
            }
            for key, (measured, expected) in pairs.items()
        },
        "jobs": [
            {"name": a.name, "live": parts(a), "simulated": parts(b)}
            for a, b in zip(live, played, strict=True)
        ],
    }


def parts(one: Ran) -> dict[str, object]:
    """Where a job's time went, for JSON."""
    found: dict[str, object] = {
        key: round(getattr(one, key), 2)
        for key in ("jct_s", "wait_s", "start_s", "slurm_s", "workers_s", "train_s", "end_s")
    }
    return {**found, "cpus": list(one.shares)}


def measure(time_scale: float, costs: str) -> dict[str, object]:
    """Run live, simulate, compare; for both mechanisms."""
    screen = Screen(Console(stderr=True, width=120))
    lines, load = [], os.getloadavg()[0]
    calibrated = costs == "calibrated"
    with embedded_slurm() as (work, cluster):

        def run(part: str, mechanism: str, scale: float) -> list[Ran]:
            screen.heading(f"{mechanism}: {part}")
            (work / part).mkdir(exist_ok=True)
            return run_live(Stage(work / part, cluster), screen, mechanism, scale)

        for mechanism in MECHANISM_NAMES:
            before = run("before", mechanism, CALIBRATION_SCALE) if calibrated else None
            live = run("compared", mechanism, time_scale)
            if before is None:
                found = mean_costs(live)
            else:
                found = mean_costs(before, run("after", mechanism, CALIBRATION_SCALE))
            lines.append(
                compare(mechanism, live, run_simulated(mechanism, time_scale, live, found))
            )
    loads = {"load_before": round(load, 2), "load_after": round(os.getloadavg()[0], 2)}
    return {**loads, "time_scale": time_scale, "costs": costs, "runs": lines}


def positive(text: str) -> float:
    """An option's value."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--time-scale", type=positive, default=1.0, help="how much longer jobs take"
    )
    parser.add_argument(
        "--costs",
        choices=COSTS,
        default=COSTS[0],
        help="whether a job's start and end cost what they did in this run, or in others",
    )
    parser.add_argument("--limit", type=positive, help="largest difference allowed, as a part")
    args = parser.parse_args(argv)
    try:
        outcome = measure(args.time_scale, args.costs)
    except SynergyError as err:
        print(f"live_vs_simulated: {err}", file=sys.stderr)
        return 2
    runs = outcome["runs"]
    assert isinstance(runs, list)
    if args.json:
        print(json.dumps(outcome))
    else:
        show(runs)
    worst = max(abs(run[key]["difference"]) for run in runs for key in ("avg_jct_s", "makespan_s"))
    return 1 if args.limit is not None and worst > args.limit else 0


def show(runs: Sequence[Mapping[str, Any]]) -> None:
    """The outcome for people."""
    rows = []
    for run in runs:
        for key, words in (("avg_jct_s", "average JCT"), ("makespan_s", "makespan")):
            one = run[key]
            values = (f"{one['live']:.1f} s", f"{one['simulated']:.1f} s")
            rows.append([run["mechanism"], words, *values, f"{one['difference']:+.1%}"])
    print_table(("mechanism", "quantity", "live", "simulated", "difference"), rows)
    print("\nWhere the time went, in seconds, live / simulated (start and end are measured):\n")
    keys = ("wait_s", "start_s", "train_s", "end_s", "jct_s")
    heads = ("mechanism", "job", "waits", "starts", "trains", "ends", "in all")
    print_table(
        (*heads, "of start: Slurm, workers", "cores"),
        [
            [
                run["mechanism"],
                job["name"],
                *(f"{job['live'][key]:.1f} / {job['simulated'][key]:.1f}" for key in keys),
                f"{job['live']['slurm_s']:.1f}, {job['live']['workers_s']:.1f}",
                "→".join(map(str, job["live"]["cpus"])),
            ]
            for run in runs
            for job in run["jobs"]
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
