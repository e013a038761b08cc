"""What the modes observe and advise need of Slurm: a client that cannot write, and the advice.

The advice is one section of a job's AdminComment, ``synergy-advice{...}``. It is replaced in place;
whatever else is there, the mark of ``job_submit.lua`` included, stays as it is.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NoReturn, Protocol, cast

from slurm_synergy.cluster import Action, Clock, Hold, Renew, Resize, Start, Stop
from slurm_synergy.core.model import Placement, Plan, Reason
from slurm_synergy.core.wording import counted
from slurm_synergy.errors import ClusterError, SlurmCommandError
from slurm_synergy.slurm.client import SlurmClient
from slurm_synergy.slurm.facts import JobFacts

__all__ = ["Adviser", "advice_for", "clear_advice", "read_only", "with_advice"]

_LOG = logging.getLogger(__name__)

_SECTION = re.compile(r"\s*synergy-advice\{[^}]*\}")
_NODES_NAMED = 4
_WRITE_AT_MOST_S = 10.0
_READS = ("read_", "ping", "budget", "diagnose")


class _ReadOnly:
    """A client of which only the reading methods, and those in ``also``, can be called."""

    def __init__(self, client: SlurmClient, word: str, also: Collection[str]) -> None:
        self._client, self._word, self._also = client, word, frozenset(also)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_READS) or name in self._also:
            return getattr(self._client, name)
        if name.startswith("_"):
            raise AttributeError(name)
        return self._refuser(name)

    def _refuser(self, name: str) -> Callable[..., NoReturn]:
        def refuse(*given: object, **named: object) -> NoReturn:
            raise ClusterError(
                f"{name}{given}: nothing is written to Slurm in mode {self._word}; this is a "
                "mistake of the program: please report it"
            )

        return refuse


def read_only(client: SlurmClient, word: str, also: Collection[str] = ()) -> SlurmClient:
    """``client``, with every method that could change Slurm raising ClusterError.

    What is not known to be a reading method is taken as one that writes. ``also`` names methods
    that are let through, ``word`` is the mode for the message.
    """
    return cast(SlurmClient, _ReadOnly(client, word, also))


def with_advice(admin_comment: str, advice: str) -> str:
    """``admin_comment`` with our section saying ``advice``, or without one when that is empty."""
    found = _SECTION.search(admin_comment)
    section = f"synergy-advice{{{advice.replace('{', '(').replace('}', ')')}}}" if advice else ""
    if found is None:
        return f"{admin_comment} {section}".strip() if section else admin_comment
    before, after = admin_comment[: found.start()], admin_comment[found.end() :]
    # One section only, should there ever be several.
    after = _SECTION.sub("", after)
    return " ".join(part for part in (before, section, after.lstrip()) if part)


def advice_for(action: Action, waits: Reason | None) -> str:
    """What would be done, in words that stay the same as long as the decision does."""
    match action:
        case Start():
            return f"would start now on {_where(action.placement)}"
        case Resize():
            return f"would now have {_where(action.placement)}"
        case Stop():
            return f"would be stopped now ({action.reason.code.value})"
        case Renew():
            return "would run on as it does"
        case Hold():
            return f"would wait ({waits.code.value if waits else 'held'})"
    return f"would be treated with {type(action).__name__.lower()}"


def _where(placement: Placement) -> str:
    nodes = placement.nodes
    named = "+".join(nodes) if len(nodes) <= _NODES_NAMED else f"{len(nodes)} nodes"
    share = placement.shares[0][1]
    each = " each" if len(nodes) > 1 else ""
    cores = counted(share.cpus, "CPU")
    return f"{named}: {counted(share.gpus, 'GPU')}, {cores}, {share.mem_mib} MiB{each}"


class _Looked(Protocol):
    def facts(self, job_id: int) -> JobFacts | None:
        """The job as last read."""
        ...


class Adviser:
    """Keeps the advice in AdminComment as the last round has it; writes only what has changed.

    A round's writing ends after ten seconds, the rest follows with the next one. Failures are
    logged: no round depends on them.
    """

    def __init__(self, client: SlurmClient, cluster: _Looked, clock: Clock) -> None:
        self._client, self._cluster, self._clock = client, cluster, clock

    def advise(self, actions: Iterable[Action], plan: Plan, deferred: Mapping[int, Reason]) -> int:
        """Write what would have been done; the number of jobs whose advice was changed."""
        until_s, written, left = self._clock.now_s() + _WRITE_AT_MOST_S, 0, 0
        for action in actions:
            job_id = action.job_id
            waits = deferred.get(job_id) or plan.waiting.get(job_id)
            facts, advice = self._cluster.facts(job_id), advice_for(action, waits)
            if facts is None or with_advice(facts.admin_comment, advice) == facts.admin_comment:
                continue
            if self._clock.now_s() > until_s:
                left += 1
                continue
            written += _write(self._client, job_id, advice)
        if left:
            _LOG.info(
                "advise: the advice of %s is written with the next rounds", counted(left, "job")
            )
        return written


def clear_advice(client: SlurmClient, jobs: Iterable[JobFacts]) -> int:
    """Take our section out of every AdminComment; of how many. Raises ClusterError."""
    cleared = 0
    for facts in jobs:
        if _SECTION.search(facts.admin_comment) and not facts.state.finished:
            cleared += _write(client, facts.job_id, "")
    return cleared


def _write(client: SlurmClient, job_id: int, advice: str) -> bool:
    """Whether the comment was changed. Read anew first: others write there too."""
    try:
        fresh = client.read_job(job_id)
        wanted = with_advice(fresh.admin_comment, advice)
        # A finished job's comment belongs to accounting: tools sum up a job there when it ends.
        if fresh.state.finished or fresh.completing or wanted == fresh.admin_comment:
            return False
        client.set_admin_comment(job_id, wanted)
    except SlurmCommandError as err:
        if err.kind == "controller_down":
            raise
        if err.kind not in ("not_found", "finished"):
            _LOG.warning("advise: job %d: its AdminComment cannot be written: %s", job_id, err)
        return False
    return True
