"""Many short jobs under random faults: ``python soak.py --jobs 500 --minutes 30 --seed 1 --json``.

An embedded Slurm, the controller, jobs that arrive at random times, and something that breaks every
few seconds. In the end every job must be completed, or cancelled where the soak cancelled it, and
its log must be sound (see ``fault_checks``). Exit status 0 when nothing was lost, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), *map(str, HERE.parents[:3])]

from fault_checks import verify  # noqa: E402
from fault_site import FAULT_CONF, FAULT_NODES, Site, Trainee  # noqa: E402

from slurm_synergy.devcluster import DevCluster, NodeShape  # noqa: E402
from slurm_synergy.errors import ClusterError, DevClusterError  # noqa: E402
from slurm_synergy.slurm.facts import JobFacts, JobState  # noqa: E402

__all__ = ["Soak", "main"]

# slurmctld that dies hard forgets what it was told in the last seconds (measured: up to 8 s).
_SETTLED_S = 10.0
# For one more job to come to its end, once nothing is broken any more.
_LONGEST_PAUSE_S = 300.0
_SHOWN_LINES = 60


@dataclass(slots=True)
class Tally:
    """What happened."""

    faults: Counter[str] = field(default_factory=Counter)
    cancelled: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    starts: int = 0
    steps: int = 0
    repeated: int = 0
    completed: int = 0


class Soak:
    """One run. ``say`` gets a line about each fault."""

    def __init__(
        self,
        site: Site,
        *,
        jobs: int,
        minutes: float,
        seed: int,
        fault_every_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._site, self._say = site, say
        self._random = random.Random(seed)
        self._span_s, self._every_s = 60 * minutes, fault_every_s
        # Arrivals end before the time does, so that the last jobs can end in it as well.
        self._arrivals = sorted(self._random.uniform(0, 0.85 * self._span_s) for _ in range(jobs))
        self.tally = Tally()
        self._submitted_s = 0.0
        self._repairs: list[tuple[float, Callable[[], None]]] = []
        self._down: set[str] = set()
        self._controller_away = False

    def run(self) -> None:
        """Submit, break, repair, and wait for the end of all jobs."""
        site = self._site
        site.start(scheduling={"grace_s": 10.0, "round_s": 10.0})
        begun_s = time.monotonic()
        next_fault_s = self._every_s
        while (now_s := time.monotonic() - begun_s) < self._span_s or self._arrivals:
            if self._arrivals and now_s >= self._arrivals[0]:
                self._arrivals.pop(0)
                self._submit()
            if next_fault_s <= now_s < self._span_s:
                self._break(now_s)
                next_fault_s = now_s + self._random.uniform(0.5, 1.5) * self._every_s
            self._repair(now_s)
            if not self._arrivals and self._ended() == len(self._site.jobs):
                break
            time.sleep(0.1)
        self._repair(float("inf"))
        self._drain()
        self._judge()

    # -- jobs --------------------------------------------------------------------------------------

    def _submit(self) -> None:
        pick = self._random
        hours = pick.choice((1, 2, 4, 8))
        env = {
            "FAULT_STEPS": str(pick.randint(10, 60)),
            "FAULT_STEP_S": f"{pick.uniform(0.05, 0.2):.2f}",
            "FAULT_SAVE_EVERY": str(pick.choice((5, 10, 20))),
        }
        gpus = pick.choice((1, 1, 2, 4))
        for _ in range(60):
            try:
                self._site.train(gpus=gpus, time_limit=f"{hours}:00:00", env=env)
                break
            except DevClusterError:
                # Slurm is down: this user tries again.
                time.sleep(1.0)
        else:
            self.tally.problems.append("a job could not be submitted for a minute")
        self._submitted_s = time.monotonic()

    def _records(self) -> dict[int, JobFacts]:
        try:
            return {job.job_id: job for job in self._site.slurm.client.read_queue()}
        except ClusterError:
            return {}

    def _ended(self) -> int:
        """How many jobs have come to their end; 0 when Slurm does not answer."""
        shown = self._records()
        return sum(_over(shown.get(job.job_id)) for job in self._site.jobs) if shown else 0

    def _drain(self) -> None:
        """However slow the machine is, jobs are to end one after the other."""
        most, seen_s = 0, time.monotonic()
        while (over := self._ended()) < len(self._site.jobs):
            if over > most:
                most, seen_s = over, time.monotonic()
            if time.monotonic() > seen_s + _LONGEST_PAUSE_S:
                self.tally.problems.append("jobs do not come to their end")
                return
            self._resume_drained()
            time.sleep(1.0)

    def _judge(self) -> None:
        shown = self._records()
        for job in self._site.jobs:
            facts = shown.get(job.job_id)
            state = facts.state if facts else None
            wanted = {JobState.COMPLETED}
            if job.job_id in self.tally.cancelled:
                wanted.add(JobState.CANCELLED)
            if state not in wanted:
                self._problem(job, f"is {state.value if state else 'unknown to Slurm'}")
            try:
                found = verify(job.events())
            except AssertionError as err:
                self._problem(job, str(err))
                continue
            self.tally.starts += found.starts
            self.tally.steps += found.steps
            self.tally.repeated += found.repeated
            self.tally.completed += state is JobState.COMPLETED
            if state is JobState.COMPLETED and not found.ended:
                self._problem(job, "is COMPLETED, but its program did not end well")

    def _problem(self, job: Trainee, what: str) -> None:
        self.tally.problems.append(f"job {job.job_id} ({job.home.name}) {what}")
        self._tell(job)

    def _tell(self, job: Trainee) -> None:
        """What there is to find out why: its record, its output, what the daemons said of it."""
        self._say(f"job {job.job_id}: {self._records().get(job.job_id)}\n{job.output[-4000:]}")
        named = re.compile(rf"\b{job.job_id}\b")
        places = sorted((self._site.cluster.state_dir / "log").glob("*.log"))
        for place in (*places, self._site.daemon.log_path):
            text = place.read_text(encoding="utf-8", errors="replace")
            lines = [line for line in text.splitlines() if named.search(line)]
            if lines:
                self._say("\n  ".join((f"{place.name}:", *lines[-_SHOWN_LINES:])))

    # -- faults ------------------------------------------------------------------------------------

    def _break(self, now_s: float) -> None:
        name = self._random.choice(sorted(_FAULTS))
        self._say(f"{now_s:6.0f} s: {name}")
        try:
            done = _FAULTS[name](self, now_s)
        except (ClusterError, DevClusterError, OSError) as err:
            self._say(f"          came to nothing: {err}")
            return
        self.tally.faults[name if done else f"{name} (nothing to break)"] += 1

    def _later(self, at_s: float, repair: Callable[[], None]) -> None:
        self._repairs.append((at_s, repair))

    def _repair(self, now_s: float) -> None:
        due = [one for one in self._repairs if one[0] <= now_s]
        self._repairs = [one for one in self._repairs if one[0] > now_s]
        for _, repair in due:
            repair()
        self._resume_drained()

    def _resume_drained(self) -> None:
        """What an admin does about a node that Slurm has drained for a duplicate job id."""
        if self._down or self._random.random() > 0.05:
            return
        done = self._site.cluster.run(["sinfo", "-h", "-N", "-o", "%N %T"], check=False)
        for line in done.stdout.splitlines():
            name, _, state = line.partition(" ")
            if state.startswith("drain"):
                self.tally.faults["node resumed by the admin"] += 1
                self._node(name, "resume")

    def _node(self, name: str, state: str) -> None:
        argv = ["scontrol", "update", f"nodename={name}", f"state={state}", "reason=soak"]
        self._site.cluster.run(argv, check=False)

    def _running(self) -> list[Trainee]:
        shown = self._records()
        return [
            job for job in self._site.jobs if (facts := shown.get(job.job_id)) and facts.running
        ]

    def _kill_controller(self, now_s: float) -> bool:
        if self._controller_away:
            # Its restart is on the way; a second one would find the first in the state directory.
            return False
        self._controller_away = True
        self._site.daemon.kill()
        self._later(now_s + self._random.uniform(0.5, 8.0), self._restart_controller)
        return True

    def _restart_controller(self) -> None:
        self._site.restart()
        self._controller_away = False

    def _kill_slurmctld(self, now_s: float) -> bool:
        if time.monotonic() - self._submitted_s < _SETTLED_S:
            time.sleep(_SETTLED_S - (time.monotonic() - self._submitted_s))
        self._site.cluster.slurmctld_kill()
        self._site.cluster.slurmctld_start()
        return True

    def _restart_slurmctld(self, now_s: float) -> bool:
        self._site.cluster.slurmctld_stop()
        self._site.cluster.slurmctld_start()
        return True

    def _kill_slurmd(self, now_s: float) -> bool:
        node = self._random.choice(self._site.cluster.node_names)
        self._site.cluster.slurmd_kill(node)
        self._later(
            now_s + self._random.uniform(1.0, 25.0), lambda: self._site.cluster.slurmd_start(node)
        )
        return True

    def _lose_node(self, now_s: float) -> bool:
        if self._down:
            return False
        node = self._random.choice(self._site.cluster.node_names)
        self._down.add(node)
        self._node(node, "drain")
        self._node(node, "down")
        self._later(now_s + self._random.uniform(3.0, 15.0), lambda: self._return_node(node))
        return True

    def _drain_node(self, now_s: float) -> bool:
        if self._down:
            return False
        node = self._random.choice(self._site.cluster.node_names)
        self._down.add(node)
        self._node(node, "drain")
        self._later(now_s + self._random.uniform(3.0, 15.0), lambda: self._return_node(node))
        return True

    def _return_node(self, node: str) -> None:
        self._node(node, "resume")
        self._down.discard(node)

    def _restart_munged(self, now_s: float) -> bool:
        self._site.cluster.munged_stop()
        time.sleep(1.0)
        self._site.cluster.munged_start()
        return True

    def _scontrol(self, verb: str) -> bool:
        running = self._running()
        if not running:
            return False
        job = self._random.choice(running)
        self._site.cluster.run(["scontrol", verb, str(job.job_id)], check=False)
        if verb == "suspend":
            at_s = float("-inf")
            time.sleep(2.0)
            self._later(
                at_s,
                lambda: _ignore(
                    self._site.cluster.run(["scontrol", "resume", str(job.job_id)], check=False)
                ),
            )
        return True

    def _requeue(self, now_s: float) -> bool:
        return self._scontrol("requeue")

    def _suspend(self, now_s: float) -> bool:
        return self._scontrol("suspend")

    def _cancel(self, now_s: float) -> bool:
        if not self._site.jobs:
            return False
        job = self._random.choice(self._site.jobs)
        if _over(self._records().get(job.job_id)):
            return False
        self._site.cluster.run(["scancel", str(job.job_id)], check=False)
        self.tally.cancelled.add(job.job_id)
        return True


def _ignore(result: object) -> None:
    """A repair has no result."""


def _over(facts: JobFacts | None) -> bool:
    return facts is not None and facts.state.finished and not facts.completing


_FAULTS: dict[str, Callable[[Soak, float], bool]] = {
    "controller killed": Soak._kill_controller,
    "slurmctld killed": Soak._kill_slurmctld,
    "slurmctld restarted": Soak._restart_slurmctld,
    "slurmd killed": Soak._kill_slurmd,
    "node down": Soak._lose_node,
    "node drained": Soak._drain_node,
    "munged restarted": Soak._restart_munged,
    "job requeued by an admin": Soak._requeue,
    "job suspended and resumed": Soak._suspend,
    "job cancelled by its user": Soak._cancel,
}


def soak(
    home: Path,
    *,
    jobs: int,
    minutes: float,
    seed: int,
    fault_every_s: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run it on a cluster of its own; the result as one JSON object."""
    shapes = (
        *FAULT_NODES,
        NodeShape(nodes="n-4", gpus=4, cores=8, mem_mib=64_000, gpu_type="v100", sockets=1),
    )
    conf = [line for line in FAULT_CONF if not line.startswith("MinJobAge")]
    begun_s = time.monotonic()
    with DevCluster(
        nodes=shapes, real_node=False, extra_conf=[*conf, "MinJobAge=86400"]
    ) as cluster:
        site = Site(cluster, home, lambda name, value: None)
        run = Soak(
            site, jobs=jobs, minutes=minutes, seed=seed, fault_every_s=fault_every_s, say=say
        )
        try:
            run.run()
        finally:
            if site.daemon.died() is None:
                site.daemon.stop()
            site.slurm.cancel_all()
        tally = run.tally
        return {
            "slurm": cluster.status().slurm,
            "seed": seed,
            "jobs": len(site.jobs),
            "completed": tally.completed,
            "cancelled": len(site.jobs) - tally.completed if not tally.problems else None,
            "lost": sum(
                "unknown to Slurm" in text or "is FAILED" in text for text in tally.problems
            ),
            "problems": tally.problems,
            "faults": dict(sorted(tally.faults.items())),
            "starts": tally.starts,
            "steps": tally.steps,
            "steps_repeated": tally.repeated,
            "wall_s": round(time.monotonic() - begun_s, 1),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fault-every", type=float, default=15.0, metavar="SECONDS")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--keep", type=Path, help="leave logs and checkpoints in this directory")
    given = parser.parse_args()

    def say(text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    with tempfile.TemporaryDirectory(prefix="synergy-soak-") as place:
        home = given.keep or Path(place)
        home.mkdir(parents=True, exist_ok=True)
        found = soak(
            home,
            jobs=given.jobs,
            minutes=given.minutes,
            seed=given.seed,
            fault_every_s=given.fault_every,
            say=say,
        )
    if given.json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        for key, value in found.items():
            sys.stdout.write(f"{key:16} {value}\n")
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    # A run in the background is ended like one in the foreground: everything is taken down.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    os.umask(0o022)
    sys.exit(main())
