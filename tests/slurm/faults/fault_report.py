"""Runs the whole fault matrix and writes docs/faults.md from its results: ``make faults``.

The results stay in build/faults.xml. ``--results FILE...`` takes those of earlier runs (pytest's
``--junitxml``) instead; of a row that is in several files the last result counts, so that a row
that failed can be run again alone. Nothing is written when a row failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
DOCUMENT = ROOT / "docs" / "faults.md"
RESULTS = ROOT / "build" / "faults.xml"

_HEAD = """\
# Faults

What breaks, what happens then, and the test that proves it. Written by `make faults` from the
results of the tests in `tests/slurm/faults`: real Slurm ({release}), the real controller, real
processes; the nodes' GPUs are device files.

Every test also asserts, from what each training has logged and synced step by step:

* **Nothing lost.** Each job that Slurm accepted comes to its end (or to the end that the row
  names).
* **Little repeated.** Each start goes on from the last checkpoint that was published before it,
  or a newer one.
* **No GPU twice.** Each training locks its GPUs (by node and index) in the kernel for as long as
  its process lives; no lock was ever found taken, also not by the left-overs of an earlier run.
* **No job twice.** Each training locks its job in the same way.

*Recovery* is the time in seconds from the fault to the state that the row describes, jobs' ends
included where the test waits for them; measured once, on a machine of {cores} cores with a load
average of {load:.0f} (every process waits that much longer for its turn), with fast settings
(rounds of 5 s, leases of 6 s, SlurmdTimeout=15, KillWait=4): an order of magnitude. Rows marked ○
run in `make faults` only, all others in every CI run as well.
"""

_TAIL = """\
## What this does not show

* Real GPUs, CUDA, and a file system that fails below us; `ConstrainDevices`.
* Clocks of whole nodes: one machine has one clock. The row about a clock moves the one that
  `munged` sees.
* A node that is cut off from slurmctld *and* from the controller: its old processes cannot be
  reached by anybody. They run on until Slurm's own means (or power) end them, while the job runs
  anew elsewhere; the GPUs there are marked DOWN, so they are not given away.
* Slurm's own losses: slurmctld that dies hard forgets submissions and updates of the last seconds
  (22.05: lost at 0 s, kept at 8 s). What it forgot, it never accepted durably; the tests wait
  that long.
* The end of a job that Slurm never heard of, because its node went down in that moment: the job
  runs again from its last checkpoint, perhaps with nothing left to do.
* `Duplicate jobid`: 22.05 may drain a node when a job returns to it within moments. An admin has
  to resume the node; no job is lost.
* The step daemon of the batch script killed by hand: Slurm notices it after minutes only; until
  then the training runs on.
* A job whose step daemon was killed, requeued at once: with `proctrack/linuxproc` the first run's
  srun may live on for seconds and then abort the step of the second run, which has the same number
  (22.05); the job is FAILED. Cancel it instead, or wait for the end of that srun.
* What a training starts itself (torchrun's workers, say) when its step daemon is killed: only the
  program under the launcher is sure to end. `ProctrackType=proctrack/cgroup` lets Slurm find the
  others.

## The soak test

`{python} tests/slurm/faults/soak.py --jobs 500 --minutes 30` submits short jobs at random times,
breaks something at random every few seconds, and judges every job's log as above. CI runs a
shorter one (`test_soak.py`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One test's result."""

    file: str
    test: str
    outcome: str
    why: str
    words: dict[str, str]


def read_results(path: Path) -> list[Row]:
    """The rows of a junit file, in its order."""
    rows = []
    for case in ElementTree.parse(path).iter("testcase"):
        words = {
            one.attrib["name"]: one.attrib["value"] for one in case.iter("property") if one.attrib
        }
        if "broken" not in words:
            continue
        outcome, why = "passed", ""
        for kind in ("failure", "error", "skipped"):
            found = case.find(kind)
            if found is not None:
                outcome, why = kind, found.attrib.get("message", "")
        file = case.attrib["classname"].rpartition(".")[2]
        rows.append(Row(file=file, test=case.attrib["name"], outcome=outcome, why=why, words=words))
    return rows


def document(rows: Sequence[Row], release: str) -> str:
    """docs/faults.md."""
    load = os.getloadavg()[2]
    parts = [_HEAD.format(release=release, cores=os.cpu_count(), load=load)]
    for file, title in (
        ("test_faults_controller", "The controller and its services"),
        ("test_faults_slurm", "Slurm, its nodes, and its admins"),
        ("test_faults_jobs", "Users, checkpoints, ranks"),
        ("test_faults_elastic", "Jobs whose GPUs change"),
    ):
        parts.append(f"## {title}\n\nTests in `tests/slurm/faults/{file}.py`.\n")
        parts.append("| broken | what happens | what is seen | recovery (s) | test |")
        parts.append("|---|---|---|---:|---|")
        parts += [_line(row) for row in rows if row.file == file]
        parts.append("")
    parts.append(_TAIL.format(python=".venv/bin/python"))
    return "\n".join(parts)


def _line(row: Row) -> str:
    words = row.words
    recovery = words.get("recovery_s", "–") if row.outcome == "passed" else f"not run: {row.why}"
    mark = "" if words["everywhere"] == "yes" else " ○"
    cells = (words["broken"], words["happens"], words["seen"], recovery, f"`{row.test}`{mark}")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def run_matrix(results: Path, workers: int) -> int:
    """Run every row; pytest's exit status."""
    argv = [
        sys.executable, "-m", "pytest", str(HERE), "-q", "-n", str(workers), "--dist", "loadfile",
        f"--junitxml={results}",
    ]  # fmt: skip
    return subprocess.run(
        argv, cwd=ROOT, env={**os.environ, "SYNERGY_FAULTS": "all"}, check=False
    ).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, nargs="+", help="junit files of earlier runs")
    parser.add_argument("--workers", type=int, default=2, help="tests at a time (default: 2)")
    given = parser.parse_args()
    files = given.results or [RESULTS]
    if given.results is None and run_matrix(RESULTS, given.workers) not in (0, 1):
        sys.stderr.write("faults: pytest did not come to its end\n")
        return 1
    found = {(row.file, row.test): row for path in files for row in read_results(path)}
    rows = list(found.values())
    bad = [row for row in rows if row.outcome in ("failure", "error")]
    for row in bad:
        sys.stderr.write(f"faults: {row.test}: {row.outcome}\n")
    if bad or not rows:
        sys.stderr.write(f"faults: {len(bad)} of {len(rows)} rows failed; {DOCUMENT} is left\n")
        return 1
    release = subprocess.run(["slurmd", "-V"], capture_output=True, text=True, check=True)
    DOCUMENT.write_text(document(rows, release.stdout.strip()), encoding="utf-8")
    sys.stdout.write(f"faults: {len(rows)} rows in {DOCUMENT.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
