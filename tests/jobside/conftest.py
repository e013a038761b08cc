"""Fixtures of the tests of the job side."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from forks import Forks

if TYPE_CHECKING:
    from torchjob import Job


@pytest.fixture(scope="module")
def forks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Forks]:
    """Programs with torch imported already, or with what the test module's PRELOAD names."""
    modules = getattr(request.module, "PRELOAD", None)
    if modules is None:
        yield request.getfixturevalue("torch_forks")
        return
    made = Forks(tmp_path_factory.mktemp("forks"), *modules)
    yield made
    made.close()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """Incarnations of a job in this process, which is left as it was."""
    from torchjob import Job

    from slurm_synergy.jobside import session

    handler = signal.getsignal(signal.SIGTERM)
    yield Job(tmp_path, monkeypatch)
    signal.signal(signal.SIGTERM, handler)
    session._session = None
