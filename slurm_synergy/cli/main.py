"""``synergyctl``: exit status 0 done, 1 refused or not reachable, 2 wrong usage or settings.

An error goes to standard error in words, and with ``--json`` as ``{"error": WORDS}`` to standard
output too.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from slurm_synergy.cli.loading import missing_package

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run synergyctl and exit."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    _open_what_is_closed()
    status, text = _run(arguments)
    if text and _asks_for_json(arguments):
        with contextlib.suppress(OSError):  # it may be standard output that is full
            sys.stdout.write(json.dumps({"error": text}) + "\n")
            sys.stdout.flush()
    sys.exit(status)


def _run(arguments: Sequence[str]) -> tuple[int, str]:
    """The exit status, and what was said on standard error."""
    try:
        # Here, so that a missing package and a Ctrl-C meanwhile have an answer in words.
        from slurm_synergy.cli.commands import run

        return run(arguments)
    except ModuleNotFoundError as err:
        text = missing_package(err)
        sys.stderr.write(f"synergyctl: {text}\n")
        return 1, text
    except KeyboardInterrupt:
        sys.stderr.write("\nAborted!\n")
        return 1, "aborted"


def _open_what_is_closed() -> None:
    """Where the caller closed an output, what is printed is lost, and no file takes its number."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115


def _asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether --json is among the options: whoever reads JSON finds the error there too."""
    own = itertools.takewhile(lambda argument: argument != "--", arguments)
    return "--json" in own


if __name__ == "__main__":
    main()
