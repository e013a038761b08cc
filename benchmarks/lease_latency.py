#!/usr/bin/env python3
"""How long a resize in place takes: from the controller's decision to all threads pinned.

The controller's own keeper of leases (ledger on disk) and its gRPC service, over loopback;
credentials are made and decoded by MUNGE. The clock starts before ``resize``, which is durable when
it returns, and stops when the task's threads have their new masks, read back.

``one_node``: one resize after the other, with the launcher's own client; the task is a process of
its own with eight threads, which are pinned to other cores of this machine.

``many``: as many jobs as ``--leases`` says, four on a node. Every round resizes all of them at
once, as a round of the controller does; the clock of each lease starts with the round. On a cluster
every launcher has a node's cores; here all of them share this machine's with the controller. So
they are connections of two processes, each with the launchers' messages, the launchers' reading of
the answers and choice of cores, and a thread of its own that is pinned. ``round_ms`` is the time
until the last lease is in force, ``decided_ms`` that of the resizes alone: cores of 125 nodes, and
one transaction that is on disk. ``cpu_ms`` is the CPU time per round of the controller's side,
``clients_cpu_ms`` that of the launchers' until the last is in force: what a cluster does not have
to share. Without MUNGE registrations are not authenticated (``munge`` is false in the result); no
resize needs it.

    python benchmarks/lease_latency.py --json
"""

from __future__ import annotations

import argparse
import asyncio
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent / "support"))
from lease_world import LeaseWorld, munged, node_of_job
from wire_launcher import WireLauncher

from slurm_synergy.jobside.binding import CpuChoice, choose_cpus, pin_tree
from slurm_synergy.jobside.board import Report
from slurm_synergy.jobside.environment import Task
from slurm_synergy.jobside.lease_client import LeaseClient, update_of
from slurm_synergy.proto import lease_pb2 as pb

EXIT_TOO_SLOW = 1
LIMIT_ONE_NODE_S = 0.3
LIMIT_MANY_S = 1.0
PATIENCE_S = 60.0
PROCESSES = 2
HOLD_S = 10.0
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


def folded(cores: Iterable[int], granted: Sequence[int]) -> CpuChoice:
    """A lease's cores are more than this machine has: onto those that it has."""
    count = len(granted)
    return choose_cpus(sorted({core % count for core in cores}), granted, count)


class Launcher:
    """A launcher's client, and what the launcher does with an update: pin, and note when."""

    def __init__(
        self,
        endpoint: str,
        munge_socket: str,
        job_id: int,
        note: Callable[[int, int, float], None],
        pid: int,
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
        if pin_tree(self._pid, folded(grant.cores, self._granted).cpus).wrong == 0:
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


class WireTask(WireLauncher):
    """A launcher on the wire, with a thread of its own that it pins as its lease says."""

    def __init__(self, endpoint: str, job_id: int, over: threading.Event) -> None:
        super().__init__(endpoint, job_id)
        self._granted = sorted(os.sched_getaffinity(0))
        self._thread = threading.Thread(target=over.wait, daemon=True)
        self._thread.start()

    async def live(self, pool: ThreadPoolExecutor, munge_socket: str) -> None:
        """Register, then renew and obey until cancelled; tell what is in force, and when."""
        reply = await self.register(pool, munge_socket)
        known = 0
        while True:
            grant = update_of(reply).grant
            if grant is not None and grant.generation != known and self._pinned(grant.cores):
                known = grant.generation
                print(self.job_id, known, time.monotonic(), flush=True)
            reply = await self.renew(pb.Progress(), HOLD_S)

    def _pinned(self, cores: Sequence[int]) -> bool:
        choice = folded(cores, self._granted)
        thread = self._thread.native_id
        assert thread is not None
        os.sched_setaffinity(thread, choice.cpus)
        return os.sched_getaffinity(thread) == choice.cpus


async def _live(endpoint: str, munge_socket: str, job_ids: Sequence[int]) -> None:
    over = threading.Event()
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    with ThreadPoolExecutor(2) as pool:
        tasks = [WireTask(endpoint, job_id, over) for job_id in job_ids]
        lives = [asyncio.create_task(task.live(pool, munge_socket)) for task in tasks]
        # One that fails fails all: a lease that is not obeyed would be waited for.
        await asyncio.wait({ended, *lives}, return_when=asyncio.FIRST_COMPLETED)
        for life in lives:
            life.cancel()
        found = await asyncio.gather(*lives, return_exceptions=True)
        await asyncio.gather(*(task.close() for task in tasks))
    over.set()
    failed = [one for one in found if not isinstance(one, asyncio.CancelledError)]
    if failed:
        raise RuntimeError(f"{len(failed)} launchers failed, the first: {failed[0]!r}")


def _listen(lines: Iterable[bytes], pinned: Pinned) -> None:
    for line in lines:
        job_id, generation, at_s = line.split()
        pinned.note(int(job_id), int(generation), float(at_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Seconds: per lease; per round until all are in force, of the resizes alone, and of CPU."""

    leases_s: list[float]
    whole_s: list[float]
    decided_s: list[float]
    cpu_s: list[float]
    clients_cpu_s: list[float]


def _cpu_s(processes: Iterable[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _many(world: LeaseWorld, rounds: int) -> Rounds:
    """Rounds that resize all leases."""
    children = [_child(world, world.job_ids[part::PROCESSES]) for part in range(PROCESSES)]
    processes = [psutil.Process(child.pid) for child in children]
    found = Rounds(leases_s=[], whole_s=[], decided_s=[], cpu_s=[], clients_cpu_s=[])
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
            before_s = _cpu_s(processes)
            began_s, began_cpu_s = time.monotonic(), time.process_time()
            wanted = world.resize_all(2 - number % 2)
            found.decided_s.append(time.monotonic() - began_s)
            took_s = [pinned.since(*one) - began_s for one in wanted.items()]
            found.cpu_s.append(time.process_time() - began_cpu_s)
            found.clients_cpu_s.append(_cpu_s(processes) - before_s)
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
        "clients_cpu_ms": statistics.median(many.clients_cpu_s) * 1e3,
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
        job_ids = [int(job_id) for job_id in options.jobs.split(",")]
        asyncio.run(_live(options.clients, options.munge, job_ids))
        return 0
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
            f"it was on disk; CPU time: {found['cpu_ms']:.0f} ms of the controller's side, "
            f"{found['clients_cpu_ms']:.0f} ms of the launchers'"
        )
        print(f"load of this machine: {found['load_1min']:.1f}")
    fast = (
        found["one_node_median_ms"] < LIMIT_ONE_NODE_S * 1e3
        and found["round_ms"] < LIMIT_MANY_S * 1e3
    )
    return 0 if fast else EXIT_TOO_SLOW


if __name__ == "__main__":
    sys.exit(main())
