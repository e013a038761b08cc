"""No shell, no unpickling, and no text of a user's that a command could take for an option."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_synergy.core.hints import Hints, parse_hints
from slurm_synergy.errors import HintError, SynergyError
from slurm_synergy.slurm.cli_client import CliSlurmClient
from slurm_synergy.slurm.commands import CommandResult, SlurmCommands

ROOT = Path(__file__).parents[2]


def _is_python(path: Path) -> bool:
    return path.suffix == ".py" or (not path.suffix and b"python" in path.read_bytes()[:80])


SOURCES = sorted(
    path
    for place in ("slurm_synergy", "benchmarks", "examples", "scripts", "wrapper", "sbin")
    for path in (ROOT / place).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts and _is_python(path)
)
FORBIDDEN = {
    *("os.system", "os.popen", "os.spawnl", "os.spawnlp", "os.spawnv", "os.spawnvp", "pty.spawn"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads"),
    *("shelve.open", "dill.load", "joblib.load", "yaml.unsafe_load", "yaml.full_load"),
    *("tempfile.mktemp", "eval", "exec", "compile"),
}
STARTERS = {"run", "Popen", "call", "check_call", "check_output"}
# The classes of this project are made from their fields, as dataclasses does it.
MAY = {
    "slurm_synergy/core/values.py": {"exec"},
    # Samples in the job's own cache, which this user's processes alone can write to.
    "slurm_synergy/jobside/minio_pickle.py": {"pickle.loads"},
}


def _name(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    return ".".join(reversed(parts))


def calls(source: str) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield _name(node.func), node


def offences(source: str, may: Collection[str] = ()) -> list[str]:
    """What in ``source`` starts a shell, or runs what it read."""
    found = []
    for name, call in calls(source):
        keywords = {one.arg: one.value for one in call.keywords}
        if name in FORBIDDEN and name not in may:
            found.append(f"line {call.lineno}: {name}")
        shell = keywords.get("shell")
        if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
            found.append(f"line {call.lineno}: shell=")
        program = call.args[0] if call.args else None
        starts = name.startswith("subprocess.") and name.partition(".")[2] in STARTERS
        if starts and isinstance(program, ast.Constant | ast.JoinedStr | ast.BinOp):
            found.append(f"line {call.lineno}: a command that is one text")
        if name == "torch.load":
            safe = keywords.get("weights_only")
            if not (isinstance(safe, ast.Constant) and safe.value is True):
                found.append(f"line {call.lineno}: torch.load without weights_only=True")
        if name == "yaml.load" and "Loader" not in keywords:
            found.append(f"line {call.lineno}: yaml.load without a loader")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_starts_a_shell_or_runs_what_it_read(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    assert offences(path.read_text(encoding="utf-8"), MAY.get(name, ())) == []


def test_the_search_finds_what_it_looks_for() -> None:
    assert len(SOURCES) > 100
    bad = [
        "import os\nos.system('ls')",
        "subprocess.run(argv, shell=True)",
        "subprocess.run(argv, shell=flag)",
        "subprocess.Popen('ls -l')",
        "subprocess.run(f'scontrol hold {job}')",
        "subprocess.check_output('squeue -j ' + job)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text)",
        "pickle.loads(raw)",
        "eval(text)",
        "exec(text)",
    ]
    assert [source for source in bad if not offences(source)] == []


def test_the_loader_of_the_settings_is_a_safe_one() -> None:
    yaml = pytest.importorskip("yaml")
    from slurm_synergy import config

    assert issubclass(config._StrictLoader, yaml.SafeLoader)


class Recorder:
    """Keeps every command, and answers as if all were well and nothing were there."""

    def __init__(self) -> None:
        self.argvs: list[tuple[str, ...]] = []
        self.lines: list[str] = []

    def run(self, argv: Sequence[str], *, timeout_s: float, stdin: str = "") -> CommandResult:
        self.argvs.append(tuple(argv))
        self.lines += stdin.splitlines()
        return CommandResult(argv=tuple(argv), rc=0, stdout="No reservations", stderr="")


CONSTANT = re.compile(
    r"scontrol|squeue|scancel|show|hold|release|requeue|update|create|delete|reservation|job|node"
    r"|partition|config|-a|-d|-o|-h|-j|-t|all|\d+|[A-Za-z]+=.*",
    re.DOTALL,
)
TEXTS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        [
            "--all",
            "-o/tmp/x",
            "x; rm -rf /",
            "$(reboot)",
            "`id`",
            "a b",
            "a' Priority=1",
            "a\nPriority=1",
            "Users=root",
            "a,b",
            "",
        ]
    ),
)


@given(text=TEXTS, more=TEXTS)
def test_no_text_becomes_an_option_or_a_second_argument(text: str, more: str) -> None:
    tried: list[Callable[[CliSlurmClient], object]] = [
        lambda client: client.set_comment(7, text),
        lambda client: client.set_admin_comment(7, text),
        lambda client: client.update_each({7: (f"AdminComment={text}",), 8: (f"Name={more}",)}),
        lambda client: client.create_reservation(text, ["n1"], ["root"]),
        lambda client: client.create_reservation("synergy", [text], [more]),
        lambda client: client.update_reservation_nodes("synergy", [text, more]),
        lambda client: client.update_reservation_users(more, [text]),
        lambda client: client.renew_reservation(text),
        lambda client: client.delete_reservation(text),
        lambda client: client.read_partition(text),
    ]
    for call in tried:
        recorder = Recorder()
        client = CliSlurmClient(recorder, tries=1, sleep=lambda seconds: None)
        with contextlib.suppress(SynergyError, ValueError):
            call(client)
        for argv in recorder.argvs:
            for word in argv[1:]:
                named = argv[1:4] == ("-a", "-o", "show") and word == text
                assert CONSTANT.fullmatch(word) or named, argv
                assert not (named and word.startswith("-")), argv
        for line in recorder.lines:
            assert all(not word.startswith("-") for word in line.split())


def test_a_partition_that_looks_like_an_option_is_refused() -> None:
    recorder = Recorder()
    client = CliSlurmClient(recorder, tries=1, sleep=lambda seconds: None)
    with pytest.raises(ValueError, match="is not a name"):
        client.read_partition("--help")
    assert recorder.argvs == []


def test_arguments_reach_the_program_as_they_are(tmp_path: Path) -> None:
    program = tmp_path / "scontrol"
    program.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "<$word>"; done\n')
    program.chmod(0o755)
    hostile = ["update", "Comment=a b; touch x", "Comment=$(id) `id` $HOME", "Comment=*", "a'\"b"]
    done = SlurmCommands(bin_dir=str(tmp_path)).run(["scontrol", *hostile], timeout_s=20)
    assert done.stdout.splitlines() == [f"<{word}>" for word in hostile]


NUMBERS = st.integers(0, 10**40).map(str)
KEYS = st.sampled_from(
    ["profile", "min_mem", "samples", "epochs", "batch", "min_gpus", "max_gpus", "grace_s", "x"]
)


@given(st.lists(st.tuples(KEYS, st.one_of(NUMBERS, st.text(max_size=10))), max_size=20))
def test_hints_are_few_and_their_numbers_bounded(pairs: list[tuple[str, str]]) -> None:
    comment = "synergy:" + ",".join(f"{key}={value}" for key, value in pairs)
    try:
        hints = parse_hints(comment)
    except HintError:
        return
    assert len(pairs) <= len(Hints.__dataclass_fields__)
    for field in Hints.__dataclass_fields__:
        value = getattr(hints, field)
        for number in value if isinstance(value, tuple) else (value,):
            assert not isinstance(number, int) or 0 < number < 10**15
