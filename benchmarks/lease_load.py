#!/usr/bin/env python3
"""Can one core of the controller keep the leases of 2,000 launchers?

The lease service as the controller runs it (ledger on disk, gRPC, MUNGE) in a process of its own
that is pinned to one core. The load comes from this process, on the other cores: a connection for
every launcher. First all register, each with a fresh MUNGE credential that the service decodes
(munged runs where the system puts it); then each renews every ``--every`` seconds with its session
token, which is all that a renewal is authenticated with. Progress is reported with every call and
saved to the ledger every five seconds, as always. Nothing else is kept back or cached.

Renewals are due at times spread evenly, whether earlier ones were answered or not; the latency is
from sending to the answer. ``--hold`` sends them as launchers do, to be held for up to ten seconds
while there is no news; then the latency is what an answer takes beyond that time.

    python benchmarks/lease_load.py --json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent / "support"))
from lease_world import LeaseWorld, munged
from wire_launcher import WireLauncher

from slurm_synergy.proto import lease_pb2 as pb

EXIT_TOO_SLOW = 1
LIMIT_P99_S = 0.2
RANKS = 4
HOLD_S = 10.0


class Launcher(WireLauncher):
    """One that trains: it has done fifty more steps with every renewal."""

    def __init__(self, endpoint: str, job_id: int, rank: int) -> None:
        super().__init__(endpoint, job_id, rank, ranks=RANKS)
        self._steps = 0

    async def timed_renewal(self, wait_s: float) -> float:
        """One renewal: how long it took beyond ``wait_s``, in seconds."""
        self._steps += 50
        progress = pb.Progress(step=self._steps, samples=8 * self._steps, step_s=0.5)
        known, began_s = self.reply.lease.generation, time.monotonic()
        reply = await self.renew(progress, wait_s)
        if reply.gone or reply.lease.generation != known:
            raise RuntimeError(f"unexpected answer: {reply}")
        return max(0.0, time.monotonic() - began_s - wait_s)


def _serve(core: int, munge_socket: str, jobs: int) -> None:
    """The second process: the service on one core, until standard input ends."""
    os.sched_setaffinity(0, {core})
    with (
        tempfile.TemporaryDirectory(prefix="synergy-bench-") as name,
        LeaseWorld(Path(name), munge_socket or None, jobs=jobs) as world,
    ):
        print(world.endpoint, flush=True)
        sys.stdin.read()


@contextlib.contextmanager
def _service(core: int, munge_socket: str, jobs: int) -> Iterator[tuple[str, psutil.Process]]:
    argv = [sys.executable, __file__, f"--serve={core}", f"--munge={munge_socket}"]
    child = subprocess.Popen(
        [*argv, f"--launchers={jobs * RANKS}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        yield child.stdout.readline().decode().strip(), psutil.Process(child.pid)
    finally:
        child.communicate()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def _load(
    endpoint: str, process: psutil.Process, options: argparse.Namespace, munge_socket: str
) -> dict[str, float]:
    count = options.launchers
    launchers = [Launcher(endpoint, 1 + n // RANKS, n % RANKS) for n in range(count)]
    began_s = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        await asyncio.gather(*(one.register(pool, munge_socket) for one in launchers))
    registered_s = time.monotonic() - began_s
    used_s, began_s, wait_s = _cpu_s(process), time.monotonic(), HOLD_S if options.hold else 0.0
    calls = []
    for number in range(int(options.seconds / options.every * count)):
        due_s = began_s + number * options.every / count
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        calls.append(asyncio.create_task(launchers[number % count].timed_renewal(wait_s)))
    latencies = sorted(await asyncio.gather(*calls))
    busy = (_cpu_s(process) - used_s) / (time.monotonic() - began_s)
    memory_mib = process.memory_info().rss / 2**20
    await asyncio.gather(*(one.close() for one in launchers))
    return {
        "calls": len(latencies),
        "median_ms": statistics.median(latencies) * 1e3,
        "p99_ms": latencies[int(len(latencies) * 0.99)] * 1e3,
        "max_ms": latencies[-1] * 1e3,
        "core_busy_pct": busy * 100,
        "memory_mib": memory_mib,
        "register_all_s": registered_s,
    }


def measure(options: argparse.Namespace) -> Mapping[str, float | int | bool]:
    """The figures of one run."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one file a launcher
    cores = sorted(os.sched_getaffinity(0))
    jobs = -(-options.launchers // RANKS)
    with (
        munged() as socket,
        _service(cores[0], socket or "", jobs) as (endpoint, process),
    ):
        if len(cores) > 1:
            os.sched_setaffinity(0, cores[1:])
        found = asyncio.run(_load(endpoint, process, options, socket or ""))
    return {
        **found,
        "launchers": options.launchers,
        "munge": socket is not None,
        "load_1min": psutil.getloadavg()[0],
    }


def main(argv: list[str] | None = None) -> int:
    """Print the figures; exit status 1 when the 99th percentile misses its limit."""
    parser = argparse.ArgumentParser(
        description="Renewals of many launchers by one core. Exit status "
        f"{EXIT_TOO_SLOW} when 1% of them take {LIMIT_P99_S * 1e3:g} ms or more.",
    )
    parser.add_argument("--launchers", type=int, default=2000, metavar="N")
    parser.add_argument("--every", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to renew")
    parser.add_argument("--hold", action="store_true", help="have renewals held, as launchers do")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--munge", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve is not None:
        _serve(options.serve, options.munge, -(-options.launchers // RANKS))
        return 0
    found = measure(options)
    if options.json:
        shown = {
            key: round(value, 1) if isinstance(value, float) else value
            for key, value in found.items()
        }
        print(json.dumps(shown))
    else:
        print(
            f"{found['calls']} renewals of {options.launchers} launchers: median "
            f"{found['median_ms']:.1f} ms, 99% within {found['p99_ms']:.1f} ms, longest "
            f"{found['max_ms']:.0f} ms; the core {found['core_busy_pct']:.0f}% busy, "
            f"{found['memory_mib']:.0f} MiB; all registered in {found['register_all_s']:.0f} s; "
            f"load of this machine {found['load_1min']:.1f}"
        )
    return 0 if found["p99_ms"] < LIMIT_P99_S * 1e3 else EXIT_TOO_SLOW


if __name__ == "__main__":
    sys.exit(main())
