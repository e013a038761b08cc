"""A training loop whose loader and GPU are pretended, with a known truth. Run inside a job.

``emulated_loop.py GPU_RATE CORES:RATE,CORES:RATE,… BATCH [DATA]`` trains until it is ended. Its
loader makes samples at the rate that the truth gives for the cores of the lease, as read from the
board before each batch, two batches ahead; its GPU takes GPU_RATE. Both keep to a time table, so
that a busy machine makes single steps late but not the rate wrong. The files in the directory DATA
are said to be its data set, and one of them is kept in the job's data cache.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from slurm_synergy.core.model import PipelineModel
from slurm_synergy.core.pipeline import preprocess_rate
from slurm_synergy.jobside import cached_open, describe_data, iterate
from slurm_synergy.jobside.board import Board

AHEAD = 2


class TimeTable:
    """When batches are ready and when steps end, as if nothing else slowed them."""

    def __init__(self, pipeline: PipelineModel, gpu_rate: float, batch: int) -> None:
        self._pipeline, self._gpu_rate, self._batch = pipeline, gpu_rate, batch
        self._ready_s = self._end_s = time.monotonic()
        self._starts = [self._ready_s] * AHEAD

    def fetch(self, cores: int) -> None:
        """Sleep until the next batch is ready."""
        loads_s = self._batch / preprocess_rate(self._pipeline, cores)
        self._ready_s = max(self._ready_s, self._starts[-AHEAD]) + loads_s
        sleep_until(self._ready_s)

    def step(self) -> None:
        """Sleep until the step on the newest batch is done."""
        start_s = max(self._end_s, self._ready_s)
        self._starts = [*self._starts[1:], start_s]
        self._end_s = start_s + self._batch / self._gpu_rate
        sleep_until(self._end_s)


def sleep_until(moment_s: float) -> None:
    left_s = moment_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)


def main(argv: list[str]) -> int:
    gpu_rate, batch = float(argv[0]), int(argv[2])
    points = [point.split(":") for point in argv[1].split(",")]
    pipeline = PipelineModel(preprocess=tuple((int(c), float(rate)) for c, rate in points))
    board = Board.attach(Path(os.environ["SYNERGY_BOARD"]))
    if argv[3:]:
        files = sorted(Path(argv[3]).iterdir())
        describe_data(files)
        cached_open(files[0]).close()
    table = TimeTable(pipeline, gpu_rate, batch)

    def batches() -> Iterator[int]:
        told = 0
        while True:
            cores = board.read_lease().core_count
            if cores != told:
                told = cores
                print(f"cores {cores}", flush=True)
            table.fetch(cores)
            yield cores

    for _ in iterate(batches(), batch_size=batch):
        table.step()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
