"""A checkpoint that somebody prepared: nothing of it runs, and nothing is written elsewhere."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slurm_synergy.errors import CheckpointError
from slurm_synergy.jobside.checkpoint import CheckpointStore, Progress

NOBODY = 65534


class _Payload:
    """Unpickled, it makes a directory: the proof that code ran."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (str(self._proof),)


def _plain(proof: Path) -> bytes:
    return pickle.dumps(_Payload(proof), protocol=2)


def _as_torch_writes(proof: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"model": {"w": _Payload(proof)}}, buffer)
    return buffer.getvalue()


def _as_torch_wrote_once(proof: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": _Payload(proof)}, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def _foreign_archive(proof: Path) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", _plain(proof))
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def _saved(directory: Path) -> Path:
    return CheckpointStore(directory).save(
        Progress(step=3, samples=24),
        lambda: {"model": {"w": torch.ones(3)}},
        {"run": "abc"},
        {"now": 1},
    )


def _sign(path: Path) -> None:
    """Make the manifest agree: whoever can write a checkpoint can do that as well."""
    manifest = json.loads((path / "MANIFEST.json").read_bytes())
    for name in manifest["files"]:
        raw = (path / name).read_bytes()
        digest = hashlib.blake2b(raw, digest_size=32).hexdigest()
        manifest["files"][name] = {"bytes": len(raw), "blake2b": digest}
    (path / "MANIFEST.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("make", [_plain, _as_torch_writes, _as_torch_wrote_once, _foreign_archive])
@pytest.mark.parametrize(
    "name", ["objects.pt", "rank-00000.pt", "state.json", "MANIFEST.json", "all"]
)
def test_a_malicious_pickle_in_any_file_is_refused_and_nothing_runs(
    tmp_path: Path, name: str, make: Callable[[Path], bytes]
) -> None:
    proof, path = tmp_path / "it-ran", _saved(tmp_path / "checkpoints")
    names = [one.name for one in path.iterdir()] if name == "all" else [name]
    assert set(names) <= {one.name for one in path.iterdir()}
    for each in names:
        (path / each).write_bytes(make(proof))
    if "MANIFEST.json" not in names:
        _sign(path)
    said: list[str] = []
    with pytest.raises(CheckpointError, match="none of 1 checkpoints is intact"):
        CheckpointStore(tmp_path / "checkpoints").load_newest(said.append)
    assert len(said) == 1
    assert not proof.exists()


def test_the_payload_is_one_that_would_run(tmp_path: Path) -> None:
    pickle.loads(_plain(tmp_path / "it-ran"))
    assert (tmp_path / "it-ran").is_dir()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MANIFEST.json", "[]"),
        ("MANIFEST.json", '{"version": 1, "step": 3, "files": []}'),
        ("MANIFEST.json", '{"version": 1, "step": 3, "files": {"../../x": {}}}'),
        ("MANIFEST.json", "[" * 200_000),
        ("state.json", '{"step": Infinity}'),
        ("state.json", "7"),
        ("state.json", '{"step": 1e999, "samples": 0}'),
    ],
)
def test_values_that_make_no_sense_are_damage_and_no_crash(
    tmp_path: Path, name: str, text: str
) -> None:
    path = _saved(tmp_path)
    (path / name).write_text(text)
    if name != "MANIFEST.json":
        _sign(path)
    with pytest.raises(CheckpointError, match="none of 1 checkpoints is intact"):
        CheckpointStore(tmp_path).load_newest(lambda text: None)


def test_nothing_is_written_through_a_link_that_somebody_put_there(tmp_path: Path) -> None:
    trap, directory = tmp_path / "trap", tmp_path / "checkpoints"
    trap.mkdir()
    directory.mkdir()
    (directory / "step-000000000003.tmp-0").symlink_to(trap)
    store = CheckpointStore(directory, rank=0, ranks=2, wait_s=0.2)
    with pytest.raises(CheckpointError, match="is a link or another user's"):
        store.save(Progress(step=3), dict, {}, {})
    assert list(trap.iterdir()) == []


@pytest.mark.parametrize("name", ["rank-00000.pt.part", "objects.pt.part"])
def test_nor_is_a_file_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    precious, temporary = tmp_path / "precious", tmp_path / "c" / "step-000000000003.tmp-0"
    precious.write_text("kept")
    temporary.mkdir(parents=True)
    (temporary / name).symlink_to(precious)
    store = CheckpointStore(tmp_path / "c", rank=0, ranks=2, wait_s=0.2)
    with pytest.raises(CheckpointError, match="cannot save a checkpoint"):
        store.save(Progress(step=3), lambda: {"w": {}}, {}, {})
    assert precious.read_text() == "kept"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can prepare another user's directory")
def test_a_directory_that_another_user_prepared_is_not_written_into(tmp_path: Path) -> None:
    temporary = tmp_path / "step-000000000003.tmp-0"
    temporary.mkdir()
    os.chown(temporary, NOBODY, NOBODY)
    store = CheckpointStore(tmp_path, rank=0, ranks=2, wait_s=0.2)
    with pytest.raises(CheckpointError, match="another user's"):
        store.save(Progress(step=3), dict, {}, {})


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_checkpoint_is_its_users_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        path = _saved(tmp_path / "c")
    finally:
        os.umask(before)
    assert {one.stat().st_mode & 0o777 for one in path.iterdir()} == {0o600}
    assert path.stat().st_mode & 0o777 == 0o700
