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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_synergy.jobside.board import LeaseView

if TYPE_CHECKING:
    from slurm_synergy.jobside.adaptive_training import Adaptive
    from slurm_synergy.jobside.dali_source import CachedFiles
    from slurm_synergy.jobside.minio import CachedDataset, cached_open
    from slurm_synergy.jobside.session import LeaseEnded, Session

__all__ = [
    "CachedDataset",
    "CachedFiles",
    "LeaseEnded",
    "LeaseView",
    "adaptive",
    "cached_open",
    "describe_data",
    "epochs",
    "iterate",
    "lease",
    "primary",
    "register",
    "resume",
    "run_pipeline",
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
    if name == "CachedFiles":
        from slurm_synergy.jobside.dali_source import CachedFiles

        return CachedFiles
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _session() -> Session:
    from slurm_synergy.jobside.session import current

    data_module = sys.modules.get("torch.utils.data")
    if data_module is not None:
        from slurm_synergy.jobside.torch_loader import install

        install(data_module)
    if "nvidia.dali.pipeline" in sys.modules:
        from slurm_synergy.jobside import dali_loader

        dali_loader.install_pipelines(sys.modules["nvidia.dali.pipeline"])
        if "nvidia.dali.plugin.pytorch" in sys.modules:
            dali_loader.install_iterators(sys.modules["nvidia.dali.plugin.pytorch"])
    return current()


def register(**objects: Any) -> None:
    """Name the objects that make up the training state, each with ``state_dict`` and
    ``load_state_dict``: model, optimizer, scheduler, scaler, anything of your own.

    Without arguments it says that the position in the data and :func:`state` are all there is.
    Raises CheckpointError for an object without these methods.
    """
    _session().register(**objects)


def adaptive(
    model: Any,
    optimizer: Any,
    loader: Any,
    *,
    batch: tuple[int, int],
    local_batch: int | None = None,
    scaling: str | None = None,
    clip_norm: float | None = None,
) -> Adaptive:
    """Let the batch size of a PyTorch training follow the lease, and the learning rate the batch.

    ``batch`` are total batch sizes, over all GPUs: the one that the learning rate was tuned for,
    with which the training begins, and the largest. ``local_batch`` is what one GPU takes in a pass
    (default: the loader's batch size); a step of more takes several passes. ``scaling`` is the rule
    for the learning rate: ``adascale`` (default with SGD), ``sqrt`` (default with Adam), ``linear``
    or ``none``. ``clip_norm`` clips the gradient of a whole step; do not clip it yourself.

    ``loader`` becomes the training loader. Call it after ``init_process_group`` and before
    :func:`register`, to which the result belongs (``adaptive=...``). ``model`` is the
    DistributedDataParallel if there are several ranks. Raises ConfigError for what it cannot use.
    """
    from slurm_synergy.jobside.adaptive_training import make_adaptive

    made = make_adaptive(
        model,
        optimizer,
        loader,
        _session(),
        batch=batch,
        local_batch=local_batch,
        scaling=scaling,
        clip_norm=clip_norm,
    )
    primary(loader)
    return made


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
    """Make ``loader`` the training loader, instead of the one found by itself; returns it.

    A PyTorch DataLoader, or a pipeline or an iterator of DALI.
    """
    _session()
    from slurm_synergy.jobside import dali_loader

    if dali_loader.is_dali(loader):
        return dali_loader.make_primary(loader)
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


def describe_data(files: Iterable[str | os.PathLike[str]], *, samples: int = 0) -> None:
    """Say which files the data set lies in, for loaders whose data set does not tell.

    ``samples`` are the items of an epoch (default: one in each file). When the job is measured,
    some of the files are read, so that its profile knows what memory for a cache would bring.
    Raises LeaseError for something that is no file's path, and for no files.
    """
    from slurm_synergy.jobside.data_told import tell_files

    tell_files(files, samples)


def run_pipeline(pipe: Any, steps: int) -> Iterator[Any]:
    """Run a DALI pipeline for one epoch of ``steps`` steps under the lease.

    Gives what ``pipe.run()`` returns. A resumed epoch has the rest of its steps; an epoch ends
    early where the pipeline's source does. May raise LeaseEnded between two steps, ConfigError for
    something that is no pipeline.
    """
    _session()
    from slurm_synergy.jobside import dali_loader

    return dali_loader.run_pipeline(pipe, steps)
