"""Messages to systemd (sd_notify), without its library. Outside systemd they go nowhere."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping

__all__ = ["Notifier"]


class Notifier:
    """Speaks to the socket that systemd named in NOTIFY_SOCKET of ``environment``."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        env = os.environ if environment is None else environment
        self._address = env.get("NOTIFY_SOCKET", "")
        usec, pid = env.get("WATCHDOG_USEC", ""), env.get("WATCHDOG_PID", "")
        asked = usec.isdigit() and int(usec) > 0 and (not pid or pid == str(os.getpid()))
        self.watchdog_s: float | None = int(usec) / 1e6 if asked else None

    def ready(self, status: str) -> None:
        """Start-up, or a reload, is finished."""
        self._send(f"READY=1\nSTATUS={status}")

    def reloading(self) -> None:
        """A reload begins; ``ready`` ends it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """A clean stop begins."""
        self._send("STOPPING=1")

    def alive(self, status: str = "") -> None:
        """The main loop turned once more."""
        self._send("WATCHDOG=1" + (f"\nSTATUS={status}" if status else ""))

    def _send(self, text: str) -> None:
        if not self._address:
            return
        address = self._address
        if address.startswith("@"):
            address = "\0" + address[1:]
        # Nothing of ours may fail because the service manager does not listen.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.connect(address)
            sock.sendall(text.encode())
