"""A short soak: the long one is `python tests/slurm/faults/soak.py --jobs 500 --minutes 30`."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak import soak


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_short_jobs_under_random_faults_are_all_completed(tmp_path: Path) -> None:
    said: list[str] = []
    found = soak(tmp_path, jobs=12, minutes=0.5, seed=3, fault_every_s=6.0, say=said.append)
    assert found["problems"] == [], "\n".join(said)
    assert found["jobs"] == 12
    assert found["completed"] >= 9
    assert sum(found["faults"].values()) >= 3
