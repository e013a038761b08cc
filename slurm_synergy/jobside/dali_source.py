"""Files for DALI's pipelines that come through the job's data cache.

In place of a file reader, a pipeline takes an external source::

    source = synergy.CachedFiles(paths, labels, batch_size=256, shuffle=True, seed=7)
    jpegs, labels = source.nodes()

The order is a permutation computed from (seed, epoch), so DALI may ask for any batch of any epoch:
its checkpoints and Python workers (``parallel=True``) need nothing more. Each batch is read through
the cache of the node, and copied once, by DALI.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurm_synergy.errors import ConfigError
from slurm_synergy.jobside.data_told import tell_files
from slurm_synergy.jobside.minio import read_cached
from slurm_synergy.jobside.minio_job import job_cache, open_early
from slurm_synergy.jobside.sampler import derive_seed

__all__ = ["CachedFiles"]

_ENDS = ("partial", "fill", "drop")


class CachedFiles:
    """The batches of a shard of files, as (contents, labels), for ``fn.external_source``.

    ``files`` are paths, with one integer of ``labels`` each (their position where left out).
    ``shuffle`` gives each epoch an order of its own, the same for all shards, by ``seed``. Shards
    are dealt out in turn and differ by one sample at most. ``last_batch``: "partial" (smaller),
    "fill" (padded with the shard's last sample, all shards to the same number of batches), "drop"
    (as many full batches as the smallest shard has). Raises ConfigError for impossible values.

    Iterators need neither ``size`` nor ``reader_name``: an epoch ends where this does.
    """

    def __init__(
        self,
        files: Sequence[str | os.PathLike[str]],
        labels: Sequence[int] | None = None,
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        shard_id: int = 0,
        num_shards: int = 1,
        last_batch: str = "partial",
    ) -> None:
        if not files or batch_size < 1 or not 0 <= shard_id < num_shards:
            raise ConfigError(
                f"CachedFiles: {len(files)} files, batches of {batch_size}, shard {shard_id} of"
                f" {num_shards}: there must be files, and shards count from 0"
            )
        if labels is not None and len(labels) != len(files):
            raise ConfigError(f"CachedFiles: {len(labels)} labels for {len(files)} files")
        if last_batch not in _ENDS:
            raise ConfigError(
                "CachedFiles: no such end of an epoch",
                key="last_batch", value=last_batch, remedy=f"one of {', '.join(_ENDS)}",
            )  # fmt: skip
        self.files = [os.fspath(path) for path in files]
        self.labels = list(range(len(files)) if labels is None else labels)
        self.batch_size, self._shuffle, self._seed = batch_size, shuffle, seed
        self._shard, self._shards, self._last_batch = shard_id, num_shards, last_batch
        self._order: tuple[int, Any] = (-1, None)
        open_early()
        if shuffle:  # what is trained on, not what is validated with
            tell_files(self.files)

    @classmethod
    def from_folders(cls, root: str | os.PathLike[str], **options: Any) -> CachedFiles:
        """The files in the folders of ``root``; labels number these in the order of their names,
        as DALI's ``file_root`` does. ``options`` are the keywords of the class."""
        folders = sorted(path for path in Path(root).iterdir() if path.is_dir())
        found = [
            (str(path), label)
            for label, folder in enumerate(folders)
            for path in sorted(folder.iterdir())
            if path.is_file()
        ]
        return cls([path for path, _ in found], [label for _, label in found], **options)

    def __len__(self) -> int:
        """Batches in an epoch of this shard."""
        full, rest = divmod(self._samples(), self.batch_size)
        if self._last_batch == "drop":
            return (len(self.files) // self._shards) // self.batch_size
        if self._last_batch == "fill":
            largest = math.ceil(len(self.files) / self._shards)
            return math.ceil(largest / self.batch_size)
        return full + bool(rest)

    def _samples(self) -> int:
        return len(range(self._shard, len(self.files), self._shards))

    def __call__(self, batch: Any) -> tuple[list[Any], list[Any]]:
        """Contents and labels of a batch, told by DALI's BatchInfo. Raises StopIteration."""
        if batch.iteration >= len(self):
            raise StopIteration
        first = batch.iteration * self.batch_size
        mine = self._of_epoch(batch.epoch_idx)
        chosen = list(mine[first : first + self.batch_size])
        if self._last_batch == "fill":
            chosen += [mine[-1]] * (self.batch_size - len(chosen))
        return self._contents(chosen), self._labels(chosen)

    def _of_epoch(self, epoch: int) -> Any:
        """The numbers of this shard's files in their order."""
        import numpy as np

        if not self._shuffle:
            epoch = 0
        if self._order[0] != epoch:
            order = np.arange(len(self.files))
            if self._shuffle:
                np.random.default_rng(derive_seed(self._seed, epoch)).shuffle(order)
            self._order = epoch, order[self._shard :: self._shards]
        return self._order[1]

    def _contents(self, chosen: list[int]) -> list[Any]:
        import numpy as np

        cache, found = job_cache(), []
        for number in chosen:
            path = self.files[number]
            view = read_cached(cache, path, len(self.files))
            content = Path(path).read_bytes() if view is None else view
            found.append(np.frombuffer(content, dtype=np.uint8))
        return found

    def _labels(self, chosen: list[int]) -> list[Any]:
        import numpy as np

        return [np.array([self.labels[number]], dtype=np.int64) for number in chosen]

    def __getstate__(self) -> dict[str, Any]:
        # A Python worker of DALI computes the order itself.
        return {**self.__dict__, "_order": (-1, None)}

    def nodes(self, *, parallel: bool = False) -> tuple[Any, Any]:
        """(contents, labels) as nodes, inside a definition of a pipeline.

        ``parallel`` reads in DALI's Python workers (``py_num_workers``).
        """
        import nvidia.dali.fn as fn
        import nvidia.dali.types as types

        outputs = fn.external_source(
            source=self, num_outputs=2, batch=True, batch_info=True, parallel=parallel,
            dtype=[types.DALIDataType.UINT8, types.DALIDataType.INT64], ndim=[1, 1],
        )  # fmt: skip
        return outputs[0], outputs[1]
