"""job_submit.lua in a plain Lua interpreter, with Slurm's side of it played by a table."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm_synergy.core.hints import HINT_EXAMPLES, MAX_HINT_BYTES, Hints, parse_hints
from slurm_synergy.devcluster.conf import lua_value
from slurm_synergy.errors import HintError

SOURCE = Path(__file__).resolve().parents[2] / "etc" / "job_submit.lua"
LUAS = [name for name in ("lua5.1", "lua5.3", "lua5.4", "luajit") if shutil.which(name)]
pytestmark = pytest.mark.skipif(
    not LUAS, reason="no Lua interpreter (scripts/install-slurm.sh installs lua5.1)"
)

NO_VAL16, NO_VAL, NO_VAL64 = 65534, 4294967294, 18446744073709551614.0
INFINITE = 4294967295

# What 22.05 hands to slurm_job_submit for an option that was not given (dumped from a real one).
UNSET: dict[str, object] = {
    "cpus_per_task": NO_VAL16,
    "het_job_offset": NO_VAL,
    "max_nodes": NO_VAL,
    "min_cpus": 1,
    "min_nodes": NO_VAL,
    "nice": NO_VAL,
    "ntasks_per_gpu": NO_VAL16,
    "ntasks_per_node": NO_VAL16,
    "ntasks_per_tres": NO_VAL16,
    "num_tasks": NO_VAL,
    "pn_min_memory": NO_VAL64,
    "priority": NO_VAL,
    "requeue": NO_VAL16,
    "shared": NO_VAL16,
    "time_limit": NO_VAL,
    "environment": {"HOME": "/home/u"},
    "script": "#!/bin/bash\nsynergy-srun python train.py\n",
}
# The same for slurm_job_modify.
UNTOUCHED: dict[str, object] = {
    "begin_time": 0,
    "boards_per_node": 0,
    "contiguous": NO_VAL16,
    "cores_per_socket": NO_VAL16,
    "cpus_per_task": NO_VAL16,
    "delay_boot": NO_VAL,
    "het_job_offset": 0,
    "max_cpus": NO_VAL,
    "max_nodes": NO_VAL,
    "min_cpus": NO_VAL,
    "min_nodes": NO_VAL,
    "nice": NO_VAL,
    "ntasks_per_board": 0,
    "ntasks_per_node": NO_VAL16,
    "num_tasks": NO_VAL,
    "pn_min_cpus": NO_VAL16,
    "pn_min_memory": NO_VAL64,
    "pn_min_tmp_disk": NO_VAL,
    "priority": NO_VAL,
    "reboot": NO_VAL16,
    "requeue": NO_VAL16,
    "shared": NO_VAL16,
    "site_factor": NO_VAL,
    "time_limit": NO_VAL,
    "time_min": NO_VAL,
}
SITE: dict[str, object] = {
    "partition": "synergy",
    "operators": [0, 64030],
    "endpoint": "head:7311",
    "shapes": [
        {"type": "v100", "nodes": 4, "gpus": 8, "cores": 24, "mem_mib": 500000},
        {"type": "v100", "nodes": 1, "gpus": 2, "cores": 2, "mem_mib": 20000},
        {"type": "a100", "nodes": 2, "gpus": 8, "cores": 64, "mem_mib": 1000000},
    ],
}

_DRIVER = """
local out = {}
slurm = { SUCCESS = 0, ERROR = -1,
  log_user = function(f, ...) out[#out + 1] = "USER " .. string.format(f, ...) end,
  log_error = function(f, ...) out[#out + 1] = "ERROR " .. string.format(f, ...) end }
local rc_load = dofile(%(script)s)
local job, record, parts = %(job)s, %(record)s, %(parts)s
local broken = %(broken)s
-- Like Slurm's own object: fields are read and written through a metatable.
local proxy = setmetatable({}, {
  __index = function(_, key)
    if broken == key then error("cannot read " .. key) end
    return job[key]
  end,
  __newindex = function(_, key, value)
    if broken == "set " .. key then error("cannot set " .. key) end
    job[key] = value
  end })
local rc
if record then rc = slurm_job_modify(proxy, record, parts, %(uid)d)
else rc = slurm_job_submit(proxy, parts, %(uid)d) end
print("LOAD " .. rc_load)
print("RC " .. rc)
for _, line in ipairs(out) do print((string.gsub(line, "\\n", " "))) end
for _, key in ipairs({ "priority", "requeue", "min_nodes", "max_nodes", "admin_comment",
  "tres_per_node", "tres_per_job", "tres_per_task", "cpus_per_tres", "mem_per_tres", "num_tasks",
  "pn_min_memory", "ntasks_per_node" }) do
  if job[key] ~= nil then print("SET " .. key .. "=" .. tostring(job[key])) end
end
for key, value in pairs(job.environment or {}) do print("ENV " .. key .. "=" .. value) end
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    accepted: bool
    user: str
    log: str
    fields: Mapping[str, str]
    env: Mapping[str, str]

    @property
    def mark(self) -> dict[str, str]:
        pairs = self.fields["admin_comment"].split()[-1].removeprefix("synergy:").split(",")
        return dict(pair.split("=") for pair in pairs)


@pytest.fixture(params=LUAS)
def lua(request: pytest.FixtureRequest, tmp_path: Path) -> Lua:
    return Lua(str(request.param), tmp_path)


class Lua:
    """Calls the two entry points the way slurmctld does."""

    def __init__(self, interpreter: str, place: Path) -> None:
        self.interpreter, self.place = interpreter, place
        shutil.copyfile(SOURCE, place / "job_submit.lua")
        self.site(SITE)

    def site(self, given: Mapping[str, object] | str | None) -> None:
        path = self.place / "synergy_site.lua"
        if given is None:
            path.unlink()
        else:
            path.write_text(given if isinstance(given, str) else f"return {lua_value(given)}\n")

    def call(
        self,
        job: Mapping[str, object],
        record: Mapping[str, object] | None,
        uid: int,
        broken: str | None,
        parts: Mapping[str, object],
    ) -> Answer:
        driver = self.place / "driver.lua"
        driver.write_text(
            _DRIVER
            % {
                "script": lua_value(str(self.place / "job_submit.lua")),
                "job": lua_value({k: v for k, v in job.items() if v is not None}),
                "record": lua_value(record),
                "parts": lua_value(parts),
                "broken": lua_value(broken),
                "uid": uid,
            }
        )
        done = subprocess.run(
            [self.interpreter, str(driver)], capture_output=True, text=True, timeout=20, check=False
        )
        assert done.returncode == 0, done.stderr
        lines = [line.partition(" ") for line in done.stdout.splitlines()]
        said = {kind: [rest for k, _, rest in lines if k == kind] for kind, _, _ in lines}
        assert said["LOAD"] == ["0"]
        return Answer(
            accepted=said["RC"] == ["0"],
            user=" ".join(said.get("USER", [])),
            log=" ".join(said.get("ERROR", [])),
            fields=dict(f.split("=", 1) for f in said.get("SET", [])),
            env=dict(f.split("=", 1) for f in said.get("ENV", [])),
        )

    def submit(
        self,
        *,
        broken: str | None = None,
        parts: Mapping[str, object] | None = None,
        **given: object,
    ) -> Answer:
        job = {**UNSET, "partition": "synergy", "tres_per_node": "gres:gpu:v100:4", **given}
        return self.call(job, None, 1000, broken, parts or {})

    def modify(
        self,
        *,
        record: Mapping[str, object] | None = None,
        uid: int = 1000,
        broken: str | None = None,
        **changes: object,
    ) -> Answer:
        managed: dict[str, object] = {
            "partition": "synergy",
            "admin_comment": "synergy:v=1,wrapper=yes",
            "time_limit": 60,
        }
        whole = {**managed, **(record or {})}
        job = {**UNTOUCHED, **changes}
        return self.call(job, {k: v for k, v in whole.items() if v is not None}, uid, broken, {})


def test_a_managed_job_is_held_requeueable_and_marked_with_its_request(lua: Lua) -> None:
    answer = lua.submit(
        min_nodes=2, max_nodes=2, ntasks_per_node=4, num_tasks=8, cpus_per_task=3,
        min_mem_per_node=65534,
    )  # fmt: skip
    assert answer.accepted, answer.user
    assert answer.fields["priority"] == "0"
    assert answer.fields["requeue"] == "1"
    assert answer.fields["admin_comment"] == (
        "synergy:v=1,wrapper=yes,gpn=4,type=v100,nodes=2,tpn=4,cpt=3,mem=65534,limit=0"
    )


def test_a_bare_request_is_one_node_of_any_type(lua: Lua) -> None:
    answer = lua.submit(tres_per_node="gres:gpu:2")
    assert answer.mark == {
        "v": "1", "wrapper": "yes", "gpn": "2", "type": "any", "nodes": "1", "tpn": "0",
        "cpt": "0", "mem": "0", "limit": "0",
    }  # fmt: skip
    assert answer.fields["min_nodes"] == answer.fields["max_nodes"] == "1"


@pytest.mark.parametrize(
    ("tres", "gpn", "gpu_type"),
    [
        ("gres:gpu", "1", "any"),
        ("gres:gpu:v100", "1", "v100"),
        ("gres:gpu:a100:8", "8", "a100"),
        ("gres/gpu:a100:3", "3", "a100"),
        ("gres/gpu:5", "5", "any"),
        ("gpu:2", "2", "any"),
    ],
)
def test_all_spellings_of_gpus_per_node_are_understood(
    lua: Lua, tres: str, gpn: str, gpu_type: str
) -> None:
    answer = lua.submit(tres_per_node=tres)
    assert answer.accepted, answer.user
    assert (answer.mark["gpn"], answer.mark["type"]) == (gpn, gpu_type)


def test_floats_of_newer_releases_are_understood(lua: Lua) -> None:
    answer = lua.submit(min_nodes=2.0, max_nodes=2.0, num_tasks=2.0, min_mem_per_cpu=100.0)
    assert answer.accepted, answer.user
    assert (answer.mark["nodes"], answer.mark["tpn"], answer.mark["mem"]) == ("2", "1", "100")


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"tres_per_node": None}, "must ask for GPUs; use --gres=gpu:N"),
        ({"tres_per_node": "gres:gpu:0"}, "must ask for GPUs"),
        ({"tres_per_node": "gres:gpu:4,gres:nic:1"}, 'not "nic:1"'),
        ({"tres_per_node": "gres:gpu:v100:1,gres:gpu:a100:1"}, "several GPU types"),
        ({"tres_per_node": "gres:gpu:2K"}, "not a GPU request"),
        ({"tres_per_node": "gres:gpu:99999999999"}, "too many GPUs"),
        ({"tres_per_node": "gres:gpu:h100:1"}, "no GPUs of type h100; known types: v100, a100"),
        ({"tres_per_node": "gres:gpu:v100:9"}, "at most 8 per node"),
        ({"min_nodes": 5, "max_nodes": 5}, "ask for at most 4 nodes"),
        ({"tres_per_node": "gres:gpu:2", "min_nodes": 6, "max_nodes": 6}, "at most 5 nodes"),
        ({"min_nodes": 1, "max_nodes": 4}, "node ranges (-N 1-4)"),
        ({"min_nodes": 0, "max_nodes": 0}, "-N 0 cannot be used"),
        ({"tres_per_node": None, "tres_per_job": "gres:gpu:5", "min_nodes": 2, "max_nodes": 2},
         "5 GPUs (--gpus) cannot be spread evenly over 2 nodes; use --gres=gpu:N"),
        ({"tres_per_node": None, "tres_per_job": "gres:gpu:16"}, "at most 8 per node, and"),
        ({"tres_per_job": "gres:gpu:3"}, "asks for 4 and for 3 GPUs on each of 1 node"),
        ({"tres_per_job": "gres:gpu:a100:4"}, "the GPU types v100 and a100; name one"),
        ({"tres_per_socket": "gres:gpu:v100:2", "sockets_per_node": 2}, "use --gres=gpu:v100:4"),
        ({"tres_per_socket": "gres:gpu:2"}, "use --gres=gpu:N (GPUs per node)"),
        ({"tres_per_task": "gres:gpu:1"}, "use --gres=gpu:4 -N 1 --ntasks-per-node=4"),
        ({"tres_per_task": "cpu=2,gres/gpu=1"}, "--gpus-per-task together with --gres"),
        ({"tres_per_node": None, "tres_per_task": "gres:gpu:1"}, "the same number of tasks"),
        ({"cpus_per_tres": "gres:gpu:2", "script": "srun x"}, "use -c (CPUs per task), or leave"),
        ({"mem_per_tres": "gres:gpu:2", "script": "srun x"}, "use --mem (memory per node)"),
        ({"cpus_per_tres": "gres:gpu:7"}, "28 CPUs per node"),
        ({"mem_per_tres": "gres:gpu:200000"}, "800000M of memory per node"),
        ({"ntasks_per_tres": 1}, "--ntasks-per-gpu"),
        ({"sockets_per_node": 2}, "--sockets-per-node cannot be used"),
        ({"threads_per_core": 1}, "--hint"),
        ({"ntasks_per_core": 1}, "the controller chooses the cores"),
        ({"pn_min_cpus": 4}, "--mincpus"),
        ({"contiguous": 1}, "--contiguous"),
        ({"req_switch": 1}, "--switches"),
        ({"time_min": 5}, "give one limit with --time"),
        ({"het_job_offset": 0}, "heterogeneous"),
        ({"script": None}, "use sbatch"),
        ({"shared": 0}, "--exclusive"),
        ({"reservation": "r"}, "--reservation"),
        ({"req_nodes": "v100-1"}, "--nodelist"),
        ({"features": "nvme"}, "--constraint=nvme cannot be used in partition synergy: only GPU"),
        ({"features": "v100&nvme"}, "--gres=gpu:TYPE:N"),
        ({"features": "a100"}, "names GPU type v100, --constraint does not"),
        ({"tres_per_node": "gres:gpu:2", "features": "v100",
          "comment": "synergy:gpu_types=v100+a100"}, "the hint gpu_types names a100, --constraint"),
        ({"partition": "synergy,main"}, "name one: -p synergy"),
        ({"partition": "main,synergy"}, "name one: -p synergy"),
        ({"num_tasks": 3, "min_nodes": 2, "max_nodes": 2}, "spread evenly over 2 nodes"),
        ({"num_tasks": 5}, "5 tasks per node with 4 GPUs per node; use one task per node "),
        ({"ntasks_per_node": 3}, "one per GPU (--ntasks-per-node=4)"),
        ({"num_tasks": 5, "ntasks_per_node": 4}, "5 tasks in all (-n) and 4 per node on 2 nodes"),
        ({"priority": 0}, "submit without --hold, or use --begin=TIME"),
        ({"min_mem_per_node": 921600}, "900G of memory per node"),
        ({"min_mem_per_node": 500001}, "of type v100 with 4 GPUs has; ask for at most 500000M"),
        ({"min_mem_per_cpu": 102400, "cpus_per_task": 6}, "600G of memory per node"),
        ({"min_mem_per_cpu": 102400, "cpus_per_task": 2, "ntasks_per_node": 4}, "800G of memory"),
        ({"comment": "synergy:min_mem=900G"}, "ask for at most 500000M"),
        ({"comment": "synergy:min_mem=0.9T"}, "the hint min_mem) is more than any node"),
        ({"min_mem_per_node": 921600, "comment": "synergy:min_mem=20G"}, "900G of memory"),
        ({"cpus_per_task": 999}, "999 CPUs per node (-c for each task) are more than any node of "
         "type v100 with 4 GPUs has; ask for at most 24,"),
        ({"cpus_per_task": 7, "ntasks_per_node": 4}, "28 CPUs per node"),
        ({"tres_per_node": "gres:gpu:8", "cpus_per_task": 64, "min_nodes": 3, "max_nodes": 3},
         "the CPUs and the memory asked for each are more than there are; ask for at most 2 nodes"),
    ],
)  # fmt: skip
def test_requests_that_cannot_be_planned_are_refused_with_the_remedy(
    lua: Lua, given: dict[str, object], what: str
) -> None:
    answer = lua.submit(**given)
    assert not answer.accepted
    assert what in answer.user
    assert answer.user.startswith("slurm-synergy: ")
    assert answer.log == ""


@pytest.mark.parametrize(
    ("given", "mark", "written"),
    [
        ({"tres_per_job": "gres:gpu:4", "min_nodes": 2, "max_nodes": 2},
         {"gpn": "2", "nodes": "2", "tpn": "0"}, "gres:gpu:2"),
        ({"tres_per_job": "gres/gpu:a100:8"}, {"gpn": "8", "type": "a100"}, "gres/gpu:a100:8"),
        ({"tres_per_job": "gres:gpu:8", "tres_per_node": "gres:gpu:v100:4"},
         {"gpn": "4", "nodes": "2", "type": "v100"}, "gres:gpu:v100:4"),
        ({"tres_per_task": "gres:gpu:v100:2", "num_tasks": 4},
         {"gpn": "8", "tpn": "4", "type": "v100"}, "gres:gpu:v100:8"),
        ({"tres_per_task": "cpu=3,gres/gpu=1", "num_tasks": 4, "cpus_per_task": 3,
          "min_nodes": 2, "max_nodes": 2}, {"gpn": "2", "tpn": "2", "cpt": "3"}, "gres/gpu:2"),
        ({"tres_per_job": "gres:gpu:4", "tres_per_task": "gres:gpu:2", "num_tasks": 2},
         {"gpn": "4", "tpn": "2"}, "gres:gpu:4"),
        ({"tres_per_node": "gres:gpu:4", "cpus_per_tres": "gres:gpu:2", "num_tasks": 4},
         {"cpt": "2", "gpn": "4"}, "gres:gpu:4"),
        ({"tres_per_node": "gres:gpu:4", "mem_per_tres": "gres:gpu:10240"},
         {"mem": "40960"}, "gres:gpu:4"),
    ],
)  # fmt: skip
def test_every_form_is_rewritten_to_gpus_per_node(
    lua: Lua, given: dict[str, object], mark: dict[str, str], written: str
) -> None:
    answer = lua.submit(**{"tres_per_node": None, **given})
    assert answer.accepted, answer.user
    assert {key: answer.mark[key] for key in mark} == mark
    assert answer.fields["tres_per_node"] == written
    for field in ("tres_per_job", "cpus_per_tres", "mem_per_tres"):
        assert answer.fields.get(field, "") == ""
    assert answer.fields.get("tres_per_task", "") in ("", "cpu=3")
    tasks = int(answer.mark["tpn"]) * int(answer.mark["nodes"])
    assert not tasks or int(float(answer.fields["num_tasks"])) == tasks


def test_a_form_that_cannot_be_rewritten_is_refused_and_not_let_through(lua: Lua) -> None:
    answer = lua.submit(tres_per_node=None, tres_per_job="gres:gpu:4", broken="set tres_per_job")
    assert not answer.accepted


def test_the_requests_own_form_is_left_as_it_is(lua: Lua) -> None:
    answer = lua.submit(num_tasks=4)
    assert answer.fields["tres_per_node"] == "gres:gpu:v100:4"
    assert float(answer.fields["pn_min_memory"]) > 1.8e19


@pytest.mark.parametrize(
    ("features", "kind"),
    [("v100", "v100"), ("a100|v100", "a100+v100"), ("[v100|a100]", "a100+v100")],
)
def test_a_constraint_that_names_gpu_types_chooses_them(lua: Lua, features: str, kind: str) -> None:
    answer = lua.submit(tres_per_node="gres:gpu:2", features=features)
    assert answer.accepted, answer.user
    assert answer.mark["type"] == kind


def test_the_time_limit_is_part_of_the_mark(lua: Lua) -> None:
    assert lua.submit(time_limit=720).mark["limit"] == "720"
    assert lua.submit(time_limit=INFINITE).mark["limit"] == "0"


def test_members_of_an_array_get_directories_of_their_own(lua: Lua) -> None:
    answer = lua.submit(array_inx="0-9%2", comment="synergy:ckpt_dir=/scratch/me")
    assert answer.accepted, answer.user
    assert answer.env["SYNERGY_CHECKPOINT_ROOT"] == "/scratch/me"
    assert "SYNERGY_CHECKPOINT_DIR" not in answer.env


@pytest.mark.parametrize(
    ("key", "given"),
    [("interactive", {"script": None}), ("heterogeneous", {"het_job_offset": 0, "script": None})],
)
def test_a_site_may_leave_such_jobs_to_slurm(lua: Lua, key: str, given: dict[str, object]) -> None:
    assert not lua.submit(**given).accepted
    lua.site({**SITE, key: "pass"})
    answer = lua.submit(tres_per_node=None, tres_per_job="gres:gpu:3", **given)
    assert answer.accepted, answer.user
    assert answer.fields["admin_comment"] == f"synergy:pass={key}"
    assert answer.fields["priority"] == str(NO_VAL)
    assert answer.fields["tres_per_job"] == "gres:gpu:3"
    # Its owner may do with it what Slurm allows.
    record = {"admin_comment": answer.fields["admin_comment"]}
    assert lua.modify(record=record, priority=0).accepted
    lua.site({**SITE, key: "perhaps"})
    assert "must be refuse or pass" in lua.submit(**given).user


def test_the_owner_may_change_how_many_members_run_at_once(lua: Lua) -> None:
    assert lua.modify(array_inx="%3").accepted
    assert lua.modify(array_inx="4").accepted
    assert not lua.modify(array_inx="0-5").accepted


@pytest.mark.parametrize(
    "given",
    [
        {"min_mem_per_node": 500000, "cpus_per_task": 24},
        {"tres_per_node": "gres:gpu:4", "min_mem_per_node": 921600, "cpus_per_task": 64},
        {"tres_per_node": "gres:gpu:2", "min_nodes": 5, "max_nodes": 5, "cpus_per_task": 2},
        {"min_mem_per_node": 0},
        {"comment": "synergy:min_mem=500000"},
    ],
)
def test_memory_and_cores_that_some_kind_of_node_has_are_accepted(
    lua: Lua, given: dict[str, object]
) -> None:
    answer = lua.submit(**given)
    assert answer.accepted, answer.user


def test_a_shape_that_says_only_nodes_and_gpus_has_any_memory_and_cores(lua: Lua) -> None:
    lua.site({**SITE, "shapes": [{"type": "v100", "nodes": 1, "gpus": 4}]})
    assert lua.submit(min_mem_per_node=10**9, cpus_per_task=999).accepted
    assert not lua.submit(tres_per_node="gres:gpu:v100:5").accepted


def test_one_gpu_leaves_one_number_of_tasks_to_name(lua: Lua) -> None:
    answer = lua.submit(tres_per_node="gres:gpu:v100:1", ntasks_per_node=2)
    assert answer.user == (
        "slurm-synergy: 2 tasks per node with 1 GPU per node; use --ntasks-per-node=1"
    )


def test_one_task_per_node_and_one_per_gpu_are_accepted(lua: Lua) -> None:
    for given in (
        {"ntasks_per_node": 1}, {"ntasks_per_node": 4}, {"num_tasks": 4}, {"num_tasks": 1},
        {"num_tasks": 8, "ntasks_per_node": 4},
    ):  # fmt: skip
        answer = lua.submit(**given)
        assert answer.accepted, (given, answer.user)


@pytest.mark.parametrize(
    "hints",
    [
        "profile=resnet18-imagenet",
        "min_mem=20G,batch=128-4096,max_gpus=16",
        "min_mem=0.4T",
        "min_mem=900",
        "samples=1281167,epochs=90,batch=256",
        "samples=153740040000,epochs=999999999999999",
        "elastic=full,min_gpus=1,max_gpus=2,scale_unit=2",
        "elastic=rigid,min_gpus=1,max_gpus=2",
        "gpu_types=v100+a100,ckpt_dir=/scratch/me,grace_s=30",
    ],
)
def test_well_formed_hints_are_accepted_beside_the_users_own_comment(lua: Lua, hints: str) -> None:
    comment = f"my run synergy:{hints} of tuesday"
    answer = lua.submit(comment=comment)
    assert answer.accepted, answer.user
    assert parse_hints(comment) != Hints()


@pytest.mark.parametrize(
    ("hints", "what"),
    [
        ("maxgpus=3", "known hints: batch, ckpt_dir, elastic,"),
        ("", "one word of key=value and commas, without spaces"),
        ("max_gpus", 'the hint "max_gpus" is not key=value'),
        ("max_gpus=3,", "one word of key=value and commas, without spaces"),
        ("max_gpus=3, min_mem=20G", "one word of key=value and commas, without spaces"),
        ("max_gpus = 3", "hints are one word without spaces"),
        ("samples=1000000000000000", "write samples=1281167"),
        ("batch=1000000000", "write batch=256"),
        ("max_gpus=", "write max_gpus=16"),
        ("max_gpus=0", "write max_gpus=16"),
        ("scale_unit=0", "scale_unit=0 is not a whole number from 1 to 999999999; write scale_"),
        ("epochs=0", "is not a whole number from 1 to 999999999999999; write epochs=90"),
        ("max_gpus=4.5", "write max_gpus=16"),
        ("max_gpus=-4", "write max_gpus=16"),
        ("max_gpus=4,max_gpus=5", "given twice"),
        ("min_gpus=4,max_gpus=2", "contradict"),
        ("max_gpus=2,scale_unit=4", "the job grows in steps of scale_unit"),
        ("batch=4096-128", "batch=128-4096"),
        ("min_mem=20GB", "write min_mem=20G"),
        ("min_mem=0", "write min_mem=20G"),
        ("elastic=yes", "rigid, scale or full"),
        ("ckpt_dir=here", "ckpt_dir=/scratch/me/run1"),
        ("gpu_types=v100,a100", "is not key=value"),
        ("gpu_types=v100++a100", "gpu_types=v100+a100"),
        ("gpu_types=h100", "known types: v100, a100"),
        ("gpu_types=a100", "make them agree"),
        ("profile=../x", "profile=resnet18-imagenet"),
        ("profile=a synergy:profile=b", "more than one synergy: list"),
    ],
)
def test_bad_hints_are_refused_with_an_example(lua: Lua, hints: str, what: str) -> None:
    answer = lua.submit(comment=f"synergy:{hints}")
    assert not answer.accepted
    assert what in answer.user
    # What only the cluster can know is Lua's alone; the grammar is the same in Python.
    if hints not in ("gpu_types=h100", "gpu_types=a100"):
        with pytest.raises(HintError) as caught:
            parse_hints(f"synergy:{hints}")
        assert "whole number" not in what or what in str(caught.value)


def test_lists_up_to_the_same_length_are_taken_as_in_python(lua: Lua) -> None:
    for name in ("x", "ä"):
        room = MAX_HINT_BYTES - len("synergy:ckpt_dir=/")
        fits = name * (room // len(name.encode()))
        assert lua.submit(comment=f"mine synergy:ckpt_dir=/{fits}").accepted
        assert parse_hints(f"synergy:ckpt_dir=/{fits}").ckpt_dir == f"/{fits}"
        for prefix in ("synergy", "Synergy"):
            comment = f"{prefix}:ckpt_dir=/{fits}{name}"
            with pytest.raises(HintError) as caught:
                parse_hints(comment)
            assert str(caught.value) in lua.submit(comment=comment).user


def test_the_prefix_in_another_case_is_refused_with_the_right_spelling(lua: Lua) -> None:
    for comment in ("Synergy:max_gpus=4", "mine SYNERGY:max_gpus=4 of tuesday"):
        answer = lua.submit(comment=comment)
        assert "lower case" in answer.user and "write synergy:max_gpus=4" in answer.user
        with pytest.raises(HintError, match="write synergy:max_gpus=4"):
            parse_hints(comment)


def test_hint_types_widen_where_the_request_names_none(lua: Lua) -> None:
    for types, nodes, accepted in (("a100", 2, True), ("a100", 3, False), ("a100+v100", 4, True)):
        answer = lua.submit(
            tres_per_node="gres:gpu:8", min_nodes=nodes, max_nodes=nodes,
            comment=f"synergy:gpu_types={types}",
        )  # fmt: skip
        assert answer.accepted is accepted, (types, nodes, answer.user)


def test_lua_and_python_know_the_same_hints_with_the_same_examples() -> None:
    table = SOURCE.read_text().partition("local HINTS = {")[2].partition("\n}\n")[0]
    found = re.findall(r'^  (\w+) = \{.*?example = "([^"]+)" \}', table, flags=re.M | re.S)
    assert dict(found) == dict(HINT_EXAMPLES)


@pytest.mark.parametrize(
    ("script", "wrapper"),
    [
        ("#!/bin/bash\n  /opt/bin/synergy-srun -n1 python t.py", "yes"),
        ("#!/bin/bash\nexec synergy-srun\tpython t.py", "yes"),
        ("#!/bin/bash\nX=1 $(which synergy-srun) python t.py", "yes"),
        ("#!/bin/bash\n# synergy-srun python t.py\nsrun python t.py", "no"),
        ("#!/bin/bash\nsrun python t.py # not synergy-srun", "no"),
        ("#!/bin/bash\nmy-synergy-srun x; synergy-srun.bak y; synergy-srunner z", "no"),
        ("", "no"),
    ],
)
def test_the_wrapper_is_seen_only_where_the_script_calls_it(
    lua: Lua, script: str, wrapper: str
) -> None:
    assert lua.submit(script=script).mark["wrapper"] == wrapper


def test_the_endpoint_is_filled_in_but_never_replaced(lua: Lua) -> None:
    assert lua.submit().env["SYNERGY_ENDPOINT"] == "head:7311"
    mine = {"SYNERGY_ENDPOINT": "mine:1"}
    assert lua.submit(environment=mine).env["SYNERGY_ENDPOINT"] == "mine:1"
    assert lua.submit(environment=None).accepted


def test_the_hinted_checkpoint_directory_reaches_the_launcher(lua: Lua) -> None:
    hint = "synergy:ckpt_dir=/scratch/me/run1"
    assert lua.submit(comment=hint).env["SYNERGY_CHECKPOINT_DIR"] == "/scratch/me/run1"
    mine = {"SYNERGY_CHECKPOINT_DIR": "/mine"}
    answer = lua.submit(comment=hint, environment=mine)
    assert answer.env["SYNERGY_CHECKPOINT_DIR"] == "/mine"
    assert "SYNERGY_CHECKPOINT_DIR" not in lua.submit().env
    # After the submission the environment cannot be changed any more.
    before = {"comment": hint}
    assert lua.modify(record=before, comment=hint + ",max_gpus=4").accepted
    for comment in ("synergy:ckpt_dir=/else", "synergy:max_gpus=4", ""):
        assert "ckpt_dir cannot be changed" in lua.modify(record=before, comment=comment).user
    assert not lua.modify(comment=hint).accepted


def test_an_existing_admin_comment_is_kept_but_a_forged_mark_is_not(lua: Lua) -> None:
    answer = lua.submit(admin_comment="JS1:abc synergy:v=1,wrapper=yes,gpn=1 x")
    text = answer.fields["admin_comment"]
    assert text.startswith("JS1:abc x synergy:v=1,")
    assert text.count("synergy:") == 1


def test_other_jobs_pass_untouched(lua: Lua) -> None:
    for partition in ("main", "synergy2", "main,debug,synergy-old", None):
        answer = lua.submit(
            partition=partition, tres_per_node=None, comment="synergy:nonsense", script=None
        )
        assert answer.accepted
        assert answer.user == answer.log == ""
        assert answer.fields["priority"] == str(NO_VAL)
        assert "admin_comment" not in answer.fields
        assert "SYNERGY_ENDPOINT" not in answer.env


def test_without_a_partition_the_default_partition_decides(lua: Lua) -> None:
    ours = {"synergy": {"flag_default": 1}, "main": {"flag_default": 0}}
    assert lua.submit(partition=None, parts=ours).fields["priority"] == "0"
    other = {"synergy": {"flag_default": 0}, "main": {"flag_default": 1}}
    assert lua.submit(partition=None, parts=other).fields["priority"] == str(NO_VAL)


@pytest.mark.parametrize(
    "broken",
    [
        "comment", "script", "tres_per_node", "environment", "set priority", "set requeue",
        "set admin_comment", "set max_nodes",
    ],
)  # fmt: skip
def test_a_run_time_error_refuses_a_managed_job_and_no_other(lua: Lua, broken: str) -> None:
    answer = lua.submit(broken=broken)
    assert not answer.accepted
    assert "internal error" in answer.user
    assert broken in answer.log
    assert lua.submit(broken=broken, partition="main").accepted


def test_a_job_whose_partition_cannot_be_read_passes_since_it_names_none_of_ours(lua: Lua) -> None:
    assert lua.submit(broken="partition").accepted


@pytest.mark.parametrize(
    "text",
    [
        'return {\n  partition = "gpu",\n  operators = { 0,\n',
        'error("boom")\n  partition = "gpu",\n',
        'return {\n  partition = "gpu",\n  colour = "red",\n}',
        'return {\n  partition = "gpu",\n  shapes = { { type = "v100" } },\n}',
    ],
)
def test_a_broken_site_file_refuses_managed_jobs_and_lets_others_pass(lua: Lua, text: str) -> None:
    lua.site(text)
    refused = lua.submit(partition="gpu")
    assert not refused.accepted
    assert "settings are broken" in refused.user
    assert "synergy_site.lua" in refused.log
    assert lua.submit(partition="main").accepted


def test_without_a_site_file_nothing_is_known_about_nodes_but_jobs_are_held(lua: Lua) -> None:
    lua.site(None)
    answer = lua.submit(tres_per_node="gres:gpu:h100:64")
    assert answer.accepted
    assert answer.fields["priority"] == "0"


CHANGES = [
    {"priority": INFINITE}, {"priority": 5}, {"priority": 0}, {"partition": "main"},
    {"reservation": "r"}, {"reservation": ""}, {"qos": "high"}, {"nice": 2147483658},
    {"min_cpus": 3},
    {"cpus_per_task": 2}, {"pn_min_cpus": 2}, {"num_tasks": 2}, {"min_nodes": 2},
    {"max_nodes": 2}, {"min_mem_per_node": 5}, {"pn_min_memory": 5},
    {"tres_per_node": "gres:gpu:1"}, {"tres_per_job": "gres:gpu:1"}, {"features": "a100"},
    {"req_nodes": "v100-1"}, {"exc_nodes": "v100-1"}, {"requeue": 0}, {"shared": 0},
    {"admin_comment": ""}, {"time_limit": 61}, {"time_limit": INFINITE},
    {"comment": "synergy:bogus=1"},
]  # fmt: skip


@pytest.mark.parametrize("changes", CHANGES, ids=json.dumps)
def test_the_owner_cannot_hold_release_or_reshape_a_managed_job(
    lua: Lua, changes: dict[str, object]
) -> None:
    assert not lua.modify(**changes).accepted
    # Neither after the job was moved away, nor before the mark was there.
    assert not lua.modify(record={"partition": "main"}, **changes).accepted
    assert not lua.modify(record={"admin_comment": None}, **changes).accepted
    assert lua.modify(uid=0, **changes).accepted
    assert lua.modify(uid=64030, **changes).accepted
    unmanaged = {"partition": "main", "admin_comment": "JS1:x"}
    assert lua.modify(record=unmanaged, **changes).accepted


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"name": "x"}, {"comment": "mine synergy:max_gpus=4"},
        {"comment": ""}, {"time_limit": 59}, {"begin_time": 1795993569},
    ],
)  # fmt: skip
def test_the_owner_may_rename_rehint_shorten_and_delay(
    lua: Lua, changes: dict[str, object]
) -> None:
    answer = lua.modify(**changes)
    assert answer.accepted, answer.user


def test_a_foreign_job_cannot_be_moved_into_the_managed_partition(lua: Lua) -> None:
    record = {"partition": "main", "admin_comment": None}
    for wanted in ("synergy", "main,synergy"):
        answer = lua.modify(record=record, partition=wanted)
        assert not answer.accepted
        assert "submit it with -p synergy" in answer.user
    assert lua.modify(record=record, partition="debug").accepted


def test_a_run_time_error_refuses_the_change_of_a_managed_job(lua: Lua) -> None:
    for broken in ("priority", "comment", "time_limit", "reservation"):
        assert not lua.modify(broken=broken).accepted


def test_jobs_of_others_cost_microseconds(lua: Lua, capsys: pytest.CaptureFixture[str]) -> None:
    calls = 200_000
    timing = lua.place / "timing.lua"
    timing.write_text(
        "slurm = { SUCCESS = 0, ERROR = -1, log_user = print, log_error = print }\n"
        f"dofile({lua_value(str(lua.place / 'job_submit.lua'))})\n"
        "local job = { partition = 'main' }\n"
        "local begun = os.clock()\n"
        f"for _ = 1, {calls} do slurm_job_submit(job, {{}}, 1000) end\n"
        f"print((os.clock() - begun) / {calls} * 1e6)\n"
    )
    done = subprocess.run(
        [lua.interpreter, str(timing)], capture_output=True, text=True, check=True, timeout=60
    )
    per_call_us = float(done.stdout)
    with capsys.disabled():
        print(f"\n{lua.interpreter}: {per_call_us:.2f} µs per unmanaged submission")
    assert per_call_us < 50


# elastic jobs --------------------------------------------------------------------------------


def test_the_tasks_of_an_elastic_job_are_no_fixed_number_per_node(lua: Lua) -> None:
    answer = lua.submit(
        comment="synergy:elastic=scale,max_gpus=8",
        tres_per_node="gres:gpu:2",
        ntasks_per_node=2,
    )
    assert answer.accepted, answer.user
    assert (answer.fields["num_tasks"], answer.fields["ntasks_per_node"]) == ("2", str(NO_VAL16))
    assert (answer.mark["elastic"], answer.mark["tpn"]) == ("yes", "2")
    assert answer.env["SYNERGY_ELASTIC"] == "1"


def test_a_rigid_job_keeps_its_tasks_and_is_not_marked_as_elastic(lua: Lua) -> None:
    for hints, told in (
        ("elastic=rigid", ""),
        ("max_gpus=8", "it asks for: max_gpus has no effect"),
        ("elastic=rigid,scale_unit=2,min_gpus=2", "min_gpus and scale_unit have no effect"),
    ):
        answer = lua.submit(
            comment=f"synergy:{hints}", tres_per_node="gres:gpu:2", ntasks_per_node=2
        )
        assert answer.accepted, answer.user
        assert told in answer.user and bool(told) is ("without the hint elastic=" in answer.user)
        assert answer.fields["ntasks_per_node"] == "2"
        assert "elastic" not in answer.mark
        assert "SYNERGY_ELASTIC" not in answer.env


@pytest.mark.parametrize(
    ("hints", "given", "what"),
    [
        ("elastic=full", {"script": "#!/bin/bash\nsrun python x\n"}, "needs a script that starts"),
        ("elastic=scale,scale_unit=4", {}, "in steps of scale_unit=4 can never run"),
        ("elastic=scale,scale_unit=4,max_gpus=6,min_gpus=5", {}, "scale_unit=4 can never run"),
        ("elastic=scale,max_gpus=1", {"tres_per_node": "gres:gpu:4"}, ""),
    ],
)
def test_an_elastic_job_that_could_never_run_is_refused(
    lua: Lua, hints: str, given: dict[str, object], what: str
) -> None:
    answer = lua.submit(comment=f"synergy:{hints}", **{"tres_per_node": "gres:gpu:2", **given})
    assert answer.accepted is not bool(what)
    assert what in answer.user


def test_a_job_cannot_be_made_elastic_later_but_stays_as_elastic_as_it_is(lua: Lua) -> None:
    for before, after, accepted in (
        ("max_gpus=2", "elastic=full,max_gpus=2", False),
        ("elastic=scale", "elastic=full", True),
        ("elastic=scale", "max_gpus=2", True),
    ):
        record = {"comment": f"synergy:{before}"}
        answer = lua.modify(record=record, comment=f"synergy:{after}")
        assert answer.accepted is accepted, (before, after, answer.user)
        assert accepted or "cannot be made elastic after submission" in answer.user
