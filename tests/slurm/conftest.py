"""Fixtures on a real Slurm: one shared embedded cluster per test process, fresh ones on demand."""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from accounts import OrdinaryUser

from slurm_synergy.devcluster import DevCluster, missing_programs


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
def eventually() -> Callable[..., None]:
    """``eventually(holds, timeout_s=20)`` polls until ``holds()`` is true; fails with ``what``."""

    def wait(
        holds: Callable[[], bool], *, timeout_s: float = 20.0, what: str = "condition"
    ) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline_s:
                pytest.fail(f"{what}: not within {timeout_s:g} s")
            time.sleep(0.1)

    return wait
