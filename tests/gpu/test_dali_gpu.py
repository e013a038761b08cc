"""DALI with mixed decoding on a GPU: stopped and continued, rebuilt, its threads in the lease.

Each case is one program in an interpreter of its own, since a process that used a GPU cannot be
put back. The programs compare themselves with an uninterrupted run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import os, sys
from pathlib import Path
import torch
import nvidia.dali.fn as fn
import nvidia.dali.types as types
from nvidia.dali import pipeline_def
from nvidia.dali.plugin.pytorch import DALIClassificationIterator, LastBatchPolicy
import slurm_synergy.jobside as synergy
from slurm_synergy.jobside import dali_loader, session
from slurm_synergy.jobside.board import Board, LeaseView

folder, save = Path(sys.argv[1]), sys.argv[2] == "save"
session._LOOK_EVERY_S = session._REPORT_EVERY_S = 0.0

@pipeline_def(num_threads=2, device_id=0, batch_size=4, seed=11, enable_checkpointing=save)
def pipe():
    jpegs, labels = fn.readers.file(
        file_root=str(folder / "images"), name="reader", random_shuffle=True, pad_last_batch=True)
    images = fn.decoders.image_random_crop(jpegs, device="mixed", output_type=types.RGB)
    images = fn.resize(images, size=(32, 32))
    flip = fn.random.coin_flip(probability=0.5)
    images = fn.crop_mirror_normalize(images, mirror=flip, mean=[128.0], std=[64.0])
    return images, labels.gpu()

def loader():
    return DALIClassificationIterator(
        pipe(), reader_name="reader", last_batch_policy=LastBatchPolicy.PARTIAL, auto_reset=True)

def start(number, cores=2):
    session._session, dali_loader._primary = None, lambda: None
    if number < 0:
        os.environ.pop("SYNERGY_BOARD", None), os.environ.pop("SYNERGY_CHECKPOINT_DIR", None)
        return None
    board = Board.create(folder / f"board{number}", rank=0, ranks=1)
    board.write_lease(LeaseView(core_count=cores))
    os.environ["SYNERGY_BOARD"] = str(board.path)
    os.environ["SYNERGY_CHECKPOINT_DIR"] = str(folder / "checkpoints")
    return board

def run(batches, found, act=lambda count: None):
    for epoch in synergy.epochs(3):
        for (part,) in batches:
            assert part["data"].is_cuda
            content = part["data"].double().sum().item()
            found.append((epoch, part["label"].ravel().tolist(), content))
            act(len(found))
    return found

start(-1)
expected = run(loader(), [])
assert len(expected) == 9
found = []
for number, cut in enumerate((2, 5, 7, None)):
    board = start(number)
    batches = loader()
    synergy.register()
    assert synergy.resume() is (number > 0)
    try:
        end = LeaseView(core_count=2, stop=True)
        run(batches, found, lambda n: n == cut and board.write_lease(end))
    except synergy.LeaseEnded:
        assert len(found) == cut
assert found == expected, (found, expected)
print("continued")
if save:
    board = start(9, cores=2)
    os.environ.pop("SYNERGY_CHECKPOINT_DIR")
    session._session = None
    batches, threads = loader(), []
    def act(count):
        threads.append(batches._pipes[0].num_threads)
        if count == 4:
            board.write_lease(LeaseView(core_count=6))
    assert run(batches, [], act) == expected
    assert threads == [2] * 4 + [6] * 5, threads
    print("rebuilt")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten JPEG images in two classes."""
    image = pytest.importorskip("PIL.Image", reason="Pillow, which makes the images, is missing")
    for number in range(10):
        where = tmp_path / "images" / f"class-{number % 2}"
        where.mkdir(parents=True, exist_ok=True)
        made = image.effect_noise((64, 48), 60 + number).convert("RGB")
        made.save(where / f"{number}.jpg", quality=95)
    return tmp_path


@pytest.mark.parametrize("kind", ["save", "position"])
def test_mixed_decoding_continues_exactly(gpu: int, folder: Path, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), kind],
        capture_output=True, text=True, timeout=280, check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": str(gpu)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == (["continued", "rebuilt"] if kind == "save" else ["continued"])
