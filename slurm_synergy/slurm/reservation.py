"""The controller's one reservation: it keeps the pool's nodes for the jobs that it starts.

Whole nodes, IGNORE_JOBS, and FLEX: Slurm ends the jobs of a reservation that comes to its end
(measured on 22.05), except in one with FLEX. Its end is put off long before it comes.

Slurm keeps no word of whose a reservation is, so the moment at which ours begins is remembered: one
of the same name that begins at another moment belongs to somebody else, and is left alone. A
controller that remembers none (its state was lost) takes one over that could be of its own making.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Protocol

from slurm_synergy.cluster import Clock
from slurm_synergy.errors import ClusterError, SlurmCommandError
from slurm_synergy.slurm import hostlist
from slurm_synergy.slurm.client import SlurmClient
from slurm_synergy.slurm.facts import ReservationFacts
from slurm_synergy.slurm.sizing import Demand, sized

__all__ = ["OVERLAPPING", "ReservationKeeper", "ReservationMemory"]

_LOG = logging.getLogger(__name__)

OVERLAPPING = frozenset({"MAINT", "OVERLAP"})
"""Flags of reservations that may lie over others, so that they do not stand in the way of ours."""

_YEAR_S = 365 * 86_400.0
# Between the note of what is about to be made and its making, in seconds; clocks differ.
_MAKING_S = 600.0


class ReservationMemory(Protocol):
    """Durable memory of which reservation is ours."""

    def reservation(self) -> str:
        """What was remembered; empty when nothing ever was."""
        ...

    def set_reservation(self, mark: str) -> None:
        """Remember it, durably."""
        ...


class ReservationKeeper:
    """Makes, sizes, renews and gives back the reservation ``name``. Not thread-safe.

    ``partition`` is where its jobs are.
    ``window_s`` is how long it lasts if the controller does not renew it (None: a year), ``idle_s``
    how long a node that is not needed is kept.
    """

    def __init__(
        self,
        client: SlurmClient,
        name: str,
        partition: str,
        memory: ReservationMemory,
        clock: Clock,
        *,
        window_s: float | None = None,
        idle_s: float = 0.0,
    ) -> None:
        self.name, self._partition = name, partition
        self._client, self._memory, self._clock = client, memory, clock
        self._window_s, self._idle_s = window_s, idle_s
        self._ours: ReservationFacts | None = None
        self._demand: Demand | None = None
        self._needed_s: dict[str, float] = {}
        self._stale = False
        self.others: tuple[ReservationFacts, ...] = ()
        """All reservations but ours, as last read."""
        self.intention = ""
        """What ``look`` found to be done about the reservation, in words; empty for nothing."""

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that are reserved for us, as last read or written."""
        return frozenset(self._ours.nodes) if self._ours else frozenset()

    def forget(self) -> None:
        """Read Slurm's word again at the next ``admit``: something did not work as remembered."""
        self._stale = True

    def keep(self, demand: Demand) -> None:
        """Read Slurm's reservations, and see to it that ours covers what ``demand`` asks for.

        Users once admitted stay. Raises ClusterError that says what the controller lacks.
        """
        self._demand = demand
        self._repair(frozenset())

    def is_due(self, demand: Demand) -> bool:
        """Whether ``demand`` asks for other nodes than are reserved, as far as is known here."""
        taken = self._taken(demand)
        all_taken = len(taken) == len(demand.nodes)
        return not all_taken and set(self._sized(demand, self.nodes, taken)) != self.nodes

    def admit(self, users: Iterable[str]) -> None:
        """See to it that jobs of ``users`` may start in it; asks Slurm only to change something."""
        wanted = frozenset(users)
        known = self._ours is not None and wanted <= set(self._ours.users)
        if self._demand is not None and (self._stale or not known):
            self._repair(wanted)

    def _repair(self, users: frozenset[str]) -> None:
        try:
            self._ours = self._repaired(users | {"root"})
            self._stale = False
        except SlurmCommandError as err:
            if err.kind == "controller_down":
                raise
            raise ClusterError(
                f"reservation {self.name!r} cannot be kept: {err}; run the controller as root, "
                "SlurmUser or a Slurm operator, or set pool.reservation: false"
            ) from err

    def look(self, demand: Demand) -> None:
        """Read which nodes could be reserved, and change nothing; ``intention`` says the rest."""
        self._demand = demand
        found = self._read(insist=False)
        nodes = self._wanted(found)
        over = hostlist.compress(nodes)
        if found is None:
            self.intention = f"make reservation {self.name} over {over}" if nodes else ""
        else:
            moves = set(found.nodes) != set(nodes)
            self.intention = f"move reservation {self.name} to {over}" if moves else ""
        users = found.users if found else ()
        self._ours = ReservationFacts(name=self.name, nodes=nodes, users=users)

    # Reading

    def _read(self, *, insist: bool = True) -> ReservationFacts | None:
        """Our reservation as it is. Raises ClusterError for somebody else's of our name."""
        reservations = self._client.read_reservations()
        self.others = tuple(one for one in reservations if one.name != self.name)
        found = next((one for one in reservations if one.name == self.name), None)
        if found is not None and insist and not self._is_ours(found):
            raise ClusterError(
                f"reservation {self.name!r} over {hostlist.compress(found.nodes)} was not made by "
                "this controller: give this controller a name of its "
                "own (cluster.controller_name, or pool.reservation_name); if nobody needs that "
                "reservation, take it away with 'synergyctl release-all' or "
                f"'scontrol delete ReservationName={self.name}'"
            )
        return found

    def _is_ours(self, found: ReservationFacts) -> bool:
        mark = self._memory.reservation()
        noted = json.loads(mark) if mark else {}
        if noted.get("name") != found.name:
            # Nothing is known of one of this name.
            ours = self._could_be_ours(found)
            if ours:
                _LOG.warning("reservation %s was made by an earlier controller: kept", self.name)
        elif "making_s" in noted:
            # It died while it made it.
            ours = abs((found.start_s or 0.0) - noted["making_s"]) <= _MAKING_S
        else:
            return bool(noted.get("start_s") == found.start_s)
        if ours:
            self._note(start_s=found.start_s)
        return ours

    def _could_be_ours(self, found: ReservationFacts) -> bool:
        """Of the form that is made here, on nodes of the pool, and used by nobody else's jobs."""
        pool = {node.name for node in self._demand.nodes} if self._demand else set()
        form = "IGNORE_JOBS" in found.flags and not found.accounts and "root" in found.users
        if not form or found.flags & OVERLAPPING or not set(found.nodes) <= pool:
            return False
        return all(
            job.partition == self._partition
            for job in self._client.read_queue()
            if job.reservation == found.name and not job.state.finished
        )

    def _note(self, **when: float | None) -> None:
        self._memory.set_reservation(json.dumps({"name": self.name, **when}))

    def _wanted(self, found: ReservationFacts | None) -> tuple[str, ...]:
        """The nodes to cover. Raises ClusterError when others have reserved the whole pool."""
        assert self._demand is not None
        taken = self._taken(self._demand)
        if len(taken) == len(self._demand.nodes):
            raise ClusterError(
                f"reservation {self.name!r}: every node of the pool is in another reservation; "
                "delete that one or choose other nodes in pool.nodes"
            )
        reserved = frozenset(found.nodes) if found else frozenset()
        return self._sized(self._demand, reserved, taken)

    def _taken(self, demand: Demand) -> frozenset[str]:
        others = (one for one in self.others if not one.flags & OVERLAPPING)
        return frozenset(node for one in others for node in one.nodes) & frozenset(
            node.name for node in demand.nodes
        )

    def _sized(
        self, demand: Demand, reserved: frozenset[str], taken: frozenset[str]
    ) -> tuple[str, ...]:
        now_s = self._clock.now_s()
        wanted, needed = sized(
            demand,
            reserved=reserved,
            taken=taken,
            idle_for_s=lambda name: now_s - self._needed_s.setdefault(name, now_s),
            idle_s=self._idle_s,
        )
        self._needed_s.update(dict.fromkeys(needed, now_s))
        return tuple(sorted(wanted))

    # Changing

    def _repaired(self, users: frozenset[str]) -> ReservationFacts | None:
        found = self._read()
        nodes = self._wanted(found)
        if found is None:
            return self._made(nodes, users)
        if not nodes:
            return self._given_back(found)
        if set(found.nodes) != set(nodes):
            nodes = self._moved(found, nodes)
        if self._ends_early(found):
            # Only now: a longer one may reach into reservations of others on nodes just given up.
            self._client.renew_reservation(self.name, self._window_s)
            _LOG.debug("reservation %s renewed", self.name)
        admitted = tuple(sorted(users | set(found.users)))
        if set(admitted) != set(found.users):
            self._client.update_reservation_users(self.name, admitted)
        return ReservationFacts(
            name=self.name, nodes=nodes, users=admitted, start_s=found.start_s, end_s=found.end_s
        )

    def _made(self, nodes: tuple[str, ...], users: frozenset[str]) -> ReservationFacts | None:
        if not nodes:
            return None
        self._note(making_s=self._clock.now_s())
        try:
            self._client.create_reservation(self.name, nodes, sorted(users), self._window_s)
        except SlurmCommandError as err:
            nodes = self._without_overlap(err, nodes)
            self._client.create_reservation(self.name, nodes, sorted(users), self._window_s)
        _LOG.info("reservation %s made over %s", self.name, hostlist.compress(nodes))
        found = self._read(insist=False)
        if found is not None:
            self._note(start_s=found.start_s)
        return found

    def _moved(self, found: ReservationFacts, nodes: tuple[str, ...]) -> tuple[str, ...]:
        try:
            self._client.update_reservation_nodes(self.name, nodes)
        except SlurmCommandError as err:
            nodes = self._without_overlap(err, nodes)
            self._client.update_reservation_nodes(self.name, nodes)
        _LOG.info(
            "reservation %s moved from %s to %s",
            self.name,
            hostlist.compress(found.nodes),
            hostlist.compress(nodes),
        )
        return nodes

    def _without_overlap(self, err: SlurmCommandError, nodes: tuple[str, ...]) -> tuple[str, ...]:
        """``nodes`` without those in any other reservation, if that is what Slurm refused."""
        if err.kind != "overlap":
            raise err
        self._read()
        others = {node for one in self.others for node in one.nodes}
        left = tuple(node for node in nodes if node not in others)
        if not left or left == nodes:
            raise err
        _LOG.warning("reservation %s: %s; only %s", self.name, err.in_short, ",".join(left))
        return left

    def _given_back(self, found: ReservationFacts) -> ReservationFacts | None:
        """Nothing is needed: no reservation, unless waiting jobs of ours still name it."""
        try:
            self._client.delete_reservation(self.name)
        except SlurmCommandError as err:
            if err.kind != "in_use":
                raise
            _LOG.debug("reservation %s stays: %s", self.name, err.in_short)
            return found
        _LOG.info("reservation %s deleted: no node is needed now", self.name)
        return None

    def _ends_early(self, found: ReservationFacts) -> bool:
        window_s = _YEAR_S if self._window_s is None else self._window_s
        return found.end_s is not None and found.end_s - self._clock.now_s() < window_s / 2
