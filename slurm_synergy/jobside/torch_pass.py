"""One epoch of the training loader under a lease: what is fetched, and by which workers."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from slurm_synergy.jobside.data_told import tell_of
from slurm_synergy.jobside.rng import capture_rng, restore_rng
from slurm_synergy.jobside.sampler import EpochSampler, derive_seed
from slurm_synergy.jobside.session import Session, say
from slurm_synergy.jobside.torch_feed import (
    cached_data,
    choose_seed,
    data_module,
    has_plain_order,
    own_sampler,
    seeded,
)
from slurm_synergy.jobside.torch_workers import NEVER_S, change_due_s, twin_of, worker_count

__all__ = ["Pass", "shut_down"]

_KEPT = "_synergy_kept"


class Pass:
    """One epoch of the training loader: what is fetched, by which workers.

    Workers fetch ahead. When their number changes, the old ones get no more to do and deliver what
    they have under way, while the new ones already draw on from the same source of indices: nothing
    is lost, repeated or fetched twice.
    """

    __slots__ = (
        "_continued",
        "_draining",
        "_due_s",
        "_exhausted",
        "_indices",
        "_inner",
        "_iterable",
        "_loader",
        "_pending",
        "_replacing",
        "_sampler",
        "_sequence",
        "_session",
        "_twin",
        "_wanted",
        "_workers",
    )

    def __init__(self, loader: Any, session: Session) -> None:
        self._loader, self._session = loader, session
        self._iterable = isinstance(loader.dataset, data_module().IterableDataset)
        self._draining: Any = None
        self._due_s = NEVER_S
        if session.seed < 0 and self._in_own_order:
            session.seed = choose_seed(loader, session)
        if session.board is not None and not self._iterable:
            tell_of(loader.dataset, session.board.path)
        self._continued = session.begin_epoch()
        self._sampler = self._own_sampler()
        self._sequence = session.lease_sequence
        self._workers = self._wanted = worker_count(loader, session)
        # The samples of each batch of the user's own source that was drawn and not delivered.
        self._pending: deque[int] = deque()
        self._exhausted = self._replacing = False
        self._indices = self._index_source()
        self._twin, self._inner = self._kept_inner() or self._build()
        if self._iterable and self._continued:
            for _ in range(session.epoch_batches):
                next(self._inner, None)  # only the data set itself can be wound forward

    # -- indices ---------------------------------------------------------------------------------

    @property
    def _in_own_order(self) -> bool:
        """The order is ours as far as it can stand for the program's."""
        return self._session.registered

    def _own_sampler(self) -> EpochSampler | None:
        own = self._session.registered and has_plain_order(self._loader)
        return own_sampler(self._loader, self._session) if own else None

    def _first_number(self) -> int:
        """The number of the next batch, by which it is seeded."""
        return self._session.epoch_batches

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
            source = seeded(source, session, self._first_number())
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
        """New workers. Those that take the place of others draw their seed where nobody sees it.

        PyTorch draws one for new workers, which an undisturbed program would not have here.
        """
        loader, session = self._loader, self._session
        key = "batch_sampler" if loader._auto_collation else "sampler"
        changes: dict[str, Any] = {
            key: self._indices,
            "in_order": True,
            **cached_data(loader, session),
        }
        if session.registered or self._replacing:
            # The program's own sampler may draw from its own generator, now or later.
            torch = sys.modules["torch"]
            generator = torch.Generator()
            generator.manual_seed(
                derive_seed(session.seed, session.epoch, 0)
                if session.registered
                else derive_seed(torch.initial_seed(), session.epoch, session.step + 1)
            )
            changes["generator"] = generator
        twin = twin_of(loader, self._workers, session, **changes)
        return twin, twin._get_iterator()

    def _kept_inner(self) -> tuple[Any, Any] | None:
        """The persistent workers of the previous epoch, wound to this one's source; or None."""
        loader = self._loader
        kept = loader.__dict__.pop(_KEPT, None)
        if kept is None:
            return None
        workers, twin, inner = kept
        if workers != self._workers:
            shut_down(inner)
            self._replacing = True
            return None
        key = "batch_sampler" if loader._auto_collation else "sampler"
        twin.__dict__[key] = inner._index_sampler = self._indices
        inner._reset(twin)
        return twin, inner

    def _note_lease(self) -> None:
        """The lease has changed: decide when the number of workers is to follow it."""
        session = self._session
        self._sequence = session.lease_sequence
        wanted = worker_count(self._loader, session)
        if wanted != self._wanted:  # a renewal of the same cores does not put it off
            self._wanted = wanted
            self._due_s = change_due_s(self._workers, wanted, session.looked_at_s)

    def _change_workers(self) -> None:
        """Take as many workers as the lease gives, from the next batch that nobody fetches yet."""
        self._due_s = NEVER_S
        self._workers = self._wanted = worker_count(self._loader, self._session)
        self._draining = self._inner
        self._inner._sampler_iter = iter(())
        self._replacing = True
        self._twin, self._inner = self._build()

    # -- batches ---------------------------------------------------------------------------------

    def batches(self) -> Iterator[tuple[Any, int]]:
        """The batches with their samples of all ranks, across changes of the workers."""
        session = self._session
        usual, last_at = self._usual_step()
        try:
            while True:
                if session.lease_sequence != self._sequence:
                    self._note_lease()
                if session.looked_at_s >= self._due_s:
                    self._change_workers()
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
            shut_down(self._inner)

    def _usual_step(self) -> tuple[int, int]:
        """(samples of each step but the last, position of the last whole one); then no call is
        needed for a batch.
        """
        if self._sampler is None:
            return 0, -1
        usual, session = self._sampler.per_step, self._session
        return usual, session.samples - session.epoch_samples + self._sampler.samples - usual

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
            shut_down(inner)


def shut_down(inner: Any) -> None:
    """End the worker processes of an inner iterator, if it has any."""
    stop = getattr(inner, "_shutdown_workers", None)
    if stop is not None:
        stop()
