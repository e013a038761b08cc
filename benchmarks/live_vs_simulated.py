"""The demonstration's workload on a real Slurm and in the simulator, side by side.

The four jobs of ``make demo`` (docs/demo.md) run on the embedded Slurm, under PROPORTIONAL and
under TUNE. The simulator plays the same jobs with the catalogue's rates and the same rounds. What
the catalogue does not know is how long a job takes from its start to its first batch and from its
last batch to its end. A calibration measures that for each job, in runs of its own whose jobs are a
tenth as long: one before the compared run and one after it, because on a busy machine starting
takes longer. Nothing of the compared runs enters the simulation but the moments of submission.

Slurm's records are in whole seconds. ``--json`` prints one object. With ``--limit 0.05`` the exit
status is 1 when a difference exceeds 5 %; it is 2 when the runs failed.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from slurm_synergy.cli.demo_acts import MOTIVATING_JOBS, Watch, all_completed
from slurm_synergy.cli.demo_screen import Screen
from slurm_synergy.cli.demo_stage import MOTIVATING_NODES, SHAPES, Stage
from slurm_synergy.cli.tables import print_table
from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.model import Job, JobStatus, Node
from slurm_synergy.core.pipeline import reference_rate
from slurm_synergy.core.resources import Resources
from slurm_synergy.devcluster import DevCluster
from slurm_synergy.errors import SynergyError
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES
from slurm_synergy.simulator.engine import Outline, play
from slurm_synergy.simulator.truth import SimulatedJob

MECHANISM_NAMES = ("proportional", "tune")
CALIBRATION_SCALE = 0.1
# As the demonstration sets its controller: the simulator must play the same rounds.
ROUND_S, DEBOUNCE_S = 30.0, 0.5
SCRIPTS = Path(__file__).resolve().parents[1] / "examples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a script of the demonstration trains: from its own command line."""

    name: str
    model: str
    gpus: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One job as Slurm recorded it, in seconds since the first submission."""

    name: str
    submitted_s: float
    ended_s: float

    @property
    def jct_s(self) -> float:
        """Submission to end."""
        return self.ended_s - self.submitted_s


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
    with stage.controller(
        directory, policy="fifo", mechanism=mechanism, nodes=MOTIVATING_NODES
    ) as controller:
        watch = Watch(stage, controller, screen)
        env = {"EMULATED_TIME_SCALE": str(scale)}
        jobs = [
            watch.submit(directory, f"examples/{name}.sbatch", env=env) for name in MOTIVATING_JOBS
        ]
        facts = watch.until(all_completed, what="all jobs complete", within_s=120 + 180 * scale)
    first_s = min(job.submitted_s for job in jobs)
    return [
        Ran(
            name=job.name,
            submitted_s=job.submitted_s - first_s,
            ended_s=(facts[job.job_id].end_s or 0.0) - first_s,
        )
        for job in jobs
    ]


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
    index: int, work: Work, scale: float, submitted_s: float, start_s: float
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
        start_s=start_s,
    )


def run_simulated(
    mechanism: str, scale: float, live: Sequence[Ran], starts_s: Mapping[str, float]
) -> list[Ran]:
    """The jobs submitted when they were in ``live``, in the simulator."""
    submitted = {one.name: one.submitted_s for one in live}
    played = play(
        Outline(
            nodes=nodes(),
            jobs=tuple(
                simulated_job(
                    index, read_work(name), scale, submitted[name], starts_s.get(name, 0.0)
                )
                for index, name in enumerate(MOTIVATING_JOBS, start=1)
            ),
            policy=POLICIES["fifo"],
            mechanism=MECHANISMS[mechanism],
            round_s=ROUND_S,
            event_delay_s=DEBOUNCE_S,
        )
    )
    return sorted(
        (
            Ran(
                name=one.spec.job.name,
                submitted_s=one.arrived_s,
                ended_s=one.completed_s or 0.0,
            )
            for one in played.world.finished
        ),
        key=lambda one: MOTIVATING_JOBS.index(one.name),
    )


# comparison ------------------------------------------------------------------------------------


def average_s(ran: Sequence[Ran]) -> float:
    """Average completion time."""
    return sum(one.jct_s for one in ran) / len(ran)


def makespan_s(ran: Sequence[Ran]) -> float:
    """First submission to last end."""
    return max(one.ended_s for one in ran) - min(one.submitted_s for one in ran)


def calibrate(stage: Stage, screen: Screen, mechanism: str) -> dict[str, float]:
    """What each job's start and end take: live minus simulated, in a short run of its own."""
    live = run_live(stage, screen, mechanism, CALIBRATION_SCALE)
    ideal = run_simulated(mechanism, CALIBRATION_SCALE, live, {})
    return {a.name: max(a.jct_s - b.jct_s, 0.0) for a, b in zip(live, ideal, strict=True)}


def compare(
    mechanism: str, live: Sequence[Ran], simulated: Sequence[Ran], starts_s: Mapping[str, float]
) -> dict[str, object]:
    """One mechanism's outcome."""
    pairs = {
        "avg_jct_s": (average_s(live), average_s(simulated)),
        "makespan_s": (makespan_s(live), makespan_s(simulated)),
    }
    return {
        "mechanism": mechanism,
        **{
            key: {
                "live": round(measured, 2),
                "simulated": round(played, 2),
                "difference": round(played / measured - 1, 4),
            }
            for key, (measured, played) in pairs.items()
        },
        "jobs": [
            {
                "name": a.name,
                "live_s": round(a.jct_s, 2),
                "simulated_s": round(b.jct_s, 2),
                "start_and_end_s": round(starts_s[a.name], 2),
            }
            for a, b in zip(live, simulated, strict=True)
        ],
    }


def measure(time_scale: float) -> dict[str, object]:
    """Calibrate, run live, simulate, compare; for both mechanisms."""
    screen = Screen(Console(stderr=True, width=120))
    lines = []
    with embedded_slurm() as (work, cluster):
        stages = {}
        for part in ("before", "compared", "after"):
            (work / part).mkdir()
            stages[part] = Stage(work / part, cluster)
        for mechanism in MECHANISM_NAMES:
            screen.heading(f"{mechanism}: calibration before, compared run, calibration after")
            before = calibrate(stages["before"], screen, mechanism)
            live = run_live(stages["compared"], screen, mechanism, time_scale)
            after = calibrate(stages["after"], screen, mechanism)
            starts_s = {name: (before[name] + after[name]) / 2 for name in before}
            played = run_simulated(mechanism, time_scale, live, starts_s)
            lines.append(compare(mechanism, live, played, starts_s))
    return {"load": os.getloadavg()[0], "time_scale": time_scale, "runs": lines}


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--time-scale", type=float, default=1.0, help="how much longer jobs take")
    parser.add_argument("--limit", type=float, help="largest difference allowed, as a part")
    args = parser.parse_args(argv)
    try:
        outcome = measure(args.time_scale)
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


def show(runs: Sequence[Mapping[str, object]]) -> None:
    """The outcome for people."""
    rows = []
    for run in runs:
        for key, words in (("avg_jct_s", "average JCT"), ("makespan_s", "makespan")):
            one = run[key]
            assert isinstance(one, dict)
            rows.append(
                [
                    str(run["mechanism"]),
                    words,
                    f"{one['live']:.1f} s",
                    f"{one['simulated']:.1f} s",
                    f"{one['difference']:+.1%}",
                ]
            )
        jobs = run["jobs"]
        assert isinstance(jobs, list)
        rows += [
            [
                str(run["mechanism"]),
                f"{job['name']} (start and end: {job['start_and_end_s']:.1f} s)",
                f"{job['live_s']:.1f} s",
                f"{job['simulated_s']:.1f} s",
                f"{job['simulated_s'] / job['live_s'] - 1:+.1%}",
            ]
            for job in jobs
        ]
    print_table(("mechanism", "quantity", "live", "simulated", "difference"), rows)


if __name__ == "__main__":
    sys.exit(main())
