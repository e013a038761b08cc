"""The controller's one reservation: it keeps the pool's nodes for the jobs that it starts.

Whole nodes, without end, IGNORE_JOBS (jobs of others that run there are left to finish). The name
is unique per controller, so a restarted controller finds its own again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from slurm_synergy.errors import ClusterError, SlurmCommandError
from slurm_synergy.slurm import hostlist
from slurm_synergy.slurm.client import SlurmClient
from slurm_synergy.slurm.facts import ReservationFacts

__all__ = ["ReservationKeeper"]

_LOG = logging.getLogger(__name__)

# Slurm lets these overlap with others, so they do not stand in the way of ours.
_OVERLAPPING = frozenset({"MAINT", "OVERLAP"})


class ReservationKeeper:
    """Makes, repairs and remembers the reservation ``name``. Not thread-safe."""

    def __init__(self, client: SlurmClient, name: str) -> None:
        self.name = name
        self._client = client
        self._ours: ReservationFacts | None = None
        self._stale = False
        self.intention = ""
        """What ``look`` found to be done about the reservation, in words; empty for nothing."""

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that are reserved for us, as last read or written."""
        return frozenset(self._ours.nodes) if self._ours else frozenset()

    def forget(self) -> None:
        """Read Slurm's word again at the next ``ensure``: something did not work as remembered."""
        self._stale = True

    def ensure(self, pool: Iterable[str], users: Iterable[str], *, reread: bool = False) -> None:
        """See to it that the reservation covers ``pool`` and admits ``users``.

        Nodes in somebody else's reservation are left out. Users once admitted stay. Asks Slurm
        only when something is to be changed, or with ``reread``. Raises ClusterError that says
        what the controller lacks.
        """
        wanted, admitted = frozenset(pool), frozenset(users) | {"root"}
        ours = self._ours
        known = ours is not None and admitted <= set(ours.users)
        if known and not reread and not self._stale:
            return
        try:
            self._ours = self._repaired(wanted, admitted)
            self._stale = False
        except SlurmCommandError as err:
            if err.kind == "controller_down":
                raise
            raise ClusterError(
                f"reservation {self.name!r} over {hostlist.compress(sorted(wanted))} cannot be "
                f"kept: {err}; run the controller as root, SlurmUser or a Slurm operator, "
                "or set pool.reservation: false"
            ) from err

    def look(self, pool: Iterable[str]) -> None:
        """Read which nodes could be reserved, and change nothing; ``intention`` says the rest."""
        nodes, found = self._available(frozenset(pool))
        over = hostlist.compress(nodes)
        if found is None:
            self.intention = f"make reservation {self.name} over {over}"
        else:
            moves = set(found.nodes) != set(nodes)
            self.intention = f"move reservation {self.name} to {over}" if moves else ""
        users = found.users if found else ()
        self._ours = ReservationFacts(name=self.name, nodes=nodes, users=users)

    def _available(self, wanted: frozenset[str]) -> tuple[tuple[str, ...], ReservationFacts | None]:
        """The nodes that nobody else has reserved, and our reservation as it is."""
        reservations = self._client.read_reservations()
        taken = {
            node
            for other in reservations
            if other.name != self.name and not other.flags & _OVERLAPPING
            for node in other.nodes
        }
        nodes = tuple(sorted(wanted - taken))
        if not nodes:
            raise ClusterError(
                f"reservation {self.name!r}: every node of the pool is in another reservation; "
                "delete that one or choose other nodes in pool.nodes"
            )
        return nodes, next((one for one in reservations if one.name == self.name), None)

    def _repaired(self, wanted: frozenset[str], admitted: frozenset[str]) -> ReservationFacts:
        nodes, found = self._available(wanted)
        if found is None:
            self._client.create_reservation(self.name, nodes, sorted(admitted))
            _LOG.info("reservation %s made over %s", self.name, hostlist.compress(nodes))
            return ReservationFacts(name=self.name, nodes=nodes, users=tuple(sorted(admitted)))
        if set(found.nodes) != set(nodes):
            self._client.update_reservation_nodes(self.name, nodes)
            _LOG.info("reservation %s moved to %s", self.name, hostlist.compress(nodes))
        users = tuple(sorted(admitted | set(found.users)))
        if set(users) != set(found.users):
            self._client.update_reservation_users(self.name, users)
        return ReservationFacts(name=self.name, nodes=nodes, users=users)
