"""The controller without root: as the account that Slurm knows, with no right but its own."""

from __future__ import annotations

import os
import pwd
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import ControllerProcess, Slurm

from slurm_synergy.devcluster import DevCluster, NodeShape

# The checkout and its interpreter may lie where only root can read: reading is all that is left.
READ_ONLY = [
    *("setpriv", "--clear-groups", "--no-new-privs"),
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"),
    "--bounding-set=-all,+dac_read_search",
]
# PR_SET_MDWE, as MemoryDenyWriteExecute= of the unit: no memory is both written and run.
SHUT_IN = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(65, 1, 0, 0, 0); os.execv(sys.argv[1],"
    " sys.argv[1:])"
)
needs_root_and_setpriv = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None,
    reason="needs root, to start Slurm as two users, and setpriv (util-linux)",
)
pytestmark = needs_root_and_setpriv


class AsAccount(ControllerProcess):
    """The controller as another user."""

    forked = False
    account: pwd.struct_passwd

    def command(self, *options: str) -> list[str]:
        ids = [f"--reuid={self.account.pw_uid}", f"--regid={self.account.pw_gid}"]
        own = super().command(*options)
        return [*READ_ONLY, *ids, "--", sys.executable, "-c", SHUT_IN, *own]


def _run_slurmctld_as(account: pwd.struct_passwd, cluster: DevCluster) -> None:
    cluster.slurmctld_stop()
    # The slurmds have files of their own.
    for conf in (cluster.conf_path, *(cluster.state_dir / "etc").rglob("*slurm*.conf")):
        text = conf.read_text()
        conf.write_text(text.replace("SlurmUser=root\n", f"SlurmUser={account.pw_name}\n"))
    assert f"SlurmUser={account.pw_name}\n" in cluster.conf_path.read_text()
    for part in ("state", "run", "log"):
        place = cluster.state_dir / part
        for path in (place, *place.rglob("slurmctld*"), *(cluster.state_dir / "state").rglob("*")):
            os.chown(path, account.pw_uid, account.pw_gid)
    cluster.slurmctld_start()
    # They take orders from the SlurmUser that they knew when they started.
    for node in cluster.node_names:
        cluster.slurmd_stop(node)
        cluster.slurmd_start(node)


def operator_account() -> pwd.struct_passwd:
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    return names.get("games") or names["nobody"]


@pytest.fixture
def account() -> pwd.struct_passwd:
    return operator_account()


@pytest.fixture
def home(account: pwd.struct_passwd) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="synergy-operator-", dir="/tmp"))
    place.chmod(0o755)
    os.chown(place, account.pw_uid, account.pw_gid)
    yield place
    shutil.rmtree(place, ignore_errors=True)


def test_the_controller_needs_no_root(
    fresh_cluster: Callable[..., DevCluster], account: pwd.struct_passwd, home: Path
) -> None:
    shape = NodeShape(nodes="v100-[1-2]", gpus=4, cores=12, mem_mib=48_000, gpu_type="v100")
    site = {"operators": [0, account.pw_uid]}
    cluster = fresh_cluster(nodes=[shape], real_node=False, site=site)
    _run_slurmctld_as(account, cluster)
    jobs = Slurm(cluster, home)
    # A job of root's, which another account may hold and release only as an operator.
    job_id = jobs.submit("--gres=gpu:v100:2", script="sleep 300\n")
    daemon = AsAccount(cluster, home, pool={"nodes": "v100-[1-2]"})
    daemon.account = account
    daemon.start()
    try:
        jobs.running(job_id, timeout_s=60)
        process = daemon._process
        assert process is not None
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
        )
        assert set(status["Uid"].split()) == {str(account.pw_uid)}
        assert int(status["CapEff"], 16) == 1 << 2  # reading, see above
        assert status["NoNewPrivs"] == "1"
        owners = {path.stat().st_uid for path in (home / "state").rglob("*")}
        assert owners == {account.pw_uid}
    finally:
        jobs.cancel_all()
        assert daemon.stop() == 0
    assert "Traceback" not in daemon.log
