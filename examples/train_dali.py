#!/usr/bin/env python3
"""Trains a small classifier on images that DALI decodes; may be stopped and resumed anywhere.

The images are made at the first start (noise whose strength is the class), so nothing is
downloaded. Runs on the CPU, or on a GPU with ``--device 0``; by hand, or in a job with
``synergy-srun python examples/train_dali.py``. Needs the extra ``dali``, and Pillow for the images.

``--cached`` reads the files through the job's data cache instead of with DALI's own reader.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import nvidia.dali.fn as fn
import nvidia.dali.types as types
import torch
from nvidia.dali import pipeline_def
from nvidia.dali.plugin.pytorch import DALIClassificationIterator, LastBatchPolicy

import slurm_synergy.jobside as synergy

CLASSES = 4
SIDE = 32


def make_images(root: Path, per_class: int) -> None:
    """A folder of JPEG files for each class."""
    from PIL import Image

    for label in range(CLASSES):
        folder = root / f"class-{label}"
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            path = folder / f"{number:04}.jpg"
            if not path.exists():
                noise = Image.effect_noise((48, 48), 20.0 + 40.0 * label)
                noise.convert("RGB").save(path, quality=90)


@pipeline_def(enable_checkpointing=True)  # type: ignore[untyped-decorator]
def images(root: Path, cached: synergy.CachedFiles | None, gpu: bool) -> Any:
    """Decoded, cropped, mirrored, normalised images and their labels."""
    if cached is None:
        jpegs, labels = fn.readers.file(
            file_root=str(root), name="reader", random_shuffle=True, pad_last_batch=True
        )
    else:
        jpegs, labels = cached.nodes()
    decoded = fn.decoders.image_random_crop(
        jpegs, device="mixed" if gpu else "cpu", output_type=types.RGB
    )
    resized = fn.resize(decoded, size=(SIDE, SIDE))
    mirror = fn.random.coin_flip(probability=0.5)
    normal = fn.crop_mirror_normalize(
        resized, mirror=mirror, mean=[128.0], std=[64.0], dtype=types.FLOAT
    )
    return normal, labels.gpu() if gpu else labels


def make_loader(given: argparse.Namespace) -> Any:
    """The training data: an ordinary iterator of DALI's PyTorch plugin."""
    cached = None
    if given.cached:
        cached = synergy.CachedFiles.from_folders(
            given.data, batch_size=given.batch_size, shuffle=True, seed=1
        )
    pipe = images(
        given.data,
        cached,
        given.device is not None,
        batch_size=given.batch_size,
        num_threads=4,  # where a lease says nothing
        device_id=given.device,
        seed=1,
    )
    if cached is not None:
        return DALIClassificationIterator(pipe, auto_reset=True)
    return DALIClassificationIterator(
        pipe,
        reader_name="reader",
        last_batch_policy=LastBatchPolicy.PARTIAL,
        auto_reset=True,
    )


def main() -> int:
    """Train, and print one line an epoch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("dali-images"))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--per-class", type=int, default=100, help="images to make")
    parser.add_argument("--device", type=int, help="number of a GPU (none: the CPU)")
    parser.add_argument("--cached", action="store_true", help="read through the data cache")
    given = parser.parse_args()
    make_images(given.data, given.per_class)
    torch.manual_seed(1)
    where = torch.device("cpu" if given.device is None else f"cuda:{given.device}")
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, stride=2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 15 * 15, CLASSES),
    ).to(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = make_loader(given)
    synergy.register(model=model, optimizer=optimizer)
    synergy.resume()
    for epoch in synergy.epochs(given.epochs):
        seen, loss_sum = 0, 0.0
        for (part,) in loader:
            labels = part["label"].flatten().long()
            loss = torch.nn.functional.cross_entropy(model(part["data"]), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seen, loss_sum = seen + len(labels), loss_sum + float(loss.detach()) * len(labels)
        print(f"epoch {epoch}: {seen} images, loss {loss_sum / max(seen, 1):.4f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
