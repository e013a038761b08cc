"""Many changes in one ``scontrol`` process: one line each on its standard input.

A session has one exit status, and prints errors without the line that they belong to (``No changes
specified`` names no job, 22.05 names jobs of an array by other ids). So each line is followed by
one that scontrol cannot know: it answers ``invalid keyword: <mark>`` on the same stream, without
asking slurmctld, and everything between two marks is the answer to the line between them. A mark
that is missing tells that the session ended before it.

**No text may break out of its line.** scontrol splits at blanks, knows quotes and backslashes, and
a line break is the end of a command. So only words of harmless characters travel this way; others
(comments, say) need a process of their own, where they are arguments that nobody splits.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_synergy.errors import ClusterError, SlurmCommandError, SlurmParseError
from slurm_synergy.slurm.commands import (
    CommandResult,
    CommandRunner,
    classify,
    is_done_for_the_rest,
)

__all__ = ["LONGEST_LINE", "LineResult", "fits", "run_lines"]

LONGEST_LINE = 4000
"""Most characters of a line; scontrol built without readline cuts lines at 4,096."""

_MOST_LINES = 500
_HARMLESS = re.compile(r"[A-Za-z0-9_.,:;/@%+=\[\]*-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResult:
    """What became of one line: ``error`` is None when scontrol said nothing against it."""

    words: tuple[str, ...]
    error: ClusterError | None


def fits(words: Sequence[str]) -> bool:
    """Whether a command may travel as a line of a session."""
    return (
        bool(words)
        and all(_HARMLESS.fullmatch(word) and not word.startswith("-") for word in words)
        and sum(len(word) + 1 for word in words) <= LONGEST_LINE
    )


def run_lines(
    runner: CommandRunner,
    lines: Sequence[Sequence[str]],
    *,
    timeout_s: float,
    mark: str | None = None,
) -> tuple[LineResult, ...]:
    """Run ``scontrol`` commands (without the word scontrol), each as one line; results in order.

    ``timeout_s`` bounds every session of up to 500 lines. Raises ``ValueError`` for a line that
    does not fit (see ``fits``), ``SlurmTimeout`` as the runner does. A line that was not reached
    has an error, and so may have taken effect a line whose answer is missing: read back.
    """
    for line in lines:
        if not fits(line):
            raise ValueError(f"not for a scontrol session: {' '.join(line)!r}")
    results: list[LineResult] = []
    for start in range(0, len(lines), _MOST_LINES):
        chosen = [tuple(line) for line in lines[start : start + _MOST_LINES]]
        results += _run(runner, chosen, timeout_s, mark or f"mark-{secrets.token_hex(8)}")
    return tuple(results)


def _run(
    runner: CommandRunner, lines: Sequence[tuple[str, ...]], timeout_s: float, mark: str
) -> list[LineResult]:
    marks = [f"{mark}-{number}" for number in range(len(lines))]
    text = "".join(f"{' '.join(line)}\n{own}\n" for line, own in zip(lines, marks, strict=True))
    answer = runner.run(("scontrol",), timeout_s=timeout_s, stdin=text)
    rest, results = answer.stderr, []
    for line, own in zip(lines, marks, strict=True):
        said, found, later = rest.partition(f"invalid keyword: {own}\n")
        results.append(LineResult(words=line, error=_error(line, said, bool(found), answer)))
        rest = later if found else ""
    return results


def _error(
    line: tuple[str, ...], said: str, reached: bool, answer: CommandResult
) -> ClusterError | None:
    said = said.strip()
    if is_done_for_the_rest(said):
        return None
    if said:
        return SlurmCommandError(("scontrol", *line), answer.rc, said, kind=classify(said))
    if not reached:
        what = f"scontrol ended (status {answer.rc}) before it answered to {' '.join(line)!r}"
        return SlurmParseError(what, answer.stderr[-200:])
    return None
