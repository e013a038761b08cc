"""The parts of the controller, made from settings and put together.

Only here and in ``mode_parts`` does the controller's side meet Slurm's.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from slurm_synergy.config import Mode, SchedulingSettings, Settings
from slurm_synergy.controller.exposition import MetricsServer
from slurm_synergy.controller.figures import Figures, RpcUse
from slurm_synergy.controller.learning import Learner
from slurm_synergy.controller.leases import LeaseBook
from slurm_synergy.controller.ledger import Ledger
from slurm_synergy.controller.loop import Parts
from slurm_synergy.controller.mode_parts import ModeWiring
from slurm_synergy.controller.policy_inputs import NEEDS_SCIPY
from slurm_synergy.controller.profiling import Profiler
from slurm_synergy.controller.survey import Surveyor
from slurm_synergy.core.decide import Policy
from slurm_synergy.core.model import Node
from slurm_synergy.errors import ClusterError, ConfigError
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES
from slurm_synergy.policy_settings import Section
from slurm_synergy.slurm.clients import make_client, make_pacer
from slurm_synergy.slurm.cluster import SlurmCluster
from slurm_synergy.slurm.request import is_held

__all__ = ["SystemClock", "Wiring", "open_metrics", "with_settings"]

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


class SystemClock:
    """The machine's clock."""

    def now_s(self) -> float:
        """See ``Clock``."""
        return time.time()


class Wiring:
    """Makes the parts of the loop from settings; the client and the leases stay over reloads."""

    def __init__(self, settings: Settings, ledger: Ledger, wake: threading.Event, dry_run: bool):
        self._ledger, self.dry_run = ledger, dry_run
        self.clock = SystemClock()
        self._client = make_client(settings.slurm)
        self.pacer = make_pacer(self._client, settings.slurm)
        self._reading: tuple[SlurmCluster, ...] = ()
        self._cluster_name, self._mode = "", settings.mode
        self.learner = Learner(ledger, self.clock)
        self.book = LeaseBook(
            ledger,
            self.clock,
            lease_s=settings.leases.lease_s,
            node_of=self._node_of,
            grace_of=self._grace_of,
            on_event=lambda job_id: wake.set(),
            on_measured=self._measured,
            on_training=self.learner.reported,
        )
        # Above those of a controller before this one.
        numbers = itertools.count(int(self.clock.now_s() * 1000) + 1)
        self.surveyor = Surveyor(
            leases=self.book,
            learner=self.learner,
            clock=self.clock,
            enabled=settings.profiling.enabled,
            acting=self._acting,
            numbers=numbers,
        )
        self.profiler = Profiler(
            settings.profiling,
            leases=self.book,
            store=ledger,
            clock=self.clock,
            acting=self._acting,
            later=self.surveyor.comes_first,
            numbers=numbers,
        )
        self.figures = Figures(self.book, self.clock)
        self._modes = ModeWiring(self._client, self.book, ledger, self.clock, self.figures)

    def parts(self, settings: Settings) -> Parts:
        """Raises ConfigError for settings that do not fit here, ClusterError without Slurm."""
        # The option --dry-run goes before the settings.
        scheduling = settings.scheduling.model_copy(update={"dry_run": self.dry_run})
        policy = with_settings(_named("policy", POLICIES, scheduling.policy), scheduling)
        _check_solver(policy.name)
        mechanism = _named("mechanism", MECHANISMS, scheduling.mechanism)
        made = self._modes.dry_run(settings) if self.dry_run else self._modes.in_mode(settings)
        self._reading, self._mode = made.reading, settings.mode
        self.surveyor.reload(settings.profiling.enabled)
        self.profiler.reload(settings.profiling)
        return Parts(
            cluster=made.cluster,
            policy=policy,
            mechanism=mechanism,
            scheduling=scheduling,
            shown=made.shown,
            watchers=(self.figures.round_done, *made.watchers),
            pace=self.pacer,
        )

    def rpc_use(self) -> RpcUse | None:
        """See ``Live``."""
        return self._client.budget()

    def mode(self) -> Mode:
        """See ``Live``. While it changes, the one before is in force."""
        word = self._ledger.mode()
        return Mode(word) if word in list(Mode) else self._mode

    def draining(self) -> bool:
        """See ``Live``."""
        return self._ledger.draining()

    def leases(self) -> Mapping[int, Mapping[str, object]]:
        """See ``Live``."""
        return self.book.snapshot()

    def learning(self, job_id: int) -> Mapping[str, object] | None:
        """What is learned of a job, and which batch size it just tries, as JSON values."""
        known = self.learner.describe(job_id)
        return None if known is None else {**known, "survey": self.surveyor.describe(job_id)}

    def ledger_errors(self) -> int:
        """See ``Live``."""
        return self._ledger.error_count

    def unattended(self) -> int:
        """See ``Live``."""
        if self._mode is Mode.ACT or not self._reading:
            return 0
        return sum(facts.pending and is_held(facts) for facts in self._reading[0].last_jobs())

    def enforced_because(self) -> str:
        """Why cores move as they do, in words; empty before Slurm was read."""
        return self._reading[0].enforcement_why if self._reading else ""

    def cluster_name(self) -> str:
        """What Slurm calls the cluster; empty when it does not say."""
        if not self._cluster_name:
            try:
                self._cluster_name = self._client.read_config().cluster_name
            except ClusterError as err:
                _LOG.debug("the cluster's name is not known: %s", err)
        return self._cluster_name

    def _acting(self) -> bool:
        return not self.dry_run and self.mode() is Mode.ACT

    def _measured(self, job_id: int) -> None:
        """A probe was answered: whose it was takes it in."""
        self.surveyor.measured(job_id)
        self.profiler.measured(job_id)

    def _grace_of(self, job_id: int) -> float:
        return max((cluster.grace_s(job_id) for cluster in self._reading), default=0.0)

    def _node_of(self, name: str) -> Node | None:
        found = (cluster.node(name) for cluster in self._reading)
        return next((node for node in found if node is not None), None)


def open_metrics(stack: contextlib.ExitStack, settings: Settings, wiring: Wiring) -> None:
    """Serve /metrics until ``stack`` is left. No job depends on it: a failure is only logged."""
    listen = settings.metrics.listen
    if listen is None:
        return
    try:
        from slurm_synergy.controller.metrics import registry

        figures = registry(wiring.figures, wiring, job_labels=settings.metrics.job_labels)
        server = stack.enter_context(MetricsServer(listen, figures))
    except ImportError as err:
        _LOG.error("no metrics: %s; pip install 'slurm-synergy[controller]'", err)
    except ConfigError as err:
        _LOG.error("no metrics: %s", err)
    else:
        _LOG.info("metrics are served at %s", server.url)


def with_settings(policy: Policy, scheduling: SchedulingSettings) -> Policy:
    """The policy with its own section of the settings, if it has one."""
    section = getattr(scheduling, policy.name, None)
    if not isinstance(section, Section):
        return policy
    own: Any = policy
    changed: Policy = replace(own, **section.model_dump())
    return changed


def _check_solver(policy: str) -> None:
    """Raise ConfigError now for a policy that could decide no round here."""
    if policy not in NEEDS_SCIPY:
        return
    try:
        import scipy.optimize  # noqa: F401 - also, the first round need not wait for it
    except ImportError as err:
        raise ConfigError(
            f"needs the Python module scipy, which cannot be imported: {err}",
            key="scheduling.policy",
            value=policy,
            remedy="pip install 'slurm-synergy[controller]' into the controller's environment, or "
            "choose another policy",
        ) from err


def _named(key: str, known: Mapping[str, _T], name: str) -> _T:
    if name not in known:
        raise ConfigError(
            f"there is no such {key}",
            key=f"scheduling.{key}",
            value=name,
            remedy=f"choose one of: {', '.join(sorted(known))}",
        )
    return known[name]
