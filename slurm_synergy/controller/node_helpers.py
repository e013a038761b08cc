"""Which nodes' helpers are heard (``slurm-synergyd --node``; see ``docs/adr/033-*.md``)."""

from __future__ import annotations

import threading

from slurm_synergy.cluster import Clock

__all__ = ["NodeHelpers"]


class NodeHelpers:
    """Notes when each node's helper last asked for its leases; thread-safe.

    A helper asks at least every third of a lease. One that was not heard for ``lease_s`` seconds
    has let go of every lease, as far as it is there at all. A controller that has just started
    gives all of them that time to be heard.
    """

    def __init__(self, clock: Clock, *, lease_s: float) -> None:
        self._clock, self._lease_s = clock, lease_s
        self._began_s = clock.now_s()
        self._heard_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def heard(self, node: str) -> None:
        """The helper of ``node`` asked, or was answered; it has proven that it is root."""
        with self._lock:
            self._heard_s[node] = self._clock.now_s()

    def age_s(self, node: str) -> float | None:
        """How long ago the helper of ``node`` was last heard; None: never by this controller."""
        with self._lock:
            heard_s = self._heard_s.get(node)
        return None if heard_s is None else max(0.0, self._clock.now_s() - heard_s)

    def silent(self, node: str) -> bool:
        """Whether the helper of ``node`` cannot be counted on."""
        with self._lock:
            since_s = self._heard_s.get(node, self._began_s)
        return self._clock.now_s() - since_s >= self._lease_s
