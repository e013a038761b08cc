"""A Python that has imported what takes seconds, and forks itself for each program to run.

usage: zygote.py PLACE MODULE...
A line of JSON on standard input, {"arguments", "environment", "cwd", "out", "err", "status"}, runs
``arguments`` (a script and its words) as a program of its own, which finds the modules imported and
is patched as the launcher's injection would have patched them. The answer is its process id, a
line; its wait status is written to the file ``status``. At the end of the input all are killed.

The socket PLACE/socket takes the same from ``standin.py``: a line of JSON without the files, and
three descriptors in their place. It answers with the process id, and at the end the wait status;
a program whose stand-in is gone is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

INSTALL = {
    "torch.utils.data": ("torch_loader", "install"),
    "nvidia.dali.pipeline": ("dali_loader", "install_pipelines"),
    "nvidia.dali.plugin.pytorch": ("dali_loader", "install_iterators"),
}


class Server:
    """Forks a child for each request, and notes how the children end."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._children: dict[int, Path | socket.socket] = {}
        self._wake, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> dict[str, Any]:
        """Returns in a child only: what it is to run."""
        left = b""
        while True:
            standins = {
                one: pid for pid, one in self._children.items() if not isinstance(one, Path)
            }
            ready, _, _ = select.select([0, self._wake, self._listener, *standins], [], [])
            if self._wake in ready:
                os.read(self._wake, 4096)
                self._reap()
            for one, pid in standins.items():
                if one in ready and pid in self._children:  # they say nothing: it is gone
                    os.kill(pid, signal.SIGKILL)
                    self._children[pid] = Path(os.devnull)
                    one.close()
            if self._listener in ready and (asked := self._meet()):
                return asked
            if 0 not in ready:
                continue
            read = os.read(0, 65536)
            if not read:
                for pid in self._children:
                    os.kill(pid, signal.SIGKILL)
                raise SystemExit(0)
            *lines, left = (left + read).split(b"\n")
            for line in lines:
                request: dict[str, Any] = json.loads(line)
                if (pid := self._fork()) == 0:
                    return request
                self._children[pid] = Path(request["status"])
                os.write(1, b"%d\n" % pid)

    def _meet(self) -> dict[str, Any] | None:
        """Fork for a stand-in; what to run, in the child only."""
        standin, _ = self._listener.accept()
        read, files, _, _ = socket.recv_fds(standin, 65536, 3)
        while read and not read.endswith(b"\n"):
            more = standin.recv(65536)
            read = read + more if more else b""
        if not read:
            standin.close()
        elif (pid := self._fork()) == 0:
            standin.close()
            return {**json.loads(read), "files": files}
        else:
            self._children[pid] = standin
            standin.sendall(b"%d\n" % pid)
        for file in files:
            os.close(file)
        return None

    def _fork(self) -> int:
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._listener.close()
            for one in self._children.values():
                if isinstance(one, socket.socket):
                    one.close()
        return pid

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                pid, status = ended
                told = self._children.pop(pid)
                if isinstance(told, socket.socket):
                    with contextlib.suppress(OSError):
                        told.sendall(b"%d\n" % status)
                    told.close()
                elif told != Path(os.devnull):
                    new = told.with_suffix(".new")
                    new.write_text(str(status))
                    new.rename(told)


def become(request: dict[str, Any]) -> None:
    """Run the program that was asked for, in this process."""
    if "files" in request:
        for number, file in enumerate(request["files"]):
            os.dup2(file, number)
            os.close(file)
    else:
        for number, name in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
            flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
            opened = os.open(name, flags, 0o644)
            os.dup2(opened, number)
            os.close(opened)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    script = request["arguments"][0]
    sys.argv = request["arguments"]
    sys.path[:0] = [str(Path(script).parent)]
    if os.environ.get("SYNERGY_BOARD"):
        for name, (ours, install) in INSTALL.items():
            if name in sys.modules:
                module = importlib.import_module(f"slurm_synergy.jobside.{ours}")
                getattr(module, install)(sys.modules[name])
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    """Import, tell that all is there, and serve."""
    place = sys.argv[1]
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else the collector of each child would copy all of this
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{place}/socket")
        listener.listen(64)
        server = Server(listener)
        os.write(1, b"0\n")
        request = server.serve()
    code = 0
    try:
        become(request)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:  # noqa: BLE001 (what a program raises, Python would show)
        traceback.print_exc()
        code = 1
    end_with(code)


def end_with(code: int) -> NoReturn:
    """End as Python does, but without taking apart, and copying, what was imported."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
