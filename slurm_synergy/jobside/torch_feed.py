"""What a training loader fetches, and in which order.

The pieces that :mod:`slurm_synergy.jobside.torch_loader` puts together. Nothing here imports torch:
all of it runs in programs that did so themselves.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slurm_synergy.errors import ConfigError
from slurm_synergy.jobside.sampler import EpochSampler, StepSampler, derive_seed
from slurm_synergy.jobside.session import Session

if TYPE_CHECKING:
    from slurm_synergy.core.scaling import BatchSize

__all__ = [
    "SeededBatch",
    "cached_data",
    "choose_seed",
    "data_module",
    "has_plain_order",
    "in_worker",
    "own_sampler",
    "ranks_of_data",
    "seeded",
]

_CACHED = "_synergy_cached"


def data_module() -> Any:
    """The ``torch.utils.data`` that the program imported."""
    return sys.modules["torch.utils.data"]


def in_worker() -> bool:
    """This process only fetches for a loader; it takes no part in the lease."""
    return data_module().get_worker_info() is not None


# -- order ---------------------------------------------------------------------------------------


def has_plain_order(loader: Any) -> bool:
    """The sampler is one of PyTorch's whose order ours can stand for."""
    data = data_module()
    if isinstance(loader.dataset, data.IterableDataset):
        return False
    if loader.batch_size is not None and type(loader.batch_sampler) is not data.BatchSampler:
        return False
    if loader.batch_size is None and loader.batch_sampler is not None:
        return False
    sampler = loader.sampler
    if type(sampler) is data.RandomSampler:
        whole = sampler.num_samples == len(sampler.data_source)
        return whole and not sampler.replacement
    return type(sampler) in (data.SequentialSampler, data.distributed.DistributedSampler)


def ranks_of_data(loader: Any, session: Session) -> tuple[int, int]:
    """(rank, ranks) that share the data: the sampler knows best (model-parallel groups)."""
    sampler = loader.sampler
    if isinstance(sampler, data_module().distributed.DistributedSampler):
        return sampler.rank, sampler.num_replicas
    return session.identity.rank, session.identity.world


def choose_seed(loader: Any, session: Session) -> int:
    """The seed of the order; ranks must agree on it without talking to each other.

    SYNERGY_SEED, else that of a DistributedSampler or of the user's generator; else, for one rank,
    the one given to ``torch.manual_seed``, and 0 for several, which may be seeded differently.
    """
    asked = os.environ.get("SYNERGY_SEED")
    if asked:
        try:
            return abs(int(asked))
        except ValueError:
            raise ConfigError(
                "not an integer", key="SYNERGY_SEED", value=asked, remedy="give a whole number"
            ) from None
    sampler = loader.sampler
    if isinstance(sampler, data_module().distributed.DistributedSampler):
        return int(sampler.seed)
    generator = getattr(sampler, "generator", None)
    if generator is not None:
        return int(generator.initial_seed())
    if session.identity.world > 1:
        return 0
    return int(sys.modules["torch"].initial_seed())


def own_sampler(loader: Any, session: Session, batch: BatchSize | None = None) -> EpochSampler:
    """The samples of this rank from the session's position on; ``batch`` where it is adaptive."""
    rank, ranks = ranks_of_data(loader, session)
    sampler = loader.sampler
    sequential = type(sampler) is data_module().SequentialSampler
    place: dict[str, Any] = {
        "seed": session.seed,
        "epoch": session.epoch,
        "consumed": session.epoch_samples,
        "rank": rank,
        "ranks": ranks,
        "shuffle": not sequential and getattr(sampler, "shuffle", True),
        "drop_last": loader.drop_last,
    }
    samples = len(loader.dataset)
    if batch is None:
        return EpochSampler(samples, batch_size=loader.batch_size or 1, **place)
    return StepSampler(samples, batch_size=batch.local, passes=batch.accumulation + 1, **place)


class SeededBatch(list[int]):
    """Indices of a batch that seed the worker's generators when it begins to fetch them."""

    __slots__ = ("_seed",)

    def __init__(self, indices: list[int], seed: int) -> None:
        super().__init__(indices)
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        if in_worker():
            sys.modules["torch"].default_generator.manual_seed(self._seed)
            random.seed(self._seed)
            numpy_random = sys.modules.get("numpy.random")
            if numpy_random is not None:
                numpy_random.seed(self._seed & 0xFFFFFFFF)
        return super().__iter__()

    def __reduce__(self) -> Any:
        # list's own way would iterate, and so seed, in the process that sends the batch.
        return SeededBatch, (list(super().__iter__()), self._seed)


def seeded(batches: Iterator[Any], session: Session, first: int) -> Iterator[Any]:
    """Give each batch the seed of its place in the job's data; the ``first`` one's number."""
    seed, epoch, rank = session.seed, session.epoch, session.identity.rank
    for number, indices in enumerate(batches, first):
        if type(indices) is list:
            yield SeededBatch(indices, derive_seed(seed, epoch, number, rank))
        else:
            yield indices


# -- cache ---------------------------------------------------------------------------------------


def cached_data(loader: Any, session: Session) -> dict[str, Any]:
    """What the training loader fetches from, by way of the cache where that helps.

    As attributes of the loader that differ from the program's own.
    """
    dataset, board = loader.dataset, session.board
    if board is None or isinstance(dataset, data_module().IterableDataset):
        return {}
    from slurm_synergy.jobside.minio_inject import CollateAndTakeIn, cached_for, has_budget

    if not has_budget(board.read_lease().mem_mib):
        return {}
    known = loader.__dict__.get(_CACHED)
    if known is None or known.dataset is not dataset or len(known) != len(dataset):
        collate = data_module().default_collate
        copied = loader.batch_size is not None and loader.collate_fn is collate
        known = cached_for(dataset, only_collated=copied)
        if known is not dataset:
            loader.__dict__[_CACHED] = known
    return {"dataset": known, "collate_fn": CollateAndTakeIn(loader.collate_fn)}
