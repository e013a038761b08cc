"""What all tests share. Its being here also makes ``builders`` importable for them."""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from forks import Forks
from hypothesis import HealthCheck, settings

# Shared machines are slow at times: a property fails for what it finds, not for how long it took.
settings.register_profile(
    "synergy", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# CI tries the same examples each time, so that a change is judged by what it changed; everybody
# else's runs search on.
settings.register_profile("ci", settings.get_profile("synergy"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "synergy")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: half a gigabyte that no collection of garbage need look through,
    and no fork of this process copy for it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# Files of minutes: what begins last is what a run waits for in the end.
_LONGEST = (
    *("test_end_to_end", "test_faults_slurm", "test_elastic", "test_faults_controller"),
    *("test_synergy_srun", "test_soak", "test_rivals_live", "test_faults_jobs"),
    *("test_controller", "test_client_contract", "test_profiling_live", "test_demo_parts"),
)
# Those that wait for Slurm have all begun when so much of the other files has.
_WAITING_UNTIL = 0.6


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where workers share the files, one that waits for Slurm runs beside others that compute."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    files = list(dict.fromkeys(item.path for item in items))
    waiting = [path for path in files if "slurm" in path.parts]
    computing = [path for path in files if "slurm" not in path.parts]
    ranks = {name: rank for rank, name in enumerate(_LONGEST)}
    waiting.sort(key=lambda path: ranks.get(path.stem, len(ranks)))
    turns = {path: turn / len(computing) for turn, path in enumerate(computing)}
    for turn, path in enumerate(waiting):
        turns[path] = _WAITING_UNTIL * turn / len(waiting)
    items.sort(key=lambda item: turns[item.path])


@pytest.fixture(scope="session")
def torch_forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Programs with torch, and what a training uses of it and of ours, imported already."""
    made = Forks(
        tmp_path_factory.mktemp("forks"),
        *("torch.distributed.fsdp", "torch.nn.parallel", "torch.utils.data", "torch._dynamo"),
        *("slurm_synergy.jobside.adaptive_training", "slurm_synergy.jobside.integrations.fsdp"),
        *("slurm_synergy.jobside.torch_loader", "sklearn.datasets"),
    )
    yield made
    made.close()


@pytest.fixture(scope="session")
def munge_socket() -> Iterator[Path]:
    """The socket of a real munged with a key of its own."""
    munged = shutil.which("munged", path="/usr/sbin:/usr/local/sbin:/sbin:/usr/bin")
    if munged is None:
        pytest.skip("munged is not installed (Debian: apt-get install munge)")
    # Not tmp_path: munged wants every directory above its socket searchable by all.
    directory = Path(tempfile.mkdtemp(prefix="synergy-munge-", dir="/tmp"))
    directory.chmod(0o711)
    key = directory / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    argv = [munged, "--force", "--foreground", "--syslog"]
    argv += [f"--{name}={directory / name}" for name in ("socket", "pid-file", "seed-file")]
    daemon = subprocess.Popen(
        [*argv, f"--key-file={key}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    socket = directory / "socket"
    deadline_s = time.monotonic() + 10
    while not socket.exists():
        assert daemon.poll() is None, f"munged ended with status {daemon.returncode}"
        assert time.monotonic() < deadline_s, "munged did not come up within 10 s"
        time.sleep(0.02)
    yield socket
    os.kill(daemon.pid, signal.SIGTERM)
    daemon.wait(10)
    shutil.rmtree(directory, ignore_errors=True)
