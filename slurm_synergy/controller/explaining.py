"""Explain a job from a round of the journal, with the order of the policy that made it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from slurm_synergy.controller.codec import encode
from slurm_synergy.controller.rounds import Round
from slurm_synergy.core.explain import Explanation, explain, find_job, in_words, public
from slurm_synergy.core.model import JobPhase, Snapshot
from slurm_synergy.policies import policy_of_plan
from slurm_synergy.policies.pollux import Pollux
from slurm_synergy.policies.queue import QueuePolicy, queue_order
from slurm_synergy.policies.sia import Sia

__all__ = ["explain_round", "explained"]


def explain_round(record: Round, job: str) -> Explanation:
    """The round's word on ``job`` (``12`` or ``12_3``). Raises ModelError for an unknown job."""
    snapshot, plan = record.snapshot, record.plan
    job_id = find_job(snapshot, job)
    policy = policy_of_plan(plan)
    order = queue_order(policy, snapshot) if isinstance(policy, QueuePolicy) else ()
    # A search is not asked: the next one may well find something else, and each takes seconds.
    asked = None if isinstance(policy, Pollux) else policy

    def grants(changed: Snapshot, wanted: int) -> bool:
        return asked is not None and any(
            grant.job_id == wanted for grant in asked.choose(changed).grants
        )

    return explain(
        snapshot,
        plan,
        job_id,
        order=order,
        outcomes=record.reasons,
        grants=grants,
        market=policy.market(snapshot, job_id) if isinstance(policy, Sia) else None,
    )


def explained(
    record: Round,
    job: str,
    *,
    now_s: float,
    may_see_all: Callable[[str], bool],
    phase_now: Callable[[int], JobPhase | None] = lambda job_id: None,
) -> Mapping[str, object]:
    """The answer to ``synergyctl explain`` as one JSON object. Raises ModelError.

    ``may_see_all`` tells from the job's owner whether the asker may see what follows from hints,
    ``phase_now`` where the job is by now, None when that is not known.
    """
    found = explain_round(record, job)
    private = may_see_all(found.user)
    shown = found if private else public(found)
    lines, now = list(in_words(shown)), phase_now(found.job_id)
    if now is not None and now is not found.phase:
        lines.append(f"since that round: now {now.value}, until then {found.phase.value}")
    return {
        "round": record.snapshot.round,
        "round_age_s": round(max(now_s - record.snapshot.now_s, 0.0), 1),
        "phase_now": now.value if now is not None else None,
        "private": private,
        "explanation": encode(shown),
        "text": lines,
    }
