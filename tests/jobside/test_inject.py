"""The hook in the user's interpreter: it does its work, costs nothing else, and harms nothing."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from inprocess import INJECT, ROOT, clean_environment, finish, injected, lease, start

from slurm_synergy.jobside.board import Board

LOADER = """
import torch
from torch.utils.data import DataLoader
loader = DataLoader(list(range(10)), batch_size=3, shuffle=True)
print(type(iter(loader)).__name__, sorted(int(v) for b in loader for v in b))
"""
ROOMS = """
import sys
import slurm_synergy.jobside as synergy
synergy.register(); synergy.resume(); list(synergy.iterate([1]))
print(*sorted(name.partition('.')[0] for name in sys.modules))
print(*sorted(name for name in sys.modules if name.startswith('slurm_synergy.')))
"""
FINDER = """
import inspect, torch.utils.data as data
print(type(data.__loader__).__name__, type(data.__spec__.loader).__name__)
print(inspect.signature(data.DataLoader.__init__).parameters["dataset"].name)
assert "class DataLoader" in inspect.getsource(data.DataLoader)
"""
# Where nothing is to be patched: an import of the real one takes seconds.
NO_TORCH = {
    "torch/__init__.py": "",
    "torch/utils/__init__.py": "",
    "torch/utils/data.py": """
class DataLoader:
    def __init__(self, data, batch_size, shuffle):
        self.data = data
    def __iter__(self):
        return _SingleProcessDataLoaderIter(self.data)
class _SingleProcessDataLoaderIter:
    def __init__(self, data):
        self.rest = [[number] for number in data]
    def __iter__(self):
        return self
    def __next__(self):
        if not self.rest:
            raise StopIteration
        return self.rest.pop(0)
""",
}


@pytest.fixture
def board(tmp_path: Path) -> Board:
    made = Board.create(tmp_path / "board", rank=0, ranks=1)
    made.write_lease(lease(2))
    return made


def _run(program: str, environment: dict[str, str]) -> tuple[str, str]:
    status, out, err = finish(start(["-c", program], environment))
    assert status == 0, err
    return out.strip(), err.strip()


def _write_torch(place: Path) -> str:
    """The directory of a package that has torch's name, and a loader to be left as it is."""
    for name, text in NO_TORCH.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return str(place)


def _check_rooms(everything: str, ours: str) -> None:
    foreign = {"grpc", "google", "pydantic", "yaml", "click", "psutil", "rich"}
    assert not foreign & set(everything.split())
    allowed = ("slurm_synergy.jobside", "slurm_synergy.errors")
    assert all(name.startswith(allowed) for name in ours.split())


def test_an_unchanged_script_becomes_lease_aware_and_loads_only_what_it_needs(
    board: Board,
) -> None:
    out, err = _run(LOADER + FINDER + ROOMS, injected(board, None))
    loader, loaders, first, *modules = out.splitlines()
    assert loader == f"generator {list(range(10))}"
    assert err == ""
    assert board.read_report().step == 5  # four batches, and one of what loads the rest
    # The finder's loader looks like the original.
    assert (loaders.split(), first) == (["SourceFileLoader", "SourceFileLoader"], "dataset")
    _check_rooms(*modules)


@pytest.mark.parametrize("off", [{"SYNERGY_INJECT": "0"}, {"SYNERGY_BOARD": ""}], ids=str)
def test_switched_off_it_does_nothing(board: Board, tmp_path: Path, off: dict[str, str]) -> None:
    environment = {**injected(board, None), **off}
    environment["PYTHONPATH"] += f":{_write_torch(tmp_path / 'packages')}"
    out, err = _run(LOADER, environment)
    assert out.startswith("_SingleProcessDataLoaderIter") and err == ""


def test_the_package_need_not_be_installed_for_the_users_interpreter(
    board: Board, tmp_path: Path
) -> None:
    # Without site-packages' own record of this package: only the hook can find it.
    environment = {**injected(board, None), "PYTHONPATH": str(INJECT)}
    program = """
import sys
sys.path[:] = [p for p in sys.path if not p.startswith(ROOT) or "site-packages" in p]
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in getattr(f, "__name__", "")]
import slurm_synergy.jobside as synergy
print(synergy.lease().core_count, synergy.__file__ == ROOT + "/slurm_synergy/jobside/__init__.py")
""".replace("ROOT", repr(str(ROOT)))
    out, err = _run(program, environment)
    assert (out, err) == ("2 True", "")


@pytest.mark.parametrize("switch", ["1", "0"])
def test_the_users_own_sitecustomize_still_runs(board: Board, tmp_path: Path, switch: str) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "sitecustomize.py").write_text("import builtins\nbuiltins.mine = __name__\n")
    environment = {
        **injected(board, None),
        "PYTHONPATH": f"{INJECT}:{mine}",
        "SYNERGY_INJECT": switch,
    }
    program = "import sys; print(mine, sys.modules['sitecustomize'].__file__)"
    out, err = _run(program, environment)
    assert out == f"sitecustomize {mine}/sitecustomize.py" and err == ""


def test_a_broken_sitecustomize_of_the_user_is_reported_as_always(
    board: Board, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("1 / 0\n")
    environment = {**injected(board, None), "PYTHONPATH": f"{INJECT}:{tmp_path}"}
    out, err = _run("print('running')", environment)
    assert out == "running" and "ZeroDivisionError" in err


def test_a_failing_hook_costs_one_line_and_the_program_runs(board: Board, tmp_path: Path) -> None:
    # A copy of the package in which the loader part cannot be imported.
    package = tmp_path / "slurm_synergy"
    # Byte code comes and goes while other tests import the package.
    left = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "slurm_synergy" / "jobside", package / "jobside", ignore=left)
    (package / "__init__.py").touch()
    (package / "jobside" / "torch_loader.py").write_text("raise RuntimeError('broken')\n")
    torch = _write_torch(tmp_path / "packages")
    path = f"{package / 'jobside' / 'inject'}:{torch}"
    out, err = _run(LOADER, {**injected(board, None), "PYTHONPATH": path})
    assert out.startswith("_SingleProcessDataLoaderIter")
    assert err == "slurm-synergy: the data loader is left as it is: RuntimeError: broken"


def test_a_missing_board_costs_one_line_and_the_program_runs(board: Board, tmp_path: Path) -> None:
    environment = {**injected(board, None), "SYNERGY_BOARD": str(tmp_path / "gone")}
    out, err = _run(LOADER, environment)
    assert out.startswith("_SingleProcessDataLoaderIter")
    assert err.count("\n") == 0 and "running without a lease" in err


def test_where_torch_is_not_imported_nothing_of_ours_is(board: Board) -> None:
    program = "import sys, json; print([n for n in sys.modules if n.startswith('slurm_synergy')])"
    out, err = _run(program, injected(board, None))
    assert (out, err) == ("[]", "")


def test_the_hook_imports_nothing_that_python_had_not_imported(board: Board) -> None:
    program = "import sys; print(*sorted(sys.modules))"
    plain, _ = _run(program, clean_environment())
    hooked, _ = _run(program, injected(board, None))
    added = set(hooked.split()) - set(plain.split())
    assert added <= {"sitecustomize", "importlib.machinery", "importlib.util", "importlib._abc"}


def test_a_plain_process_loads_nothing_of_the_other_rooms(board: Board) -> None:
    out, _err = _run(ROOMS, injected(board, None))
    everything, ours = out.splitlines()
    assert not {"torch", "numpy"} & set(everything.split())
    _check_rooms(everything, ours)


def test_this_interpreter_was_not_touched() -> None:
    assert not any(type(finder).__module__ == "sitecustomize" for finder in sys.meta_path)
