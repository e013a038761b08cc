"""What memory brings a job that was measured, from what its launchers read of its data: pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from slurm_synergy.controller.probes import DataRead, Measured
from slurm_synergy.profiler.filling import DataFacts

__all__ = ["data_facts", "data_in_words", "data_of"]

# What processes may come to need besides what they were seen to have, at least.
_MEM_MARGIN, _LEAST_MARGIN_MIB = 1.25, 1024
# What the data cache leaves free of a lease's memory, besides what the processes have.
_CACHE_LEAVES = 0.1


def data_of(answers: Sequence[Measured]) -> DataRead | None:
    """What is known of a job's data from the answers of all its tasks; None where nothing is.

    All nodes read at once, and a job is as fast as its slowest node.
    """
    told = [one.data for one in answers if one.data is not None]
    if not told:
        return None
    first = next((one for one in told if one.dataset_mib), told[0])
    return replace(
        first,
        storage_mib_s=min(one.storage_mib_s for one in told),
        in_memory=all(one.in_memory for one in told),
        cached=all(one.cached for one in told),
    )


def data_facts(
    data: DataRead | None, *, own_mem_mib: float, share_mib: int, least_mib: int
) -> DataFacts:
    """What the memory side of a profile is made from.

    ``own_mem_mib`` are what the job's processes had on a node where its share is ``share_mib``.
    Where what memory brings cannot be known, or no cache would use it, a job keeps ``least_mib``,
    the least share that goes with its GPUs on any node.
    """
    # It has run within its share: a margin beyond it would only keep others out.
    own_mib = min(max(own_mem_mib * _MEM_MARGIN, own_mem_mib + _LEAST_MARGIN_MIB), share_mib)
    if data is None or not _says_all(data) or not own_mem_mib:
        return DataFacts(process_mem_mib=max(round(own_mib), least_mib))
    # The cache keeps to a part of the lease. Up to the share the model then promises no more items
    # than there will be, and where all fit it is exact.
    all_mib = (data.dataset_mib + own_mib) / (1 - _CACHE_LEAVES)
    left_mib = _CACHE_LEAVES * min(all_mib, share_mib)
    return DataFacts(
        dataset_mib=data.dataset_mib,
        samples_per_epoch=data.samples,
        storage_mib_s=math.inf if data.in_memory else data.storage_mib_s,
        process_mem_mib=min(math.ceil(own_mib + left_mib), share_mib),
    )


def _says_all(data: DataRead) -> bool:
    return data.cached and data.dataset_mib > 0 and (data.in_memory or data.storage_mib_s > 0)


def data_in_words(data: DataRead | None, told: str) -> str:
    """What the memory side of a profile rests on, or why it has none."""
    if data is None:
        return f"memory is not planned by what it brings: {told}"
    known = []
    if data.dataset_mib:
        known.append(f"data set {data.dataset_mib:.0f} MiB in {data.samples} items")
    if data.storage_mib_s:
        known.append(f"storage {data.storage_mib_s:.0f} MiB/s")
    if data.how:
        known.append(f"({data.how})")
    text = " ".join(known)
    if _says_all(data):
        return text
    if not data.dataset_mib:
        why = "the program does not tell its data set"
    elif not data.cached:
        why = "the job keeps no data cache"
    else:
        why = "the bandwidth of the storage is not known"
    return f"memory is not planned by what it brings: {why}; {text}".rstrip("; ")
