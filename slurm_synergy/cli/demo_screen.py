"""What the demonstration shows: a live table on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table

__all__ = ["Finished", "Row", "Screen", "comparison"]

_LINE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One job as it is now; ``cpus`` and ``mem_mib`` are its lease's, None while it has none."""

    job_id: int
    name: str
    state: str
    node: str
    cpus: int | None
    mem_mib: int | None
    progress: str

    def line(self) -> str:
        """The row as a piece of one line of a log."""
        share = f"{self.cpus} CPUs {_gib(self.mem_mib)} GiB" if self.cpus is not None else ""
        words = (self.name, self.state if not self.node else self.node, share, self.progress)
        return " ".join(word for word in words if word)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What a job had and how long it took from submission to its end, as Slurm recorded it.

    ``cpus`` and ``mem_mib`` are those of its leases one after the other.
    """

    name: str
    node: str
    cpus: tuple[int, ...]
    mem_mib: tuple[int, ...]
    jct_s: float


def _gib(mem_mib: int | None) -> str:
    return "-" if mem_mib is None else f"{mem_mib / 1024:.0f}"


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)


class Screen:
    """Writes to ``console``; ``live`` tables only where they can be redrawn."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._next_line_s = 0.0
        self._begun_s = time.monotonic()

    def say(self, text: str) -> None:
        """One line, or several."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def heading(self, text: str) -> None:
        """The title of an act."""
        self.say("")
        self._console.print(text, style="bold", markup=False, highlight=False, soft_wrap=True)

    def table(self, table: Table) -> None:
        """A table that stays."""
        self._console.print(table)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, ``show`` redraws one table (on a terminal)."""
        self._next_line_s = 0.0
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, auto_refresh=False) as self._live:
            try:
                yield
            finally:
                self._live = None

    def show(self, rows: Sequence[Row]) -> None:
        """The state of the jobs now."""
        if self._live is not None:
            self._live.update(_live_table(rows), refresh=True)
            return
        now_s = time.monotonic()
        if now_s >= self._next_line_s:
            self._next_line_s = now_s + _LINE_EVERY_S
            self.say(f"{now_s - self._begun_s:5.0f} s  " + "; ".join(row.line() for row in rows))


def _live_table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("job", "name", "state", "node"):
        table.add_column(title)
    table.add_column("CPUs", justify="right")
    table.add_column("GiB", justify="right")
    table.add_column("progress")
    for row in rows:
        table.add_row(
            str(row.job_id),
            row.name,
            row.state,
            row.node,
            _count(row.cpus),
            _gib(row.mem_mib),
            row.progress,
        )
    return table


def _then(texts: Iterable[str]) -> str:
    """The texts in order with arrows between, a repeated one once."""
    return "→".join(text for text, _ in itertools.groupby(texts)) or "-"


def comparison(runs: Sequence[tuple[str, Sequence[Finished]]]) -> Table:
    """Each job under each mechanism side by side; the last column is first over last JCT."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("\njob", no_wrap=True)
    for mechanism, _ in runs:
        table.add_column(f"{mechanism}:\nnode", no_wrap=True)
        for title in ("CPUs", "GiB", "JCT s"):
            table.add_column(f"\n{title}", justify="right", no_wrap=True)
    table.add_column("\nfaster", justify="right")
    names = [finished.name for finished in runs[0][1]]
    for name in names:
        cells = [name]
        jcts_s = []
        for _, results in runs:
            (one,) = (finished for finished in results if finished.name == name)
            gib = _then(_gib(mem_mib) for mem_mib in one.mem_mib)
            cells += [one.node, _then(map(str, one.cpus)), gib, f"{one.jct_s:.0f}"]
            jcts_s.append(one.jct_s)
        table.add_row(*cells, f"{jcts_s[0] / jcts_s[-1]:.2f}x")
    return table
