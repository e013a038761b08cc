"""Makes ``torch.utils.data.DataLoader`` lease-aware, in place.

``install`` replaces ``__init__``, ``__iter__`` and ``__len__`` of the class, so instances,
subclasses, ``isinstance`` and pickling stay what they were. A loader that is iterated gets its data
through a short-lived twin: the same attributes, but our index source and worker count. Everything
that reaches a worker process is module level and can be pickled.

The training loader ("primary") is the first one created with a RandomSampler or a shuffling
DistributedSampler, a later one over the same data set, or the one given to ``make_primary``. It
follows the lease within an epoch. Where the program has registered its state, its order of samples
is ours (see :mod:`slurm_synergy.jobside.sampler`), so that it can continue anywhere, and each
batch seeds the worker that makes it, so random augmentation does not depend on the number of
workers either. Otherwise PyTorch's order stays, to the last bit.

Custom samplers, batch samplers and IterableDatasets are iterated as they are; a resumed epoch
skips what was seen. The worker count of an IterableDataset stays the user's, as it is part of the
order of its samples. Other loaders only take over the worker count when an iteration begins.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from slurm_synergy.errors import SynergyError
from slurm_synergy.jobside.rng import capture_rng, restore_rng
from slurm_synergy.jobside.sampler import derive_seed, steps_left
from slurm_synergy.jobside.session import Session, current, say
from slurm_synergy.jobside.torch_feed import (
    cached_data,
    choose_seed,
    cpus_for_workers,
    data_module,
    has_plain_order,
    in_worker,
    own_sampler,
    ranks_of_data,
    seeded,
    twin_of,
    worker_count,
)

__all__ = ["install", "make_primary"]

_INSTALLED = "_synergy_installed"
_ROLE = "_synergy_role"
_KEPT = "_synergy_kept"
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


def _is_primary(loader: Any, session: Session) -> bool:
    role = loader.__dict__.get(_ROLE)
    if role is None and _primary() is None:
        # Made before we were installed, or one whose sampler tells nothing about its purpose.
        custom = not has_plain_order(loader)
        if _shuffles(loader) or (custom and session.registered):
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
    if session.board is None and not session.registered:
        return None
    if _is_primary(loader, session):
        one = _Pass(loader, session)
        return session.drive(one.batches(), one.ended)
    workers = worker_count(loader, session)
    if workers == loader.num_workers or loader.persistent_workers:
        return None
    return twin_of(loader, workers, cpus_for_workers(session))._get_iterator()


class _Pass:
    """One epoch of the training loader: what is fetched, by which workers.

    Workers fetch ahead. When their number changes, the old ones get no more to do and deliver what
    they have under way, while the new ones already draw on from the same source of indices: nothing
    is lost, repeated or fetched twice.
    """

    __slots__ = (
        "_continued",
        "_draining",
        "_exhausted",
        "_indices",
        "_inner",
        "_iterable",
        "_loader",
        "_pending",
        "_sampler",
        "_sequence",
        "_session",
        "_twin",
        "_workers",
    )

    def __init__(self, loader: Any, session: Session) -> None:
        self._loader, self._session = loader, session
        self._iterable = isinstance(loader.dataset, data_module().IterableDataset)
        self._draining: Any = None
        if session.seed < 0 and session.registered:
            session.seed = choose_seed(loader, session)
        self._continued = session.begin_epoch()
        own = session.registered and has_plain_order(loader)
        self._sampler = own_sampler(loader, session) if own else None
        self._sequence = session.lease_sequence
        self._workers = worker_count(loader, session)
        # The samples of each batch of the user's own source that was drawn and not delivered.
        self._pending: deque[int] = deque()
        self._exhausted = False
        self._indices = self._index_source()
        self._twin, self._inner = self._kept_inner() or self._build()
        if self._iterable and self._continued:
            for _ in range(session.epoch_batches):
                next(self._inner, None)  # only the data set itself can be wound forward

    # -- indices ---------------------------------------------------------------------------------

    def _index_source(self) -> Iterator[Any]:
        """What to fetch from here to the end of the epoch."""
        loader, session = self._loader, self._session
        source: Iterator[Any]
        if self._sampler is None:
            source = self._user_order()
        elif loader.batch_size is None:
            source = (indices[0] for indices in self._sampler)
        else:
            source = iter(self._sampler)
        if session.registered and self._workers and not self._iterable:
            source = seeded(source, session)
        return source

    def _user_order(self) -> Iterator[Any]:
        """The user's own index source, at the position where this epoch continues."""
        session = self._session
        if session.registered:
            if self._continued and session.epoch_rng is not None:
                restore_rng(session.epoch_rng)
            else:
                session.epoch_rng = capture_rng()
        source: Iterator[Any] = iter(self._loader._index_sampler)
        skip = session.epoch_batches
        if skip:
            say(
                f"continuing epoch {session.epoch}: skipping {skip} batches"
                " of the program's own sampler"
            )
        if self._iterable:
            return source
        # At once, as the generators are where they were when the epoch began.
        for _ in range(skip):
            next(source, None)
        return self._counted(source)

    def _counted(self, source: Iterator[Any]) -> Iterator[Any]:
        world = self._session.identity.world
        for indices in source:
            self._pending.append((len(indices) if hasattr(indices, "__len__") else 1) * world)
            yield indices
        self._exhausted = True

    def ended(self) -> bool:
        """Known where indices are drawn ahead; a stop is then left to the next epoch."""
        if self._sampler is not None:
            return self._sampler.steps_left(self._session.epoch_samples) == 0
        return self._exhausted and not self._pending

    # -- inner iterators -------------------------------------------------------------------------

    def _build(self) -> tuple[Any, Any]:
        loader, session = self._loader, self._session
        key = "batch_sampler" if loader._auto_collation else "sampler"
        changes: dict[str, Any] = {
            key: self._indices,
            "in_order": True,
            "dataset": cached_data(loader, session),
        }
        if session.registered:
            # Drawing the workers' base seed must not move the program's own generator, from
            # which the program's own sampler may draw.
            generator = sys.modules["torch"].Generator()
            generator.manual_seed(derive_seed(session.seed, session.epoch, 0))
            changes["generator"] = generator
        twin = twin_of(loader, self._workers, cpus_for_workers(session), **changes)
        return twin, twin._get_iterator()

    def _kept_inner(self) -> tuple[Any, Any] | None:
        """The persistent workers of the previous epoch, wound to this one's source; or None."""
        loader = self._loader
        kept = loader.__dict__.pop(_KEPT, None)
        if kept is None or kept[0] != self._workers:
            return None
        _workers, twin, inner = kept
        key = "batch_sampler" if loader._auto_collation else "sampler"
        twin.__dict__[key] = inner._index_sampler = self._indices
        inner._reset(twin)
        return twin, inner

    def _follow_lease(self) -> None:
        """Change to the lease's worker count, from the next batch that nobody fetches yet."""
        self._sequence = self._session.lease_sequence
        workers = worker_count(self._loader, self._session)
        if workers == self._workers:
            return
        self._workers = workers
        self._draining = self._inner
        self._inner._sampler_iter = iter(())
        if self._session.registered:
            self._twin, self._inner = self._build()
            return
        before = capture_rng()
        self._twin, self._inner = self._build()
        restore_rng(before)

    # -- batches ---------------------------------------------------------------------------------

    def batches(self) -> Iterator[tuple[Any, int]]:
        """The batches with their samples of all ranks, across changes of the workers."""
        session = self._session
        # With our own order each step but the last has as many samples: no call is needed.
        usual, last_at = 0, -1
        if self._sampler is not None:
            usual = self._sampler.per_step
            epoch_at = session.samples - session.epoch_samples
            last_at = epoch_at + self._sampler.samples - usual
        try:
            while True:
                if session.lease_sequence != self._sequence:
                    self._follow_lease()
                if self._draining is not None:
                    yield from self._drain()
                    continue
                try:
                    batch = next(self._inner)
                except StopIteration:
                    break
                yield batch, usual if session.samples <= last_at else self._samples()
            if self._loader.persistent_workers and self._workers:
                self._loader.__dict__[_KEPT] = (self._workers, self._twin, self._inner)
                self._inner = None
        finally:
            _shut_down(self._inner)

    def _samples(self) -> int:
        """The samples of all ranks in the batch that is delivered now."""
        sampler = self._sampler
        if sampler is not None:
            left = sampler.samples - self._session.epoch_samples
            return min(sampler.per_step, left)
        if self._iterable:
            return (self._loader.batch_size or 1) * self._session.identity.world
        return self._pending.popleft()

    def _drain(self) -> Iterator[tuple[Any, int]]:
        """What the previous workers had under way, while the new ones are starting."""
        inner = self._draining
        try:
            for batch in inner:
                yield batch, self._samples()
        finally:
            self._draining = None
            _shut_down(inner)


def _shut_down(inner: Any) -> None:
    stop = getattr(inner, "_shutdown_workers", None)
    if stop is not None:
        stop()
