"""A profiling lease never has a core that is anybody else's, whatever happens on its node."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from manual_clock import ManualClock

from slurm_synergy.controller.leases import LeaseBook
from slurm_synergy.controller.ledger import Ledger
from slurm_synergy.controller.probes import Probe
from slurm_synergy.core.model import Job, JobStatus, Node, Placement, Reason, ReasonCode
from slurm_synergy.core.resources import Resources

FULL = Resources(gpus=4, cpus=16, mem_mib=64_000)
NODES = {
    name: Node(name=name, gpu_type="v100", total=FULL, capacity=FULL, sockets=2)
    for name in ("n1", "n2")
}
PROBE = Probe(number=1, warmup_steps=1, steps=1, longest_s=1.0)
MOVED = Reason(code=ReasonCode.MOVED, text="")

jobs = st.integers(1, 4)
counts = st.integers(1, 16)
steps = st.one_of(
    st.tuples(st.just("grant"), jobs, counts, st.sampled_from([("n1",), ("n2",), ("n1", "n2")])),
    st.tuples(st.just("resize"), jobs, counts),
    st.tuples(st.just("probe"), jobs, counts),
    # Mostly as many as can be had.
    st.tuples(st.just("probe"), st.integers(1, 2), st.integers(7, 16)),
    st.tuples(st.just("probe"), st.integers(1, 2), st.integers(7, 16)),
    st.tuples(st.just("stop"), jobs),
    st.tuples(st.just("end"), jobs),
    st.tuples(st.just("reserve"), st.sets(st.integers(0, 15), max_size=6)),
)


def played(book: LeaseBook, step: tuple[object, ...]) -> None:
    """One thing that happens; one that cannot happen now is left out."""
    kind, what = step[0], step[1]
    if kind == "reserve":
        book.set_reserved("n1", what)  # type: ignore[arg-type]
        return
    job_id = int(str(what))
    lease = book.lease(job_id)
    if kind == "grant" and lease is None:
        share = Resources(gpus=1, cpus=step[2], mem_mib=1000)  # type: ignore[arg-type]
        shares = tuple((name, share) for name in step[3])  # type: ignore[attr-defined]
        job = Job(job_id=job_id, user="u", submitted_s=0.0, gpus=len(shares), nodes=len(shares))
        book.grant(
            status=JobStatus(job=job),
            owner_uid=1,
            incarnation=0,
            placement=Placement(job_id=job_id, gpu_type="v100", shares=shares),
            granted=dict(shares),
        )
    elif lease is None:
        return
    elif kind == "resize":
        share = Resources(gpus=1, cpus=step[2], mem_mib=1000)  # type: ignore[arg-type]
        shares = tuple((name, share) for name in lease.placement.nodes)
        book.resize_all((Placement(job_id=job_id, gpu_type="v100", shares=shares),))
    elif kind == "probe":
        found = book.probe(job_id, PROBE, step[2])  # type: ignore[arg-type]
        assert found is None or all(len(ids) == step[2] for ids in found.cores.values())
    elif kind == "stop":
        book.stop(job_id=job_id, reason=MOVED, grace_s=10)
        assert book.probing(job_id) is None
    elif kind == "end":
        book.end(job_id)


def check(book: LeaseBook, reserved: frozenset[int]) -> None:
    for job_id in book.job_ids():
        probe, lease = book.probing(job_id), book.lease(job_id)
        assert lease is not None
        if probe is None:
            continue
        for name in lease.placement.nodes:
            more = set(probe.cores[name]) - set(lease.cores[name])
            assert more <= set(range(16))
            if name == "n1":
                assert more.isdisjoint(reserved)
            for other in book.job_ids():
                theirs, held = book.probing(other), book.lease(other)
                assert held is not None
                if other != job_id:
                    assert more.isdisjoint(held.cores.get(name, ()))
                    assert more.isdisjoint(held.floor.get(name, ()))
                    assert theirs is None or more.isdisjoint(theirs.cores.get(name, ()))


starts = st.lists(st.integers(1, 6), min_size=2, max_size=3)


@settings(max_examples=100, deadline=None)
@given(starts, st.lists(steps, min_size=2, max_size=10))
def test_probes_take_from_nobody(cpus: list[int], history: list[tuple[object, ...]]) -> None:
    started = [("grant", job_id, count, ("n1",)) for job_id, count in enumerate(cpus, 1)]
    with tempfile.TemporaryDirectory() as place:
        clock = ManualClock()
        with Ledger(Path(place) / "state", clock=clock) as ledger:
            book = LeaseBook(ledger, clock, lease_s=60, node_of=NODES.get)
            reserved: frozenset[int] = frozenset()
            for step in (*started, *history):
                played(book, step)
                if step[0] == "reserve":
                    reserved = frozenset(step[1])  # type: ignore[arg-type]
                check(book, reserved)
