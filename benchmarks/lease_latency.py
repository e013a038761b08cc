#!/usr/bin/env python3
"""How long a resize in place takes: from the controller's decision to all threads pinned.

The controller's own keeper of leases (ledger on disk), its gRPC service and the launcher's own
client, over loopback; credentials are made and decoded by MUNGE. The clock starts before
``resize``, which is durable when it returns, and stops when the task's threads have their new
masks, read back.

``one_node``: one resize after the other; the task is a process of its own with eight threads, which
are pinned to other cores of this machine. ``many``: as many jobs as ``--leases`` says, four on a
node, with a launcher's client each, in ten processes, each of which pins one thread of its own.
Every round resizes all of them at once, as a round of the controller does; the clock of each
lease starts with the round. ``round_ms`` is the time from there to the last lease in force,
``decided_ms`` that of the resizes alone: cores of 125 nodes, and one transaction that is on disk.
``cpu_ms`` is the CPU time of the controller's side per round. Without MUNGE registrations are not
authenticated (``munge`` is false in the result); no resize needs it.

    python benchmarks/lease_latency.py --json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent / "support"))
from lease_world import LeaseWorld, munged, node_of_job

from slurm_synergy.jobside.binding import choose_cpus, pin_tree
from slurm_synergy.jobside.board import Report
from slurm_synergy.jobside.environment import Task
from slurm_synergy.jobside.lease_client import LeaseClient

EXIT_TOO_SLOW = 1
LIMIT_ONE_NODE_S = 0.3
LIMIT_MANY_S = 1.0
PATIENCE_S = 60.0
PROCESSES = 10
_THREADS = """
import sys, threading
for _ in range(7):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""


class Pinned:
    """Since when (monotonic) which generation of a job's lease is in force."""

    def __init__(self) -> None:
        self._seen = threading.Condition()
        self._known: dict[int, tuple[int, float]] = {}

    def note(self, job_id: int, generation: int, at_s: float) -> None:
        """It is in force now."""
        with self._seen:
            if generation > self._known.get(job_id, (0, 0.0))[0]:
                self._known[job_id] = (generation, at_s)
                self._seen.notify_all()

    def since(self, job_id: int, generation: int) -> float:
        """Wait for ``generation``, or a newer one: when all threads had its mask."""
        with self._seen:
            if not self._seen.wait_for(
                lambda: self._known.get(job_id, (0, 0.0))[0] >= generation, PATIENCE_S
            ):
                raise TimeoutError(f"job {job_id}: generation {generation} is not in force")
            return self._known[job_id][1]


class Launcher:
    """A launcher's client, and what the launcher does with an update: pin, and note when."""

    def __init__(
        self,
        endpoint: str,
        munge_socket: str,
        job_id: int,
        note: Callable[[int, int, float], None],
        pid: int | None = None,
    ) -> None:
        self.job_id, self._pid, self._note = job_id, pid, note
        self._granted = sorted(os.sched_getaffinity(0))
        self._generation = 0
        self.client = LeaseClient(
            endpoint,
            Task(
                job_id=job_id,
                restart_count=0,
                step_id=0,
                rank=0,
                ranks=1,
                local_rank=0,
                local_ranks=1,
                node=node_of_job(job_id),
                nodes=1,
                granted_cpus=1,
                granted_mem_mib=1,
            ),
            os_cpus=tuple(self._granted),
            report=Report,
            notify=self._obey,
            say=lambda text: None,
            munge_socket=munge_socket,
        )
        self.client.start()

    def _obey(self) -> None:
        update = self.client.take()
        grant = update.grant if update else None
        if grant is None or grant.generation == self._generation:
            return
        # The lease's cores are more than this machine has: folded onto those that it has.
        cores = sorted({core % len(self._granted) for core in grant.cores})
        choice = choose_cpus(cores, self._granted, len(self._granted))
        if self._pid is None:
            os.sched_setaffinity(0, choice.cpus)
            right = os.sched_getaffinity(0) == choice.cpus
        else:
            right = pin_tree(self._pid, choice.cpus).wrong == 0
        if right:
            self._generation = grant.generation
            self._note(self.job_id, grant.generation, time.monotonic())


@contextlib.contextmanager
def _program() -> Iterator[int]:
    child = subprocess.Popen(
        [sys.executable, "-c", _THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    try:
        yield child.pid
    finally:
        child.communicate()


def _one_node(world: LeaseWorld, resizes: int) -> list[float]:
    took_s, pinned, job_id = [], Pinned(), world.job_ids[0]
    with _program() as pid:
        launcher = Launcher(world.endpoint, world.munge_socket, job_id, pinned.note, pid)
        try:
            pinned.since(job_id, 1)
            for number in range(resizes):
                began_s = time.monotonic()
                generation = world.resize(job_id, 2 - number % 2)
                took_s.append(pinned.since(job_id, generation) - began_s)
        finally:
            launcher.client.close()
    return took_s


def _clients(endpoint: str, munge_socket: str, job_ids: Iterable[int]) -> None:
    """A process of clients; says on standard output what is in force, and when."""
    lock = threading.Lock()

    def note(job_id: int, generation: int, at_s: float) -> None:
        with lock:
            print(job_id, generation, at_s, flush=True)

    launchers = [Launcher(endpoint, munge_socket, job_id, note) for job_id in job_ids]
    sys.stdin.read()
    with lock:
        os._exit(0 if launchers else EXIT_TOO_SLOW)


def _listen(lines: Iterable[bytes], pinned: Pinned) -> None:
    for line in lines:
        job_id, generation, at_s = line.split()
        pinned.note(int(job_id), int(generation), float(at_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Seconds: per lease, and per round until all are in force, of the resizes alone, and CPU."""

    leases_s: list[float]
    whole_s: list[float]
    decided_s: list[float]
    cpu_s: list[float]


def _many(world: LeaseWorld, rounds: int) -> Rounds:
    """Rounds that resize all leases."""
    children = [_child(world, world.job_ids[part::PROCESSES]) for part in range(PROCESSES)]
    found = Rounds(leases_s=[], whole_s=[], decided_s=[], cpu_s=[])
    pinned = Pinned()
    listeners = [
        threading.Thread(target=_listen, args=(child.stdout, pinned)) for child in children
    ]
    for listener in listeners:
        listener.start()
    try:
        for job_id in world.job_ids:
            pinned.since(job_id, 1)
        for number in range(rounds):
            began_s, began_cpu_s = time.monotonic(), time.process_time()
            wanted = world.resize_all(2 - number % 2)
            found.decided_s.append(time.monotonic() - began_s)
            took_s = [pinned.since(*one) - began_s for one in wanted.items()]
            found.cpu_s.append(time.process_time() - began_cpu_s)
            found.leases_s.extend(took_s)
            found.whole_s.append(max(took_s))
    finally:
        for child in children:
            assert child.stdin is not None
            child.stdin.close()
        for child, listener in zip(children, listeners, strict=True):
            child.wait()
            listener.join()
    return found


def _child(world: LeaseWorld, job_ids: Sequence[int]) -> subprocess.Popen[bytes]:
    argv = [sys.executable, __file__, "--clients", world.endpoint, f"--munge={world.munge_socket}"]
    return subprocess.Popen(
        [*argv, f"--jobs={','.join(map(str, job_ids))}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def _figures(prefix: str, took_s: list[float]) -> dict[str, float]:
    ordered = sorted(took_s)
    return {
        f"{prefix}_median_ms": statistics.median(ordered) * 1e3,
        f"{prefix}_p90_ms": ordered[int(len(ordered) * 0.9)] * 1e3,
        f"{prefix}_max_ms": ordered[-1] * 1e3,
    }


def measure(*, leases: int, resizes: int, rounds: int) -> Mapping[str, float | int | bool]:
    """Latencies in ms: medians, 90th percentiles and the longest, of one node and of many."""
    with tempfile.TemporaryDirectory(prefix="synergy-bench-") as name, munged() as socket:
        with LeaseWorld(Path(name) / "one", socket, jobs=1) as world:
            one = _one_node(world, resizes)
        with LeaseWorld(Path(name) / "many", socket, jobs=leases) as world:
            many = _many(world, rounds)
    return {
        **_figures("one_node", one),
        **_figures("many", many.leases_s),
        "round_ms": statistics.median(many.whole_s) * 1e3,
        "decided_ms": statistics.median(many.decided_s) * 1e3,
        "cpu_ms": statistics.median(many.cpu_s) * 1e3,
        "leases": leases,
        "munge": socket is not None,
        "load_1min": psutil.getloadavg()[0],
    }


def main(argv: list[str] | None = None) -> int:
    """Print the figures; exit status 1 when one misses its limit."""
    parser = argparse.ArgumentParser(
        description=f"Time from a resize to all threads pinned. Exit status {EXIT_TOO_SLOW} when "
        f"the median is {LIMIT_ONE_NODE_S * 1e3:g} ms or more on one node, or a round of many "
        f"leases takes {LIMIT_MANY_S * 1e3:g} ms or more.",
    )
    parser.add_argument("--leases", type=int, default=500, metavar="N")
    parser.add_argument("--resizes", type=int, default=40, metavar="N", help="on one node")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of all leases")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--clients", metavar="HOST:PORT", help=argparse.SUPPRESS)
    parser.add_argument("--munge", default="", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.clients:
        _clients(options.clients, options.munge, map(int, options.jobs.split(",")))
    found = measure(leases=options.leases, resizes=options.resizes, rounds=options.rounds)
    if options.json:
        shown = {
            key: round(value, 1) if isinstance(value, float) else value
            for key, value in found.items()
        }
        print(json.dumps(shown))
    else:
        for prefix, words in (("one_node", "one node"), ("many", f"{options.leases} leases")):
            print(
                f"{words}: median {found[f'{prefix}_median_ms']:.0f} ms, "
                f"90% within {found[f'{prefix}_p90_ms']:.0f} ms, "
                f"longest {found[f'{prefix}_max_ms']:.0f} ms"
            )
        print(
            f"a round of all: {found['round_ms']:.0f} ms, {found['decided_ms']:.0f} of it until "
            f"it was on disk; {found['cpu_ms']:.0f} ms of CPU on the controller's side"
        )
        print(f"load of this machine: {found['load_1min']:.1f}")
    fast = (
        found["one_node_median_ms"] < LIMIT_ONE_NODE_S * 1e3
        and found["round_ms"] < LIMIT_MANY_S * 1e3
    )
    return 0 if fast else EXIT_TOO_SLOW


if __name__ == "__main__":
    sys.exit(main())
