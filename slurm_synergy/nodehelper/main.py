"""The helper's process: asks, obeys, and leaves nothing behind.

Exit status: 0 stopped as told, 1 something could not be done, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from slurm_synergy.controller.auth import Authenticator, munge_socket
from slurm_synergy.controller.notify import Notifier
from slurm_synergy.errors import ConfigError, LeaseError, SynergyError
from slurm_synergy.jobside.environment import ENDPOINT_FILE, endpoint_from
from slurm_synergy.nodehelper.channel import Answer, Channel
from slurm_synergy.nodehelper.enforcer import Enforcer
from slurm_synergy.nodehelper.guard import Guard
from slurm_synergy.nodehelper.leases import Standing
from slurm_synergy.nodehelper.parts import argument_parser, enforcer, make_run_dir, user_ids

__all__ = ["main"]

_LOG = logging.getLogger("slurm_synergy")
_LOOK_S = 1.0
_HOLD_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_GIVE_BACK_FOR_S = 20.0
_CONTROLLER = "slurm-synergy"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the helper; the process's exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = argument_parser().parse_args(arguments)
    stamp = "" if "JOURNAL_STREAM" in os.environ else "%(asctime)s "
    logging.basicConfig(stream=sys.stderr, format=f"{stamp}%(levelname)s %(name)s: %(message)s")
    _LOG.setLevel(logging.DEBUG if options.debug else logging.INFO)
    try:
        if os.geteuid() != 0:
            raise ConfigError("only root may change cgroups", remedy="start it as root")
        make_run_dir(options.run_dir)
        if options.give_back:
            return 0 if _given_back(enforcer(options)) else 1
        with _alone(options.run_dir):
            return _run(options, arguments)
    except ConfigError as err:
        sys.stderr.write(f"slurm-synergyd --node: {err}\n")
        return 2
    except (SynergyError, OSError) as err:
        sys.stderr.write(f"slurm-synergyd --node: {err}\n")
        return 1


@contextlib.contextmanager
def _alone(run_dir: Path) -> Iterator[None]:
    """Keep a second helper out. Raises ConfigError where one runs."""
    with (run_dir / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            raise ConfigError(
                "another helper runs on this node", key="--run-dir", value=str(run_dir)
            ) from err
        yield


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    channel = _channel(options)
    notifier = Notifier()
    parts = enforcer(options)
    # What a helper before this one may have left.
    parts.give_back()
    with Guard(arguments) as guard:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)
        notifier.ready("running")
        _LOG.info(
            "helper of node %s, for the controller at %s", options.node_name, channel.endpoint
        )
        _obey(parts, channel, stop, notifier, guard)
        notifier.stopping()
        done = _given_back(parts)
    _LOG.info("stopped")
    return 0 if done else 1


def _channel(options: argparse.Namespace) -> Channel:
    environment = dict(os.environ)
    if options.endpoint:
        environment["SYNERGY_ENDPOINT"] = options.endpoint
    try:
        text = Path(ENDPOINT_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    try:
        endpoint = endpoint_from(environment, text, ENDPOINT_FILE)
    except LeaseError as err:
        raise ConfigError(str(err), remedy="write it as HOST:PORT, as in head-node:7737") from err
    if not endpoint:
        raise ConfigError(
            "the controller's address is not known",
            remedy=f"name it with --endpoint, or write HOST:PORT to {ENDPOINT_FILE}",
        )
    return Channel(
        endpoint,
        options.node_name,
        authenticator=Authenticator(munge_socket(options.munge_socket, environment)),
        controller_uids=user_ids(options.controller_user or [_CONTROLLER]),
    )


class _Questions:
    """Asks the controller in a thread of its own: an answer, or munge, may take its time."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ended = threading.Event()
        self.answers: queue.SimpleQueue[Answer | SynergyError] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="questions", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._channel.close()

    def _run(self) -> None:
        known, failures = b"", 0
        while not self._ended.is_set():
            try:
                answer = self._channel.ask(known, _HOLD_S)
            except SynergyError as err:
                known = b""
                pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(failures, 10))
                failures += 1
                self.answers.put(err)
                self._ended.wait(pause_s)
            except ValueError:
                return  # the channel was closed
            else:
                known, failures = answer.state, 0
                self.answers.put(answer)


def _obey(
    parts: Enforcer, channel: Channel, stop: threading.Event, notifier: Notifier, guard: Guard
) -> None:
    """Until told to stop: bring the node to what stands, at each answer and every second."""
    standing, said = Standing(), ""
    questions = _Questions(channel)
    questions.start()
    try:
        while not stop.is_set():
            with contextlib.suppress(queue.Empty):
                answer = questions.answers.get(timeout=_LOOK_S)
                if isinstance(answer, Answer):
                    said = _back(said)
                    for text in standing.take(answer.leases):
                        _LOG.warning("%s: not obeyed", text)
                elif str(answer) != said:
                    said = str(answer)
                    _LOG.warning("%s; leases end when their time is over", said)
            try:
                parts.obey(standing.in_force(time.monotonic()))
            except (OSError, ValueError) as err:
                _LOG.warning("the cgroups of this node cannot be read: %s", err)
            try:
                guard.alive()
            except OSError as err:
                _LOG.warning("there is no guard now: %s", err)
            notifier.alive()
    finally:
        questions.end()


def _back(said: str) -> str:
    if said:
        _LOG.info("the controller answers again")
    return ""


def _given_back(parts: Enforcer) -> bool:
    """Give all back, as often as it takes within reason: processes may start meanwhile."""
    until_s = time.monotonic() + _GIVE_BACK_FOR_S
    while not parts.give_back():
        if time.monotonic() > until_s:
            _LOG.error("not everything could be given back: jobs use more than Slurm gave them")
            return False
        time.sleep(_LOOK_S / 10)
    return True


if __name__ == "__main__":
    sys.exit(main())
