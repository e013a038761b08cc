"""Makes ``torch.utils.data.DataLoader`` lease-aware, in place.

``install`` replaces ``__init__``, ``__iter__`` and ``__len__`` of the class, so instances,
subclasses, ``isinstance`` and pickling stay what they were. A loader that is iterated gets its data
through a short-lived twin: the same attributes, but our index source and worker count. Everything
that reaches a worker process is module level and can be pickled.

The training loader ("primary") is the first one created with a RandomSampler or a shuffling
DistributedSampler, a later one over the same data set, or the one given to ``make_primary``. It
follows the lease within an epoch (see :mod:`slurm_synergy.jobside.torch_workers`). Where the
program has registered its state, its order of samples is ours (see
:mod:`slurm_synergy.jobside.sampler`), so that it can continue anywhere, and each batch seeds the
worker that makes it, so random augmentation does not depend on the number of workers either.
Otherwise PyTorch's order stays, to the last bit.

Custom samplers, batch samplers and IterableDatasets are iterated as they are; a resumed epoch
skips what was seen. The worker count of an IterableDataset stays the user's, as it is part of the
order of its samples. Other loaders only take over the worker count when an iteration begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

from slurm_synergy.errors import SynergyError
from slurm_synergy.jobside.sampler import passes_in, steps_left
from slurm_synergy.jobside.session import Session, current, say
from slurm_synergy.jobside.torch_feed import data_module, has_plain_order, in_worker, ranks_of_data
from slurm_synergy.jobside.torch_pass import Pass, shut_down
from slurm_synergy.jobside.torch_workers import twin_of, worker_count

__all__ = ["install", "make_primary", "primary_loader"]

_INSTALLED = "_synergy_installed"
_ROLE = "_synergy_role"
_TWIN = "_synergy_twin"
_ADAPTIVE = "_synergy_adaptive"  # see adaptive_training.py, which only adaptive jobs load
_PRIMARY, _OTHER = "primary", "other"

# The loader that is primary now: a weak reference, as the program owns its loaders.
_primary: Callable[[], Any] = lambda: None  # noqa: E731
_complained = False


def install(module: Any) -> None:
    """Make the DataLoader of ``torch.utils.data`` lease-aware; a second call does nothing."""
    loader_class = module.DataLoader
    if _INSTALLED in loader_class.__dict__:
        return
    plain_init, plain_iter = loader_class.__init__, loader_class.__iter__
    plain_len = loader_class.__len__

    @wraps(plain_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        _guarded(_note_created, self)

    @wraps(plain_iter)
    def iterate(self: Any) -> Any:
        made = _guarded(_open, self)
        return plain_iter(self) if made is None else made

    @wraps(plain_len)
    def length(self: Any) -> int:
        ours = _guarded(_own_length, self)
        return plain_len(self) if ours is None else ours  # type: ignore[no-any-return]

    loader_class.__init__ = init
    loader_class.__iter__ = iterate
    loader_class.__len__ = length
    setattr(loader_class, _INSTALLED, True)


def _guarded(step: Callable[[Any], Any], loader: Any) -> Any:
    """Run a step of ours; where the program relies on nothing of ours, it must not fail by us."""
    global _complained
    try:
        return step(loader)
    except SynergyError:
        raise
    except Exception as err:
        if current().registered:
            raise
        if not _complained:
            _complained = True
            say(f"the data loader is used as it is: {type(err).__name__}: {err}")
        return None


# -- which loader trains -----------------------------------------------------------------------


def _shuffles(loader: Any) -> bool:
    data = data_module()
    sampler = loader.sampler
    if isinstance(sampler, data.distributed.DistributedSampler):
        return bool(sampler.shuffle)
    return isinstance(sampler, data.RandomSampler)


def _note_created(loader: Any) -> None:
    if in_worker() or not _shuffles(loader):
        return
    known = _primary()
    if known is None or known.dataset is loader.dataset:
        _set_primary(loader)


def _set_primary(loader: Any) -> None:
    global _primary
    loader.__dict__[_ROLE] = _PRIMARY
    _primary = weakref.ref(loader)


def make_primary(loader: Any) -> Any:
    """Make ``loader`` the training loader, whatever its sampler; returns it."""
    known = _primary()
    if known is not None and known is not loader:
        known.__dict__[_ROLE] = _OTHER
    _set_primary(loader)
    return loader


def primary_loader() -> Any:
    """The training loader; None when none is known, or the program has dropped it."""
    return _primary()


def _is_primary(loader: Any, session: Session) -> bool:
    role = loader.__dict__.get(_ROLE)
    if role is None and _primary() is None:
        # Made before we were installed, or one whose sampler tells nothing about its purpose.
        custom = not has_plain_order(loader)
        if _shuffles(loader) or (custom and session.stoppable):
            _set_primary(loader)
            return True
    if role == _PRIMARY and _primary() is None:
        _set_primary(loader)  # came to this process by pickling
    return bool(role == _PRIMARY)


def _own_length(loader: Any) -> int | None:
    """Steps of a whole epoch in our order; None where PyTorch's own answer holds."""
    if in_worker():
        return None
    session = current()
    if _ADAPTIVE in loader.__dict__:
        batch = loader.__dict__[_ADAPTIVE].batch
        return passes_in(
            len(loader.dataset),
            ranks=batch.replicas,
            local=batch.local,
            passes=batch.accumulation + 1,
            drop_last=loader.drop_last,
        )
    if not session.registered or not _is_primary(loader, session) or not has_plain_order(loader):
        return None
    _rank, ranks = ranks_of_data(loader, session)
    per_step = (loader.batch_size or 1) * ranks
    return steps_left(len(loader.dataset), 0, per_step=per_step, drop_last=loader.drop_last)


# -- iterating -----------------------------------------------------------------------------------


def _open(loader: Any) -> Any:
    """The iterator for ``iter(loader)``; None where PyTorch's own shall be used."""
    if in_worker():
        return None
    session = current()
    if _ADAPTIVE in loader.__dict__:
        from slurm_synergy.jobside.adaptive_pass import AdaptivePass

        return AdaptivePass(loader, session, loader.__dict__[_ADAPTIVE]).run()
    if session.board is None and not session.registered:
        return None
    if _is_primary(loader, session):
        one = Pass(loader, session)
        if session.by_hook:
            return session.hand_out(one.batches())
        return session.drive(one.batches(), one.ended)
    return _open_other(loader, session)


def _open_other(loader: Any, session: Session) -> Any:
    """A pass over a loader that does not train, with as many workers as the lease gives now."""
    workers = worker_count(loader, session)
    twin = loader.__dict__.get(_TWIN)  # of persistent workers
    if twin is not None and twin.num_workers == workers:
        twin._iterator._reset(twin)
        return twin._iterator
    if twin is not None:
        del loader.__dict__[_TWIN]
        shut_down(twin._iterator)
    elif workers == loader.num_workers:
        return None
    twin = twin_of(loader, workers, session)
    if not loader.persistent_workers:
        return twin._get_iterator()
    twin._iterator = twin._get_iterator()
    loader.__dict__[_TWIN] = twin
    return twin._iterator
