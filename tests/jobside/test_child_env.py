"""What a launcher adds to the environment of its program."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_synergy.errors import LeaseError
from slurm_synergy.jobside.board import LeaseView
from slurm_synergy.jobside.child_env import Told, child_env
from slurm_synergy.jobside.environment import switched_on, task_from


def _env(**own: str) -> tuple[dict[str, str], list[str]]:
    said: list[str] = []
    told = Told(
        board=Path("/run/board"),
        lease=LeaseView(core_count=12, mem_mib=900, batch_size=64),
        cpus=3,
        endpoint="head:7737",
        grace_s=90.0,
    )
    return child_env(own, task_from({}), told, said.append), said


def test_the_lease_is_told_and_what_the_user_has_set_stays() -> None:
    env, said = _env(PYTHONPATH="/mine", MASTER_PORT="7", SYNERGY_CHECKPOINT_DIR="/kept")
    assert env["SYNERGY_BOARD"] == "/run/board" and env["SYNERGY_ENDPOINT"] == "head:7737"
    assert (env["SYNERGY_LEASE_CPUS"], env["SYNERGY_LEASE_MEM_MIB"]) == ("12", "900")
    assert (env["SYNERGY_BATCH_SIZE"], env["SYNERGY_GRACE_S"]) == ("64", "90")
    assert env["SYNERGY_CHECKPOINT_DIR"] == "/kept" and env["MASTER_PORT"] == "7"
    assert env["PYTHONPATH"].endswith("/jobside/inject:/mine") and "SYNERGY_INJECT" not in env
    assert env["OMP_NUM_THREADS"] == "3"
    assert said == ["set CUDA_DEVICE_ORDER=PCI_BUS_ID OMP_NUM_THREADS=3"]


@pytest.mark.parametrize("word", ["0", "no", "Off", "FALSE"])
def test_the_injection_is_switched_off_by_the_usual_words(word: str) -> None:
    env, _ = _env(SYNERGY_INJECT=word)
    assert env["SYNERGY_INJECT"] == "0" and "PYTHONPATH" not in env


def test_a_switch_with_another_word_is_named() -> None:
    env, said = _env(SYNERGY_INJECT="maybe")
    assert "PYTHONPATH" in env
    assert said[0].startswith("SYNERGY_INJECT = 'maybe': expected 0, no, off, false or 1, yes, on")
    with pytest.raises(LeaseError, match="X = 'y': expected"):
        switched_on({"X": "y"}, "X", unset=True)
    assert switched_on({"X": " "}, "X", unset=True) and not switched_on({}, "X", unset=False)
    assert switched_on({"X": "True"}, "X", unset=False)
