"""The job side: what a training program may call, and what runs beside it.

Nothing here is needed for a program that merely runs under ``synergy-srun``. To be stopped and
continued without loss, it registers what makes up its state::

    import slurm_synergy.jobside as synergy

    synergy.register(model=model, optimizer=optimizer, scheduler=scheduler)
    synergy.resume()
    for epoch in synergy.epochs(90):
        for images, labels in loader:       # an ordinary torch.utils.data.DataLoader
            ...

The training loader is the first one made with ``shuffle=True`` (or a RandomSampler, or a shuffling
DistributedSampler); :func:`primary` names another one. One pass over it is one epoch. Without a
launcher all of this works as well: set ``SYNERGY_CHECKPOINT_DIR`` to keep checkpoints.

Importing this package imports neither torch nor gRPC.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_synergy.jobside.board import LeaseView

if TYPE_CHECKING:
    from slurm_synergy.jobside.minio import CachedDataset, cached_open
    from slurm_synergy.jobside.session import LeaseEnded, Session

__all__ = [
    "CachedDataset",
    "LeaseEnded",
    "LeaseView",
    "cached_open",
    "epochs",
    "iterate",
    "lease",
    "primary",
    "register",
    "resume",
    "save",
    "save_every",
    "state",
]


def __getattr__(name: str) -> Any:
    # These live with the session, which the launcher does not need to load.
    if name == "LeaseEnded":
        from slurm_synergy.jobside.session import LeaseEnded

        return LeaseEnded
    if name in ("CachedDataset", "cached_open"):
        from slurm_synergy.jobside import minio

        return getattr(minio, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _session() -> Session:
    from slurm_synergy.jobside.session import current

    data_module = sys.modules.get("torch.utils.data")
    if data_module is not None:
        from slurm_synergy.jobside.torch_loader import install

        install(data_module)
    return current()


def register(**objects: Any) -> None:
    """Name the objects that make up the training state, each with ``state_dict`` and
    ``load_state_dict``: model, optimizer, scheduler, scaler, anything of your own.

    Without arguments it says that the position in the data and :func:`state` are all there is.
    Raises CheckpointError for an object without these methods.
    """
    _session().register(**objects)


def resume() -> bool:
    """Load the newest intact checkpoint into the registered objects; False when there is none.

    Call it after :func:`register` and, in distributed training, after
    ``torch.distributed.init_process_group``. Raises CheckpointError when checkpoints exist and
    none is intact: it never starts from the beginning by itself.
    """
    return _session().resume()


def epochs(total: int) -> Iterator[int]:
    """The epochs still to run: ``range(total)``, or from the interrupted one after a resume."""
    return _session().epochs(total)


def save() -> Path:
    """Publish a checkpoint now and return its directory.

    Call it at the end of the loop body, when the batch has been used up, on all ranks at the same
    step. Raises CheckpointError when it failed; the previous checkpoint stays.
    """
    return _session().save()


def save_every(*, steps: int = 0, seconds: float = 0.0) -> None:
    """Save at batch boundaries by itself, every so many steps or (one rank only) seconds."""
    _session().save_every(steps=steps, seconds=seconds)


def state() -> dict[str, Any]:
    """A dictionary of your own JSON values that travels with the checkpoints (a run id, say)."""
    return _session().user_state


def lease() -> LeaseView:
    """The current lease; without a launcher, the cores and memory of the environment."""
    session = _session()
    if session.board is not None:
        return session.board.read_lease()
    cores = os.environ.get("SYNERGY_LEASE_CPUS") or len(os.sched_getaffinity(0))
    mem_mib = os.environ.get("SYNERGY_LEASE_MEM_MIB") or 0
    return LeaseView(core_count=int(cores), mem_mib=int(mem_mib))


def primary(loader: Any) -> Any:
    """Make ``loader`` the training loader, instead of the one found by itself; returns it."""
    _session()
    from slurm_synergy.jobside.torch_loader import make_primary

    return make_primary(loader)


def iterate(items: Any, *, batch_size: int = 1) -> Iterator[Any]:
    """Go through ``items`` once under the lease, for loops without a PyTorch loader.

    One item counts as one step of ``batch_size`` samples on each rank. A resumed pass skips the
    items that were seen already. May raise LeaseEnded between two items.
    """
    _session()
    from slurm_synergy.jobside import session

    return session.iterate(items, batch_size=batch_size)
