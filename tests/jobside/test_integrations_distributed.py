"""Plain DDP and sharded models (FSDP) under a lease: real ranks, stopped and continued."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import Forks
from inprocess import finish, injected, lease, wait_for
from launchers import Launchers, ended, free_port

import slurm_synergy.jobside as synergy
from slurm_synergy.errors import CheckpointError
from slurm_synergy.jobside.board import Board

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "train_distributed.py"
SAMPLES, BATCH, EPOCHS = 720, 12, 2
STEPS = EPOCHS * SAMPLES // BATCH


@dataclass
class Training:
    """Incarnations of examples/train_distributed.py, each with its own ranks."""

    place: Path
    forks: Forks
    shard: bool = False
    incarnations: int = 0
    stops: list[int] = field(default_factory=list)

    def run(self, ranks: int, *, stop_after: int = 0) -> None:
        """One incarnation; with ``stop_after`` a stop is asked for after so many steps of it."""
        directory = self.place / f"boards{self.incarnations}"
        directory.mkdir(parents=True)
        boards = [
            Board.create(directory / f"board{rank}", rank=rank, ranks=ranks)
            for rank in range(ranks)
        ]
        for board in boards:
            board.write_lease(lease(1))
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
            "WORLD_SIZE": str(ranks),
            "SLURM_RESTART_COUNT": str(self.incarnations),
        }
        options = [f"--samples={SAMPLES}", f"--batch-size={BATCH}", f"--epochs={EPOCHS}"]
        # A stop is agreed some seconds ahead: without a pause training would be over by then.
        options += [f"--step-seconds={0.1 if stop_after else 0.0}", f"--out={self.place / 'out'}"]
        options += ["--shard"] if self.shard else []
        self.incarnations += 1
        processes = [
            self.forks.start(
                [str(PROGRAM), *options],
                injected(board, self.place / "checkpoints", RANK=str(rank), **common),
            )
            for rank, board in enumerate(boards)
        ]
        with ended(processes):
            if stop_after:
                begun = self.stops[-1] if self.stops else 0
                at = begun + stop_after
                wait_for(lambda: boards[0].read_report().step >= at, f"step {at}", 120)
                with Launchers(boards):
                    results = [finish(process, 240) for process in processes]
                self.stops.append(boards[0].read_report().step)
            else:
                results = [finish(process, 240) for process in processes]
        expected = 85 if stop_after else 0
        for status, _out, err in results:
            assert status == expected, err
        assert all(board.read_report().checkpoint_done is bool(stop_after) for board in boards)

    def lines(self) -> list[dict[str, Any]]:
        """What was computed, whichever run of the job did it."""
        lines = [json.loads(line) for line in (self.place / "out").read_text().splitlines()]
        return [
            {name: line[name] for name in ("step", "epoch", "loss", "samples")} for line in lines
        ]


def each_sample_once(lines: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for epoch in range(EPOCHS):
        seen = [i for line in lines if line["epoch"] == epoch for i in line["samples"]]
        assert sorted(seen) == list(range(SAMPLES))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> list[dict[str, Any]]:
    """What two ranks of plain DDP write when nobody stops them."""
    training = Training(tmp_path_factory.mktemp("undisturbed"), forks)
    training.run(2)
    each_sample_once(training.lines())
    return training.lines()


def test_ddp_stops_and_continues_without_a_trace(
    tmp_path: Path, forks: Forks, undisturbed: list[dict[str, Any]]
) -> None:
    training = Training(tmp_path, forks)
    training.run(2, stop_after=5)
    training.run(2)
    assert 5 <= training.stops[0] < STEPS
    assert training.lines() == undisturbed  # to the last bit of each loss


def test_a_sharded_model_continues_on_another_number_of_ranks(
    tmp_path: Path, forks: Forks, undisturbed: list[dict[str, Any]]
) -> None:
    training = Training(tmp_path, forks, shard=True)
    training.run(2, stop_after=5)
    newest = max((tmp_path / "checkpoints").iterdir())
    shards = {path.name for path in (newest / "part-sharded").iterdir()}
    assert {".metadata", "__0_0.distcp", "__1_0.distcp", "values.json"} <= shards
    training.run(1)
    lines = training.lines()
    each_sample_once(lines)
    assert [line["samples"] for line in lines] == [line["samples"] for line in undisturbed]
    # Sharded or not, on two ranks or one: the same numbers but for the order of additions.
    losses = [line["loss"] for line in lines]
    assert losses == pytest.approx([line["loss"] for line in undisturbed], rel=1e-9)


# -- in this process -------------------------------------------------------------------------------


def test_shards_are_saved_and_loaded_by_one_process_alone(tmp_path: Path) -> None:
    from slurm_synergy.jobside.integrations.fsdp import ShardedState

    def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = made(1)
    ShardedState(model, optimizer).save_files(tmp_path)
    other, its_optimizer = made(2)
    ShardedState(other, its_optimizer).load_files(tmp_path)
    assert torch.equal(model.weight, other.weight)  # type: ignore[arg-type]
    assert its_optimizer.param_groups[0]["lr"] == 0.1
    assert its_optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    ours, theirs = (each.state_dict()["state"][0] for each in (optimizer, its_optimizer))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_missing_shards_are_an_error_of_ours(tmp_path: Path) -> None:
    from slurm_synergy.jobside.integrations.fsdp import ShardedState

    state = ShardedState(torch.nn.Linear(3, 2))
    state.save_files(tmp_path)
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="shards"):
        state.load_files(tmp_path)


# Pickles that would make a file: by a name of its own, and by one that an allowed module has.
EVIL = [
    b"\x80\x04cos\nsystem\n(Vtouch made\ntR.",
    b"\x80\x04ctorch.distributed.checkpoint.metadata\nos.system\n(Vtouch made\ntR.",
]


@pytest.mark.parametrize("evil", EVIL, ids=["plain", "dotted"])
def test_an_index_of_shards_cannot_run_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evil: bytes
) -> None:
    from slurm_synergy.jobside.integrations.fsdp import ShardedState

    state = ShardedState(torch.nn.Linear(3, 2))
    state.save_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(evil)
    with pytest.raises(CheckpointError, match="refused"):
        state.load_files(tmp_path)
    assert not (tmp_path / "made").exists()
    pickle.loads(evil)
    assert (tmp_path / "made").exists()


def test_a_sharded_model_cannot_be_registered_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import FSDPModule

    from slurm_synergy.jobside import session

    class Sharded(torch.nn.Linear, FSDPModule):  # type: ignore[misc]
        """Looks like what fully_shard makes of a module."""

        def __new__(cls, *_args: int) -> Any:
            return object.__new__(cls)

    monkeypatch.setattr(session, "_session", None)
    with pytest.raises(CheckpointError, match=r"ShardedState\(model, optimizer\)"):
        synergy.register(model=torch.nn.Sequential(Sharded(2, 2)))
    session._session = None
