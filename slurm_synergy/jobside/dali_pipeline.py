"""One DALI pipeline: its threads, its seed, and building it again at the same sample.

DALI restores a state only while a pipeline is built. A program keeps its pipeline object for
good, so the same object is built again: the graph that Python holds stays, the backend is
replaced. That needs attributes that DALI does not document; where a release lacks one of them
(:func:`can_rebuild`), pipelines keep the threads that they were built with, and a resumed one runs
over what was seen before. Nothing here imports DALI.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from slurm_synergy.jobside.session import Session

__all__ = [
    "can_rebuild",
    "captures_everything",
    "prepare",
    "rebuild",
    "shuffles",
    "threads_of",
]

_ASKED = "_synergy_asked_threads"
_SHARE = "_synergy_share"
_MASK = "DALI_AFFINITY_MASK"
_SHUFFLING = ("random_shuffle", "shuffle_after_epoch")
# What a pipeline begins with; all of these exist in the releases that are tested.
_AS_NEW: dict[str, Any] = {
    "_pipe": None,
    "_backend_prepared": False,
    "_built": False,
    "_first_iter": True,
    "_last_iter": False,
    "_epoch_idx": 0,
    "_consumer_iter": 0,
    "_batches_to_consume": 0,
    "_is_restored_from_checkpoint": False,
    "_iterator_data": None,
}
# In some releases only.
_AS_NEW_TOO: dict[str, Any] = {"_consumer_epoch_idx": 0, "_api_type": None}
_READ = ("_checkpoint", "_deserialized", "_enable_checkpointing", "_num_threads", "_ops", "_seed")


# -- before it is built ------------------------------------------------------------------------


def prepare(pipe: Any, session: Session, share: int = 0) -> None:
    """Give a pipeline that is to be built the lease's threads, and a seed that can be saved.

    ``share`` pipelines of one iterator have the threads together (0: as before, else alone).
    """
    fields = pipe.__dict__
    if share:
        fields[_SHARE] = share
    if fields.get("_built") or fields.get("_backend_prepared") or fields.get("_deserialized"):
        return
    fields.setdefault(_ASKED, fields["_num_threads"])
    fields["_num_threads"] = threads_of(pipe, session)
    if fields.get("_seed") is None:
        # As DALI would; but only a seed that is known can be used again.
        fields["_seed"] = int.from_bytes(os.urandom(4), "little") >> 1
    _near_the_lease(pipe, session)


def threads_of(pipe: Any, session: Session) -> int:
    """CPU threads that the lease gives this pipeline; the user's number where it does not say."""
    fields = pipe.__dict__
    asked: int = fields.get(_ASKED, fields["_num_threads"])
    if os.environ.get("SYNERGY_WORKERS") == "keep" or not asked or asked < 1:
        return asked
    if session.board is not None:
        session.lease = session.board.read_lease()
    cores = session.lease.core_count or int(os.environ.get("SYNERGY_LEASE_CPUS") or 0)
    if not cores:
        return asked
    share: int = fields.get(_SHARE, 1)
    return max(cores // session.identity.local_ranks // share, 1)


def _near_the_lease(pipe: Any, session: Session) -> None:
    """With ``set_affinity`` DALI asks the driver for CPUs, whatever this job was granted."""
    cores = session.lease.cores
    ours = os.environ.get("SYNERGY_DALI_AFFINITY") == os.environ.get(_MASK)
    if not pipe.__dict__.get("_set_affinity") or not cores or not (ours or _MASK not in os.environ):
        return
    threads = pipe.__dict__["_num_threads"]
    mask = ",".join(str(cores[number % len(cores)]) for number in range(threads))
    os.environ[_MASK] = os.environ["SYNERGY_DALI_AFFINITY"] = mask


# -- what it is ---------------------------------------------------------------------------------


def _operators(pipe: Any) -> Iterable[Any]:
    return pipe.__dict__.get("_ops") or ()


def shuffles(pipe: Any) -> bool:
    """One of its readers shuffles, as those for training do. It must have been built."""
    for instance in _operators(pipe):
        operator = getattr(instance, "_op", instance)
        for name in ("_init_args", "_call_args"):
            given = getattr(operator, name, None) or {}
            if any(given.get(word) is True for word in _SHUFFLING):
                return True
    return False


def captures_everything(pipe: Any) -> bool:
    """DALI's checkpoints of this pipeline hold the position of all its sources."""
    if not pipe.__dict__.get("_enable_checkpointing"):
        return False
    return _sources_can_be_asked_again(pipe)


def _sources_can_be_asked_again(pipe: Any) -> bool:
    """All external sources answer for any number: DALI calls them with what they are to give."""
    groups = pipe.__dict__.get("_input_callbacks") or ()
    # Without a callback the program pushes its data in itself.
    fed = any(
        "ExternalSource" in type(getattr(instance, "_op", instance)).__name__
        and getattr(instance, "_callback", None) is None
        for instance in _operators(pipe)
    )
    known = all(
        getattr(group.source_desc.kind, "name", "") == "CALLABLE" and group.source_desc.has_inputs
        for group in groups
    )
    return known and not fed


def can_rebuild(pipe: Any) -> bool:
    """It can be built anew inside the same object, at its beginning or at a checkpoint."""
    fields = pipe.__dict__
    if not (_AS_NEW.keys() | set(_READ)) <= fields.keys() or fields["_deserialized"]:
        return False
    if not _sources_can_be_asked_again(pipe):
        return False
    pool = fields.get("_py_pool")
    # Forking a process that uses a GPU is not allowed; workers can then not be started again.
    torch = sys.modules.get("torch")
    gpu = fields.get("_device_id") is not None or (
        torch is not None and torch.cuda.is_initialized()
    )
    return pool is None or fields.get("_py_start_method") != "fork" or not gpu


# -- building it again --------------------------------------------------------------------------


def rebuild(
    pipe: Any, session: Session, *, checkpoint: bytes | None = None, seed: int | None = None
) -> None:
    """Make ``pipe`` as it was before it was built, with the lease's threads.

    Its next use builds it, at ``checkpoint`` if there is one. Only where :func:`can_rebuild`.
    """
    fields = pipe.__dict__
    backend, pool = fields["_pipe"], fields.get("_py_pool")
    fields.update(_AS_NEW)
    fields.update({name: value for name, value in _AS_NEW_TOO.items() if name in fields})
    if backend is not None:
        # First, as two of them need not fit into the memory of a GPU.
        backend.Shutdown()
    if pool is not None:
        pool.close()
        fields["_py_pool"], fields["_py_pool_started"] = None, False
    for group in fields.get("_input_callbacks") or ():
        group.reset_indices()
    fields["_checkpoint"] = checkpoint
    if seed is not None:
        fields["_seed"] = seed
    prepare(pipe, session)
