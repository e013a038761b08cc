"""The controller's process: wires the parts together, obeys signals, and ends cleanly.

Exit status: 0 stopped as told, 1 Slurm or the ledger could not be used, 2 wrong usage or settings.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import slurm_synergy
from slurm_synergy.config import DEFAULT_PATH, Settings, load_settings
from slurm_synergy.controller.audience import Audiences
from slurm_synergy.controller.auth import Authenticator, munge_socket, operator_uids
from slurm_synergy.controller.daily import DailySummary
from slurm_synergy.controller.lease_service import LeaseServer
from slurm_synergy.controller.ledger import Ledger
from slurm_synergy.controller.log_format import PlainFormatter
from slurm_synergy.controller.loop import Loop, Parts
from slurm_synergy.controller.notify import Notifier
from slurm_synergy.controller.state_files import open_private
from slurm_synergy.controller.status import StatusView
from slurm_synergy.controller.wiring import SystemClock, Wiring, open_metrics
from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.wording import counted
from slurm_synergy.errors import ClusterError, ConfigError, LedgerError, SynergyError

__all__ = ["NEED_RESTART", "SystemClock", "argument_parser", "main"]

_LOG = logging.getLogger("slurm_synergy")

NEED_RESTART = ("cluster", "slurm", "leases", "operators", "state_dir", "journal", "metrics")
"""Sections of the settings whose changes a reload does not take over."""
_START_RETRY_S = 5.0


class _Signals:
    """What the process was told by signals. Handlers only set flags."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.reload = threading.Event()
        self.wake = threading.Event()

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGHUP, self._on_reload)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self.stop.set()
        self.wake.set()

    def _on_reload(self, number: int, frame: FrameType | None) -> None:
        self.reload.set()
        self.wake.set()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the controller; the process's exit status."""
    options = argument_parser().parse_args(argv)
    # The journal has the time already.
    stamp = "" if "JOURNAL_STREAM" in os.environ else "%(asctime)s "
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter(f"{stamp}%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    try:
        settings = _settings(options.config)
        _LOG.setLevel(settings.log_level.value.upper())
        signals = _Signals()
        signals.install()
        dry_run = options.dry_run or settings.scheduling.dry_run
        with _state_dir(settings, dry_run) as state_dir:
            return _serve(settings, state_dir, signals, options, dry_run)
    except ConfigError as err:
        sys.stderr.write(f"slurm-synergyd: {err}\n")
        return 2
    except SynergyError as err:
        sys.stderr.write(f"slurm-synergyd: {err}\n")
        return 1


def argument_parser() -> argparse.ArgumentParser:
    """The command line of the daemon."""
    parser = argparse.ArgumentParser(
        prog="slurm-synergyd",
        description="Schedules the GPU jobs of one Slurm partition: who runs, where, and with how "
        "much CPU and memory.",
        epilog="SIGHUP reads the settings again, SIGTERM stops the controller; jobs run on. "
        "Exit status: 0 stopped as told, 1 Slurm or the ledger could not be used, 2 wrong usage "
        "or settings.",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"settings (default: {DEFAULT_PATH} if it exists, else the built-in defaults)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="follow what was begun, run one round, and exit; a later call follows its starts",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be done and change nothing"
    )
    parser.add_argument(
        "--node",
        action="store_true",
        help="run the helper of a compute node instead, which has options of its own "
        "(slurm-synergyd --node --help)",
    )
    version = getattr(slurm_synergy, "__version__", "unknown")
    parser.add_argument("--version", action="version", version=f"slurm-synergyd {version}")
    return parser


def _settings(path: Path | None) -> Settings:
    if path is None and not DEFAULT_PATH.exists():
        _LOG.info("no %s: built-in defaults", DEFAULT_PATH)
        return Settings()
    return load_settings(path or DEFAULT_PATH)


@contextlib.contextmanager
def _state_dir(settings: Settings, dry_run: bool) -> Iterator[Path]:
    """The state directory; for a dry run one that is thrown away, so that it may run anywhere."""
    if not dry_run:
        yield settings.state_dir
        return
    with tempfile.TemporaryDirectory(prefix="synergy-dry-run-") as name:
        yield Path(name)


def _serve(
    settings: Settings,
    state_dir: Path,
    signals: _Signals,
    options: argparse.Namespace,
    dry_run: bool,
) -> int:
    clock = SystemClock()
    with Ledger(
        state_dir,
        clock=clock,
        journal_max_mib=settings.journal.max_mib,
        journal_keep=settings.journal.keep,
        catalogue=CATALOGUE.get,
    ) as ledger:
        wiring = Wiring(settings, ledger, signals.wake, dry_run)
        if options.once:
            return _once(settings, wiring, ledger, signals)
        return _run(settings, state_dir, wiring, ledger, signals, options.config)


def _once(settings: Settings, wiring: Wiring, ledger: Ledger, signals: _Signals) -> int:
    view = StatusView(settings, ledger=ledger, leases=wiring.book, clock=wiring.clock)
    audience = Audiences(view, wiring.figures)
    before_s = _last_round_s(ledger)
    loop = Loop(wiring.parts(settings), ledger, wiring.clock, audience, signals.wake, before_s)
    _look_into_intents(ledger)
    loop.turn()
    return 1 if loop.error else 0


def _run(
    settings: Settings,
    state_dir: Path,
    wiring: Wiring,
    ledger: Ledger,
    signals: _Signals,
    config: Path | None,
) -> int:
    notifier = Notifier()
    operators = operator_uids(settings.operators)
    authenticator = None if wiring.dry_run else _authenticator(settings)
    parts = _first_parts(settings, wiring, signals)
    if parts is None:
        return 0
    view = StatusView(settings, ledger=ledger, leases=wiring.book, clock=wiring.clock)
    view.slow_because = lambda: wiring.pacer.reason
    view.enforced_because = wiring.enforced_because
    if not settings.cluster.name:
        view.named(wiring.cluster_name())
    view.profiling = wiring.profiler.describe
    view.learning = wiring.learning
    audience = Audiences(view, wiring.figures, wiring.surveyor, wiring.profiler, wiring.learner)
    loop = Loop(
        parts, ledger, wiring.clock, audience, signals.wake, previous_s=_last_round_s(ledger)
    )
    _look_into_intents(ledger)
    current, daily = settings, DailySummary(state_dir, wiring.clock)

    def between() -> None:
        nonlocal current
        daily.look()
        if signals.reload.is_set():
            signals.reload.clear()
            notifier.reloading()
            current = _reload(current, config, wiring, loop)
            view.reload(current)
            notifier.ready(_status(loop))
        notifier.alive(_status(loop))

    with contextlib.ExitStack() as stack:
        stack.callback(wiring.learner.close)
        if authenticator is not None:
            server = LeaseServer(
                settings.leases,
                leases=wiring.book,
                control=view,
                authenticator=authenticator,
                operators=operators,
            )
            _open_service(stack, server, state_dir)
            open_metrics(stack, settings, wiring)
        notifier.ready("running")
        loop.run(signals.stop.is_set, between, (notifier.watchdog_s or math.inf) / 3)
        notifier.stopping()
        _LOG.info("stopped; running jobs go on")
    return 0


def _authenticator(settings: Settings) -> Authenticator:
    """Tried out. Raises MungeError: without it no job could ever register."""
    made = Authenticator(munge_socket(settings.leases.munge.socket, os.environ))
    made.check()
    return made


def _open_service(stack: contextlib.ExitStack, server: LeaseServer, state_dir: Path) -> None:
    """Serve leases until ``stack`` is left; the bound address goes to ``endpoint``."""
    stack.enter_context(server)
    path = state_dir / "endpoint"
    fresh = path.with_suffix(".new")
    try:
        # No secret: whoever may look into the directory may read it.
        with os.fdopen(open_private(fresh, os.O_WRONLY | os.O_TRUNC, 0o644), "w") as file:
            file.write(f"{server.endpoint}\n")
        fresh.replace(path)
    except OSError as err:
        raise LedgerError(f"cannot write {path}: {err}") from err
    stack.callback(path.unlink, missing_ok=True)
    _LOG.info("leases are served at %s", server.endpoint)


def _first_parts(settings: Settings, wiring: Wiring, signals: _Signals) -> Parts | None:
    """The parts, as soon as Slurm answers; None when told to stop before that."""
    said = ""
    while not signals.stop.is_set():
        try:
            return wiring.parts(settings)
        except ClusterError as err:
            if err.in_short != said:
                _LOG.error("%s; will be tried again", err.in_short)
                _LOG.debug("in full: %s", err)
            said = err.in_short
        signals.wake.wait(_START_RETRY_S)
        signals.wake.clear()
    return None


def _last_round_s(ledger: Ledger) -> float | None:
    """When the last round of an earlier process was; a policy's quantum may not be over since."""
    try:
        record = ledger.last_round()
    except LedgerError as err:
        _LOG.warning("the journal's last round is not known: %s", err)
        return None
    return None if record is None else record.snapshot.now_s


def _look_into_intents(ledger: Ledger) -> None:
    """What a dead controller was doing needs no repair of its own.

    A start made its lease before the release: the first reading shows whether the job runs (it is
    adopted), waits released (it is followed), or is held (the lease ends, and it is planned anew).
    Every other action is repeated by the next round as long as it is wanted.
    """
    intents = ledger.open_intents()
    for intent in intents:
        _LOG.info(
            "job %d: %s of round %d was not confirmed; looking at Slurm for what became of it",
            intent.action.job_id,
            type(intent.action).__name__.lower(),
            intent.round_number,
        )
    if intents:
        ledger.forget_intents(intents[-1].round_number)


def _reload(current: Settings, config: Path | None, wiring: Wiring, loop: Loop) -> Settings:
    """Take over changed settings; wrong ones leave everything as it is."""
    try:
        wanted = _settings(config)
        fixed = [key for key in NEED_RESTART if getattr(wanted, key) != getattr(current, key)]
        if fixed:
            _LOG.warning("changes of %s need a restart of the controller", ", ".join(fixed))
        kept = {key: getattr(current, key) for key in NEED_RESTART}
        if wanted.scheduling.dry_run != current.scheduling.dry_run:
            _LOG.warning("a change of scheduling.dry_run needs a restart of the controller")
            kept["scheduling"] = wanted.scheduling.model_copy(
                update={"dry_run": current.scheduling.dry_run}
            )
        applied = wanted.model_copy(update=kept)
        loop.replace(wiring.parts(applied))
    except SynergyError as err:
        _LOG.error("settings not reloaded: %s; going on with the old ones", err)
        return current
    _LOG.setLevel(applied.log_level.value.upper())
    _LOG.info("settings reloaded")
    return applied


def _status(loop: Loop) -> str:
    if loop.error:
        return loop.error
    if loop.last is None:
        return "running"
    plan = loop.last.plan
    placed = counted(len(plan.placements), "job")
    return f"round {plan.round}: {placed} placed, {len(plan.waiting)} wait"
