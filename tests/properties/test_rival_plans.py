"""Promises that the policies to compare with keep with every mechanism, and how far they rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import Harness, quiet
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from promises import check_actions, check_all_placed, check_idle_gpus, shuffled, telling
from strategies import RIVALS, SHORT_POLLUX, jobs, nodes, profiles, snapshots

from slurm_synergy.cluster import Stop
from slurm_synergy.core.decide import Policy, check_plan, decide
from slurm_synergy.core.model import Enforcement, JobPhase, Node, Snapshot
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES
from slurm_synergy.round import Known

QUANTISED = sorted(RIVALS - {"pollux"})
MECHANISMS_HERE = sorted(set(MECHANISMS) - {"opt"})
SKIPPING = {name for name, one in MECHANISMS.items() if getattr(one, "may_skip", False)}


def policy_of(name: str) -> Policy:
    return SHORT_POLLUX if name == "pollux" else POLICIES[name]


@pytest.mark.parametrize("policy", sorted(RIVALS))
@settings(max_examples=8)
@given(snapshot=snapshots(), seed=st.integers(0, 1000))
def test_a_rival_keeps_every_promise_with_every_mechanism(
    policy: str, snapshot: Snapshot, seed: int
) -> None:
    for mechanism in MECHANISMS_HERE:
        with telling(policy, mechanism):
            _check(policy, mechanism, replace(snapshot), seed)


@settings(max_examples=2, deadline=None)
@given(snapshot=snapshots())
def test_a_rival_keeps_every_promise_with_a_solver(snapshot: Snapshot) -> None:
    for policy in sorted(RIVALS):
        with telling(policy, "opt"):
            _check(policy, "opt", replace(snapshot), seed=1)


def _check(policy: str, mechanism: str, snapshot: Snapshot, seed: int) -> None:
    """All that test_plans asks of our own policies, test by test."""
    plan = decide(snapshot, policy_of(policy), MECHANISMS[mechanism])
    check_plan(snapshot, plan)
    assert decide(shuffled(snapshot, seed), policy_of(policy), MECHANISMS[mechanism]) == plan
    check_actions(snapshot, plan)
    if mechanism not in SKIPPING:
        decision = policy_of(policy).choose(snapshot)
        check_all_placed(decision, MECHANISMS[mechanism].place(snapshot, decision))
        if not snapshot.draining:
            check_idle_gpus(snapshot, plan)


# rest ------------------------------------------------------------------------------------------


class Served(Harness):
    """A harness in which time passes as under the controller: service counts, rounds are known."""

    def __init__(self, pool: list[Node], policy: str, enforcement: Enforcement) -> None:
        super().__init__(pool, policy_of(policy), "proportional", enforcement)
        self.known = Known()

    def at(self, now_s: float) -> Any:
        """A round at that time."""
        span_s = max(now_s - self.clock.time_s, 0.0)
        for job_id in self.running():
            record, gpus = self.records.records[job_id], self.lease(job_id).gpus
            kind = self.lease(job_id).gpu_type
            self.records.records[job_id] = replace(
                record,
                attained_service_gpu_s=record.attained_service_gpu_s + span_s * gpus,
                held_s={**record.held_s, kind: record.held_s.get(kind, 0.0) + span_s},
            )
        self.clock.time_s = now_s
        result = self.round()
        self.clock.time_s = now_s
        return result

    def fill(self, data: st.DataObject, most: int = 8) -> None:
        """Some jobs."""
        for job_id in range(1, data.draw(st.integers(1, most)) + 1):
            self.submit(data.draw(jobs(job_id)), belief=data.draw(profiles()))


QUANTUM_S = 360.0


@pytest.mark.parametrize("policy", QUANTISED)
@settings(max_examples=10)
@given(data=st.data(), pool=nodes(), enforcement=st.sampled_from(Enforcement))
def test_within_a_quantum_nothing_is_stopped_and_the_cluster_comes_to_rest(
    policy: str, data: st.DataObject, pool: list[Node], enforcement: Enforcement
) -> None:
    harness = Served(pool, policy, enforcement)
    harness.fill(data)
    for quantum in range(3, 6):
        begin_s = quantum * QUANTUM_S
        ran = len(harness.running())
        renewal = harness.at(begin_s)
        stops = sum(isinstance(action, Stop) for action in renewal.actions)
        event(f"stops at a renewal: {min(stops, 3)}")
        assert stops <= ran, "each job that runs at most once"
        later = [harness.at(begin_s + after_s) for after_s in (30.0, 60.0, 90.0, 300.0)]
        assert not any(isinstance(one, Stop) for result in later for one in result.actions)
        # One round starts what the renewal made room for; then nothing changes.
        assert all(quiet(result) for result in later[1:])
    assert {held.phase for held in harness.cluster.jobs.values()} <= {
        JobPhase.PENDING,
        JobPhase.RUNNING,
    }


@pytest.mark.parametrize("policy", QUANTISED)
@settings(max_examples=8, suppress_health_check=[HealthCheck.filter_too_much])
@given(data=st.data(), pool=nodes())
def test_where_everybody_fits_renewals_move_nobody(
    policy: str, data: st.DataObject, pool: list[Node]
) -> None:
    """On one GPU type; of two types, jobs take turns on the faster one."""
    only = [replace(one, gpu_type="v100") for one in pool]
    harness = Served(only, policy, Enforcement.SHARED)
    harness.fill(data, most=3)
    harness.at(3 * QUANTUM_S)
    assume(len(harness.running()) == len(harness.cluster.jobs))
    assert all(quiet(harness.at(quantum * QUANTUM_S)) for quantum in range(4, 8))


@settings(max_examples=8)
@given(data=st.data(), pool=nodes())
def test_pollux_restarts_a_job_the_less_the_more_often_it_was(
    data: st.DataObject, pool: list[Node]
) -> None:
    """After as many restarts as its age has room for, a move of it counts nothing."""
    harness = Served(pool, "pollux", Enforcement.SHARED)
    harness.fill(data)
    delta_s = SHORT_POLLUX.restart_s
    for number in range(1, 25):
        now_s = number * delta_s
        harness.at(now_s)
        for held in harness.cluster.jobs.values():
            assert held.restarts <= (now_s - held.job.submitted_s) / delta_s + 1
