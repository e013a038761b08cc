"""The embedded cluster's files and node shapes, without starting anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_synergy.devcluster import (
    DEFAULT_SHAPES,
    DevCluster,
    NodeShape,
    accounting,
    load_shapes,
    missing_programs,
    parse_shape,
    ports,
)
from slurm_synergy.devcluster.accounting import slurmdbd_conf
from slurm_synergy.devcluster.conf import (
    ClusterFacts,
    cgroup_conf,
    gres_conf,
    lua_value,
    site_lua,
    slurm_conf,
)
from slurm_synergy.devcluster.layout import claim_dir
from slurm_synergy.devcluster.processes import alive, end, identify
from slurm_synergy.devcluster.shapes import check_distinct, real_shape
from slurm_synergy.errors import ConfigError, DevClusterError

FACTS = ClusterFacts(
    name="synergy-1",
    state_dir=Path("/tmp/dc"),
    user="me",
    host="here",
    first_port=20000,
    shapes=DEFAULT_SHAPES,
    slurm_version=(22, 5),
    real_task_plugin="task/affinity",
)


def test_accounting_has_a_port_of_its_own_and_knows_gpus() -> None:
    assert "accounting_storage/none" in slurm_conf(FACTS, task_plugin="task/none")
    lines = slurm_conf(replace(FACTS, accounting=True), task_plugin="task/none").splitlines()
    assert "AccountingStorageType=accounting_storage/slurmdbd" in lines
    assert "AccountingStorageTRES=gres/gpu,gres/gpu:a100,gres/gpu:v100" in lines
    # slurmctld and six slurmds have the ports before it.
    assert "AccountingStoragePort=20007" in lines
    assert not any("accounting_storage/none" in line for line in lines)
    assert "DbdPort=20007\n" in slurmdbd_conf(FACTS.state_dir, port=20007, user="me")


def test_accounting_without_its_programs_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounting, "find", lambda name: None)
    cluster = DevCluster(dir=tmp_path / "dc", accounting=True)
    if not missing_programs():
        with pytest.raises(DevClusterError, match=r"mariadbd, slurmdbd, sacctmgr; install MariaDB"):
            cluster.up()
    with pytest.raises(DevClusterError, match="not installed: mariadbd"):
        accounting.need_accounting()
    assert not (tmp_path / "dc").exists()


def test_shapes_are_read_from_text_with_the_type_taken_from_the_name() -> None:
    shape = parse_shape("v100-[1-4]:gpus=8,cores=24,mem=500000,sockets=2")
    assert shape == DEFAULT_SHAPES[0]
    assert shape.names() == ("v100-1", "v100-2", "v100-3", "v100-4")
    assert parse_shape("n[01-02,7]:gpus=0,cores=1,mem=5").names() == ("n01", "n02", "n7")
    assert parse_shape("box:gpus=1,cores=1,mem=5,type=h100").gpu_type == "h100"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("v100-[1-4]", "no ':'"),
        ("v100-[1-4]:gpus=8,cores=24", "mem is missing"),
        ("v100-[1-4]:gpus=8,cores=24,mem=5,colour=3", "unknown key colour"),
        ("v100-[1-4]:gpus=8,cores=24,mem=5G", "whole number"),
        ("v100-[1-4]:gpus=8,cores,mem=5", "'cores' is not key=value"),
        ("v100-[1-4]:gpus=8,cores=25,mem=5,sockets=2", "multiple of 2"),
        ("v100-[1-4]:gpus=99,cores=25,mem=5", "between 0 and 64"),
        ("v100-[1-4]:gpus=9,cores=0,mem=5", "at least 1"),
        ("v100-[4-1]:gpus=8,cores=24,mem=5", "must rise"),
        ("v100-[1-9999]:gpus=8,cores=24,mem=5", "at most 256"),
        ("v100-[a]:gpus=8,cores=24,mem=5", "not a node list"),
        ("v 100:gpus=8,cores=24,mem=5,type=x", "not a node list"),
        ("v100-[1-]:gpus=8,cores=24,mem=5", "not a node list"),
        ("n1:gpus=8,cores=24,mem=5,type=a b", "must be a word"),
    ],
)
def test_wrong_shapes_say_what_is_wrong_and_how_it_is_right(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=r"for example|known:") as caught:
        parse_shape(text)
    assert what in str(caught.value)


def test_shapes_are_read_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text(
        "nodes:\n"
        "  v100-[1-4]: {gpus: 8, cores: 24, mem: 500000, sockets: 2}\n"
        "  a100-[1-2]: {gpus: 8, cores: 64, mem: 1000000, sockets: 2, type: a100}\n"
    )
    assert load_shapes(path) == DEFAULT_SHAPES


@pytest.mark.parametrize(
    "text",
    ["", "nodes: []", "nodes: {}", "nodes: {n1: 3}", "nodes: {n1: {gpus: true, cores: 1, mem: 1}}",
     "{", "nodes: {n1: {gpus: 1, cores: 1.5, mem: 1}}"],
)  # fmt: skip
def test_wrong_yaml_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"nodes\.yaml"):
        load_shapes(path)
    with pytest.raises(ConfigError, match="missing"):
        load_shapes(tmp_path / "missing.yaml")


def test_a_name_may_occur_once_only() -> None:
    twice = (DEFAULT_SHAPES[0], replace(DEFAULT_SHAPES[1], nodes="v100-3"))
    with pytest.raises(ConfigError, match="v100-3"):
        check_distinct(twice)
    with pytest.raises(ConfigError, match="no node"):
        check_distinct(())


def test_the_real_node_has_the_cores_that_this_process_may_use() -> None:
    cpus = len(os.sched_getaffinity(0))
    assert real_shape().cores == cpus
    topology = {"CPUs": cpus, "Boards": 1, "SocketsPerBoard": cpus, "ThreadsPerCore": 1}
    assert real_shape(topology).sockets == cpus
    # slurmd sees more than we may use: its sockets say nothing about ours.
    assert real_shape({**topology, "CPUs": cpus + 1}).sockets == 1


def test_every_node_gets_a_port_of_its_own_after_slurmctlds() -> None:
    text = slurm_conf(FACTS, task_plugin="task/none")
    assert "SlurmctldPort=20000\n" in text
    assert "NodeName=v100-[1-4] NodeAddr=127.0.0.1 Port=[20001-20004] CPUs=24 " in text
    assert "NodeName=a100-[1-2] NodeAddr=127.0.0.1 Port=[20005-20006] CPUs=64 " in text
    assert "SocketsPerBoard=2 CoresPerSocket=12 ThreadsPerCore=1 RealMemory=500000 " in text


def test_nothing_refers_to_the_machines_own_slurm_or_shortens_credentials() -> None:
    text = slurm_conf(FACTS, task_plugin="task/none") + gres_conf(FACTS) + cgroup_conf(FACTS)
    assert "/etc/" not in text
    assert "/var/" not in text
    assert "cred_expire" not in text
    assert "AuthInfo=socket=/tmp/dc/munge/munge.socket\n" in text
    assert "PreemptMode" not in text
    assert "KillWait" not in text


def test_sharing_goes_as_far_as_the_most_gpus_of_a_node() -> None:
    small = replace(DEFAULT_SHAPES[0], gpus=2)
    assert "OverSubscribe=FORCE:8\n" in slurm_conf(FACTS, task_plugin="x")
    assert "OverSubscribe=FORCE:2\n" in slurm_conf(replace(FACTS, shapes=(small,)), task_plugin="x")
    bare = replace(small, gpus=0)
    text = slurm_conf(replace(FACTS, shapes=(bare,)), task_plugin="x")
    assert "OverSubscribe=FORCE:1\n" in text
    assert "Gres=gpu" not in text
    assert gres_conf(replace(FACTS, shapes=(bare,))) == "\n"


def test_the_variants_of_slurm_conf_differ_in_the_task_plugin_alone() -> None:
    one = slurm_conf(FACTS, task_plugin="task/affinity").splitlines()
    two = slurm_conf(FACTS, task_plugin="task/none").splitlines()
    assert [pair for pair in zip(one, two, strict=True) if pair[0] != pair[1]] == [
        ("TaskPlugin=task/affinity", "TaskPlugin=task/none")
    ]


def test_cgroups_are_switched_off_as_the_release_allows() -> None:
    assert "disabled" in cgroup_conf(replace(FACTS, slurm_version=(24, 11)))
    old = cgroup_conf(FACTS)
    assert "IgnoreSystemd=yes" in old
    assert "disabled" not in old
    used = replace(FACTS, real_task_plugin="task/affinity,task/cgroup", slurm_version=(24, 11))
    assert "ConstrainCores=no" in cgroup_conf(used)
    assert "ConstrainCores=yes" in cgroup_conf(replace(used, constrain_cores=True))


@pytest.mark.skipif(not shutil.which("lua5.1") and not shutil.which("lua5.3"), reason="no Lua")
def test_lua_reads_back_what_was_written() -> None:
    lua = shutil.which("lua5.1") or "lua5.3"
    nasty = 'a "quoted" \\ back\nslash'
    value = {"text": nasty, "list": [1, 2.5, True], "none": None, "deep": {"k": "v"}}
    check = (
        f"local v = {lua_value(value)}\n"
        f"assert(v.text == {lua_value(nasty)} and #v.text == {len(nasty)})\n"
        "assert(v.list[1] == 1 and v.list[2] == 2.5 and v.list[3] == true and v.none == nil)\n"
        "io.write(v.text)"
    )
    done = subprocess.run([lua, "-e", check], capture_output=True, text=True, check=True)
    assert done.stdout == nasty
    with pytest.raises(ConfigError):
        lua_value(object())


def test_the_site_settings_describe_the_nodes_and_take_the_callers() -> None:
    shapes = (*DEFAULT_SHAPES, replace(DEFAULT_SHAPES[0], nodes="bare", gpus=0))
    text = site_lua(replace(FACTS, shapes=shapes), 1000, {"endpoint": "h:1", "partition": "p"})
    assert 'endpoint = "h:1",' in text
    assert 'partition = "p",' in text
    assert "operators = { 0, 1000 }," in text
    assert text.count('["type"]') == 2
    assert '["nodes"] = 4, ["gpus"] = 8, ["cores"] = 24, ["mem_mib"] = 500000' in text


def test_port_blocks_are_disjoint_and_come_back(tmp_path: Path) -> None:
    places = [tmp_path / name for name in "abc"]
    for place in places:
        place.mkdir()
    first, second = (ports.claim_block(place, 40) for place in places[:2])
    assert abs(first - second) >= 40
    third = ports.claim_block(places[2], 40, avoid=frozenset({first}))
    assert third not in (first, second)
    for place in places:
        ports.release_block(place)
        ports.release_block(place)
        assert not (place / "ports").exists()


def test_a_claim_of_a_vanished_cluster_is_void(tmp_path: Path) -> None:
    gone, new = tmp_path / "gone", tmp_path / "new"
    gone.mkdir()
    new.mkdir()
    first = ports.claim_block(gone, 4)
    shutil.rmtree(gone)
    claims = Path(f"/tmp/slurm-synergy-ports-{os.getuid()}")
    ports.claim_block(new, 4)
    owners = [path.read_text() for path in claims.glob("*-*")]
    assert str(gone) not in owners
    assert first >= 20000
    ports.release_block(new)


def test_a_process_is_ended_by_its_identity_and_not_by_a_reused_pid() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    me = identify(child.pid)
    assert me is not None
    other = replace(me, start_ticks=me.start_ticks - 1)
    assert end([other], grace_s=0.1) == []
    assert alive(me)
    assert not alive(other)
    assert end([me], grace_s=5.0) == []
    assert not alive(me)
    child.returncode = 0


def test_a_shape_value_is_checked_wherever_it_comes_from() -> None:
    with pytest.raises(ConfigError, match="cores"):
        NodeShape(nodes="n1", gpus=1, cores=3, mem_mib=1, gpu_type="x", sockets=2)


def test_a_state_directory_that_cannot_be_made_is_told_with_the_remedy() -> None:
    # pytest's own directories grow too long for Unix sockets, which is another refusal.
    with tempfile.TemporaryDirectory() as short:
        file = Path(short) / "file"
        file.touch()
        for place in (Path("/proc/foo"), file, file / "below"):
            told = rf"^{place}: cannot be .*; choose another --dir"
            with pytest.raises(DevClusterError, match=told):
                claim_dir(place, ["n1"])
