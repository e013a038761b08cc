"""A killed job leaves its data cache behind; the epilog helper removes that, and nothing else."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from accounts import OrdinaryUser

from slurm_synergy.devcluster import DevCluster, NodeShape

ROOT = Path(__file__).resolve().parents[2]
HELPER = ROOT / "etc" / "epilog-synergy-cache.sh"
NODE = NodeShape(nodes="n-1", cores=2, mem_mib=2000, gpu_type="v100", gpus=1)

# Fills its cache and waits to be killed; nothing of Python's own clearing up runs then.
PROGRAM = """
import os, signal, sys
from slurm_synergy.jobside import cached_open
for name in sys.argv[2:]:
    cached_open(name).close()
with open(sys.argv[1], "w") as note:
    note.write(str(os.getpid()))
os.rename(sys.argv[1], sys.argv[1] + ".ready")
signal.pause()
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for caches that everybody may write to, as /dev/shm."""
    made = Path(f"/dev/shm/synergy-test-{os.getpid()}")
    made.mkdir()
    made.chmod(0o1777)
    yield made
    shutil.rmtree(made)


def test_the_cache_of_a_killed_job_goes_with_its_epilog(
    fresh_cluster: Callable[..., DevCluster],
    place: Path,
    tmp_path: Path,
    eventually: Callable[..., None],
) -> None:
    epilog, seen = tmp_path / "epilog", place / "seen"
    # Notes what it found before the helper runs: without it, that would have stayed.
    epilog.write_text(f"#!/bin/sh\nls {place} >>{seen}\nexec {HELPER} {place}\n")
    epilog.chmod(0o755)
    cluster = fresh_cluster(nodes=[NODE], real_node=False, extra_conf=[f"Epilog={epilog}"])
    home, uid = tmp_path, os.getuid()
    (home / "program.py").write_text(PROGRAM)
    (home / "item").write_bytes(os.urandom(1 << 20))
    script = (
        f"#!/bin/bash\nexport SYNERGY_CACHE_DIR={place} SYNERGY_CACHE_MIB=16 PYTHONPATH={ROOT}\n"
        f"exec {sys.executable} {home}/program.py {home}/pid {home}/item\n"
    )
    neighbour = place / f"synergy-cache-{uid}-999999"
    neighbour.mkdir(mode=0o700)
    argv = ["sbatch", "--parsable", "-p", "main", "-c", "1", "--mem=100", "-o", str(home / "out")]
    sent = cluster.run(argv, input=script, cwd=home)
    job = sent.stdout.strip().partition(";")[0]
    cache = place / f"synergy-cache-{uid}-{job}"
    ready = home / "pid.ready"
    eventually(ready.exists, timeout_s=120, what="a job with a filled cache")
    assert sum(path.stat().st_blocks for path in cache.iterdir()) * 512 >= 1 << 20
    os.kill(int(ready.read_text()), signal.SIGKILL)
    eventually(
        lambda: (
            "COMPLETING" not in cluster.run(["scontrol", "show", "job", job]).stdout
            and seen.exists()
        ),
        timeout_s=120,
        what="the end of the epilog",
    )
    eventually(lambda: not cache.exists(), timeout_s=120, what="the end of the cache")
    assert cache.name in seen.read_text().split()
    assert neighbour.is_dir()
    state = cluster.run(["sinfo", "-h", "-n", "n-1", "-o", "%T"]).stdout.split()
    assert "idle" in state and not any("drain" in word for word in state)


# -- the helper alone ----------------------------------------------------------------------------


def _help(place: Path, *, uid: object, job: object) -> None:
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_UID": str(uid), "SLURM_JOB_ID": str(job)}
    done = subprocess.run([HELPER, place], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def _cache(place: Path, user: OrdinaryUser, job: int) -> Path:
    made = place / f"synergy-cache-{user.uid}-{job}"
    made.mkdir(mode=0o700)
    (made / "seg-0").write_bytes(b"x")
    for path in (made, made / "seg-0"):
        os.chown(path, user.uid, user.gid)
    return made


def test_a_link_in_place_of_a_cache_leads_nowhere(as_user: OrdinaryUser, place: Path) -> None:
    precious = _cache(place, as_user, 1)
    link = place / f"synergy-cache-{as_user.uid}-2"
    link.symlink_to(precious)
    inside = _cache(place, as_user, 3)
    (inside / "link").symlink_to(precious)
    for job in (2, 3):
        _help(place, uid=as_user.uid, job=job)
    assert (precious / "seg-0").exists() and not inside.exists()


def test_a_directory_of_somebody_else_stays(as_user: OrdinaryUser, place: Path) -> None:
    cache = _cache(place, as_user, 4)
    os.chown(cache, 0, 0)
    _help(place, uid=as_user.uid, job=4)
    assert (cache / "seg-0").exists()


@pytest.mark.parametrize(("uid", "job"), [("", 5), ("me", 5), (None, ""), (None, "5/../6")])
def test_nonsense_removes_nothing_and_does_not_drain_the_node(
    as_user: OrdinaryUser, place: Path, uid: str | None, job: object
) -> None:
    cache = _cache(place, as_user, 5)
    _help(place, uid=as_user.uid if uid is None else uid, job=job)
    assert cache.exists()
