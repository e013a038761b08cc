"""Jobs that stay on the node where they run, column by column.

In most rounds most jobs get just what they have. Each of them lies somewhere else in memory, and to
look there takes longer than the arithmetic, so what a node must give to all of them is summed up in
columns. Those for which that is not all there is to say become parties like the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.model import Placement, Snapshot
from slurm_synergy.core.packing import Plain, Request, Requests, Rule
from slurm_synergy.core.request import Asked
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.room import Pool
from slurm_synergy.core.snapshot import status_of
from slurm_synergy.core.values import maker
from slurm_synergy.mechanisms.claims import Claim, Claims, granted_mib
from slurm_synergy.mechanisms.placing import Party, party_maker
from slurm_synergy.mechanisms.sharing import Sums

__all__ = ["Bools", "Stayers"]

Bools = NDArray[np.bool_]

_ON_ONE_NODE = maker(Placement, checked=False)


class Stayers:
    """Those of ``granted``, which come by rank, that run as asked on one node and are ``staying``.

    ``requests`` and ``numbers``, those of their nodes, stand beside each other, as do
    ``placements``: what each gets where its node has all that is wanted there. For mechanisms that
    ask for what jobs can use by ``rule``, where shares can change in place.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        requests: Requests,
        granted: Sequence[Request],
        staying: frozenset[int],
        rule: Rule,
    ) -> None:
        rank_of = dict(zip(map(id, granted), range(len(granted)), strict=True))
        rows: list[Plain] = []
        self._ranks: list[int] = []
        for row in requests.plain:
            rank = rank_of.get(id(row[0]))
            if rank is not None and row[0].job_id in staying:
                rows.append(row)
                self._ranks.append(rank)
        self.requests = [row[0] for row in rows]
        self.numbers = np.array([row[1] for row in rows], dtype=np.int64)
        self._nodes = len(requests.pool.nodes)
        self._statuses, self._granted = status_of(snapshot), granted
        self._make = party_maker(snapshot, requests, rule)
        self._claims = Claims(snapshot, requests.pool)
        self._share(requests.pool, rows, self._claim(requests.pool, rows))

    def _claim(self, pool: Pool, rows: Sequence[Plain]) -> list[Claim]:
        """What each can claim of its node."""
        kind_of, statuses, claims = pool.kind_of, self._statuses, self._claims
        known: list[dict[Asked, Claim]] = [{} for _ in pool.kinds]
        found = []
        for request, number, asked, _ in rows:
            kind = kind_of[number]
            claim = known[kind].get(asked)
            if claim is None:
                one = self._make(statuses[request.job_id], request, 0)
                claim = known[kind][asked] = claims.of_sort(one, kind, request.gpus)
            if claim.is_hungry and request.now is not None:
                status, name = statuses[request.job_id], pool.nodes[number].name
                claim = claims.held_to(claim, granted_mib(status, name, request.now))
            found.append(claim)
        return found

    def _share(self, pool: Pool, rows: Sequence[Plain], claims: Sequence[Claim]) -> None:
        """What each gets if all wishes are met, and what that is together."""
        sorts = {claim: at for at, claim in enumerate(dict.fromkeys(claims))}
        each = [(one.row[0], *one.row[3], *one.row[2]) for one in sorts]
        self._rows = np.array(each, dtype=np.int64).reshape(-1, 5)
        self._sorts = np.array([sorts[claim] for claim in claims], dtype=np.int64)
        self.placements: list[Placement] = []
        made: dict[Claim, Resources] = {}
        for (request, number, _, share), claim in zip(rows, claims, strict=True):
            gpus, _, _, (cpus, mem_mib) = claim.row
            now = request.now
            if now is None or share.cpus != cpus or share.mem_mib != mem_mib:
                its = made.get(claim)
                if its is None:
                    its = made[claim] = Resources(gpus=gpus, cpus=cpus, mem_mib=mem_mib)
                node = pool.nodes[number]
                shares = ((node.name, its),)
                now = _ON_ONE_NODE(job_id=request.job_id, gpu_type=node.gpu_type, shares=shares)
            self.placements.append(now)

    def sums(self, these: Bools) -> Sums:
        """What those take and want of each node together."""
        numbers, rows = self.numbers[these], self._rows[self._sorts[these]]
        # Sums of whole numbers below 2**53 are exact.
        columns = [np.bincount(numbers, column, self._nodes) for column in rows.T]
        return [column.astype(np.int64).tolist() for column in columns]

    def on(self, nodes: Sequence[int]) -> Bools:
        """Which of them are on ``nodes``."""
        there = np.zeros(self._nodes, dtype=bool)
        there[list(nodes)] = True
        return np.asarray(there[self.numbers])

    def parties(self, these: Bools) -> list[Party]:
        """Those of them as parties."""
        statuses, chosen = self._statuses, these.tolist()
        return [
            self._make(statuses[request.job_id], request, rank)
            for request, rank in compress(zip(self.requests, self._ranks, strict=True), chosen)
        ]

    def others(self) -> list[Party]:
        """All other granted jobs as parties, by rank."""
        statuses, granted = self._statuses, self._granted
        left = np.ones(len(granted), dtype=bool)
        left[self._ranks] = False
        return [
            self._make(statuses[granted[rank].job_id], granted[rank], rank)
            for rank in np.flatnonzero(left).tolist()
        ]
