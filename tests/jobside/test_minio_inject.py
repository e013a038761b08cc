"""An unchanged script under a launcher reads its training data through the cache."""

from __future__ import annotations

import hashlib
import os
import sys
import types
from pathlib import Path

import pytest
from inprocess import finish, injected, start

from slurm_synergy.jobside.board import Board, LeaseView
from slurm_synergy.jobside.data_told import read_told
from slurm_synergy.jobside.minio import CachedDataset
from slurm_synergy.jobside.minio_inject import CachedLoader, cached_for, has_budget

# What torchvision.datasets.folder has, as far as it matters here; the names are torchvision's.
FOLDER = """
from pathlib import Path
from PIL import Image
READ = Path(__file__).with_name("read")
def pil_loader(path):
    with READ.open("a") as note: note.write("x")
    with open(path, "rb") as file: return Image.open(file).convert("RGB")
def default_loader(path): return pil_loader(path)
class DatasetFolder:
    def __init__(self, root, loader=default_loader, transform=None):
        self.samples = [(str(path), at) for at, path in enumerate(sorted(Path(root).iterdir()))]
        self.loader, self.transform = loader, transform
    def __len__(self): return len(self.samples)
    def __getitem__(self, index):
        path, target = self.samples[index]
        sample = self.loader(path)
        return self.transform(sample) if self.transform else sample, target
"""
PROGRAM = """
import hashlib, os, sys
import torchvision.datasets.folder as folder
from torch.utils.data import DataLoader, Subset
def digest(image): return hashlib.sha256(image.tobytes()).hexdigest()
data = folder.DatasetFolder(sys.argv[1], transform=digest, **(
    {"loader": folder.pil_loader} if sys.argv[2] == "subset" else {}))
if sys.argv[2] == "subset": data = Subset(data, range(12))
loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=int(sys.argv[3]))
epochs = [sorted((int(n), d) for d4, n4 in loader for d, n in zip(d4, n4)) for _ in range(3)]
print(epochs[0] == epochs[1] == epochs[2], len(epochs[0]))
print(hashlib.sha256(repr(epochs).encode()).hexdigest())
"""


@pytest.fixture
def images(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    where = tmp_path / "images"
    where.mkdir()
    for number in range(12):
        made = image.new("P" if number % 2 else "RGB", (8, 8), color=number)
        made.save(where / f"{number:02}.png")
    package = tmp_path / "path" / "torchvision" / "datasets"
    package.mkdir(parents=True)
    (package / "folder.py").write_text(FOLDER)
    return where


def _run(tmp_path: Path, program: str, *arguments: object, **more: str) -> tuple[str, str]:
    board = Board.create(tmp_path / f"board-{os.urandom(4).hex()}", rank=0, ranks=1)
    board.write_lease(LeaseView(generation=1, mem_mib=4096, core_count=2))
    environment = injected(board, None, SYNERGY_CACHE_DIR=str(tmp_path), **more)
    environment["PYTHONPATH"] += f":{tmp_path / 'path'}"
    status, out, err = finish(start(["-c", program, *map(str, arguments)], environment))
    assert status == 0, err
    return out, err


def _caches(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("synergy-cache-*"))


@pytest.mark.parametrize(("kind", "workers"), [("default", 2), ("subset", 0)])
def test_image_files_are_kept_and_decoded_as_before(
    images: Path, tmp_path: Path, kind: str, workers: int
) -> None:
    read = tmp_path / "path" / "torchvision" / "datasets" / "read"
    ours, err = _run(tmp_path, PROGRAM, images, kind, workers)
    decode = pytest.importorskip("PIL.Image").open
    expected = [
        (number, hashlib.sha256(decode(path).convert("RGB").tobytes()).hexdigest())
        for number, path in enumerate(sorted(images.iterdir()))
    ]
    digest = hashlib.sha256(repr([expected] * 3).encode()).hexdigest()
    assert ours == f"True 12\n{digest}\n" and err == ""
    assert not read.exists() and len(_caches(tmp_path)) == 1
    # And its launcher knows how much there is, and where it lies.
    sizes = [path.stat().st_size for path in images.iterdir()]
    told = read_told(tmp_path / "board")
    assert told is not None
    assert (told.samples, told.file_count, len(told.files)) == (12, 12, 12)
    assert told.mib() * 2**20 == pytest.approx(sum(sizes))


def test_a_loader_that_we_do_not_know_is_left_alone(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("torchvision.datasets.folder")
    vars(module)["__file__"] = str(tmp_path / "folder.py")
    exec(FOLDER, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    known, unknown = module.DatasetFolder(images), module.DatasetFolder(images, loader=repr)
    assert cached_for(known) is known and isinstance(known.loader, CachedLoader)
    assert cached_for(unknown) is unknown and unknown.loader is repr


DECLARED = """
import sys
from torch.utils.data import DataLoader, Dataset
class Squares(Dataset):
    synergy_deterministic = True
    def __len__(self): return 20
    def __getitem__(self, index):
        with open(sys.argv[1], "a") as file: file.write("x")
        return index * index
loader = DataLoader(Squares(), batch_size=3, shuffle=True, num_workers=2)
for _ in range(3):
    print(sorted(int(v) for batch in loader for v in batch) == [n * n for n in range(20)])
print(type(loader.dataset).__name__)
"""


def test_a_data_set_that_is_declared_deterministic_is_kept(tmp_path: Path) -> None:
    count = tmp_path / "count"
    out, err = _run(tmp_path, DECLARED, count)
    assert out == "True\n" * 3 + "Squares\n" and err == ""
    assert len(count.read_text()) == 20 + 3  # and the three looks at what the items are


class Declared(list[int]):
    """A data set whose author may say that its items are always the same."""

    synergy_deterministic = False


def test_nothing_is_wrapped_without_a_word_of_the_author() -> None:
    data = Declared([1, 2])
    assert cached_for(data) is data
    data.synergy_deterministic = True
    assert isinstance(cached_for(data), CachedDataset)


@pytest.mark.parametrize(
    ("lease_mib", "asked", "switch", "has"),
    [
        (0, "", "", False),
        (9, "", "", True),
        (0, "9", "", True),
        (9, "9", "0", False),
        (9, "", "no", False),
    ],
)
def test_there_is_a_cache_only_where_memory_is_known(
    monkeypatch: pytest.MonkeyPatch, lease_mib: int, asked: str, switch: str, has: bool
) -> None:
    monkeypatch.setenv("SYNERGY_CACHE_MIB", asked)
    monkeypatch.setenv("SYNERGY_CACHE", switch)
    assert has_budget(lease_mib) is has
