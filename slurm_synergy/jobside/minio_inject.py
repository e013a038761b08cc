"""Puts the job's data cache under the training loader of a program that does not know of it.

* torchvision's ``DatasetFolder`` and ``ImageFolder`` with one of its own loaders: the image files
  are kept as they are, and decoded from memory in the same way.
* any map-style data set with a true attribute ``synergy_deterministic``, by which its author says
  that ``dataset[i]`` is always the same: its items are kept.

Only under a launcher, whose lease tells how much memory there is. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import IO, Any, cast

from slurm_synergy.errors import CacheError, LeaseError
from slurm_synergy.jobside.environment import switched_on
from slurm_synergy.jobside.minio import CachedDataset, CachedFile, read_cached
from slurm_synergy.jobside.minio_job import batch_is_complete, job_cache, open_early
from slurm_synergy.jobside.session import say

__all__ = ["CachedLoader", "CollateAndTakeIn", "cached_for", "has_budget"]

_DECLARED = "synergy_deterministic"
_FOLDER = "torchvision.datasets.folder"
_LONGEST_CHAIN = 8


class CachedLoader:
    """Loads a file as ``load`` does, by way of the cache; ``items`` files belong together."""

    def __init__(self, load: Callable[[str], Any], items: int) -> None:
        self.load, self._items = load, items

    def __call__(self, path: str) -> Any:
        view = read_cached(job_cache(), path, self._items)
        if view is None:
            return self.load(path)
        return self.decode(view, path)

    def decode(self, view: memoryview, path: str) -> Any:
        """An RGB image, as torchvision's loader through PIL makes it."""
        from PIL import Image

        file = cast("IO[bytes]", CachedFile(view, path))
        return Image.open(file).convert("RGB")


class CollateAndTakeIn:
    """Collates as ``collate`` does, when the cache has taken in what was read for the batch."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, batch: Any) -> Any:
        batch_is_complete()
        return self._collate(batch)


def has_budget(lease_mem_mib: int) -> bool:
    """Somebody said how much memory there is for a cache, and nobody switched it off."""
    on = True
    with contextlib.suppress(LeaseError):  # which the cache tells when it is opened
        on = switched_on(os.environ, "SYNERGY_CACHE", unset=True)
    return on and bool(lease_mem_mib or os.environ.get("SYNERGY_CACHE_MIB"))


def cached_for(dataset: Any, *, only_collated: bool = False) -> Any:
    """The data set to fetch from in place of ``dataset``: itself where it is not to be cached.

    ``only_collated``: nobody sees the items but PyTorch's own ``default_collate``, which copies.
    """
    found = _cached(dataset)
    if only_collated and isinstance(found, CachedDataset):
        return found.for_collation()
    return found


def _cached(dataset: Any) -> Any:
    if isinstance(dataset, CachedDataset):
        return dataset
    if getattr(dataset, _DECLARED, False):
        try:
            return CachedDataset(dataset)
        except CacheError as err:
            say(f"the data set is used without a cache: {err}")
            return dataset
    inner = dataset
    for _ in range(_LONGEST_CHAIN):  # Subset and the like have their data set in ``dataset``
        if _loads_images(inner):
            inner.loader = CachedLoader(inner.loader, len(inner.samples))
            open_early()
            break
        inner = getattr(inner, "dataset", None)
        if inner is None or isinstance(inner, CachedDataset):
            break
    return dataset


def _loads_images(dataset: Any) -> bool:
    folder = sys.modules.get(_FOLDER)
    if folder is None or not isinstance(dataset, folder.DatasetFolder):
        return False
    loader = dataset.__dict__.get("loader")
    if loader is folder.pil_loader:
        return True
    # The default goes by a setting of torchvision; its other backends read from a path alone.
    backend = getattr(sys.modules.get("torchvision"), "get_image_backend", lambda: "PIL")
    return loader is folder.default_loader and backend() == "PIL"
