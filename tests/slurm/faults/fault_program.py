"""A training program that leaves evidence: every step, save and start, synced to disk at once.

Run inside a job as ``python fault_program.py DIRECTORY``. It steps until the file ``finish`` is in
the directory, or FAULT_STEPS are done. While it lives it has one lock on its job and one on each
of its GPUs, held by the kernel: a second copy of the job, or of another job on the same GPU, finds
the lock taken and says so in its log. ``FAULT_*`` variables make it slow, deaf or mortal.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import slurm_synergy.jobside as synergy


class Counter:
    """All the state that there is: how many steps were done."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        time.sleep(float(os.environ.get("FAULT_SAVE_S", "0")))
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Evidence:
    """The log of one rank, over all its incarnations."""

    def __init__(self, home: Path, rank: int) -> None:
        self._fd = os.open(
            home / f"rank-{rank}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
        )
        self._run = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self._locks: list[int] = []

    def note(self, event: str, **facts: Any) -> None:
        line = {"event": event, "run": self._run, "at_s": time.time(), **facts}
        os.write(self._fd, (json.dumps(line) + "\n").encode())
        os.fsync(self._fd)

    def claim(self, path: Path) -> None:
        """Lock ``path`` for the life of this process; another holder is evidence."""
        path.parent.mkdir(exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._locks.append(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.note("double", what=path.name, holder=os.pread(fd, 100, 0).decode())
            return
        os.truncate(fd, 0)
        os.pwrite(fd, f"job {os.environ['SLURM_JOB_ID']} pid {os.getpid()}".encode(), 0)


def main() -> int:
    home = Path(sys.argv[1])
    rank = int(os.environ.get("RANK", "0"))
    step_s = float(os.environ.get("FAULT_STEP_S", "0.1"))
    save_every = int(os.environ.get("FAULT_SAVE_EVERY", "5"))
    evidence, counter = Evidence(home, rank), Counter()
    gpus = os.environ.get("SLURM_STEP_GPUS") or os.environ.get("SLURM_JOB_GPUS") or ""
    node = os.environ.get("SLURMD_NODENAME", "")
    if rank == 0:
        evidence.claim(home / "running.lock")
        for gpu in gpus.split(","):
            evidence.claim(home.parent / "gpus" / f"{node}-{gpu}")
    if "FAULT_DEAF" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        synergy.register(counter=counter)
        synergy.resume()
    evidence.note("start", at=counter.steps, node=node, gpus=gpus, pid=os.getpid())
    for _ in synergy.epochs(1):
        with contextlib.closing(synergy.iterate(range(10**9))) as batches:
            train(batches, counter, evidence, home, step_s, save_every)
    evidence.note("end", at=counter.steps)
    return 0


def train(
    batches: Any, counter: Counter, evidence: Evidence, home: Path, step_s: float, save_every: int
) -> None:
    try:
        for _ in batches:
            if is_done(counter.steps):
                return  # done before: Slurm has lost the end of that run
            time.sleep(step_s)
            counter.steps += 1
            evidence.note("step", at=counter.steps)
            die_or_hang(counter.steps, home)
            if save_every and counter.steps % save_every == 0:
                begun_s = time.monotonic()
                try:
                    synergy.save()
                except Exception as err:  # noqa: BLE001 - what went wrong is evidence as well
                    evidence.note("unsaved", at=counter.steps, why=str(err))
                else:
                    took_s = time.monotonic() - begun_s
                    evidence.note("saved", at=counter.steps, took_s=took_s)
            if is_done(counter.steps):
                return
            if (home / "finish").exists():
                return
    except SystemExit:
        # Raised by the loader after it has published a checkpoint of this moment.
        evidence.note("saved", at=counter.steps)
        evidence.note("stopped", at=counter.steps)
        raise


def is_done(steps: int) -> bool:
    return 0 < int(os.environ.get("FAULT_STEPS", "0")) <= steps


def die_or_hang(step: int, home: Path) -> None:
    """Once per job, so that the next incarnation can do better."""
    for what in ("die", "hang"):
        wanted = os.environ.get(f"FAULT_{what.upper()}_AT")
        if wanted and step == int(wanted) and os.environ.get("RANK", "0") == "1":
            once = home / f"did-{what}"
            if once.exists():
                continue
            once.touch()
            if what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                time.sleep(60)


if __name__ == "__main__":
    sys.exit(main())
