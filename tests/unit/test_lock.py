"""The lock of the dependencies: whole, in accordance with setup.cfg, and strict about its lines."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def lock() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock", ROOT / "scripts" / "lock.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not module.fits() or os.environ.get("SYNERGY_UNLOCKED"):
        pytest.skip("the lock is for another Python or platform, or was not used")
    return module


def test_the_lock_is_whole_and_installed(lock: ModuleType) -> None:
    assert lock.check() == []
    assert {"grpcio", "protobuf", "numpy", "pydantic", "pytest"} <= lock.locked().keys()
    assert "torch" not in lock.locked()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("grpcio==", "grpcio==0.", "grpcio 0."),
        (" --hash=sha256:", "", "not NAME==VERSION"),
        ("--hash=sha256:", "--hash=sha256:00", "not NAME==VERSION"),
        ("psutil==", "psutil-other==", "psutil is needed but not locked"),
        ("psutil==", "psutil-other==", "psutil-other is locked but not needed"),
    ],
)
def test_what_is_wrong_is_said(
    lock: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    old: str,
    new: str,
    words: str,
) -> None:
    changed = tmp_path / "constraints-hashes.txt"
    changed.write_text(lock.LOCK.read_text().replace(old, new))
    monkeypatch.setattr(lock, "LOCK", changed)
    assert any(words in line for line in lock.check()), lock.check()


def test_an_audit_that_cannot_be_made_is_not_passed_over_in_silence(
    lock: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lock.shutil, "which", lambda name, path: None)
    assert lock.main(["audit"]) == 0
    assert "NOT looked for known vulnerabilities" in capsys.readouterr().out


def test_found_vulnerabilities_are_a_failure(
    lock: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "pip-audit"
    program.write_text("#!/bin/sh\necho found one\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(lock.shutil, "which", lambda name, path: str(program))
    assert lock.main(["audit"]) == 1
