"""The systemd unit: what it starts exists, and what it promises is so."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from slurm_synergy.nodehelper.parts import argument_parser

UNIT = Path(__file__).parents[2] / "etc" / "slurm-synergyd.service"
NODE_UNIT = UNIT.with_name("slurm-synergyd-node.service")
# Of 10; what is left is the network and the sockets that they are there for, and root on nodes.
MOST_EXPOSED = {UNIT: 1.6, NODE_UNIT: 2.7}
both_units = pytest.mark.parametrize("unit", MOST_EXPOSED, ids=lambda unit: unit.stem)


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


def test_the_helpers_unit_gives_back_with_the_options_that_it_started_with() -> None:
    lines = dict(
        line.split("=", 1) for line in NODE_UNIT.read_text().splitlines() if line.startswith("Exec")
    )
    start, after = lines["ExecStart"].split(), lines["ExecStopPost"].split()
    assert start[:2] == ["/opt/slurm-synergy/bin/slurm-synergyd", "--node"]
    assert after == [*start[:2], "--give-back", *start[2:]]
    directory = re.search(r"^RuntimeDirectory=(\S+)$", NODE_UNIT.read_text(), re.MULTILINE)
    assert directory is not None
    assert argument_parser().parse_args(["--node"]).run_dir == Path("/run", directory[1])


@both_units
def test_the_man_pages_that_it_names_are_ours(unit: Path) -> None:
    line = next(one for one in unit.read_text().splitlines() if one.startswith("Documentation="))
    pages = re.findall(r"man:(\S+)\((\d)\)", line)
    assert pages
    for name, section in pages:
        assert (UNIT.parents[1] / "docs" / "man" / f"{name}.{section}.in").is_file()


def test_it_runs_as_the_account_that_the_installation_makes() -> None:
    user = re.search(r"^User=(\S+)$", UNIT.read_text(), re.MULTILINE)
    assert user is not None
    assert user[1] != "root"
    assert f"\nu {user[1]} " in (UNIT.parent / "slurm-synergy.sysusers").read_text()


@both_units
def test_it_is_exposed_to_little(unit: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (Debian: apt-get install systemd)")
    offline = ["systemd-analyze", "security", "--offline=yes", "--no-pager"]
    done = subprocess.run([*offline, str(unit)], capture_output=True, text=True, check=False)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze does not look at unit files (from release 250 on)")
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found is not None, done.stderr
    assert float(found[1]) <= MOST_EXPOSED[unit]


@both_units
def test_systemd_understands_it(tmp_path: Path, unit: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (Debian: apt-get install systemd)")
    copy = tmp_path / unit.name
    program = tmp_path / "slurm-synergyd"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copy.write_text(unit.read_text().replace("/opt/slurm-synergy/bin/slurm-synergyd", str(program)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        check=False,
    )
    about_us = [line for line in done.stderr.splitlines() if "synergyd" in line]
    assert about_us == []
