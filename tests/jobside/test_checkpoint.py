"""Checkpoints are complete and verified, or not there."""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slurm_synergy.errors import CheckpointError
from slurm_synergy.jobside.checkpoint import CheckpointStore, Progress
from slurm_synergy.jobside.rng import capture_rng, restore_rng


def _save(store: CheckpointStore, step: int, value: float | None = None) -> Path:
    weights = torch.full((100,), float(step if value is None else value))
    return store.save(
        Progress(step=step, samples=8 * step, epoch=1, epoch_samples=8, epoch_batches=1, seed=3),
        lambda: {"model": {"w": weights}, "schedule": {"lr": 0.5, "milestones": [1, 2]}},
        {"run": "abc"},
        {"now": capture_rng()},
    )


def _silent(_text: str) -> None:
    """For loads that have nothing to complain about."""


def _complaints(store: CheckpointStore) -> tuple[Any, list[str]]:
    said: list[str] = []
    return store.load_newest(said.append), said


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "new" / "place")
    path = _save(store, 12)
    assert path.name == "step-000000000012"
    assert sorted(p.name for p in path.iterdir()) == [
        "MANIFEST.json",
        "objects.pt",
        "rank-00000.pt",
        "state.json",
    ]
    found = store.load_newest(_silent)
    assert found is not None
    assert found.progress == Progress(
        step=12, samples=96, epoch=1, epoch_samples=8, epoch_batches=1, seed=3
    )
    assert torch.equal(found.objects["model"]["w"], torch.full((100,), 12.0))
    assert found.objects["schedule"] == {"lr": 0.5, "milestones": [1, 2]}
    assert found.user_state == {"run": "abc"}
    assert found.rank_state is not None


def test_generators_continue_where_they_were(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    np.random.standard_normal(3)  # leaves a cached second value in the legacy generator
    random.gauss(0, 1)
    _save(store, 1)

    def draw() -> list[float]:
        return [
            random.gauss(0, 1),
            random.random(),
            np.random.standard_normal(),
            float(torch.rand(1)),
        ]

    expected = draw()
    found = store.load_newest(_silent)
    assert found is not None and found.rank_state is not None
    restore_rng(found.rank_state["now"])
    assert draw() == expected


def test_nothing_saved_is_no_checkpoint(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "none").load_newest(_silent) is None
    assert not CheckpointStore(tmp_path / "none").exists()


def test_the_last_two_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 10, 11):
        _save(store, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000000010", "step-000000000011"]


def test_the_same_step_can_be_saved_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 4)
    _save(store, 5, value=1)
    _save(store, 5, value=2)
    found = store.load_newest(_silent)
    assert found is not None and float(found.objects["model"]["w"][0]) == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_a_crash_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = _save(store, 5)
    path.rename(path.with_name(path.name + ".old"))
    found = store.load_newest(_silent)
    assert found is not None and found.progress.step == 5


def _flip_a_byte(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        raw = bytearray((path / name).read_bytes())
        raw[len(raw) // 2] ^= 1
        (path / name).write_bytes(raw)

    return damage


def _truncate(path: Path) -> None:
    raw = (path / "objects.pt").read_bytes()
    (path / "objects.pt").write_bytes(raw[:-1])


def _claim_another_step(path: Path) -> None:
    manifest = json.loads((path / "MANIFEST.json").read_text())
    manifest["step"] += 1
    (path / "MANIFEST.json").write_text(json.dumps(manifest))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "objects": _flip_a_byte("objects.pt"),
    "rank": _flip_a_byte("rank-00000.pt"),
    "state": _flip_a_byte("state.json"),
    "truncated": _truncate,
    "other-step": _claim_another_step,
    "no-manifest": lambda path: (path / "MANIFEST.json").unlink(),
    "empty-manifest": lambda path: (path / "MANIFEST.json").write_bytes(b""),
    "list-manifest": lambda path: (path / "MANIFEST.json").write_bytes(b"[]"),
    "no-objects": lambda path: (path / "objects.pt").unlink(),
    "empty-directory": lambda path: [p.unlink() for p in path.iterdir()] and None,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_checkpoint_is_skipped_with_one_line(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    newest = _save(store, 2)
    damage(newest)
    found, said = _complaints(store)
    assert found is not None and found.progress.step == 1
    assert len(said) == 1 and str(newest) in said[0]
    # Kept as evidence, and neither complained about again nor counted as one of the last two.
    assert newest.with_name(newest.name + ".damaged").is_dir()
    assert _complaints(store)[1] == []
    _save(store, 2)
    assert (tmp_path / "step-000000000001").is_dir()


def test_when_all_are_damaged_nothing_starts_from_scratch(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        _flip_a_byte("state.json")(_save(store, step))
    for _attempt in range(2):  # also not at the second try
        with pytest.raises(CheckpointError, match="none of 2 checkpoints is intact") as err:
            store.load_newest(_silent)
        assert str(tmp_path) in str(err.value) and "move the directory away" in str(err.value)


def test_an_unfinished_one_is_not_seen_and_is_cleared(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, restart=2)
    _save(store, 1)
    left = tmp_path / "step-000000000009.tmp-1"
    left.mkdir()
    found = store.load_newest(_silent)
    assert found is not None and found.progress.step == 1
    store.clear_left_overs()
    assert not left.exists() and (tmp_path / "step-000000000001").exists()


class _Pickled:
    """Something that only unpickling could bring back."""


def test_a_state_that_cannot_be_loaded_safely_is_refused_by_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    objects = {"fine": {"w": torch.ones(1)}, "strange": {"thing": _Pickled()}}
    with pytest.raises(CheckpointError, match="'strange'"):
        store.save(Progress(step=1), lambda: objects, {}, {"now": capture_rng()})
    assert list(tmp_path.iterdir()) == []


def test_user_state_that_is_not_json_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="state\\(\\) holds"):
        store.save(Progress(step=1), dict, {"x": object()}, {"now": capture_rng()})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def tiny_file_limit() -> Iterator[None]:
    """Writing more than 64 KiB to a file fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_no_room_keeps_the_previous_one_and_leaves_no_rest(
    tmp_path: Path, tiny_file_limit: None
) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    big = {"model": {"w": torch.zeros(100_000)}}
    with pytest.raises(CheckpointError, match="previous one is kept"):
        store.save(Progress(step=2), lambda: big, {}, {"now": capture_rng()})
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000000001"]
    found = store.load_newest(_silent)
    assert found is not None and found.progress.step == 1


def test_a_place_that_is_no_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="SYNERGY_CHECKPOINT_DIR"):
        _save(CheckpointStore(tmp_path / "file"), 1)


def _together(stores: list[CheckpointStore], step: int) -> list[Path | CheckpointError]:
    results: list[Path | CheckpointError] = [CheckpointError("did not run")] * len(stores)

    def run(index: int) -> None:
        try:
            results[index] = _save(stores[index], step)
        except CheckpointError as err:
            results[index] = err

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_all_ranks_are_in_one_checkpoint(tmp_path: Path) -> None:
    stores = [CheckpointStore(tmp_path, rank=rank, ranks=3, wait_s=30) for rank in range(3)]
    final = tmp_path / "step-000000000007"
    assert _together(stores, 7) == [final] * 3
    assert {p.name for p in final.glob("rank-*")} == {f"rank-0000{r}.pt" for r in range(3)}
    manifest = json.loads((final / "MANIFEST.json").read_text())
    assert len(manifest["files"]) == 5
    # A rank that was not there before has no state of its own, the others have.
    more = CheckpointStore(tmp_path, rank=3, ranks=4).load_newest(_silent)
    assert more is not None and more.rank_state is None


def test_a_missing_rank_fails_the_checkpoint_for_all(tmp_path: Path) -> None:
    stores = [CheckpointStore(tmp_path, rank=rank, ranks=3, wait_s=0.5) for rank in range(2)]
    results = _together(stores, 7)
    assert all(isinstance(result, CheckpointError) for result in results)
    assert "rank-00002" in str(results[0])
    assert list(tmp_path.iterdir()) == []


def test_a_failing_rank_fails_the_others_at_once(tmp_path: Path) -> None:
    stores = [CheckpointStore(tmp_path, rank=rank, ranks=2, wait_s=60) for rank in range(2)]
    outcome: list[object] = []
    first = threading.Thread(target=lambda: outcome.extend(_together(stores[:1], 3)))
    first.start()
    with pytest.raises(CheckpointError):
        stores[1].save(Progress(step=3), dict, {}, {"now": lambda: None})
    first.join(timeout=20)
    assert not first.is_alive()
    assert isinstance(outcome[0], CheckpointError) and "rank-00001" in str(outcome[0])


def test_programs_without_torch_write_json(tmp_path: Path) -> None:
    program = """
import random, sys
from pathlib import Path
from slurm_synergy.jobside.checkpoint import CheckpointStore, Progress
from slurm_synergy.jobside.rng import capture_rng, restore_rng
store = CheckpointStore(Path(sys.argv[1]))
path = store.save(Progress(step=3), lambda: {"counter": {"n": 3}}, {}, {"now": capture_rng()})
expected = random.random()
found = store.load_newest(print)
restore_rng(found.rank_state["now"])
assert random.random() == expected and found.objects == {"counter": {"n": 3}}
assert not {"torch", "numpy"} & set(sys.modules)
print(sorted(p.name for p in path.iterdir()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    names = ["MANIFEST.json", "objects.json", "rank-00000.json", "state.json"]
    assert done.stdout.strip() == str(names)
    shutil.rmtree(tmp_path)
