"""Makes DALI's pipelines, and the iterators of its PyTorch plugin, lease-aware in place.

``install_pipelines`` and ``install_iterators`` replace methods of DALI's classes, so instances,
subclasses and ``isinstance`` stay what they were. The training data ("primary") come from the first
iterator or plain pipeline whose reader shuffles, the first one used if none does, or the one given
to ``make_primary``. Batches of it are the steps of the session; everything else of DALI only takes
over the lease's threads when it is built.

One pass over an iterator is one epoch. ``Pipeline.run`` alone does not tell where an epoch ends:
:func:`run_pipeline` does. Nothing here imports DALI.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from slurm_synergy.errors import CheckpointError, ConfigError, SynergyError
from slurm_synergy.jobside.dali_feed import Feed, IteratorFeed, PipelineFeed
from slurm_synergy.jobside.dali_pipeline import prepare, shuffles
from slurm_synergy.jobside.dali_reader import checkpoint_of, read_through_cache
from slurm_synergy.jobside.session import Session, current, say

__all__ = [
    "install_iterators",
    "install_pipelines",
    "is_dali",
    "make_primary",
    "run_pipeline",
]

_INSTALLED = "_synergy_installed"
_FEED = "_synergy_feed"
_PLAIN = "_synergy_plain"
_EXTRA = "dali"
_ITERATORS = ("DALIGenericIterator", "DALIRaggedIterator")
# Off by more than this, pipelines are built again at once; by less, when an epoch begins.
_FAR = 2.0

# The training data: a weak reference, as the program owns what it made.
_primary: Callable[[], Any] = lambda: None  # noqa: E731
_complained = False


def _guarded(step: Callable[..., Any], *arguments: Any) -> Any:
    """Run a step of ours; where the program relies on nothing of ours, it must not fail by us."""
    global _complained
    try:
        return step(*arguments)
    except SynergyError:
        raise
    except Exception as err:
        if current().registered:
            raise
        if not _complained:
            _complained = True
            say(f"DALI is used as it is: {type(err).__name__}: {err}")
        return None


# -- patching ------------------------------------------------------------------------------------


def install_pipelines(module: Any) -> None:
    """Make ``nvidia.dali.pipeline.Pipeline`` lease-aware; a second call does nothing."""
    kind = module.Pipeline
    if _INSTALLED in kind.__dict__:
        return
    plain_build, plain_run, plain_reset = kind.build, kind.run, kind.reset

    @wraps(plain_build)
    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        _guarded(_before_build, self)
        read_through_cache(self, current())
        return plain_build(self, *args, **kwargs)

    @wraps(plain_run)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        feed = _feed_of_pipeline(self)
        if feed.busy:
            return plain_run(self, *args, **kwargs)
        feed.run_arguments = args, kwargs
        return _next_of(self, feed)

    @wraps(plain_reset)
    def reset(self: Any) -> None:
        feed = self.__dict__.get(_FEED)
        plain_reset(self)
        if feed is not None:
            feed.note_reset()

    kind.build, kind.run, kind.reset = build, run, reset
    saving = getattr(kind, "_get_checkpoint", None)
    if saving is not None:
        kind._get_checkpoint = checkpoint_of(saving)
    setattr(kind, _PLAIN, (plain_run, plain_reset))
    setattr(kind, _INSTALLED, True)


def _feed_of_pipeline(pipe: Any) -> PipelineFeed:
    feed: PipelineFeed | None = pipe.__dict__.get(_FEED)
    if feed is None:
        feed = pipe.__dict__[_FEED] = PipelineFeed(pipe, *getattr(type(pipe), _PLAIN))
    return feed


def _before_build(pipe: Any) -> None:
    session = current()
    if session.board is not None or session.checkpoint_dir is not None:
        prepare(pipe, session)


def install_iterators(module: Any) -> None:
    """Make the iterators of ``nvidia.dali.plugin.pytorch`` lease-aware; once."""
    for name in _ITERATORS:
        kind = getattr(module, name, None)
        if kind is not None and _INSTALLED not in kind.__dict__:
            _install_iterator(kind)


def _install_iterator(kind: Any) -> None:
    plain_init, plain_next, plain_reset = kind.__init__, kind.__next__, kind.reset

    @wraps(plain_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if _FEED in self.__dict__:
            plain_init(self, *args, **kwargs)
            return
        bound = inspect.signature(plain_init).bind(self, *args, **kwargs)
        arguments = dict(list(bound.arguments.items())[1:])
        _guarded(_share_threads, arguments["pipelines"])
        plain_init(self, *args, **kwargs)
        feed = IteratorFeed(self, arguments, plain_init, plain_next, plain_reset)
        self.__dict__[_FEED] = feed
        _guarded(_note_created, self, feed)

    @wraps(plain_next)
    def advance(self: Any) -> Any:
        feed = self.__dict__.get(_FEED)
        if feed is None or feed.busy:
            return plain_next(self)
        return _next_of(self, feed)

    @wraps(plain_reset)
    def reset(self: Any) -> None:
        feed = self.__dict__.get(_FEED)
        if feed is None or feed.busy:
            plain_reset(self)
            return
        feed.quietly(lambda: plain_reset(self))
        feed.note_reset()

    kind.__init__, kind.__next__, kind.reset = init, advance, reset
    setattr(kind, _INSTALLED, True)


def _share_threads(pipelines: Any) -> None:
    session = current()
    if session.board is None and session.checkpoint_dir is None:
        return
    pipes = pipelines if isinstance(pipelines, list) else [pipelines]
    for pipe in pipes:
        prepare(pipe, session, share=len(pipes))


# -- which one trains -----------------------------------------------------------------------------


def is_dali(thing: Any) -> bool:
    """It is an iterator or a pipeline of DALI."""
    return any(kind.__module__.startswith("nvidia.dali.") for kind in type(thing).__mro__)


def _note_created(thing: Any, feed: Feed) -> None:
    if _primary() is None and any(shuffles(pipe) for pipe in feed.pipes):
        _set_primary(thing)


def _set_primary(thing: Any) -> None:
    global _primary
    _primary = weakref.ref(thing)


def make_primary(thing: Any) -> Any:
    """Make this iterator or pipeline of DALI the source of the training data; returns it."""
    _set_primary(thing)
    return thing


def _is_primary(thing: Any) -> bool:
    known = _primary()
    if known is None:
        _set_primary(thing)
        return True
    return known is thing


# -- passes ---------------------------------------------------------------------------------------


def _next_of(thing: Any, feed: Feed) -> Any:
    """The next batch, as a step of the session where these are the training data."""
    session = current()
    active = session.board is not None or session.registered
    # A framework with a loop of its own tells the steps, and has checkpoints of its own.
    if not active or session.by_hook or not _is_primary(thing):
        return feed.fetch()
    driver = feed.driver
    if driver is None or not session.is_in_epoch(feed.epoch):
        if feed.kind == "iterator" and feed.at_end():
            return feed.fetch()  # which says so, as it did before
        if driver is not None:
            driver.close()
        driver = _guarded(_open_pass, feed, session)
        if driver is None:
            return feed.fetch()
        feed.driver = driver
    try:
        return next(driver)
    except BaseException:
        feed.driver = None
        raise


def _open_pass(feed: Feed, session: Session) -> Iterator[Any]:
    _begin(feed, session)
    return session.drive(_batches(feed, session), feed.at_end)


def _begin(feed: Feed, session: Session) -> None:
    """An epoch begins, or goes on where a checkpoint interrupted it."""
    if session.registered:
        session.rank_extras[_EXTRA] = lambda: _state_of_primary(session)
    continued = session.begin_epoch()
    feed.epoch = session.epoch
    if continued:
        _take_position(feed, session)
    feed.follow(session)


def _state_of_primary(session: Session) -> Any:
    thing = _primary()
    feed = None if thing is None else thing.__dict__.get(_FEED)
    return None if feed is None else feed.state(session.identity.world)


def _take_position(feed: Feed, session: Session) -> None:
    saved = session.restored_extras.pop(_EXTRA, None)
    ranks = session.identity.world
    if saved is not None and saved["ranks"] == ranks:
        feed.restore(session, saved)
        return
    if session.epoch_batches == 0:
        return
    if saved is None and session.identity.world == 1:
        raise CheckpointError(
            "the checkpoint was made in the middle of an epoch of other data, not of DALI's;"
            " continue it with the program that wrote it"
        )
    # The shards of DALI's readers belong to the number of ranks.
    say(f"epoch {session.epoch} begins again: DALI cannot continue one with {ranks} ranks instead")
    session.restart_epoch()


def _batches(feed: Feed, session: Session) -> Iterator[tuple[Any, int]]:
    world, sequence = session.identity.world, session.lease_sequence
    while True:
        if session.lease_sequence != sequence:
            sequence = session.lease_sequence
            feed.follow(session, factor=_FAR)
        try:
            batch = feed.fetch()
        except StopIteration:
            return
        yield batch, feed.samples(batch) * world


def run_pipeline(pipe: Any, steps: int) -> Iterator[Any]:
    """One epoch of ``steps`` runs of a plain pipeline under the lease; what ``run`` returns.

    A resumed epoch runs the rest of its steps. The epoch ends early where the pipeline's source
    does. May raise LeaseEnded between two steps.
    """
    if not hasattr(type(pipe), _INSTALLED):
        raise ConfigError(f"run_pipeline() takes a DALI pipeline, not a {type(pipe).__name__}")
    _set_primary(pipe)
    return _run_epoch(pipe, steps)


def _run_epoch(pipe: Any, steps: int) -> Iterator[Any]:
    session = current()
    pipe.build()
    feed = _feed_of_pipeline(pipe)
    _begin(feed, session)

    def source() -> Iterator[tuple[Any, int]]:
        batches = _batches(feed, session)
        while session.epoch_batches < steps:
            found = next(batches, None)
            if found is None:
                return
            yield found

    yield from session.drive(source(), lambda: session.epoch_batches >= steps)
