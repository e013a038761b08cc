"""How far an experiment is: a bar on a terminal, a line for each simulation elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

import click

__all__ = ["Progress"]


class Progress:
    """Counts simulations that are done; ``before`` of ``total`` had a result already."""

    def __init__(self, *, total: int, before: int) -> None:
        self._total, self._done = total, before
        self._began_s = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        if before:
            click.echo(f"{before} of {total} simulations have a result already", err=True)

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            text = TextColumn("{task.description}", markup=False)
            self._bar = Bar(*columns, text, console=Console(stderr=True))
            self._task = self._bar.add_task("", total=self._total, completed=self._done)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, name: str, error: str) -> None:
        """One more is done; ``error`` if it failed."""
        self._done += 1
        text = f"{name}: failed" if error else name
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=text)
            return
        took_s = time.monotonic() - self._began_s
        click.echo(f"[{self._done}/{self._total}] {took_s:.0f} s  {text}", err=True)
