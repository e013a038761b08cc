"""Limits of accounts and QOS on a real Slurm with slurmdbd: held, explained, started when eased.

The controller runs as an account that is an operator (AdminLevel=Operator), and nothing more.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from builders import scaling
from harness import Slurm
from ran import Ran
from test_limits import is_limited, tries, until
from test_security import (
    AsAccount,
    account,
    home,
    needs_root_and_setpriv,
    operator_account,
)

from slurm_synergy.controller.ledger import Ledger
from slurm_synergy.controller.wiring import SystemClock
from slurm_synergy.core.model import Profile
from slurm_synergy.devcluster import DevCluster, NodeShape, missing_accounting
from slurm_synergy.slurm.accounting import AccountingFacts
from slurm_synergy.slurm.facts import Hold

__all__ = ["account", "home"]  # fixtures

pytestmark = needs_root_and_setpriv

NODES = (NodeShape(nodes="n[1-3]", gpus=8, cores=16, mem_mib=64_000, gpu_type="v100"),)
GPU, SMALL = "--gres=gpu:1", ("--mem=1000", "--time=5")
REFUSED = "type v100 (Slurm does not start it: its QOS sets the"
GROUP = "all jobs of its account together are at the limit of "


@pytest.fixture(scope="module")
def kept_cluster() -> Iterator[DevCluster]:
    missing = missing_accounting()
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed (scripts/install-slurm.sh)")
    account = operator_account()
    site = {"operators": [0, account.pw_uid]}
    with DevCluster(nodes=NODES, real_node=False, accounting=True, site=site) as cluster:
        administer(cluster, f"add user {account.pw_name} account=root adminlevel=operator")
        yield cluster


def administer(cluster: DevCluster, line: str) -> None:
    cluster.run(["sacctmgr", "-i", *line.split()])


def operated(
    cluster: DevCluster, home: Path, account: pwd.struct_passwd, **settings: Any
) -> AsAccount:
    """A controller as an operator that is not root, not started yet."""
    daemon = AsAccount(cluster, home, pool={"nodes": "n[1-2]"}, **settings)
    daemon.account = account
    return daemon


@dataclass(frozen=True, kw_only=True)
class Case:
    """A limit, the jobs that meet it, and what an administrator does about it.

    ``first`` are the options of a job that takes what there is (None: none is needed). ``eased``
    None: that job is ended.
    """

    made: tuple[str, ...]
    first: tuple[str, ...] | None
    second: tuple[str, ...]
    words: str
    eased: str | None
    partition: str = "synergy"


CASES = (
    Case(
        # Limits of CPUs and memory are not for what an operator has set, as for managed jobs.
        made=("add account a1 GrpTRES=gres/gpu=1,cpu=16,mem=1000", "add user root account=a1"),
        first=("--account=a1", GPU),
        second=("--account=a1", GPU),
        words=f"{GROUP}GPUs",
        eased="modify account a1 set GrpTRES=gres/gpu=2",
    ),
    Case(
        made=("add account top GrpTRES=gres/gpu=1", "add account a2 parent=top",
              "add user root account=a2"),
        first=("--account=a2", GPU),
        second=("--account=a2", GPU),
        words=f"{GROUP}GPUs",
        eased="modify account top set GrpTRES=gres/gpu=2",
    ),
    Case(
        made=("add account a3", "add user root account=a3 MaxJobs=1"),
        first=("--account=a3", GPU),
        second=("--account=a3", GPU),
        words="its account lets no more jobs of its user run at once",
        eased="modify user root where account=a3 set MaxJobs=2",
    ),
    Case(
        made=("add account a4 GrpJobs=0", "add user root account=a4"),
        first=None,
        second=("--account=a4", GPU),
        words=f"{GROUP}jobs",
        eased="modify account a4 set GrpJobs=-1",
    ),
    Case(
        # In a partition of which the controller sees no job, on a node that is not in its pool.
        made=("add account a5 GrpTRES=gres/gpu=1", "add user root account=a5"),
        first=("--account=a5", GPU, "--nodelist=n3"),
        second=("--account=a5", GPU),
        words=f"{GROUP}GPUs",
        eased=None,
        partition="main",
    ),
    Case(
        made=("add qos q1 MaxTRESPU=gres/gpu=1", "modify user root set qos+=q1"),
        first=("--qos=q1", GPU),
        second=("--qos=q1", GPU),
        words="its QOS sets the most GPUs of all jobs of its user",
        eased="modify qos q1 set MaxTRESPU=gres/gpu=2",
    ),
    Case(
        made=("add qos q2 GrpTRES=gres/gpu=1", "modify user root set qos+=q2"),
        first=("--qos=q2", GPU),
        second=("--qos=q2", GPU),
        words="all jobs of its QOS together are at the limit of GPUs",
        eased="modify qos q2 set GrpTRES=gres/gpu=2",
    ),
    Case(
        made=("add qos q3 MaxWall=3", "modify user root set qos+=q3"),
        first=None,
        second=("--qos=q3", GPU),
        words="its QOS sets the most time of one job",
        eased="modify qos q3 set MaxWall=10",
    ),
    Case(
        made=("add qos q5 MinTRESPerJob=gres/gpu=2", "modify user root set qos+=q5"),
        first=None,
        second=("--qos=q5", GPU),
        words="its QOS sets the least GPUs of one job",
        eased="modify qos q5 set MinTRESPerJob=gres/gpu=1",
    ),
)  # fmt: skip


def test_jobs_beyond_limits_are_held_explained_and_started_when_these_are_eased(
    kept_cluster: DevCluster,
    account: pwd.struct_passwd,
    home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs = Slurm(kept_cluster, home)
    daemon = operated(kept_cluster, home, account)

    def runs(job_id: int) -> bool:
        return jobs.job(job_id).running

    def eased(before: AccountingFacts, job_id: int) -> bool:
        # What the cancelled job has freed, the controller may have given away already.
        now = jobs.client.read_accounting(before.accounts)
        return now.eased_since(before) or runs(job_id)

    for case in CASES:
        for line in case.made:
            administer(kept_cluster, line)
    daemon.start()
    try:
        # All at once: most of the time is spent on waiting.
        first = {
            case: jobs.submit(*case.first, *SMALL, partition=case.partition)
            for case in CASES
            if case.first is not None
        }
        for job_id in first.values():
            jobs.running(job_id)
        second = {case: jobs.submit(*case.second, *SMALL) for case in CASES}
        for case, job_id in second.items():
            until(partial(is_limited, daemon, job_id, case.words), daemon, timeout_s=120)
            told = Ran(capsys, "explain", str(job_id), "--config", str(daemon.config))
            assert case.words in told.out
            assert jobs.job(job_id).held is Hold.ADMIN
        for case in CASES:
            lab = jobs.job(second[case]).account or ""
            before = jobs.client.read_accounting((lab, "top"))
            if case.eased is not None:
                administer(kept_cluster, case.eased)
            else:
                jobs.client.cancel(first[case])
            until(partial(eased, before, second[case]), daemon)
        for job_id in second.values():
            until(partial(runs, job_id), daemon, timeout_s=120)
            # Waits of 2, 4, 8, 16 seconds: however slow this machine is, there are few tries.
            assert tries(daemon, job_id) <= 6
    finally:
        jobs.cancel_all()
        daemon.stop()
        jobs.client.delete_reservation(daemon.settings.reservation_name)


def test_an_elastic_job_comes_to_the_gpus_that_its_limits_allow(
    kept_cluster: DevCluster,
    account: pwd.struct_passwd,
    home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Sia would give it a whole node; four GPUs are allowed, of which another job has two.

    A third job would be given one, and its QOS wants no job below two.
    """
    jobs = Slurm(kept_cluster, home)
    scheduling = {"policy": "sia", "round_s": 2.0}
    daemon = operated(kept_cluster, home, account, scheduling=scheduling)
    for line in (
        "add qos q4 MaxTRESPU=gres/gpu=4",
        "modify user root set qos+=q4",
        "add qos q6 MinTRESPerJob=gres/gpu=2",
        "modify user root set qos+=q6",
    ):
        administer(kept_cluster, line)
    _believe_that_it_scales(daemon)
    daemon.start()

    def said(of: int, words: str) -> bool:
        return words in Ran(capsys, "explain", str(of), "--config", str(daemon.config)).out

    try:
        other = jobs.submit("--qos=q4", "--gres=gpu:2", *SMALL)
        jobs.running(other)
        hints = "--comment=synergy:elastic=full,max_gpus=8,batch=32-4096,profile="
        job_id = jobs.submit("--qos=q4", GPU, f"{hints}scales", "--mem=1000")
        third = jobs.submit("--qos=q6", GPU, f"{hints}unknown", "--mem=1000")
        assert jobs.running(job_id, timeout_s=120).gpus_held == 2
        until(partial(said, job_id, f"fewer than 4 of {REFUSED}"), daemon)
        assert tries(daemon, job_id) == 2, "with eight and with four"
        assert jobs.running(third, timeout_s=120).gpus_held == 2
        until(partial(said, third, f"more than 1 of {REFUSED}"), daemon)
        # Once, as a rule; twice was seen on a busy machine.
        assert tries(daemon, third) <= 2, daemon.log[-9000:]
        rounds = len(daemon.journal)
        until(lambda: len(daemon.journal) > rounds + 3, daemon)
        assert (jobs.job(job_id).restarts, tries(daemon, job_id)) == (0, 2), "it is left in peace"
        jobs.client.cancel(other)
        until(lambda: jobs.job(job_id).gpus_held == 4, daemon, timeout_s=120)
        # Eight are still too many, and not tried again.
        assert (jobs.job(job_id).restarts, tries(daemon, job_id)) == (1, 2), daemon.log[-9000:]
    finally:
        jobs.cancel_all()
        daemon.stop()
        jobs.client.delete_reservation(daemon.settings.reservation_name)


def _believe_that_it_scales(daemon: AsAccount) -> None:
    """As if jobs with that profile had run on all GPUs of a node."""
    belief = scaling({"v100": 1.0}, explored={"v100": 8}, noise=1e4)
    state = Path(daemon.settings.state_dir)
    ledger = Ledger(state, clock=SystemClock())
    ledger.save_profile(Profile(key="scales", scaling=belief, restart_s=1.0))
    ledger.close()
    for path in (state, *state.rglob("*")):
        os.chown(path, daemon.account.pw_uid, daemon.account.pw_gid)
