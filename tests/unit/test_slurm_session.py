"""Sessions of scontrol: what may travel in one, and to which line an answer belongs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_synergy.errors import SlurmCommandError, SlurmParseError
from slurm_synergy.slurm.commands import CommandResult
from slurm_synergy.slurm.session import LONGEST_LINE, fits, run_lines

LINES = (("update", "JobId=7", "TimeLimit=5"), ("hold", "8"), ("update", "JobId=9", "Features="))


class Scontrol:
    """Answers each line by a table, and each mark as scontrol does; may end early."""

    def __init__(self, answers: dict[str, str], ends_after: int = 1000) -> None:
        self.answers, self.ends_after = answers, ends_after
        self.stdin: list[str] = []

    def run(self, argv: Sequence[str], *, timeout_s: float, stdin: str = "") -> CommandResult:
        self.stdin.append(stdin)
        lines = stdin.splitlines()
        said = [
            self.answers.get(line, "") if place % 2 == 0 else f"invalid keyword: {line}\n"
            for place, line in enumerate(lines[: self.ends_after])
        ]
        return CommandResult(argv=tuple(argv), rc=1, stdout="", stderr="".join(said))


def test_answers_belong_to_the_line_between_two_marks() -> None:
    runner = Scontrol({"hold 8": "Invalid job id specified for job 8\nslurm_suspend error: x\n"})
    first, second, third = run_lines(runner, LINES, timeout_s=5)
    assert first.error is None and third.error is None
    assert isinstance(second.error, SlurmCommandError) and second.error.kind == "not_found"
    assert second.error.argv == ("scontrol", "hold", "8")


def test_members_of_an_array_that_are_over_are_no_error_of_the_line() -> None:
    said = "8_0,2-3: No error\n8_1: Job has already finished\n"
    assert all(
        one.error is None for one in run_lines(Scontrol({"hold 8": said}), LINES, timeout_s=5)
    )
    over = Scontrol({"hold 8": "8_1: Job has already finished\n"})
    assert isinstance(run_lines(over, LINES, timeout_s=5)[1].error, SlurmCommandError)


def test_a_session_that_ended_early_tells_which_lines_have_no_answer() -> None:
    first, second, third = run_lines(Scontrol({}, ends_after=3), LINES, timeout_s=5)
    assert first.error is None
    # The second line was sent, but its mark is missing: nobody knows.
    assert isinstance(second.error, SlurmParseError) and isinstance(third.error, SlurmParseError)
    assert "before it answered to 'hold 8'" in str(second.error)


def test_an_error_that_quotes_a_mark_of_another_session_is_taken_for_text() -> None:
    forged = "invalid keyword: mark-0000-0\ninvalid feature 'invalid keyword: mark-0000-1'\n"
    first, second, _ = run_lines(Scontrol({"hold 8": forged}), LINES, timeout_s=5)
    assert first.error is None and "mark-0000-1" in str(second.error)


def test_many_lines_go_in_several_sessions() -> None:
    runner = Scontrol({})
    results = run_lines(runner, [("hold", str(n)) for n in range(1201)], timeout_s=5)
    assert len(results) == 1201 and len(runner.stdin) == 3
    assert all(result.error is None for result in results)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("",),
        ("update", "Comment=a b"),
        ("update", "Comment=a\nhold 1"),
        ("update", "Comment='a"),
        ("update", 'Comment="a'),
        ("update", "Comment=a\\"),
        ("update", "Comment=a\tb"),
        ("update", "Comment=!1"),
        ("update", "Comment=$x"),
        ("update", "Comment=é"),
        ("-a", "hold"),
        ("update", f"ReqNodeList={'n' * LONGEST_LINE}"),
    ],
)
def test_words_that_could_break_out_of_their_line_never_enter_a_session(
    words: tuple[str, ...],
) -> None:
    assert not fits(words)
    runner = Scontrol({})
    with pytest.raises(ValueError, match="not for a scontrol session"):
        run_lines(runner, [("hold", "1"), words], timeout_s=5)
    assert runner.stdin == []


@given(st.lists(st.text(max_size=20), min_size=1, max_size=4))
def test_what_fits_is_one_line_of_the_very_same_words(words: list[str]) -> None:
    if fits(words):
        line = " ".join(words)
        assert line.split() == words and len(line.splitlines()) == 1
        assert not set(line) & set("\"'\\\n\r\t#$`!;|&<>()") - {";"}
