#!/usr/bin/env python3
"""How long a round of the controller takes with 5,000 held jobs and 500 nodes, and how much memory.

A real slurmctld of its own carries the jobs and the nodes; the jobs are submitted with sbatch
through job_submit.lua. No slurmd stands behind the nodes, so Slurm marks them as not responding;
that word is taken out of its answer, and a start of slurmd put in, since nothing would be planned
on such nodes. A round is what the controller does: read queue and nodes, observe, decide,
reconcile, record in the ledger and the journal. Its actions are not carried out (they would start
jobs on nodes that do not exist).

The first round reads every job anew and remembers it in the ledger; later ones are what a
controller does all day. The baseline is the bare commands of one reading, their answers thrown
away, in turn with the rounds. Everything is measured in a process of its own, whose peak memory is
told. With pyslurm of the very Slurm that runs here, the same is measured through it. At last 500
updates are sent as a process each, and again in one session of scontrol. ``loop_ms`` is the CPU
time of a million additions just after the rounds (about 50 at this machine's full clock), ``load``
how many processes wanted a CPU in the minute before: round figures of a busy machine mean little.

    python benchmarks/controller_round.py --json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from slurm_synergy.config import ClientChoice, Settings
from slurm_synergy.controller.leases import LeaseBook
from slurm_synergy.controller.ledger import Ledger
from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.devcluster import DevCluster, NodeShape
from slurm_synergy.errors import ConfigError
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES
from slurm_synergy.round import Known, run_round
from slurm_synergy.slurm.cli_client import CliSlurmClient
from slurm_synergy.slurm.cluster import SlurmCluster
from slurm_synergy.slurm.commands import CommandResult, SlurmCommands
from slurm_synergy.slurm.dry_run import DryRun
from slurm_synergy.slurm.pyslurm_client import PyslurmClient, open_pyslurm
from slurm_synergy.slurm.session import run_lines

LIMITS_S = {ClientChoice.CLI: 2.0, ClientChoice.PYSLURM: 0.5}
LIMIT_MIB = 300.0
EXIT_TOO_SLOW = 1
UPDATES = 500
MODELS = ("resnet18-imagenet", "gnmt-wmt16", "transformerxl-wikitext103", "m5-audio")
GPUS = (1, 1, 1, 2, 4, 8)
SCRIPT = "#!/bin/sh\nexec synergy-srun sleep 600\n"
Taken = tuple[float, float]
BARE = (
    ("squeue", "-h", "-a", "-t", "all", "-O", "JobId:|,UserId:|,Partition:|,Name:|,Comment:|"),
    ("scontrol", "-a", "-d", "-o", "show", "job"),
    ("scontrol", "-a", "-d", "-o", "show", "node"),
)


class Clock:
    """The machine's clock."""

    def now_s(self) -> float:
        """See ``Clock``."""
        return time.time()


class AsIfResponding:
    """Slurm's commands, with nodes that look as if a slurmd stood behind them."""

    def __init__(self, commands: SlurmCommands) -> None:
        self.commands = commands

    def run(self, argv: Sequence[str], *, timeout_s: float, stdin: str = "") -> CommandResult:
        """See ``CommandRunner``."""
        found = self.commands.run(argv, timeout_s=timeout_s, stdin=stdin)
        return self._changed(argv, found)

    def begin(self, argv: Sequence[str], *, timeout_s: float) -> Callable[[], CommandResult]:
        """See ``Beside``."""
        begun = self.commands.begin(argv, timeout_s=timeout_s)
        return lambda: self._changed(argv, begun())

    @staticmethod
    def _changed(argv: Sequence[str], found: CommandResult) -> CommandResult:
        if tuple(argv[-2:]) != ("show", "node"):
            return found
        text = found.stdout.replace("State=IDLE+NOT_RESPONDING", "State=IDLE")
        text = text.replace("SlurmdStartTime=None", "SlurmdStartTime=2026-01-01T00:00:00")
        return CommandResult(argv=found.argv, rc=found.rc, stdout=text, stderr=found.stderr)


# The cluster


@contextlib.contextmanager
def big_cluster(nodes: int, jobs: int) -> Iterator[DevCluster]:
    """A slurmctld with so many nodes and held jobs."""
    names = f"gpu-[0001-{nodes:04d}]"
    extra = (
        f"NodeName={names} NodeAddr=127.0.0.1 Port=9 CPUs=24 Boards=1 SocketsPerBoard=2 "
        "CoresPerSocket=12 RealMemory=500000 Gres=gpu:v100:8 Feature=v100",
        "SlurmdTimeout=0",
        "PartitionName=DEFAULT",
    )
    one = NodeShape(nodes="v100-1", gpus=8, cores=24, mem_mib=500_000, gpu_type="v100", sockets=2)
    with DevCluster(nodes=(one,), real_node=False, extra_conf=extra) as cluster:
        for state in (("state=down", "reason=new"), ("state=resume",)):
            cluster.run(["scontrol", "update", f"nodename={names}", *state])
        submit_all(cluster, jobs)
        # As a controller that has seen them has done.
        client = CliSlurmClient(SlurmCommands(slurm_conf=str(cluster.conf_path)))
        refused = client.hold_all(job.job_id for job in client.read_queue("synergy"))
        assert not refused, refused
        yield cluster


def submit_all(cluster: DevCluster, jobs: int) -> None:
    """Jobs of several sizes and models, by sbatch; job_submit.lua holds them."""

    def submit(number: int) -> None:
        gpus, model = GPUS[number % len(GPUS)], MODELS[number % len(MODELS)]
        argv = ["sbatch", "-p", "synergy", "-J", f"train-{number}", "-o", "/dev/null"]
        argv += [f"--gres=gpu:v100:{gpus}", "-c2", "--mem=20G", "-t", "600"]
        argv += [f"--comment=synergy:profile={model},samples={10_000 * (number % 97 + 1)}"]
        cluster.run(argv, input=SCRIPT)

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        list(pool.map(submit, range(jobs)))


# In the measured process


def measure(conf: str, kind: ClientChoice, rounds: int) -> dict[str, Any]:
    """Rounds against the cluster of ``conf``, and the bare commands in between."""
    logging.getLogger("slurm_synergy").setLevel(logging.ERROR)
    commands = SlurmCommands(slurm_conf=conf)
    runner = AsIfResponding(commands)
    process = open_pyslurm(commands, conf) if kind is ClientChoice.PYSLURM else None
    client = CliSlurmClient(runner) if process is None else PyslurmClient(runner, process)
    beside = Beside(process.pid if process is not None else None)
    settings = Settings.model_validate({"pool": {"reservation": False}})
    clock = Clock()
    with (
        tempfile.TemporaryDirectory() as state,
        Ledger(Path(state), clock=clock, catalogue=CATALOGUE.get) as ledger,
    ):
        live: SlurmCluster
        book = LeaseBook(ledger, clock, lease_s=60.0, node_of=lambda name: live.node(name))
        live = SlurmCluster(client, settings, book, ledger, ledger, clock)
        cluster, known = DryRun(live), Known()

        def one_round() -> Any:
            cluster.tick()
            policy, mechanism = POLICIES["srtf"], MECHANISMS["tune"]
            return run_round(cluster, ledger, clock, policy, mechanism, 300.0, known=known)

        def bare() -> None:
            for argv in BARE:
                commands.run(argv, timeout_s=60).check()

        first, result = timed(one_round, beside)
        later, bares = [], []
        for _ in range(rounds):
            bares.append(timed(bare)[0])
            taken, result = timed(one_round, beside)
            later.append(taken)
    return told(first, later, bares, beside) | {
        "jobs": len(result.snapshot.jobs),
        "nodes": len(result.snapshot.nodes),
        "planned": len(result.plan.placements),
        "part_s": {part: round(took_s, 3) for part, took_s in result.took_s.items()},
        "calls_per_round": dict(client.budget().last_turn),
    }


class Beside:
    """The process that has pyslurm, if there is one: its part counts as the controller's."""

    def __init__(self, pid: int | None = None) -> None:
        self._process = None if pid is None else psutil.Process(pid)

    def cpu_s(self) -> float:
        """CPU seconds so far."""
        return 0.0 if self._process is None else sum(self._process.cpu_times()[:2])

    def peak_mib(self) -> float:
        """Most memory so far."""
        if self._process is None:
            return 0.0
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def timed(call: Callable[[], Any], beside: Beside | None = None) -> tuple[Taken, Any]:
    """((wall, CPU of this process, its children and ``beside``), result); seconds."""
    more = beside or Beside()
    began_s, cpu_s = time.perf_counter(), cpu_now_s() + more.cpu_s()
    result = call()
    return (time.perf_counter() - began_s, cpu_now_s() + more.cpu_s() - cpu_s), result


def cpu_now_s() -> float:
    """CPU seconds of this process and its finished children."""
    own, children = (resource.getrusage(who) for who in (0, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def told(
    first: Taken, later: Sequence[Taken], bares: Sequence[Taken], beside: Beside
) -> dict[str, Any]:
    """The figures; seconds and MiB."""
    own_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    round_s, bare_s = (statistics.median(wall for wall, _ in each) for each in (later, bares))
    return {
        "round_s": round(round_s, 3),
        "round_cpu_s": round(statistics.median(cpu for _, cpu in later), 3),
        "first_round_s": round(first[0], 3),
        "bare_commands_s": round(bare_s, 3),
        "ratio_to_bare_commands": round(round_s / bare_s, 2),
        "peak_mib": round(own_mib + beside.peak_mib(), 1),
        "rounds": len(later),
    }


# The whole


def in_child(conf: str, kind: ClientChoice, rounds: int) -> dict[str, Any]:
    """``measure`` in a process of its own, and how fast and how busy the machine was."""
    from decision import loop_ms  # here: what it loads is no part of what is measured

    argv = [sys.executable, __file__, "--measure", conf, "--client", kind, "--rounds", str(rounds)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the measured process failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"loop_ms": round(loop_ms(), 1), "load": round(os.getloadavg()[0], 1)}


def compare_updates(conf: str, count: int) -> dict[str, Any]:
    """``count`` updates as a start sends them: one process each, and in one session."""
    commands = SlurmCommands(slurm_conf=conf)
    queue = sorted(job.job_id for job in CliSlurmClient(commands).read_queue("synergy"))
    jobs = queue[:count]

    def line(job_id: int, cpus: int) -> tuple[str, ...]:
        counts = (f"NumCPUs={cpus}", f"CPUsPerTask={cpus}", f"MinCPUsNode={cpus}")
        return ("update", f"JobId={job_id}", *counts, "MinMemoryNode=30000", "StartTime=now")

    def one_by_one() -> None:
        for job_id in jobs:
            commands.run(("scontrol", *line(job_id, 3)), timeout_s=60).check()

    def in_one_session() -> None:
        results = run_lines(commands, [line(job_id, 4) for job_id in jobs], timeout_s=120)
        assert not [result.error for result in results if result.error]

    (alone_s, alone_cpu_s), _ = timed(one_by_one)
    (together_s, together_cpu_s), _ = timed(in_one_session)
    return {
        "updates": len(jobs),
        "one_by_one_s": round(alone_s, 3),
        "one_by_one_client_cpu_s": round(alone_cpu_s, 3),
        "session_s": round(together_s, 3),
        "session_client_cpu_s": round(together_cpu_s, 3),
        "times_faster": round(alone_s / together_s, 1),
    }


def run(nodes: int, jobs: int, rounds: int) -> dict[str, Any]:
    """All clients that are here, on one cluster."""
    with big_cluster(nodes, jobs) as cluster:
        conf = str(cluster.conf_path)
        result: dict[str, Any] = {"cli": in_child(conf, ClientChoice.CLI, rounds)}
        try:
            open_pyslurm(SlurmCommands(slurm_conf=conf), conf).close()
            result["pyslurm"] = in_child(conf, ClientChoice.PYSLURM, rounds)
        except ConfigError as err:
            result["pyslurm"] = {"not_measured": str(err)}
        result["session"] = compare_updates(conf, min(jobs, UPDATES))
    return result


def missed(result: dict[str, Any]) -> list[str]:
    """The limits that were not kept, in words."""
    found = []
    for kind, limit_s in LIMITS_S.items():
        figures = result[kind]
        if "round_s" not in figures:
            continue
        if figures["round_s"] > limit_s:
            found.append(f"{kind}: a round takes {figures['round_s']} s, more than {limit_s} s")
        if figures["peak_mib"] > LIMIT_MIB:
            found.append(f"{kind}: {figures['peak_mib']} MiB, more than {LIMIT_MIB} MiB")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 when a limit is not kept at the full size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--measure", metavar="CONF", help=argparse.SUPPRESS)
    parser.add_argument("--client", type=ClientChoice, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.measure:
        print(json.dumps(measure(options.measure, options.client, options.rounds)))
        return 0
    result = run(options.nodes, options.jobs, options.rounds)
    result["limits"] = {"round_s": LIMITS_S, "peak_mib": LIMIT_MIB, "missed": missed(result)}
    if options.json:
        print(json.dumps(result))
    else:
        for kind, figures in result.items():
            print(kind, ", ".join(f"{key} {value}" for key, value in figures.items()))
    return EXIT_TOO_SLOW if result["limits"]["missed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
