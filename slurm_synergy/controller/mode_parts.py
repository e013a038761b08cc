"""The cluster that a loop drives in each mode, wired from the client up.

* observe: a client that cannot write, and a cluster on which everything is only shown;
* advise: the same, but AdminComments may be written, after each round;
* act: the live cluster.

What the mode before left in Slurm is given back by a ``Changeover``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from slurm_synergy.cluster import Clock, Observation
from slurm_synergy.config import Mode, Settings
from slurm_synergy.controller.figures import Figures
from slurm_synergy.controller.leases import LeaseBook
from slurm_synergy.controller.ledger import Ledger
from slurm_synergy.controller.loop import LiveCluster
from slurm_synergy.controller.modes import Changeover, under_way
from slurm_synergy.core.wording import counted
from slurm_synergy.round import RoundResult
from slurm_synergy.slurm.client import SlurmClient
from slurm_synergy.slurm.cluster import SlurmCluster
from slurm_synergy.slurm.dry_run import DryRun
from slurm_synergy.slurm.modes import Adviser, clear_advice, read_only
from slurm_synergy.slurm.release_all import original_request, release_all
from slurm_synergy.slurm.request import is_held

__all__ = ["InMode", "ModeWiring"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class InMode:
    """What a mode gives the loop. ``shown`` and ``watchers`` are those of ``Parts``.

    ``reading`` are the clusters through which Slurm is read, the one in use first.
    """

    cluster: LiveCluster
    shown: str
    reading: tuple[SlurmCluster, ...]
    watchers: tuple[Callable[[RoundResult], object], ...] = ()


class ModeWiring:
    """Makes the cluster for a mode. The client, the leases and the ledger stay over reloads."""

    def __init__(
        self, client: SlurmClient, book: LeaseBook, ledger: Ledger, clock: Clock, figures: Figures
    ) -> None:
        self._client, self._book, self._ledger = client, book, ledger
        self._clock, self._figures = clock, figures
        self._held_told = 0

    def live(
        self, settings: Settings, client: SlurmClient | None = None, *, leaving: bool = False
    ) -> SlurmCluster:
        """The live cluster over ``client`` (None: the one that may do everything)."""
        return SlurmCluster(
            client or self._client,
            settings,
            self._book,
            self._ledger,
            self._ledger,
            self._clock,
            leaving=leaving,
            helper_silent=self._book.helpers.silent,
        )

    def dry_run(self, settings: Settings) -> InMode:
        """Everything is only shown; no mode is in force."""
        looked = self.live(settings, read_only(self._client, "dry run"))
        return InMode(cluster=DryRun(looked), shown="dry run", reading=(looked,))

    def in_mode(self, settings: Settings) -> InMode:
        """The parts for ``settings.mode``, with what the mode before left behind undone first.

        Raises ConfigError for settings that do not fit this Slurm, ClusterError without Slurm.
        """
        mode, before = settings.mode, self._before()
        made = self._acting(settings) if mode is Mode.ACT else self._showing(settings, mode)
        if before is Mode.ACT and mode is not Mode.ACT:
            return self._leave_act(settings, made)
        if before is Mode.ADVISE and mode is not Mode.ADVISE:
            return self._leave_advise(settings, made)
        self._ledger.set_mode(mode.value)
        return made

    def _before(self) -> Mode | None:
        word = self._ledger.mode()
        if word in list(Mode):
            return Mode(word)
        # A ledger of a release that knew no modes: it has always acted.
        return Mode.ACT if self._book.job_ids() else None

    def _acting(self, settings: Settings) -> InMode:
        live = self.live(settings)
        return InMode(cluster=live, shown="", reading=(live,))

    def _showing(self, settings: Settings, mode: Mode) -> InMode:
        advises = mode is Mode.ADVISE
        client = read_only(self._client, mode.value, ("set_admin_comment",) if advises else ())
        looked = self.live(settings, client)
        watchers: list[Callable[[RoundResult], object]] = [
            lambda result: self._tell_of_held(looked, mode)
        ]
        if advises:
            adviser = Adviser(client, looked, self._clock)
            watchers.append(lambda result: self._advise(adviser, result))
        return InMode(
            cluster=DryRun(looked, mode.value),
            shown=mode.value,
            reading=(looked,),
            watchers=tuple(watchers),
        )

    def _advise(self, adviser: Adviser, result: RoundResult) -> None:
        if self._ledger.mode() == Mode.ADVISE.value:  # else the mode before is being left
            self._figures.advised(adviser.advise(result.actions, result.plan, result.deferred))

    def _tell_of_held(self, looked: SlurmCluster, mode: Mode) -> None:
        """Jobs that wait for somebody to release them, while nobody is going to."""
        held = sum(facts.pending and is_held(facts) for facts in looked.last_jobs())
        if held > self._held_told:
            _LOG.warning(
                "%s: %s held, and in this mode nobody starts them: see whether "
                "synergy_site.lua still has mode = 'act'; 'synergyctl release-all' releases them",
                mode.value,
                counted(held, "waiting job is", "waiting jobs are"),
            )
        self._held_told = held

    def _leave_act(self, settings: Settings, made: InMode) -> InMode:
        live = self.live(settings, leaving=True)
        name = settings.reservation_name if settings.pool.reservation else ""

        def undo() -> str:
            given = release_all(
                self._client,
                settings.slurm.partition,
                name,
                lambda facts: original_request(facts, self._ledger),
            )
            for job_id in self._book.job_ids():
                self._book.let_go(job_id)
            return given.in_words

        return self._changeover(settings, made, live, self._under_way, undo, (live,))

    def _under_way(self, observation: Observation) -> str:
        stopping = [job_id for job_id in self._book.job_ids() if self._book.stopping(job_id)]
        return under_way(observation, stopping)

    def _leave_advise(self, settings: Settings, made: InMode) -> InMode:
        looked = self.live(settings, read_only(self._client, Mode.ADVISE.value), leaving=True)

        def undo() -> str:
            count = clear_advice(self._client, looked.last_jobs())
            return f"the advice in {counted(count, 'AdminComment')} was taken out"

        leaving = DryRun(looked, Mode.ADVISE.value)
        return self._changeover(settings, made, leaving, lambda seen: "", undo, (looked,))

    def _changeover(
        self,
        settings: Settings,
        made: InMode,
        leaving: LiveCluster,
        waits_for: Callable[[Observation], str],
        undo: Callable[[], str],
        reading: tuple[SlurmCluster, ...],
    ) -> InMode:
        return InMode(
            cluster=Changeover(
                mode=settings.mode,
                memory=self._ledger,
                leaving=leaving,
                after=made.cluster,
                waits_for=waits_for,
                undo=undo,
            ),
            shown=made.shown,
            reading=(*made.reading, *reading),
            watchers=made.watchers,
        )
