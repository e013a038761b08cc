"""Cores near the GPUs: what gres.conf tells, and where the floor of a started job is put."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from slurm_world import MakeWorld, make_world

from slurm_synergy.slurm.gres_conf import GresConf

__all__ = ["make_world"]  # fixture

HALVES = """
AutoDetect=off  # by hand
NodeName=v100-[1-2] Name=gpu Type=v100 File=/dev/nvidia[0-3] Cores=12-23
NodeName=v100-[1-2] Name=gpu Type=v100 File=/dev/nvidia[4-7] \\
   Cores=0-11
NodeName=v100-1 Name=mps Count=100
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HALVES, (1, 1, 1, 1, 0, 0, 0, 0)),
        ("Name=gpu Count=8 Cores=0-11\n", (0,) * 8),
        ("Name=gpu Count=8 Cores=0-23\n", ()),
        ("Name=gpu Count=4 Cores=0-11\nName=gpu Count=4\n", (0, 0, 0, 0, -1, -1, -1, -1)),
        ("Name=gpu Count=4 Cores=0-11\n", ()),
        ("NodeName=other Name=gpu Count=8 Cores=0-11\n", ()),
        ("Name=gpu Count=8 Cores=zero\n", ()),
        ("AutoDetect=nvml\n", ()),
        ("", ()),
    ],
)
def test_the_socket_of_each_gpu_is_read_or_nothing_is_known(
    text: str, expected: tuple[int, ...]
) -> None:
    node = FakeSlurm().nodes["v100-1"]
    assert GresConf(text).gpu_sockets(node) == expected


def test_a_floor_moves_to_the_sockets_of_the_gpus_once_and_then_stays(
    make_world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gres.conf").write_text(HALVES, encoding="utf-8")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    one = make_world(FakeSlurm(nodes=1))
    jobs = [one.slurm.submit(gpus=2), one.slurm.submit(gpus=2)]
    one.round()
    planned = one.book.lease(jobs[0])
    assert planned is not None
    assert planned.floor["v100-1"] == tuple(range(6))
    one.slurm.schedule()
    one.cluster.tick()
    # Slurm gave them GPUs 0-1 and 2-3, whose socket is the second one.
    floors = {}
    for job_id in jobs:
        lease = one.book.lease(job_id)
        assert lease is not None
        floors[job_id] = set(lease.floor["v100-1"])
        assert floors[job_id] <= set(range(12, 24))
        assert floors[job_id] <= set(lease.cores["v100-1"])
    assert floors[jobs[0]].isdisjoint(floors[jobs[1]])
    # Other GPUs in the record, or another controller: the floor is where it is.
    (part,) = one.slurm.jobs[jobs[0]].allocation
    one.slurm.change(jobs[0], allocation=(replace(part, gpu_ids=(4, 5)),))
    one.boot()
    one.cluster.tick()
    lease = one.book.lease(jobs[0])
    assert lease is not None
    assert set(lease.floor["v100-1"]) == floors[jobs[0]]
