"""What synergyctl check finds: on captured output of three releases, and on evidence made up."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_synergy.cli import machine_checks
from slurm_synergy.cli.check_cmd import telling
from slurm_synergy.cli.machine_checks import machine_findings
from slurm_synergy.config import Settings
from slurm_synergy.devcluster.programs import job_submit_source
from slurm_synergy.errors import SlurmTimeout
from slurm_synergy.slurm.checks import slurm_findings
from slurm_synergy.slurm.commands import CommandResult
from slurm_synergy.slurm.evidence import NOT_ALLOWED, Evidence, gather
from slurm_synergy.slurm.facts import ReservationFacts
from slurm_synergy.slurm.findings import Finding, Grade

CAPTURES = Path(__file__).parents[1] / "fixtures" / "slurm"
VERSIONS = sorted(path.name for path in CAPTURES.iterdir() if path.is_dir())
OURS = "sbatch: error: slurm-synergy: jobs must ask for GPUs\nallocation failure"


class Recorded:
    """A Slurm that answers with captured output; ``answers`` go before it."""

    def __init__(self, version: str, answers: Mapping[str, tuple[int, str, str]]) -> None:
        self._at, self._answers = CAPTURES / version, dict(answers)
        self._version = version
        self.asked: list[tuple[str, ...]] = []

    def run(self, argv: Sequence[str], *, timeout_s: float, stdin: str = "") -> CommandResult:
        self.asked.append(tuple(argv))
        line = " ".join(argv)
        for part, (rc, out, err) in self._answers.items():
            if part in line:
                return CommandResult(argv=tuple(argv), rc=rc, stdout=out, stderr=err)
        return CommandResult(argv=tuple(argv), rc=0, stdout=self._captured(line), stderr="")

    def _captured(self, line: str) -> str:
        if "--version" in line:
            return f"slurm {self._version}\n"
        for part, name in (
            ("show config", "scontrol_show_config.out"),
            ("show partition", "scontrol_show_partition_o.out"),
            ("show node", "scontrol_d_show_node_o.out"),
            ("show reservation", "scontrol_show_reservation_o.out"),
        ):
            if part in line:
                return (self._at / name).read_text(encoding="utf-8")
        assert "squeue" in line, line
        return "1\n2\n"


REFUSALS = {"sbatch": (1, "", OURS), "delete": (1, "", "Requested reservation is invalid")}


def settings_of(**given: Any) -> Settings:
    return Settings.model_validate({"mode": "act", **given})


def looked(version: str, **answers: tuple[int, str, str]) -> tuple[Evidence, Recorded]:
    slurm = Recorded(version, {**answers, **REFUSALS})
    return gather(slurm, partition="synergy", timeout_s=60.0, now_s=lambda: NOW_S), slurm


NOW_S = 1_795_991_836.0


def partition_of(version: str) -> str:
    """A partition that the capture has."""
    text = (CAPTURES / version / "scontrol_show_partition_o.out").read_text(encoding="utf-8")
    return text.split()[0].removeprefix("PartitionName=")


@pytest.fixture(params=VERSIONS)
def evidence(request: pytest.FixtureRequest) -> Evidence:
    version = request.param
    slurm = Recorded(version, REFUSALS)
    return gather(slurm, partition=partition_of(version), timeout_s=60.0, now_s=lambda: NOW_S)


def graded(found: Sequence[Finding]) -> dict[str, Finding]:
    assert len({one.check for one in found}) == len(found)
    for one in found:
        assert one.seen
        assert (one.grade is Grade.OK) or (one.means and one.remedy), one
    return {one.check: one for one in found}


def check(evidence: Evidence, settings: Settings | None = None, **more: Any) -> dict[str, Finding]:
    name = evidence.partition.name if evidence.partition else "synergy"
    return graded(
        slurm_findings(evidence, settings or settings_of(slurm={"partition": name}), **more)
    )


def with_raw(evidence: Evidence, **raw: str) -> Evidence:
    assert evidence.config is not None
    return replace(evidence, config=replace(evidence.config, raw={**evidence.config.raw, **raw}))


def test_captures_of_every_release_are_understood(evidence: Evidence) -> None:
    assert evidence.problems == ()
    found = check(evidence)
    for name in ("version", "select", "partition", "gres", "requeue", "rights"):
        assert name in found
    assert found["select"].grade is Grade.OK
    # What these captures have: preemption on, no task plugin, output truncated, exit 85 kept.
    for name in ("preemption", "task_plugin", "append", "requeue_exit", "proctrack"):
        assert found[name].grade is Grade.WARN
    assert found["job_submit"].grade is Grade.FAIL


def test_the_clock_of_slurmctld_is_compared_in_utc(evidence: Evidence) -> None:
    assert evidence.server_time_s is not None
    assert abs(evidence.server_time_s - NOW_S) < 3
    for off_s, grade in ((0.9, "ok"), (-30.0, "warn"), (30.0, "warn"), (90.0, "fail")):
        moved = replace(evidence, asked_s=evidence.server_time_s + off_s)
        assert check(moved)["clock"].grade.value == grade
    ahead = check(replace(evidence, asked_s=evidence.server_time_s + 91.0))["clock"]
    assert ahead.seen == "this clock is 90 s ahead of slurmctld's"


def test_nothing_is_asked_of_a_slurm_that_is_down() -> None:
    down = (1, "", "slurm_load_ctl_conf error: Unable to contact slurm controller")
    found, slurm = looked(VERSIONS[0], **{"show config": down})
    assert len(slurm.asked) == 2
    (only,) = slurm_findings(found, settings_of())
    assert (only.check, only.grade) == ("controller", Grade.FAIL)
    assert "scontrol ping" in only.remedy

    class Frozen(Recorded):
        def run(self, argv: Sequence[str], *, timeout_s: float, stdin: str = "") -> CommandResult:
            if "config" in argv:
                raise SlurmTimeout(argv, timeout_s)
            return super().run(argv, timeout_s=timeout_s, stdin=stdin)

    frozen = gather(
        Frozen(VERSIONS[0], REFUSALS), partition="synergy", timeout_s=1.0, now_s=lambda: NOW_S
    )
    assert ("controller", "Slurm does not answer (scontrol: nothing within 1 s)") in frozen.problems


def test_a_partition_that_is_missing_fails_with_its_remedy() -> None:
    missing = (1, "", "Partition synergy not found")
    found, _ = looked(VERSIONS[0], **{"show partition": missing})
    result = graded(slurm_findings(found, settings_of()))
    assert result["partition"].grade is Grade.FAIL
    assert "slurm.partition" in result["partition"].remedy
    assert "gres" not in result


@pytest.mark.parametrize(
    ("raw", "check_name", "grade"),
    [
        ({"JobFileAppend": "1"}, "append", "ok"),
        ({"RequeueExitHold": "(null)"}, "requeue_exit", None),
        ({"PreemptType": "preempt/none"}, "preemption", "ok"),
        ({"PrivateData": "jobs,usage"}, "privacy", "warn"),
        ({"PrivateData": "none"}, "privacy", None),
        ({"MessageTimeout": "60 sec"}, "timeouts", "warn"),
        ({"MessageTimeout": "10 sec"}, "timeouts", None),
        ({"MinJobAge": "2 sec"}, "job_age", "warn"),
        ({"MaxJobCount": "2"}, "job_count", "warn"),
        ({"AccountingStorageEnforce": "associations,limits,qos"}, "enforced_limits", "warn"),
        ({"AccountingStorageType": "accounting_storage/slurmdbd"}, "accounting", "warn"),
        ({"GresTypes": "(null)"}, "gres", "fail"),
        ({"JobSubmitPlugins": "lua"}, "job_submit", "ok"),
        ({"JobSubmitPlugins": "require_timelimit"}, "job_submit", "fail"),
    ],
)
def test_single_settings(
    evidence: Evidence, raw: dict[str, str], check_name: str, grade: str | None
) -> None:
    found = check(with_raw(evidence, **raw)).get(check_name)
    assert (found.grade.value if found else None) == grade


def test_billing_follows_the_weights_of_the_partition(evidence: Evidence) -> None:
    storage = {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageTRES": "cpu,mem,gres/gpu",
    }
    accounted = with_raw(evidence, **storage)
    for weights, grade in (
        ("", "warn"),
        ("CPU=1.0,Mem=0.25G", "warn"),
        ("CPU=0.0,GRES/gpu=1.0", "ok"),
        ("GRES/gpu=1.0", "ok"),
    ):
        raw = {**accounted.partition_raw, "TRESBillingWeights": weights}
        found = check(replace(accounted, partition_raw=raw))
        assert found["billing"].grade.value == grade
        assert found["accounting"].grade is Grade.OK
    assert "billing" not in check(evidence)


def test_how_cores_can_be_handed_out(evidence: Evidence) -> None:
    assert evidence.partition is not None
    name = evidence.partition.name

    def cores(over: tuple[str, int], enforcement: str, **raw: str) -> dict[str, Finding]:
        partition = replace(evidence.partition, oversubscribe=over)  # type: ignore[type-var]
        made = with_raw(replace(evidence, partition=partition), **raw)
        assert made.config is not None
        config = replace(made.config, task_plugins=("task/cgroup",) if raw else ())
        asked = settings_of(slurm={"partition": name}, enforcement=enforcement)
        return check(replace(made, config=config), asked)

    shared = cores(("FORCE", 8), "auto", ConstrainCores="yes")
    assert (shared["oversubscribe"].grade, shared["task_plugin"].grade) == (Grade.OK, Grade.OK)
    alone = cores(("NO", 1), "auto", ConstrainCores="yes")
    assert (alone["oversubscribe"].grade, alone["task_plugin"].grade) == (Grade.WARN, Grade.WARN)
    assert cores(("NO", 1), "shared")["oversubscribe"].grade is Grade.FAIL
    assert cores(("FORCE", 8), "auto")["task_plugin"].grade is Grade.WARN


def test_releases_are_compared(evidence: Evidence) -> None:
    assert evidence.config is not None
    assert check(evidence)["version"].grade is Grade.OK
    old = replace(evidence.config, version=(21, 8, 8))
    assert check(replace(evidence, config=old))["version"].grade is Grade.FAIL
    for client, grade in (((99, 5), "fail"), ((20, 11), "warn")):
        assert check(replace(evidence, client_version=client))["version"].grade.value == grade


def test_admission_and_rights_weigh_less_where_nothing_is_changed(evidence: Evidence) -> None:
    bare = replace(with_raw(evidence, JobSubmitPlugins="lua"), refusals=(None, OURS))
    for acts, grade in ((True, Grade.FAIL), (False, Grade.WARN)):
        found = check(replace(bare, rights=NOT_ALLOWED), acts=acts)
        assert found["job_submit"].grade is grade
        assert found["rights"].grade is grade
    assert "not ours that answers" in check(bare)["job_submit"].seen
    odd = check(replace(bare, rights="Slurm does not answer"))["rights"]
    assert odd.seen == "cannot tell: Slurm does not answer"


def test_a_lua_that_may_refuse_nothing_is_not_taken_for_another(evidence: Evidence) -> None:
    lua = with_raw(evidence, JobSubmitPlugins="lua")
    observing = replace(lua, refusals=(None, "allocation failure: no such node"))
    assert "job_submit" not in check(telling(observing, acts=False), acts=False)
    assert "not ours" in check(telling(observing, acts=True))["job_submit"].seen
    held = telling(replace(lua, refusals=(OURS, OURS)), acts=False)
    assert check(held, acts=False)["job_submit"].grade is Grade.OK
    none = telling(with_raw(evidence, JobSubmitPlugins=""), acts=False)
    assert check(none, acts=False)["job_submit"].grade is Grade.WARN


def test_a_lua_that_refuses_everybody_is_not_in_order(evidence: Evidence) -> None:
    bare = with_raw(evidence, JobSubmitPlugins="lua")
    assert check(replace(bare, refusals=(OURS, OURS)))["job_submit"].grade is Grade.OK
    broken = (
        "sbatch: error: slurm-synergy: partition synergy takes no jobs now, its settings are "
        "broken; tell your administrator: synergy_site.lua:7: '<eof>' expected near 'this'"
    )
    found = check(replace(bare, refusals=(broken, broken)))["job_submit"]
    assert found.grade is Grade.FAIL
    assert "synergy_site.lua:7" in found.seen


def test_reservations_of_others_are_weighed_by_what_they_leave(evidence: Evidence) -> None:
    assert evidence.partition is not None
    nodes = evidence.partition.nodes

    def reserved(name: str, count: int, **more: Any) -> ReservationFacts:
        return ReservationFacts(name=name, nodes=nodes[:count], **{"state": "ACTIVE", **more})

    everything = len(nodes)
    ours, some = reserved("synergy", everything), reserved("maint", 1)
    for there, grade in (
        ((ours,), "ok"),
        ((ours, some), "warn"),
        ((reserved("maint", everything),), "fail"),
        ((reserved("overlay", everything, flags=frozenset({"OVERLAP"})),), "ok"),
        ((reserved("maint", everything, state="INACTIVE"),), "ok"),
    ):
        found = check(replace(evidence, reservations=there))["reservations"]
        assert found.grade.value == grade, there
    assert found.seen.endswith("to come: maint")
    pool = settings_of(
        slurm={"partition": evidence.partition.name}, pool={"nodes": ",".join(nodes[1:])}
    )
    found = check(replace(evidence, reservations=(some,)), pool)["reservations"]
    assert found.grade is Grade.OK


# this machine --------------------------------------------------------------------------------


def machine(settings: Settings, slurm_conf: str = "", **more: Any) -> dict[str, Finding]:
    return graded(list(machine_findings(settings, {}, slurm_conf=slurm_conf, **more)))


@pytest.fixture
def home(tmp_path: Path, munge_socket: Path) -> dict[str, Any]:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    return {
        "state_dir": str(state),
        "leases": {"listen": "127.0.0.1:0", "munge": {"socket": str(munge_socket)}},
    }


def test_a_machine_in_order(home: dict[str, Any]) -> None:
    found = machine(settings_of(**home))
    assert [found[name].grade.value for name in ("munge", "state_dir", "disk", "endpoint")] == [
        "ok"
    ] * 4
    assert found["names"].grade is Grade.WARN
    assert "127.0.0.1" in found["names"].seen


def test_munge_that_does_not_answer_fails(home: dict[str, Any], tmp_path: Path) -> None:
    home["leases"]["munge"]["socket"] = str(tmp_path / "none")
    assert machine(settings_of(**home))["munge"].grade is Grade.FAIL


def test_state_that_others_may_read_is_told(home: dict[str, Any]) -> None:
    state = Path(home["state_dir"])
    (state / "ledger.sqlite").touch(mode=0o644)
    (state / "ledger.sqlite").chmod(0o644)
    (state / "endpoint").touch(mode=0o644)
    state.chmod(0o755)
    found = machine(settings_of(**home))["state_dir"]
    assert found.grade is Grade.WARN
    assert "mode is 0755" in found.seen
    assert "others may read ledger.sqlite" in found.seen
    assert "endpoint" not in found.seen
    home["state_dir"] = str(state / "none")
    assert machine(settings_of(**home))["state_dir"].grade is Grade.OK


def test_a_small_disk_is_told(home: dict[str, Any]) -> None:
    found = machine(settings_of(**home, journal={"max_mib": 65_536, "keep": 1000}))
    assert found["disk"].grade is Grade.WARN


def test_the_lease_service_is_called_where_it_says_it_is(
    home: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = tmp_path / "published"
    monkeypatch.setattr(machine_checks, "ENDPOINT_FILE", published)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (Path(home["state_dir"]) / "endpoint").write_text(f"{address}\n")
        found = machine(settings_of(**home))
        assert found["endpoint"].grade is Grade.OK
        assert "published" not in found
        published.write_text("# the controller\nhead:7737\n")
        assert machine(settings_of(**home))["published"].grade is Grade.WARN
        published.write_text(f"{address}\n")
        assert "published" not in machine(settings_of(**home))
        (Path(home["state_dir"]) / "endpoint").unlink()
        home["leases"]["listen"] = address
        taken = machine(settings_of(**home))["endpoint"]
        assert (taken.grade, "cannot be used here" in taken.seen) == (Grade.WARN, True)
    (Path(home["state_dir"]) / "endpoint").write_text(f"{address}\n")
    assert machine(settings_of(**home))["endpoint"].grade is Grade.FAIL


def test_a_name_that_does_not_resolve_fails(home: dict[str, Any]) -> None:
    home["leases"]["advertise"] = "no-such-host.invalid:7737"
    assert machine(settings_of(**home))["names"].grade is Grade.FAIL


def test_job_submit_lua_and_its_settings_are_compared(
    home: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "slurm.conf"
    script, site = tmp_path / "job_submit.lua", tmp_path / "synergy_site.lua"

    def found(**more: Any) -> dict[str, Finding]:
        return machine(settings_of(**home), str(conf), **more)

    assert not {"lua_version", "lua_site"} & found().keys()
    script.write_bytes(job_submit_source().read_bytes())
    site.write_text('return {\n  -- partition = "other",\n  operators = { 0, 7 },\n}\n')
    assert [found()[name].grade for name in ("lua_version", "lua_site")] == [Grade.OK] * 2
    script.write_bytes(script.read_bytes() + b"-- changed\n")
    assert found()["lua_version"].grade is Grade.WARN
    site.write_text('return { partition = "gpu" }\n')
    assert "slurm.partition is 'synergy'" in found()["lua_site"].seen
    assert found()["lua_site"].grade is Grade.FAIL
    assert found(acts=False)["lua_site"].grade is Grade.WARN
    site.write_text('return { operators = { 0, 7 }, mode = "observe" }\n')
    assert "mode = 'observe', mode of the settings is 'act'" in found()["lua_site"].seen
    site.write_text("return { operators = { 0, 7 } }\n")
    monkeypatch.setattr(machine_checks.os, "geteuid", lambda: 1234)
    assert "operators lacks user id 1234" in found()["lua_site"].seen
