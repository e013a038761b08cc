"""How much room a data cache has, by file systems, memory and cgroups that the test makes up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_synergy.jobside.minio_room import room_for

MIB = 1 << 20
FREE_MIB = 1000


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc where ``tmp_path`` is a tmpfs, and 900 MiB of memory are left."""
    system = os.statvfs_result((MIB, MIB, 0, 0, FREE_MIB, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: system)
    own = tmp_path / "proc" / "self"
    own.mkdir(parents=True)
    device = tmp_path.stat().st_dev
    place = f"{os.major(device)}:{os.minor(device)}"
    (own / "mountinfo").write_text(
        f"20 1 0:999 / / rw - ext4 /dev/a rw\n21 20 {place} / /x rw shared:2 - tmpfs tmpfs rw\n"
    )
    (own.parent / "meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable: {900 * 1024} kB\n")
    return own.parent


def _group(place: Path, files: tuple[str, str], limit: str, used: int, stat: str) -> None:
    place.mkdir(parents=True)
    (place / files[0]).write_text(f"{limit}\n")
    (place / files[1]).write_text(f"{used}\n")
    (place / "memory.stat").write_text(stat)


def test_in_memory_the_least_of_all_that_limits_it_counts(tmp_path: Path, proc: Path) -> None:
    groups = tmp_path / "groups"
    room = room_for(tmp_path, 100 * MIB, proc=proc, cgroups=groups)
    assert (room.most_bytes, room.what) == (900 * MIB, "the memory of this machine")
    (proc / "self" / "cgroup").write_text("0::/job_7/step_0\n")
    names = ("memory.max", "memory.current")
    _group(
        groups / "job_7", names, str(500 * MIB), 300 * MIB, f"file {250 * MIB}\nshmem {50 * MIB}\n"
    )
    _group(groups / "job_7" / "step_0", names, "max", 300 * MIB, "")
    room = room_for(tmp_path, 50 * MIB, proc=proc, cgroups=groups)
    # 500 without the 100 that the kernel cannot free, and the 50 that are the cache's own.
    assert (room.most_bytes, room.what) == (405 * MIB, "the memory limit of this job")


def test_the_older_cgroups_count_as_well(tmp_path: Path, proc: Path) -> None:
    (proc / "self" / "cgroup").write_text("5:cpu:/a\n4:memory:/job_7\n")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    stat = f"total_cache {30 * MIB}\ntotal_shmem 0\n"
    _group(tmp_path / "groups" / "memory" / "job_7", names, str(110 * MIB), 40 * MIB, stat)
    assert room_for(tmp_path, 0, proc=proc, cgroups=tmp_path / "groups").most_bytes == 90 * MIB


def test_on_a_disk_only_the_file_system_counts(tmp_path: Path, proc: Path) -> None:
    (proc / "self" / "mountinfo").write_text("")
    room = room_for(tmp_path / "proc", 0, proc=proc, cgroups=tmp_path)
    assert room.most_bytes == FREE_MIB * MIB * 9 // 10
    assert room.what == f"the file system of {tmp_path}"
