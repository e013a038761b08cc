"""What Sia offered a job, in words, and that it is explained from a round of the journal."""

from __future__ import annotations

from dataclasses import replace

from builders import (
    GIB,
    elastic,
    job,
    node,
    pending,
    placement,
    profile,
    res,
    running,
    scaling,
    snapshot,
)

from slurm_synergy.controller.codec import decode, encode
from slurm_synergy.controller.explaining import explain_round
from slurm_synergy.controller.rounds import Round
from slurm_synergy.core.decide import decide
from slurm_synergy.core.explain import in_words, public
from slurm_synergy.core.market import Choice, Market, market_in_words
from slurm_synergy.core.model import Plan, Profile, Snapshot
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies.sia import SIA


def choice(kind: str, gpus: int, gain: float, price: float) -> Choice:
    return Choice(gpu_type=kind, gpus=gpus, nodes=1, speedup=float(gpus), gain=gain, price=price)


CHOICES = (
    *(choice("v100", 1, 0.1, 0.05), choice("v100", 2, 0.4, 0.1), choice("v100", 4, 0.5, 0.2)),
    choice("a100", 1, 0.3, 0.4),
)


def test_the_row_the_prices_and_what_more_or_less_would_have_been_are_said() -> None:
    prices = {"v100": 0.05, "a100": 0.4}
    lines = market_in_words(Market(choices=CHOICES, prices=prices, chosen=CHOICES[1]))
    assert lines[0].startswith("could run on: a100: 1 GPU at 1.0 times its least; v100: 1 GPU at")
    assert lines[1] == "worth of a GPU to the other jobs in that round: a100 0.40, v100 0.05"
    assert lines[2] == (
        "was given 2 v100 GPUs, which count 0.40 for it and are worth 0.10 to others"
    )
    assert lines[3:] == (
        "4 v100 GPUs instead would bring it 0.10 more, and take from the others 0.10 more",
        "1 v100 GPU instead would bring it 0.30 less, and take from the others 0.05 less",
        "1 a100 GPU instead would bring it 0.10 less, and take from the others 0.30 more",
    )


def test_a_job_without_gpus_is_told_what_it_came_nearest_to() -> None:
    lines = market_in_words(Market(choices=CHOICES[3:], prices={}, chosen=None))
    assert lines[-1] == (
        "nearest to being given: 1 a100 GPU, which would bring it 0.30 and is worth 0.40 to others"
    )


def a_round() -> Round:
    nodes = [node("v100-0", "v100", 4, 16, 240 * GIB), node("a100-0", "a100", 4, 16, 240 * GIB)]
    known = replace(Profile(), scaling=scaling(explored={"v100": 2, "a100": 2}, noise=100.0))
    jobs = [pending(elastic(at), known) for at in range(1, 12)]
    jobs.append(pending(job(12, 4, gpu_types=("a100",)), profile()))
    shot = snapshot(nodes, jobs)
    plan = decide(shot, SIA, MECHANISMS["tune"])
    return Round(snapshot=shot, plan=plan, actions=(), outcomes=(), took_s={}, free={}, code="")


def test_a_job_is_explained_from_the_record_of_its_round() -> None:
    record = a_round()
    again = replace(
        record,
        snapshot=decode(Snapshot, encode(record.snapshot)),
        plan=decode(Plan, encode(record.plan)),
    )
    told = 0
    for status in record.snapshot.jobs:
        found = explain_round(again, str(status.job.job_id))
        assert found.market is not None
        chosen, placed = found.market.chosen, record.plan.placement(status.job.job_id)
        assert (chosen is None) == (placed is None)
        if chosen is not None and placed is not None:
            assert (chosen.gpu_type, chosen.gpus) == (placed.gpu_type, placed.gpus)
            assert chosen in found.market.choices
        words = "\n".join(in_words(found))
        assert "worth of a GPU to the other jobs" in words
        told += "was given" in words
        assert public(found).market is None
    assert 0 < told < len(record.snapshot.jobs)


def test_under_a_queue_policy_there_is_no_market() -> None:
    record = a_round()
    other = replace(record, plan=replace(record.plan, policy="fifo"))
    assert explain_round(other, "1").market is None


def test_a_job_that_was_not_asked_between_two_plans_is_told_what_it_kept_and_why() -> None:
    nodes = [node("v100-0", "v100", 4, 16, 240 * GIB), node("a100-0", "a100", 4, 16, 240 * GIB)]
    belief = replace(Profile(), scaling=scaling(explored={"v100": 2}, noise=1e3))
    where = placement(1, "v100", v100_0=res(2, 8, 120 * GIB))
    shot = replace(
        snapshot(nodes, [running(elastic(1), where, belief), pending(elastic(2), belief)]),
        now_s=620.0,
        previous_s=610.0,
    )
    kept, came = SIA.market(shot, 1), SIA.market(shot, 2)
    assert kept is not None and kept.between and kept.chosen is not None
    assert (kept.chosen.gpu_type, kept.chosen.gpus) == ("v100", 2)
    lines = market_in_words(kept)
    assert any("moved only where another one would wait" in line for line in lines)
    assert any(line.startswith("kept 2 v100 GPUs") for line in lines)
    assert came is not None and not came.between and came.chosen is not None
