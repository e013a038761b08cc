"""What systemd hears."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from slurm_synergy.controller.notify import Notifier


def test_every_message_reaches_the_socket_that_systemd_named(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(path))
        systemd.settimeout(5)
        notifier = Notifier({"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "6000000"})
        notifier.ready("round 1")
        assert systemd.recv(1000) == b"READY=1\nSTATUS=round 1"
        notifier.alive()
        assert systemd.recv(1000) == b"WATCHDOG=1"
        notifier.reloading()
        assert systemd.recv(1000).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
        notifier.stopping()
        assert systemd.recv(1000) == b"STOPPING=1"
        assert notifier.watchdog_s == 6.0


def test_an_abstract_socket_works_too() -> None:
    name = f"\0synergy-notify-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(name)
        systemd.settimeout(5)
        Notifier({"NOTIFY_SOCKET": "@" + name[1:]}).stopping()
        assert systemd.recv(1000) == b"STOPPING=1"


def test_without_systemd_nothing_is_said_and_nothing_fails(tmp_path: Path) -> None:
    Notifier({}).ready("x")
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).alive("y")
    assert Notifier({"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}).watchdog_s is None
