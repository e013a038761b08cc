"""docs/faults.md has every row of the matrix, and no other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from fault_report import DOCUMENT, HERE, Row, document


def test_the_document_has_every_row() -> None:
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", str(HERE)]
    argv += ["-m", "fault", "-p", "no:cacheprovider"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=HERE.parents[2], check=True)
    collected = {line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line}
    assert collected
    text = Path(DOCUMENT).read_text(encoding="utf-8")
    assert set(re.findall(r"\| `(test_[^`]+)`", text)) == collected


def test_a_row_that_did_not_run_says_so() -> None:
    words = {"broken": "a|b", "happens": "c", "seen": "d", "everywhere": "no"}
    row = Row(file="test_faults_jobs", test="test_x", outcome="skipped", why="no disk", words=words)
    text = document([row], "slurm 22.05.8")
    assert "| a\\|b | c | d | not run: no disk | `test_x` ○ |" in text
