"""The systemd unit: what it starts exists, and what it promises is so."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "etc" / "slurm-synergyd.service"


def test_it_starts_the_controller_of_the_virtual_environment() -> None:
    setup = configparser.ConfigParser()
    setup.read(UNIT.parents[1] / "setup.cfg")
    program, *options = (
        next(line for line in UNIT.read_text().splitlines() if line.startswith("ExecStart="))
        .removeprefix("ExecStart=")
        .split()
    )
    assert f"\n{Path(program).name} =" in setup["options.entry_points"]["console_scripts"]
    assert Path(program).parent == Path("/opt/slurm-synergy/bin")
    assert options[:2] == ["--config", "/etc/slurm-synergy/synergy.yaml"]


def test_it_names_no_man_page() -> None:
    assert "man:" not in UNIT.read_text()


def test_systemd_understands_it(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (Debian: apt-get install systemd)")
    copy = tmp_path / UNIT.name
    program = tmp_path / "slurm-synergyd"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copy.write_text(UNIT.read_text().replace("/opt/slurm-synergy/bin/slurm-synergyd", str(program)))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False
    )
    about_us = [line for line in done.stderr.splitlines() if "synergyd" in line]
    assert about_us == []
