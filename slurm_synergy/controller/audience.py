"""Several listeners to one loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from slurm_synergy.cluster import Observation
from slurm_synergy.controller.loop import Audience
from slurm_synergy.core.model import Plan, Snapshot

__all__ = ["Audiences"]

_LOG = logging.getLogger(__name__)


class Audiences:
    """Passes on to ``first``, whose errors are the loop's, and to ``watchers``, who only watch.

    What a watcher raises is logged once per text and hurts neither the loop nor the others.
    """

    def __init__(self, first: Audience, *watchers: Audience) -> None:
        self._first, self._watchers = first, watchers
        self._complained: set[str] = set()

    def observed(self, observation: Observation) -> None:
        """See ``Audience``."""
        self._first.observed(observation)
        self._tell(lambda one: one.observed(observation))

    def publish(self, snapshot: Snapshot, plan: Plan, took_s: Mapping[str, float]) -> None:
        """See ``Audience``."""
        self._first.publish(snapshot, plan, took_s)
        self._tell(lambda one: one.publish(snapshot, plan, took_s))

    def failed(self, text: str) -> None:
        """See ``Audience``."""
        self._first.failed(text)
        self._tell(lambda one: one.failed(text))

    def _tell(self, call: Callable[[Audience], None]) -> None:
        for watcher in self._watchers:
            try:
                call(watcher)
            except Exception as err:  # noqa: BLE001 - a watcher must not end the loop
                if str(err) not in self._complained:
                    self._complained.add(str(err))
                    _LOG.exception("a mistake of the program in %s", type(watcher).__name__)
