"""Fixtures on a real Slurm: one shared embedded cluster per test process, fresh ones on demand."""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from accounts import OrdinaryUser
from forks import Forks

from slurm_synergy.devcluster import DevCluster, missing_programs
from slurm_synergy.errors import DevClusterError


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without Slurm there is nothing to test here; say which program is missing."""
    missing = missing_programs()
    if not missing:
        return
    reason = f"{', '.join(missing)} not installed (scripts/install-slurm.sh installs them)"
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def cluster() -> Iterator[DevCluster]:
    """The default cluster (four v100, two a100, real-1), up once per test process.

    Tests share it: cancel your jobs, and take a ``fresh_cluster`` to stop daemons.
    """
    with DevCluster() as shared:
        yield shared


@pytest.fixture
def fresh_cluster() -> Iterator[Callable[..., DevCluster]]:
    """A factory: called with DevCluster's arguments it returns a cluster that is up.

    All of them are taken down after the test.
    """
    made: list[DevCluster] = []

    def make(**given: Any) -> DevCluster:
        fresh = DevCluster(**given)
        made.append(fresh)
        fresh.up()
        return fresh

    yield make
    for fresh in made:
        fresh.down()


@pytest.fixture
def as_user() -> Iterator[OrdinaryUser]:
    """An ordinary account (games, else nobody); needs root to become it."""
    if os.geteuid() != 0:
        pytest.skip("only root can run commands as somebody else")
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv (util-linux) is not installed")
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    account = names.get("games") or names["nobody"]
    home = Path(tempfile.mkdtemp(prefix="synergy-user-"))
    os.chown(home, account.pw_uid, account.pw_gid)
    yield OrdinaryUser(account, home)
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def torch_python(torch_forks: Forks) -> str:
    """What a job's script has for ``python``, with torch imported already: see forks.py."""
    return " ".join(torch_forks.python)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed on the shared cluster shows what Slurm's state was just then."""
    report = yield
    shared = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and isinstance(shared, DevCluster):
        report.sections.append(("Slurm", _state_of(shared)))
    return report


def _state_of(shared: DevCluster) -> str:
    asked = (["sinfo", "-N", "-o", "%N %T %C %m %E"], ["squeue", "-o", "%i %j %T %r %N %V %S"])
    told = []
    for argv in asked:
        try:
            told.append(shared.run(argv, timeout_s=20).stdout)
        except DevClusterError as err:
            told.append(f"{err}\n")
    return "\n".join([*told, *(shared.log(name, 40) for name in ("slurmctld", "slurmd-real-1"))])


@pytest.fixture(scope="session")
def eventually() -> Callable[..., None]:
    """``eventually(holds, timeout_s=20)`` polls until ``holds()`` is true; fails with ``what``."""

    def wait(
        holds: Callable[[], bool], *, timeout_s: float = 60.0, what: str = "condition"
    ) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline_s:
                pytest.fail(f"{what}: not within {timeout_s:g} s")
            time.sleep(0.2)

    return wait
