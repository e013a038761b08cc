"""What all tests share. Its being here also makes ``builders`` importable for them."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Shared machines are slow at times: a property fails for what it finds, not for how long it took.
settings.register_profile(
    "synergy", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# CI tries the same examples each time, so that a change is judged by what it changed; everybody
# else's runs search on.
settings.register_profile("ci", settings.get_profile("synergy"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "synergy")


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
