"""The embedded cluster: what it promises to everybody who tests on it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ran import Ran

from slurm_synergy.devcluster import DEFAULT_SHAPES, DevCluster, NodeShape, ports
from slurm_synergy.devcluster.confinement import choose_task_plugin
from slurm_synergy.devcluster.processes import identify, job_processes
from slurm_synergy.errors import DevClusterError

if TYPE_CHECKING:
    from accounts import OrdinaryUser

ONE_NODE = (NodeShape(nodes="n1", gpus=4, cores=8, mem_mib=64_000, gpu_type="v100"),)


@pytest.fixture
def short_path() -> Iterator[Path]:
    # pytest's own directories grow too long for Unix sockets under xdist.
    with tempfile.TemporaryDirectory(prefix="synergy-") as place:
        yield Path(place)


def submit(cluster: DevCluster, *options: str, script: str) -> str:
    text = f"#!/bin/bash\n{script}\n"
    done = cluster.run(["sbatch", "--parsable", *options], input=text)
    return done.stdout.strip().partition(";")[0]


def state(cluster: DevCluster, job: str) -> str:
    done = cluster.run(["scontrol", "show", "job", "-o", job])
    return done.stdout.partition("JobState=")[2].split()[0]


def test_the_default_cluster_has_all_nodes_ready_within_fifteen_seconds(
    fresh_cluster: Callable[..., DevCluster],
) -> None:
    begun_s = time.monotonic()
    cluster = fresh_cluster()
    took_s = time.monotonic() - begun_s
    status = cluster.status()
    assert took_s < 15
    assert status.up
    assert set(status.nodes) == {
        *(f"v100-{n}" for n in range(1, 5)),
        "a100-1",
        "a100-2",
        "real-1",
    }
    shown = cluster.run(["scontrol", "show", "node", "a100-2"]).stdout
    assert "CPUTot=64" in shown
    assert "RealMemory=1000000" in shown
    assert "Gres=gpu:a100:8" in shown


def test_partitions_share_cores_only_where_jobs_are_managed(cluster: DevCluster) -> None:
    shown = cluster.run(["scontrol", "show", "partition", "-o"]).stdout.splitlines()
    by_name = {line.split()[0]: line for line in shown}
    assert "OverSubscribe=FORCE:8" in by_name["PartitionName=synergy"]
    assert "OverSubscribe=NO" in by_name["PartitionName=main"]
    assert "Default=YES" in by_name["PartitionName=main"]
    assert "TotalNodes=7" in by_name["PartitionName=synergy"]


def test_a_job_runs_on_a_pretended_node_and_sees_its_gpus(
    cluster: DevCluster, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    out = tmp_path / "out"
    job = submit(
        cluster,
        "-p", "main", "--gres=gpu:a100:3", "-c5", "--mem=1G", "-o", str(out),
        script="srun -n1 bash -c 'echo gpus=$CUDA_VISIBLE_DEVICES on=$SLURMD_NODENAME'",
    )  # fmt: skip
    eventually(lambda: state(cluster, job) == "COMPLETED", what="job completed")
    gpus, node = out.read_text().split()
    assert len(gpus.removeprefix("gpus=").split(",")) == 3
    assert node in ("on=a100-1", "on=a100-2")


def test_steps_on_the_real_node_are_pinned_and_pretended_nodes_are_not(
    cluster: DevCluster, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("pinning to one of one core shows nothing")
    widths = {}
    for node in ("real-1", "v100-1"):
        out = tmp_path / node
        job = submit(
            cluster,
            "-p", "main", "-w", node, "-n1", "-c1", "--mem=100", "-o", str(out),
            script="srun -n1 -c1 python3 -c 'import os; print(len(os.sched_getaffinity(0)))'",
        )  # fmt: skip
        eventually(lambda job=job: state(cluster, job) == "COMPLETED", what=f"job on {node}")
        widths[node] = int(out.read_text())
    assert widths == {"real-1": 1, "v100-1": len(os.sched_getaffinity(0))}


def test_two_clusters_run_side_by_side_and_one_ends_alone(
    fresh_cluster: Callable[..., DevCluster],
) -> None:
    first = fresh_cluster(nodes=ONE_NODE, real_node=False)
    second = fresh_cluster(nodes=ONE_NODE, real_node=False)
    assert set(first.pids.values()).isdisjoint(second.pids.values())
    first.down()
    assert second.is_up()
    assert second.run(["sinfo", "-h", "-o", "%T"]).stdout.split()[0] == "idle"


def test_down_ends_daemons_steps_and_job_processes_and_nothing_else(
    fresh_cluster: Callable[..., DevCluster],
    tmp_path: Path,
    eventually: Callable[..., None],
) -> None:
    cluster = fresh_cluster(nodes=ONE_NODE, real_node=False)
    pids = tmp_path / "pids"
    submit(
        cluster, "-p", "main", "--mem=10", "-o", "/dev/null",
        script=f"trap '' TERM; setsid sleep 600 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; "
        "env -i sleep 600",
    )  # fmt: skip
    eventually(pids.exists, what="job started")
    stranger = subprocess.Popen(["sleep", "600"], env={**os.environ, **cluster.env})
    try:
        of_job = [identify(int(pid)) for pid in pids.read_text().split()]
        daemons = [identify(pid) for pid in cluster.pids.values()]
        assert None not in of_job
        ended = cluster.down()
        assert not cluster.state_dir.exists()
        for process in (*of_job, *daemons):
            assert process is not None
            assert process.pid in ended
            assert identify(process.pid) != process
        assert stranger.poll() is None
        assert stranger.pid not in ended
    finally:
        stranger.kill()
        stranger.wait()


def test_slurmctld_keeps_its_jobs_over_stop_and_start(
    fresh_cluster: Callable[..., DevCluster], eventually: Callable[..., None]
) -> None:
    cluster = fresh_cluster(nodes=ONE_NODE, real_node=False)
    job = submit(cluster, "-p", "main", "--mem=10", "-o", "/dev/null", script="sleep 600")
    eventually(lambda: state(cluster, job) == "RUNNING", what="job runs")
    cluster.slurmctld_stop()
    assert "slurmctld" not in cluster.pids
    assert not cluster.is_up()
    cluster.slurmctld_start()
    assert state(cluster, job) == "RUNNING"
    cluster.slurmctld_kill()
    assert "slurmctld" not in cluster.pids
    cluster.slurmctld_start()
    assert cluster.is_up()


def test_up_again_restarts_only_what_is_missing(
    fresh_cluster: Callable[..., DevCluster],
) -> None:
    cluster = fresh_cluster(nodes=ONE_NODE, real_node=False)
    before = cluster.pids
    cluster.up()
    assert cluster.pids == before
    cluster.slurmd_kill("n1")
    cluster.up()
    after = cluster.pids
    assert after["slurmd-n1"] != before["slurmd-n1"]
    assert after["slurmctld"] == before["slurmctld"]


def test_up_with_other_nodes_is_refused_while_a_cluster_is_there(
    fresh_cluster: Callable[..., DevCluster],
) -> None:
    cluster = fresh_cluster(nodes=ONE_NODE, real_node=False)
    with pytest.raises(DevClusterError, match="other nodes"):
        DevCluster(dir=cluster.state_dir, nodes=DEFAULT_SHAPES).up()
    DevCluster(dir=cluster.state_dir, nodes=ONE_NODE).up()
    assert cluster.is_up()


def test_a_directory_that_was_kept_can_be_used_again(
    fresh_cluster: Callable[..., DevCluster],
) -> None:
    cluster = fresh_cluster(nodes=ONE_NODE, real_node=False)
    cluster.down(keep=True)
    assert "Terminate signal" in cluster.log("slurmctld")
    cluster.up()
    assert cluster.status().nodes == {"n1": "idle"}


def test_a_port_taken_in_between_costs_another_try_only(
    fresh_cluster: Callable[..., DevCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as squatter:
        squatter.bind(("0.0.0.0", 0))
        squatter.listen()
        taken = squatter.getsockname()[1]
        claim = ports.claim_block
        tries: list[frozenset[int]] = []

        def racing(state_dir: Path, count: int, *, avoid: frozenset[int]) -> int:
            tries.append(avoid)
            return taken if not avoid else claim(state_dir, count, avoid=avoid)

        monkeypatch.setattr(ports, "claim_block", racing)
        cluster = fresh_cluster(nodes=ONE_NODE, real_node=False)
    assert cluster.is_up()
    assert tries == [frozenset(), frozenset({taken})]


def test_cores_are_constrained_where_cgroups_allow_it(
    fresh_cluster: Callable[..., DevCluster], tmp_path: Path, eventually: Callable[..., None]
) -> None:
    plugin, why_not = choose_task_plugin()
    if why_not:
        with pytest.raises(DevClusterError, match="cannot be constrained"):
            fresh_cluster(nodes=(), constrain_cores=True)
        return
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a cpuset of one of one core shows nothing")
    cluster = fresh_cluster(nodes=(), constrain_cores=True)
    out = tmp_path / "out"
    code = "import os; os.sched_setaffinity(0, range(64)); print(len(os.sched_getaffinity(0)))"
    job = submit(
        cluster, "-p", "main", "-n1", "-c1", "--mem=100", "-o", str(out),
        script=f"srun -n1 -c1 python3 -c '{code}'",
    )  # fmt: skip
    eventually(lambda: state(cluster, job) == "COMPLETED", what="job completed")
    assert plugin == "task/affinity,task/cgroup"
    assert out.read_text() == "1\n"
    with pytest.raises(DevClusterError, match="another cluster confines"):
        fresh_cluster(nodes=(), constrain_cores=True)
    cluster.down()
    assert not list(Path("/sys/fs/cgroup").glob("*/slurm_real-1"))


def test_an_ordinary_user_can_have_a_cluster(as_user: OrdinaryUser) -> None:
    code = (
        "from slurm_synergy.devcluster import DevCluster\n"
        "with DevCluster() as c:\n"
        "    c.run(['sbatch', '-W', '--mem=10', '-o', '/dev/null', '--wrap', 'srun -n1 true'])\n"
        "    print(c.run(['whoami']).stdout, *c.status().notes)\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        ["setpriv", "--reuid", str(as_user.uid), "--regid", str(as_user.gid), "--clear-groups",
         sys.executable, "-c", code],
        cwd=as_user.home, env={**os.environ, "HOME": str(as_user.home), "PYTHONPATH": root},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert as_user.name in done.stdout
    assert "only root can make cgroups" in done.stdout


def test_a_daemon_that_fails_is_quoted_and_leaves_nothing_running(tmp_path: Path) -> None:
    cluster = DevCluster(
        nodes=ONE_NODE, real_node=False, extra_conf=["SelectTypeParameters=CR_Nonsense"]
    )
    with pytest.raises(DevClusterError, match="CR_Nonsense"):
        cluster.up(timeout_s=20)
    assert cluster.pids == {}
    cluster.down()
    assert not cluster.state_dir.exists()


def test_a_path_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DevClusterError, match="choose a shorter --dir"):
        DevCluster(dir=tmp_path / ("x" * 90)).up()


def test_a_directory_with_other_content_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    cluster = DevCluster(dir=tmp_path)
    with pytest.raises(DevClusterError, match="not empty"):
        cluster.up()
    with pytest.raises(DevClusterError, match="no embedded cluster"):
        cluster.down()
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_the_command_line_brings_a_cluster_up_and_down(
    short_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--dir", str(short_path / "dc")]

    def invoke(*argv: str) -> Ran:
        return Ran(capsys, "devcluster", *argv)

    try:
        shape = "n-[1-2]:gpus=2,cores=4,mem=9000,type=h100"
        up = ["up", *place, "--nodes", shape, "--no-real-node"]
        done = invoke(*up, "--endpoint", "127.0.0.1:7311", "--json")
        assert done.status == 0, done.err
        site = (short_path / "dc" / "etc" / "synergy_site.lua").read_text()
        assert 'endpoint = "127.0.0.1:7311",' in site
        again = invoke(*up, "--quiet")
        assert (again.status, again.out, again.err) == (0, "", "")
        other = invoke(*up, "--endpoint", "127.0.0.1:7312")
        assert other.status == 1 and "take it down first" in other.err
        assert json.loads(done.out)["nodes"] == {"n-1": "idle", "n-2": "idle"}
        shell = invoke("env", *place).out
        assert "export SYNERGY_ENDPOINT=127.0.0.1:7311" in shell
        assert all(line.startswith("export ") for line in shell.splitlines())
        shown = subprocess.run(
            ["bash", "-c", f"{shell}\nsinfo -h -p main -o %G"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert shown.stdout.strip() == "gpu:h100:2"
        assert invoke("status", *place).status == 0
    finally:
        done = invoke("down", *place, "--json")
    assert len(json.loads(done.out)["ended"]) >= 4
    assert invoke("status", *place).status == 1


def test_wrong_shapes_exit_with_two_and_say_what_is_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(tmp_path / "dc")
    for shape in ("v100-[1-4]", "v100-[4-1]:gpus=8,cores=24,mem=1", "n1:gpus=x,cores=2,mem=5"):
        done = Ran(capsys, "devcluster", "up", "--dir", place, "--nodes", shape)
        assert done.status == 2, shape
        assert "for example v100-[1-4]:gpus=8" in done.err
    assert not (tmp_path / "dc").exists()


def test_a_wrong_endpoint_exits_with_two_and_says_what_is_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong in ("head", "head:x", "head:0", ""):
        done = Ran(capsys, "devcluster", "up", "--dir", str(tmp_path / "dc"), "--endpoint", wrong)
        assert done.status == 2, wrong
        assert "--endpoint" in done.err
    assert not (tmp_path / "dc").exists()


def test_a_directory_that_cannot_be_made_exits_with_one_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = Ran(capsys, "devcluster", "up", "--dir", "/proc/foo", "--quiet")
    assert done.status == 1
    assert "/proc/foo: cannot be made" in done.err
    assert Ran(capsys, "devcluster", "up", "--quiet", "--json").status == 2


def test_a_cluster_outlives_the_command_that_started_it(short_path: Path) -> None:
    place = short_path / "dc"
    code = (
        "from slurm_synergy.devcluster import DevCluster, NodeShape\n"
        "n = NodeShape(nodes='n1', gpus=1, cores=1, mem_mib=100, gpu_type='x')\n"
        f"DevCluster(dir={str(place)!r}, nodes=[n], real_node=False).up()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    cluster = DevCluster(dir=place)
    try:
        assert cluster.is_up()
        assert cluster.status().nodes == {"n1": "idle"}
    finally:
        cluster.down()
    assert cluster.pids == {}


def test_step_daemons_are_known_without_their_environment(cluster: DevCluster) -> None:
    # Slurm 24.11 writes titles over it; a step daemon that cannot report would stay for ever.
    done = cluster.run(
        ["sbatch", "--parsable", "--gres=gpu:1", "--mem=100", "--output=/dev/null"],
        input="#!/bin/bash\nsleep 60\n",
        cwd="/tmp",
    )
    job = done.stdout.strip()

    def daemons() -> list[str]:
        found = job_processes("nobody", "NOTHING=1", cluster.state_dir)
        names = [Path(f"/proc/{who.pid}/comm").read_text() for who in found]
        return [name for name in names if name.startswith("slurmstepd")]

    try:
        deadline_s = time.monotonic() + 15
        while not daemons() and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert daemons()
        assert not job_processes("nobody", "NOTHING=1", cluster.state_dir / "elsewhere")
    finally:
        cluster.run(["scancel", "-f", job])
