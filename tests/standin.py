"""Stands for a program that runs in a fork of another Python: see zygote.py and forks.py.

usage: standin.py SOCKET SCRIPT [WORDS...]
A job of Slurm runs this where it would run ``python SCRIPT WORDS...``. The program has its files,
its environment and its directory, gets the signals that it gets, and ends with it; it ends as the
program does.
"""

import contextlib
import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Have it run, and wait for it."""
    place, *arguments = sys.argv[1:]
    request = {"arguments": arguments, "environment": dict(os.environ), "cwd": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as zygote:
        zygote.connect(place)
        socket.send_fds(zygote, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
        with zygote.makefile() as answers:
            pid = int(answers.readline())

            def forward(number: int, frame: object) -> None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

            for number in FORWARDED:
                signal.signal(number, forward)
            status = os.waitstatus_to_exitcode(int(answers.readline()))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
