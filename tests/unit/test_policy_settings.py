"""Settings of single policies, what policies miss of jobs, and how check and status tell of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import job, node, pending, profile

from slurm_synergy.cli.policy_checks import policy_findings
from slurm_synergy.config import SchedulingSettings, Settings
from slurm_synergy.controller.explaining import explain_round
from slurm_synergy.controller.policy_inputs import missing_inputs
from slurm_synergy.controller.rounds import Round
from slurm_synergy.controller.wiring import with_settings
from slurm_synergy.core.decide import decide
from slurm_synergy.core.goodput import GradientStatistics, ThroughputModel
from slurm_synergy.core.model import Elasticity, JobStatus, Profile, Snapshot
from slurm_synergy.core.scaling import Scaling, TypeSpeed
from slurm_synergy.errors import NoControllerError
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES
from slurm_synergy.policies.pollux import Pollux
from slurm_synergy.policy_settings import Section
from slurm_synergy.slurm.findings import Finding, Grade

OWN = sorted(
    name
    for name, field in SchedulingSettings.model_fields.items()
    if isinstance(field.default, Section)
)
QUANTISED = ("gavel", "shockwave", "themis")


def test_every_policy_with_settings_has_a_section() -> None:
    assert sorted(name for name, one in POLICIES.items() if hasattr(one, "parameters")) == OWN


@pytest.mark.parametrize("name", OWN)
def test_a_section_has_the_policys_settings_and_defaults(name: str) -> None:
    policy: Any = POLICIES[name]
    section = SchedulingSettings.model_fields[name].default
    assert set(type(section).model_fields) == set(policy.parameters)
    assert {key: float(value) for key, value in section.model_dump().items()} == {
        key: float(value) for key, value in policy.parameters.items()
    }
    assert with_settings(policy, SchedulingSettings()) == policy


def test_settings_reach_their_policy_and_no_other() -> None:
    scheduling = SchedulingSettings.model_validate(
        {
            "gavel": {"quantum_s": 60.0, "normalised": True},
            "themis": {"fills": False},
            "shockwave": {"rounds": 3, "power": 0.1, "makespan": 10.0},
            "pollux": {"power": -0.5, "seed": 7, "avoid_interference": False},
        }
    )
    gavel: Any = with_settings(POLICIES["gavel"], scheduling)
    assert (gavel.quantum_s, gavel.normalised, gavel.fills) == (60.0, True, True)
    themis: Any = with_settings(POLICIES["themis"], scheduling)
    assert (themis.quantum_s, themis.fills) == (360.0, False)
    shockwave: Any = with_settings(POLICIES["shockwave"], scheduling)
    assert (shockwave.rounds, shockwave.power, shockwave.makespan) == (3, 0.1, 10.0)
    pollux: Any = with_settings(POLICIES["pollux"], scheduling)
    assert (pollux.power, pollux.seed, pollux.avoid_interference) == (-0.5, 7, False)
    assert with_settings(POLICIES["fifo"], scheduling) is POLICIES["fifo"]


# what policies miss ----------------------------------------------------------------------------

KNOWN = profile(100.0, 100.0, types=("v100", "a100"))
ON_ONE = profile(100.0, 100.0, types=("v100",))


def snapshot(*statuses: JobStatus, types: tuple[str, ...] = ("v100", "a100")) -> Snapshot:
    return Snapshot(
        round=1,
        now_s=0.0,
        round_s=300.0,
        nodes=tuple(node(f"{kind}-1", kind) for kind in sorted(types)),
        jobs=statuses,
    )


def elastic(job_id: int, *, told: bool) -> JobStatus:
    one = replace(job(job_id, 1), elasticity=Elasticity.STRONG_SCALING, max_gpus=8)
    model = ThroughputModel(
        compute_s=0.1,
        compute_s_per_sample=0.1,
        node_sync_s=0.1,
        network_sync_s=0.1,
        overlap=2.0,
    )
    scaling = Scaling(
        speeds={"v100": TypeSpeed(model=model, local_most=64)} if told else {},
        statistics=GradientStatistics(square=1.0, variance=1.0),
    )
    return JobStatus(job=one, profile=Profile(scaling=scaling))


def misses(policy: str, *statuses: JobStatus, **where: Any) -> list[str]:
    return [one.what for one in missing_inputs(policy, snapshot(*statuses, **where))]


def test_a_length_is_missed_where_neither_samples_nor_a_limit_tell_it() -> None:
    told = pending(job(1, 1, total_samples=1e6), KNOWN)
    limited = pending(job(2, 1, time_limit_s=60.0), KNOWN)
    neither = pending(job(3, 1), KNOWN)
    for policy in ("themis", "shockwave", "srtf", "ftf"):
        assert misses(policy, told, limited) == []
        assert misses(policy, told, limited, neither) == ["1 of 3 jobs tells no length"]
        assert misses(policy, neither, pending(job(4, 1), KNOWN)) == ["2 of 2 jobs tell no length"]
    for policy in ("fifo", "las", "gavel", "pollux", "no such policy"):
        assert not any("length" in one for one in misses(policy, neither))
    # A number of samples is a length only by a speed, where one ranks by seconds.
    unknown = pending(job(1, 1, total_samples=1e6), Profile())
    assert misses("srtf", unknown) == ["1 of 1 job tells no length"]


@pytest.mark.parametrize("policy", QUANTISED)
def test_a_speed_is_missed_where_a_type_that_may_be_used_has_none(policy: str) -> None:
    limit = {"time_limit_s": 60.0}
    known = pending(job(1, 1, **limit), KNOWN)
    half = pending(job(2, 1, **limit), ON_ONE)
    tied = pending(job(3, 1, gpu_types=("v100",), **limit), ON_ONE)
    nothing = pending(job(4, 1, **limit), Profile())
    assert misses(policy, known, tied) == []
    (found,) = misses(policy, known, half, tied, nothing)
    assert found == "the speed of 2 of 4 jobs is not known on every GPU type that it may use"
    (found,) = misses(policy, half, nothing, types=("v100",))
    assert found == "the speed of 1 of 2 jobs is not known here"


def test_elastic_jobs_that_tell_their_steps_are_missed() -> None:
    for policy in ("pollux", "sia"):
        assert misses(policy) == []
        assert misses(policy, pending(job(1, 1), KNOWN)) == ["none of 1 job is elastic"]
        assert misses(policy, elastic(1, told=True), pending(job(2, 1), KNOWN)) == []
        (found,) = misses(policy, elastic(1, told=False), elastic(2, told=True))
        assert found == "1 of 2 elastic jobs has not told how long steps take"


def test_a_search_is_not_asked_what_would_help_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer takes seconds, and the next search may find something else."""
    one = snapshot(pending(job(1, 1), KNOWN), pending(job(2, 8), KNOWN), types=("v100",))
    plan = decide(one, POLICIES["pollux"], MECHANISMS["proportional"])
    (waiting,) = plan.waiting
    monkeypatch.setattr(Pollux, "choose", lambda self, snapshot: pytest.fail("it was asked"))
    found = explain_round(Round(snapshot=one, plan=plan), str(waiting))
    assert found.reason is not None
    assert not any("would fit now" in change for change in found.changes)
    assert any("may fit when job" in change for change in found.changes)


# synergyctl check ------------------------------------------------------------------------------


def check(
    settings: Settings, told: Mapping[str, Any] | None, *, scipy: bool = True
) -> list[Finding]:
    def status(target: object) -> Mapping[str, Any]:
        if told is None:
            raise NoControllerError("nobody answers")
        return told

    return list(policy_findings(settings, status, has_module=lambda name: scipy))


def settings(tmp_path: Path, policy: str, **more: Any) -> Settings:
    (tmp_path / "endpoint").write_text("localhost:1\n")
    return Settings.model_validate(
        {"state_dir": str(tmp_path), "scheduling": {"policy": policy, **more}}
    )


def test_check_tells_what_a_policy_lacks_here(tmp_path: Path) -> None:
    for policy in QUANTISED:
        (found,) = check(settings(tmp_path, policy), None, scipy=False)
        assert (found.check, found.grade) == ("policy", Grade.FAIL)
        assert "scipy" in found.seen
        assert "slurm-synergy[controller]" in found.remedy
        (found,) = check(settings(tmp_path, policy, **{policy: {"quantum_s": 120.0}}), None)
        assert (found.grade, found.remedy) == (
            Grade.WARN,
            f"set scheduling.{policy}.quantum_s to several times grace_s",
        )
    for policy in POLICIES:
        scipy = policy in QUANTISED
        (found,) = check(settings(tmp_path, policy), None, scipy=scipy)
        assert (found.check, found.grade) == ("policy", Grade.OK)
        assert ("a rival" in found.seen) == (policy in {*QUANTISED, "pollux"})


def test_check_asks_the_controller_what_its_jobs_lack(tmp_path: Path) -> None:
    missing = [{"what": "2 of 3 jobs tell no length", "assumed": "they wait", "remedy": "do so"}]
    told = {"policy": "themis", "missing_inputs": missing}
    _, found = check(settings(tmp_path, "themis"), told)
    assert (found.check, found.grade) == ("policy_inputs", Grade.WARN)
    assert (found.seen, found.means, found.remedy) == tuple(missing[0].values())
    assert len(check(settings(tmp_path, "gavel"), told)) == 1, "it runs another policy still"
    assert len(check(settings(tmp_path, "themis"), {"policy": "themis"})) == 1, "an older release"
