"""The order of samples of an epoch, and each rank's part of it.

The order is a permutation computed from (seed, epoch) alone; a position in it is the number of
samples that all ranks together have seen. Neither depends on the number of ranks or of loader
workers, so a job may continue an epoch with other counts and still see each sample once. The
permutation sorts the indices by a 64-bit bijective hash (the finalizer of SplitMix64), which
gives the same order on every machine and with every release of PyTorch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from slurm_synergy.errors import ModelError

if TYPE_CHECKING:
    import torch

__all__ = ["EpochSampler", "StepSampler", "derive_seed", "epoch_order", "passes_in", "steps_left"]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_CHUNK_STEPS = 64


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from any integers; well mixed, the same everywhere."""
    text = ":".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _signed(value: int) -> int:
    """A 64-bit pattern as the signed integer that torch.int64 wants."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def epoch_order(samples: int, *, seed: int, epoch: int, shuffle: bool = True) -> torch.Tensor:
    """The order of an epoch as int64 indices, shape ``(samples,)``; 16 bytes a sample to make."""
    import torch

    keys = torch.arange(samples, dtype=torch.int64)
    if not shuffle:
        return keys
    keys.mul_(_signed(_GOLDEN)).add_(_signed(derive_seed(seed, epoch)))
    # ``>>`` is arithmetic on int64: the mask makes it the logical shift that the hash needs.
    keys.bitwise_xor_((keys >> 30) & ((1 << 34) - 1)).mul_(_signed(_MIX_1))
    keys.bitwise_xor_((keys >> 27) & ((1 << 37) - 1)).mul_(_signed(_MIX_2))
    keys.bitwise_xor_((keys >> 31) & ((1 << 33) - 1))
    return torch.argsort(keys)


def steps_left(samples: int, consumed: int, *, per_step: int, drop_last: bool) -> int:
    """Steps until the end of an epoch of which ``consumed`` samples have been seen."""
    left = max(samples - consumed, 0)
    return left // per_step if drop_last else -(-left // per_step)


def passes_in(samples: int, *, ranks: int, local: int, passes: int, drop_last: bool) -> int:
    """Passes of an epoch whose steps take ``passes`` of ``local`` samples on each rank."""
    whole, rest = divmod(samples, ranks * local * passes)
    share = 0 if drop_last else -(-rest // ranks)
    last = -(-share // local)
    return whole * passes + last


class EpochSampler:
    """One rank's batches, as lists of indices, from a position to the end of the epoch.

    ``batch_size`` is per rank. A step takes the next ``batch_size * ranks`` samples, dealt out to
    the ranks in turn. The last, smaller step is dealt out the same way, so every rank has a
    sample as long as there are as many samples as ranks; when there are fewer, the ranks
    without one repeat a sample of that step, because collectives need all ranks to take the
    same number of steps. With ``drop_last`` that step is left out. Raises ModelError for
    impossible counts.
    """

    def __init__(
        self,
        samples: int,
        *,
        batch_size: int,
        seed: int,
        epoch: int = 0,
        consumed: int = 0,
        rank: int = 0,
        ranks: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        if samples < 0 or batch_size < 1 or not 0 <= rank < ranks:
            raise ModelError(
                f"no such share: {samples} samples, batch size {batch_size}, rank {rank} of {ranks}"
            )
        if not 0 <= consumed <= samples:
            raise ModelError(
                f"position {consumed} lies outside the data set of {samples} samples;"
                " did the data set change since the checkpoint?"
            )
        self.samples, self.consumed, self.drop_last = samples, consumed, drop_last
        self.rank, self.ranks, self.per_step = rank, ranks, batch_size * ranks
        self._order = epoch_order(samples, seed=seed, epoch=epoch, shuffle=shuffle)

    def steps_left(self, consumed: int) -> int:
        """Steps from that position to the end."""
        return steps_left(self.samples, consumed, per_step=self.per_step, drop_last=self.drop_last)

    def __len__(self) -> int:
        return self.steps_left(self.consumed)

    def __iter__(self) -> Iterator[list[int]]:
        return chain.from_iterable(self._chunks())

    def _chunks(self) -> Iterator[list[list[int]]]:
        """Some steps at a time: one by one, they would cost ten times as much."""
        per_step, rank, ranks = self.per_step, self.rank, self.ranks
        end = min(self.consumed + len(self) * per_step, self.samples)
        for start in range(self.consumed, end, _CHUNK_STEPS * per_step):
            indices = self._order[start : min(start + _CHUNK_STEPS * per_step, end)].tolist()
            yield [
                indices[at + rank % min(per_step, len(indices) - at) : at + per_step : ranks]
                for at in range(0, len(indices), per_step)
            ]


class StepSampler(EpochSampler):
    """One rank's passes of steps that accumulate gradients.

    Each list of indices is one pass; ``batch_size`` is that of a pass, and a step takes ``passes``
    of them. The last, smaller step takes as few as its samples need. All ranks take as many passes
    in a step: a rank that has fewer samples than these repeats one of its own.
    """

    def __init__(
        self,
        samples: int,
        *,
        batch_size: int,
        passes: int,
        seed: int,
        epoch: int = 0,
        consumed: int = 0,
        rank: int = 0,
        ranks: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            samples,
            batch_size=batch_size * passes,
            seed=seed,
            epoch=epoch,
            consumed=consumed,
            rank=rank,
            ranks=ranks,
            shuffle=shuffle,
            drop_last=drop_last,
        )
        self._local = batch_size

    def step_at(self, consumed: int) -> tuple[int, int]:
        """(samples of all ranks, passes) of the step from that position on; (0, 0) at the end."""
        if not self.steps_left(consumed):
            return 0, 0
        samples = min(self.per_step, self.samples - consumed)
        share = -(-samples // self.ranks)
        return samples, -(-share // self._local)

    def __iter__(self) -> Iterator[list[int]]:
        consumed = self.consumed
        for own in super().__iter__():
            samples, passes = self.step_at(consumed)
            consumed += samples
            size = len(own)
            for number in range(passes):
                part = own[number * size // passes : (number + 1) * size // passes]
                yield part or own[:1]
