"""What lies between a node and the controller, to be cut: a TCP relay, and a clock that is off."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
from pathlib import Path

import pytest

__all__ = ["Relay", "skewed_library"]


class Relay:
    """Forwards connections to ``target``; ``cut`` swallows everything, as a dropping firewall."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._passes = threading.Event()
        self._passes.set()
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._server.accept()
            except OSError:
                return
            self._open.append(caller)
            if not self._passes.is_set():
                continue
            try:
                onward = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                caller.close()
                continue
            self._open.append(onward)
            for source, sink in ((caller, onward), (onward, caller)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self._passes.is_set():
                    sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def cut(self) -> None:
        """Nothing gets through any more, and nobody is told."""
        self._passes.clear()

    def mend(self) -> None:
        """New connections get through; the old ones are reset."""
        self._passes.set()
        self._close_all()

    def close(self) -> None:
        """End it."""
        # A thread that waits in accept() is not woken by close().
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()
        self._close_all()

    def _close_all(self) -> None:
        while self._open:
            one = self._open.pop()
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


_CLOCK_C = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long off(void) { return access(OFF_FLAG, F_OK) == 0 ? OFF_S : 0; }
int clock_gettime(clockid_t id, struct timespec *ts) {
    int rc = syscall(SYS_clock_gettime, id, ts);
    if (rc == 0 && id == CLOCK_REALTIME) ts->tv_sec += off();
    return rc;
}
time_t time(time_t *to) {
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    if (to) *to = ts.tv_sec;
    return ts.tv_sec;
}
int gettimeofday(struct timeval *restrict tv, void *restrict zone) {
    struct timespec ts;
    (void) zone;
    clock_gettime(CLOCK_REALTIME, &ts);
    tv->tv_sec = ts.tv_sec;
    tv->tv_usec = ts.tv_nsec / 1000;
    return 0;
}
"""


def skewed_library(home: Path, off_s: int) -> tuple[Path, Path]:
    """A library for LD_PRELOAD whose clock is ``off_s`` seconds off while a flag file exists."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a clock that is off needs a C compiler (cc) here")
    source, library, flag = home / "clock.c", home / "clock.so", home / "clock-is-off"
    source.write_text(_CLOCK_C, encoding="utf-8")
    defines = [f'-DOFF_FLAG="{flag}"', f"-DOFF_S={off_s}"]
    argv = [compiler, "-shared", "-fPIC", "-O1", *defines, "-o", str(library), str(source)]
    subprocess.run(argv, check=True, capture_output=True)
    return library, flag
