"""Limits of accounts and QOS on a real Slurm with slurmdbd: held, explained, started when eased.

The controller runs as an account that is an operator (AdminLevel=Operator), and nothing more.
"""

from __future__ import annotations

import pwd
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from harness import Slurm
from ran import Ran
from test_limits import is_limited, tries, until
from test_security import AsAccount, account, home, needs_root_and_setpriv

from slurm_synergy.devcluster import DevCluster, NodeShape, missing_accounting
from slurm_synergy.slurm.accounting import AccountingFacts
from slurm_synergy.slurm.facts import Hold

__all__ = ["account", "home"]  # fixtures

pytestmark = needs_root_and_setpriv

NODES = (NodeShape(nodes="n[1-3]", gpus=8, cores=16, mem_mib=64_000, gpu_type="v100"),)
GPU, SMALL = "--gres=gpu:1", ("--mem=1000", "--time=5")
GROUP = "all jobs of its account together are at the limit of "


@pytest.fixture
def kept_cluster(account: pwd.struct_passwd) -> Iterator[DevCluster]:
    missing = missing_accounting()
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed (scripts/install-slurm.sh)")
    site = {"operators": [0, account.pw_uid]}
    with DevCluster(nodes=NODES, real_node=False, accounting=True, site=site) as cluster:
        yield cluster


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
)  # fmt: skip


def test_jobs_beyond_limits_are_held_explained_and_started_when_these_are_eased(
    kept_cluster: DevCluster,
    account: pwd.struct_passwd,
    home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs = Slurm(kept_cluster, home)
    daemon = AsAccount(kept_cluster, home, pool={"nodes": "n[1-2]"})
    daemon.account = account

    def administer(line: str) -> None:
        kept_cluster.run(["sacctmgr", "-i", *line.split()])

    def runs(job_id: int) -> bool:
        return jobs.job(job_id).running

    def eased(before: AccountingFacts, job_id: int) -> bool:
        # What the cancelled job has freed, the controller may have given away already.
        now = jobs.client.read_accounting(before.accounts)
        return now.eased_since(before) or runs(job_id)

    administer(f"add user {account.pw_name} account=root adminlevel=operator")
    for case in CASES:
        for line in case.made:
            administer(line)
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
                administer(case.eased)
            else:
                jobs.client.cancel(first[case])
            until(partial(eased, before, second[case]), daemon)
        for job_id in second.values():
            until(partial(runs, job_id), daemon, timeout_s=120)
            # Waits of 2, 4, 8, 16 seconds: however slow this machine is, there are few tries.
            assert tries(daemon, job_id) <= 6
    finally:
        daemon.stop()
