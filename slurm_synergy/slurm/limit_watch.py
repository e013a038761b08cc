"""Looks at what may have changed for the jobs that one of Slurm's limits keeps from starting."""

from __future__ import annotations

import logging

from slurm_synergy.errors import SlurmCommandError, SlurmParseError
from slurm_synergy.slurm.accounting import AccountingFacts
from slurm_synergy.slurm.ceilings import Ceilings
from slurm_synergy.slurm.client import SlurmClient
from slurm_synergy.slurm.follow import holds_now
from slurm_synergy.slurm.observing import Reading
from slurm_synergy.slurm.refusals import Refusals

__all__ = ["LimitWatch"]

_LOG = logging.getLogger(__name__)

# Slurm has a handful of levels of accounts at most.
_MOST_LEVELS = 8
_RUNNING_PATIENCE = 3


class LimitWatch:
    """Tells ``Refusals`` and ``Ceilings`` of each reading. Slurm is asked only for what matters.

    ``accounts_every_s``: the limits of accounts are asked for no more often than that, in seconds;
    a large site has many of them; where they matter to running jobs only, a third as often.
    Not thread-safe.
    """

    def __init__(self, client: SlurmClient, partition: str, *, accounts_every_s: float) -> None:
        self._client, self._partition = client, partition
        self._every_s, self._asked_s = accounts_every_s, float("-inf")
        self._above: frozenset[str] = frozenset()
        self._complained = False

    def see(self, refusals: Refusals, ceilings: Ceilings, reading: Reading) -> None:
        """One reading. Raises ClusterError when Slurm does not answer."""
        now_s, waiting = reading.now_s, refusals.accounts
        every_s = self._every_s if waiting else _RUNNING_PATIENCE * self._every_s
        accounting = self._accounting(waiting | ceilings.accounts, every_s, now_s)
        refusals.see(
            holding=[job_id for job_id, facts in reading.jobs.items() if holds_now(facts)],
            nodes=reading.nodes.values(),
            partition=(
                self._client.read_partition(self._partition) if refusals.watches_partition else None
            ),
            accounting=accounting,
        )
        ceilings.see(reading.jobs, accounting, now_s)

    def _accounting(
        self, accounts: frozenset[str], every_s: float, now_s: float
    ) -> AccountingFacts | None:
        if not accounts or now_s < self._asked_s + every_s:
            return None
        self._asked_s = now_s
        try:
            return self._read(accounts | self._above)
        except (SlurmCommandError, SlurmParseError) as err:
            if isinstance(err, SlurmCommandError) and err.kind == "controller_down":
                raise
            # Without it such jobs are tried again after doubled waits: no reason to do nothing.
            if not self._complained:
                _LOG.warning("the limits of accounts cannot be read: %s", err)
            self._complained = True
            return None

    def _read(self, asked: frozenset[str]) -> AccountingFacts:
        found = self._client.read_accounting(asked)
        for _ in range(_MOST_LEVELS):
            # The limits of the accounts above hold as well. Next time they are asked for at once.
            if found.parents <= asked:
                break
            asked |= found.parents
            found = self._client.read_accounting(asked)
        self._above = found.parents
        return found
