"""A DALI training on several ranks as a user writes it; run by the tests, not by pytest.

usage: dali_ranks_program.py OUT EPOCHS STEP_S HOW FILE...
Each rank reads its shard of the files, and appends one line per step to OUT. HOW is "checkpoints"
for pipelines with DALI's own, "position" for some without.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import nvidia.dali.fn as fn
import torch
import torch.distributed as dist
from nvidia.dali import pipeline_def
from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

import slurm_synergy.jobside as synergy


@pipeline_def
def numbers(files: list[str], rank: int, ranks: int) -> Any:
    """The number of a file, from this rank's shard of them."""
    _content, label = fn.readers.file(
        files=files,
        labels=list(range(len(files))),
        name="reader",
        random_shuffle=True,
        initial_fill=8,
        num_shards=ranks,
        shard_id=rank,
    )
    return label


def main() -> None:
    """Train for a while, in step with the other ranks."""
    out, epochs, step_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    how, files = sys.argv[4], sys.argv[5:]
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pipe = numbers(
        files, rank, ranks, batch_size=4, num_threads=1, device_id=None, seed=3,
        enable_checkpointing=how == "checkpoints",
    )  # fmt: skip
    loader = DALIGenericIterator(
        pipe, ["label"], reader_name="reader", auto_reset=True,
        last_batch_policy=LastBatchPolicy.PARTIAL,
    )  # fmt: skip
    synergy.register()
    synergy.resume()
    for epoch in synergy.epochs(epochs):
        for (part,) in loader:
            labels = part["label"].ravel().tolist()
            dist.all_reduce(torch.tensor(float(len(labels))))  # as a step of training does
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"epoch": epoch, "samples": labels}) + "\n")
            time.sleep(step_s)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
