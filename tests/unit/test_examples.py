"""The example scripts, where they are started from the wrong place."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.sbatch"))


def test_there_are_examples() -> None:
    assert "digits.sbatch" in [script.name for script in SCRIPTS]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_says_where_to_submit_it_from(script: Path, tmp_path: Path) -> None:
    def run(place: Path) -> subprocess.CompletedProcess[str]:
        # Slurm runs a copy of the script in the directory of the submission.
        return subprocess.run(
            ["/bin/bash", "-s"],
            input=script.read_text(),
            cwd=place,
            env={"PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )

    elsewhere = run(tmp_path)
    assert elsewhere.returncode == 2
    assert f"{tmp_path} has no examples/" in elsewhere.stderr
    assert "submit from the project's root" in elsewhere.stderr
    # In the right place it is only the wrapper that this PATH lacks.
    right = run(ROOT)
    assert right.returncode == 127
    assert "synergy-srun" in right.stderr
