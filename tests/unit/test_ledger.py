"""The ledger: what survives, what is refused, and that nothing is ever deleted."""

from __future__ import annotations

import json
import os
import resource
import secrets
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from manual_clock import ManualClock

from slurm_synergy.cluster import Action, Hold, Outcome, Renew, Resize, Start, Stop
from slurm_synergy.controller.codec import decode, encode
from slurm_synergy.controller.journal import Journal, decode_action, encode_action
from slurm_synergy.controller.ledger import SCHEMA_VERSION, JobProgress, Ledger, StoredLease
from slurm_synergy.core.model import (
    Enforcement,
    Job,
    JobPhase,
    JobStatus,
    Lease,
    Node,
    PipelineModel,
    Placement,
    Plan,
    Profile,
    ProfileOrigin,
    Reason,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import LedgerError, LedgerUnavailable, ModelError

MOVED = Reason(code=ReasonCode.MOVED, text="elsewhere")


def placement(job_id: int, gpus: int = 2, gpu_type: str = "v100") -> Placement:
    share = Resources(gpus=gpus, cpus=6, mem_mib=1000)
    return Placement(job_id=job_id, gpu_type=gpu_type, shares=(("n1", share),))


def stored(
    job_id: int, *, gpus: int = 2, stopping: Reason | None = None, gpu_type: str = "v100"
) -> StoredLease:
    lease = Lease(
        job_id=job_id,
        generation=3,
        placement=placement(job_id, gpus, gpu_type),
        expires_s=5.0,
        cores={"n1": (0, 1, 2)},
        floor={"n1": (0, 1)},
        granted={"n1": Resources(gpus=gpus, cpus=24, mem_mib=2000)},
    )
    return StoredLease(
        lease=lease,
        owner_uid=1000,
        incarnation=2,
        wrapped=False,
        stopping=stopping,
        stop_deadline_s=9.5 if stopping else None,
        finished=({"rank": 0, "exit_code": 85},),
    )


def snapshot() -> Snapshot:
    share = Resources(gpus=8, cpus=24, mem_mib=500000)
    pipeline = PipelineModel(preprocess=((1, 10.0),), dataset_mib=5.0)
    profile = Profile(
        key="k",
        gpu_rate_per_gpu={"v100": 2.5},
        pipeline=pipeline,
        origin=ProfileOrigin.CATALOGUE,
    )
    job = Job(job_id=7, user="u", submitted_s=1.0, gpus=2)
    return Snapshot(
        round=4,
        now_s=10.0,
        round_s=300.0,
        nodes=(Node(name="n1", gpu_type="v100", total=share, capacity=share, sockets=2),),
        jobs=(JobStatus(job=job, profile=profile, phase=JobPhase.RUNNING, lease=stored(7).lease),),
        enforcement=Enforcement.REQUEUE,
    )


def plan() -> Plan:
    return Plan(round=4, policy="p", mechanism="m", placements=(placement(7),), waiting={9: MOVED})


ACTIONS: tuple[Action, ...] = (
    Start(job_id=1, placement=placement(1)),
    Stop(job_id=2, reason=MOVED),
    Resize(job_id=3, placement=placement(3)),
    Renew(job_id=4),
    Hold(job_id=5),
)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


def test_values_come_back_from_json_as_they_were() -> None:
    for value in (snapshot(), plan()):
        text = json.dumps(encode(value), allow_nan=False)
        assert decode(type(value), json.loads(text)) == value
    for action in ACTIONS:
        assert decode_action(json.loads(json.dumps(encode_action(action)))) == action


def test_json_that_does_not_fit_is_refused() -> None:
    data = encode(stored(1).lease)
    for wrong in (data | {"job_id": "x"}, data | {"cores": 5}, data | {"placement": None}):
        with pytest.raises(ModelError, match="not a valid Lease"):
            decode(Lease, wrong)
    with pytest.raises(ModelError, match="unknown kind"):
        decode_action({"kind": "explode", "job_id": 1})
    with pytest.raises(ModelError, match="cannot be written"):
        encode(object())


def test_leases_stops_and_memory_survive_a_restart(state_dir: Path, clock: ManualClock) -> None:
    with Ledger(state_dir, clock=clock) as ledger:
        ledger.save_leases([stored(2, stopping=MOVED), stored(1)])
        ledger.set_draining(True)
        ledger.remember_request(1, {"gpn": 4})
        ledger.remember_request(1, {"gpn": 8})
        ledger.save_progress([JobProgress(job_id=1, done_samples=50.0, samples_per_s=2.0, step=7)])
        ledger.save_profile(Profile(key="mine", gpu_rate_per_gpu={"v100": 1.0}))
    with Ledger(state_dir, clock=clock) as ledger:
        assert ledger.load_leases() == (stored(1), stored(2, stopping=MOVED))
        assert ledger.draining()
        assert ledger.request(1) == {"gpn": 4}
        assert ledger.request(99) is None
        record = ledger.read()[1]
        assert record.done_samples == 50.0
        assert record.lease == stored(1).lease
        assert ledger.read()[2].stopping == MOVED
        found = ledger.profile("mine")
        assert found is not None
        assert found.gpu_rate_per_gpu == {"v100": 1.0}


def test_a_measured_profile_goes_before_the_catalogue(state_dir: Path, clock: ManualClock) -> None:
    catalogue = {"a": Profile(key="a", sample_count=1)}
    with Ledger(state_dir, clock=clock, catalogue=catalogue.get) as ledger:
        assert ledger.profile("a") == catalogue["a"]
        assert ledger.profile("b") is None
        ledger.save_profile(Profile(key="a", sample_count=2))
        assert ledger.profile("a") == Profile(key="a", sample_count=2)


def test_service_is_counted_while_gpus_are_held(state_dir: Path, clock: ManualClock) -> None:
    with Ledger(state_dir, clock=clock) as ledger:
        ledger.save_leases([stored(1, gpus=2)])
        clock.advance(10)
        assert ledger.read()[1].attained_service_gpu_s == 20.0
        ledger.save_leases([stored(1, gpus=2)])  # a renewal does not start it anew
        clock.advance(5)
        ledger.end_lease(1)
        clock.advance(100)
        ended = ledger.read()[1]
        assert ended.attained_service_gpu_s == 30.0
        assert ended.lease is None
        assert ledger.load_leases() == ()
        assert ledger.last_generation(1) == 3
        ledger.save_leases([stored(1, gpus=4)])
        clock.advance(1)
        assert ledger.read()[1].attained_service_gpu_s == 34.0
        ledger.end_lease(99)


def test_time_on_each_gpu_type_is_counted_and_survives(state_dir: Path, clock: ManualClock) -> None:
    with Ledger(state_dir, clock=clock) as ledger:
        ledger.remember_request(7, {})
        ledger.save_leases([stored(1, gpus=2)])
        clock.advance(10)
        assert ledger.read()[1].held_s == {"v100": 10.0}
        ledger.end_lease(1)
        clock.advance(100)
        ledger.save_leases([stored(1, gpus=4, gpu_type="a100")])
        clock.advance(3)
    with Ledger(state_dir, clock=clock) as ledger:
        clock.advance(1)
        ledger.save_leases([stored(1, gpus=4, gpu_type="a100")])  # as after an adoption
        clock.advance(1)
        assert ledger.read()[1].held_s == {"v100": 10.0, "a100": 5.0}
        assert ledger.read()[1].attained_service_gpu_s == 40.0
        ledger.end_lease(1)
        ledger.save_leases([stored(1, gpus=2)])
        clock.advance(-60)  # a clock that was set back
        assert ledger.read()[1].held_s == {"v100": 10.0, "a100": 5.0}
        assert ledger.read()[7].held_s == {}
        ledger.forget_job(1)
        ledger.remember_request(1, {})
        assert ledger.read()[1].held_s == {}


def test_round_numbers_grow_over_restarts(state_dir: Path, clock: ManualClock) -> None:
    with Ledger(state_dir, clock=clock) as ledger:
        assert [ledger.next_round(), ledger.next_round()] == [1, 2]
    with Ledger(state_dir, clock=clock) as ledger:
        assert ledger.next_round() == 3


def test_intents_without_an_outcome_stay_open(state_dir: Path, clock: ManualClock) -> None:
    with Ledger(state_dir, clock=clock) as ledger:
        ledger.intend(4, ACTIONS)
        done = [Outcome(action=action, done=True) for action in ACTIONS[:2]]
        refused = Outcome(action=ACTIONS[2], done=False, reason=MOVED)
        ledger.commit(4, [*done, refused], snapshot())
    with Ledger(state_dir, clock=clock) as ledger:
        assert [intent.action for intent in ledger.open_intents()] == list(ACTIONS[3:])
        assert {intent.round_number for intent in ledger.open_intents()} == {4}
        ledger.forget_intents(3)
        assert len(ledger.open_intents()) == 2
        ledger.forget_intents(4)
        assert ledger.open_intents() == ()


def test_a_forgotten_job_leaves_nothing(state_dir: Path, clock: ManualClock) -> None:
    with Ledger(state_dir, clock=clock) as ledger:
        ledger.save_leases([stored(1)])
        ledger.intend(1, [Start(job_id=1, placement=placement(1))])
        ledger.forget_job(1)
        assert ledger.read() == {}
        assert ledger.open_intents() == ()


def test_what_was_written_survives_the_death_of_the_process(
    state_dir: Path, clock: ManualClock
) -> None:
    script = f"""
import os, sys
from pathlib import Path
from slurm_synergy.cluster import Hold
from slurm_synergy.controller.ledger import Ledger
class Clock:
    def now_s(self): return 1.0
ledger = Ledger(Path({str(state_dir)!r}), clock=Clock())
ledger.intend(ledger.next_round(), [Hold(job_id=5)])
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -9
    with Ledger(state_dir, clock=clock) as ledger:
        assert [intent.action for intent in ledger.open_intents()] == [Hold(job_id=5)]
        assert ledger.next_round() == 2


def test_a_second_daemon_is_refused_until_the_first_ends(
    state_dir: Path, clock: ManualClock
) -> None:
    with (
        Ledger(state_dir, clock=clock),
        pytest.raises(LedgerError, match=f"in use by another controller .process {os.getpid()}"),
    ):
        Ledger(state_dir, clock=clock)
    Ledger(state_dir, clock=clock).close()


def test_files_are_readable_by_their_owner_only(state_dir: Path, clock: ManualClock) -> None:
    old = os.umask(0)
    try:
        with Ledger(state_dir, clock=clock) as ledger:
            ledger.set_draining(False)
            ledger.journal(snapshot(), plan(), ACTIONS, (), {"decide": 0.1})
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in state_dir.iterdir()}
    finally:
        os.umask(old)
    assert stat.S_IMODE(state_dir.stat().st_mode) == 0o700
    assert {name for name in modes if name.startswith("ledger.sqlite")} >= {"ledger.sqlite"}
    assert set(modes.values()) == {0o600}


def test_a_damaged_file_is_reported_and_left_alone(state_dir: Path, clock: ManualClock) -> None:
    Ledger(state_dir, clock=clock).close()
    file = state_dir / "ledger.sqlite"
    damaged = b"not a database at all" * 500
    file.write_bytes(damaged)
    with pytest.raises(LedgerError, match=r"ledger\.sqlite.*nothing was deleted.*move it away"):
        Ledger(state_dir, clock=clock)
    assert file.read_bytes() == damaged
    file.unlink()
    Ledger(state_dir, clock=clock).close()  # and the directory is not left locked


def test_a_damaged_row_is_reported(state_dir: Path, clock: ManualClock) -> None:
    with Ledger(state_dir, clock=clock) as ledger:
        ledger.save_leases([stored(1)])
    with sqlite3.connect(state_dir / "ledger.sqlite") as db:
        db.execute("UPDATE jobs SET lease = '{\"job_id\": 1}'")
    db.close()
    with (
        Ledger(state_dir, clock=clock) as ledger,
        pytest.raises(LedgerError, match="not a valid Lease"),
    ):
        ledger.read()


def test_a_newer_format_is_refused(state_dir: Path, clock: ManualClock) -> None:
    Ledger(state_dir, clock=clock).close()
    db = sqlite3.connect(state_dir / "ledger.sqlite")
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()
    with pytest.raises(LedgerError, match="newer release"):
        Ledger(state_dir, clock=clock)


def test_a_ledger_of_the_release_before_is_brought_up(state_dir: Path, clock: ManualClock) -> None:
    with Ledger(state_dir, clock=clock) as ledger:
        ledger.save_leases([stored(1)])
        clock.advance(10)
        ledger.end_lease(1)
        ledger.save_leases([stored(1), stored(2)])
        ledger.remember_request(3, {})
    with sqlite3.connect(state_dir / "ledger.sqlite") as db:
        db.execute("ALTER TABLE jobs DROP COLUMN profile_key")
        db.execute("ALTER TABLE jobs DROP COLUMN held_s")
        db.execute("PRAGMA user_version = 1")
    db.close()
    for _ in range(2):
        with Ledger(state_dir, clock=clock) as ledger:
            assert ledger.load_leases() == (stored(1), stored(2))
            held = {job_id: record.held_s for job_id, record in ledger.read().items()}
            assert held == {1: {"v100": 10.0}, 2: {"v100": 0.0}, 3: {}}
    with Ledger(state_dir, clock=clock) as ledger:
        assert ledger.read()[1].profile_key == ""
        ledger.set_profile_key(1, "u1-run-2")
        ledger.set_profile_key(7, "of no job")
    with Ledger(state_dir, clock=clock) as ledger:
        assert ledger.read()[1].profile_key == "u1-run-2"
        assert list(ledger.read()) == [1, 2, 3]


def test_a_file_locked_by_another_program_is_reported(
    state_dir: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurm_synergy.controller.ledger_file._BUSY_TIMEOUT_S", 0.05)
    with Ledger(state_dir, clock=clock) as ledger:
        other = sqlite3.connect(state_dir / "ledger.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match="another program has it open"):
            ledger.set_draining(True)
        other.execute("ROLLBACK")
        other.close()
        ledger.set_draining(True)
        assert ledger.draining()


def test_a_full_disk_is_not_taken_for_damage_and_the_next_write_succeeds(
    state_dir: Path, clock: ManualClock
) -> None:
    with Ledger(state_dir, clock=clock) as ledger:
        ledger.save_leases([stored(1)])
        pages = ledger._query("PRAGMA page_count")[0][0]
        ledger._query(f"PRAGMA max_page_count = {pages}")
        many = [stored(job_id) for job_id in range(2, 200)]
        with pytest.raises(LedgerUnavailable, match="free some space"):
            ledger.save_leases(many)
        assert [one.lease.job_id for one in ledger.load_leases()] == [1]
        ledger._query("PRAGMA max_page_count = 100000")
        ledger.save_leases(many)
        assert len(ledger.load_leases()) == 199


def test_a_journal_without_room_keeps_whole_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path, max_mib=1, keep=1)
    journal.append(snapshot(), plan(), (), (), {})
    whole = (tmp_path / "journal.jsonl").read_bytes()
    # The kernel writes what still fits, and refuses the rest.
    limit = len(whole) + 10
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(LedgerUnavailable, match="free some space"):
            journal.append(snapshot(), plan(), (), (), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "journal.jsonl").read_bytes() == whole


def test_an_unwritable_state_directory_is_named(tmp_path: Path, clock: ManualClock) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="set state_dir to a directory"):
        Ledger(tmp_path / "file" / "state", clock=clock)


def test_the_journal_has_one_record_per_round(state_dir: Path, clock: ManualClock) -> None:
    outcomes = [Outcome(action=ACTIONS[0], done=False, reason=MOVED)]
    with Ledger(state_dir, clock=clock) as ledger:
        ledger.journal(snapshot(), plan(), ACTIONS, outcomes, {"decide": 0.25})
        ledger.journal(snapshot(), plan(), (), (), {})
    lines = (state_dir / "journal.jsonl").read_text().splitlines()
    assert len(lines) == 2
    record = json.loads(lines[0])
    assert decode(Snapshot, record["snapshot"]) == snapshot()
    assert decode(Plan, record["plan"]) == plan()
    assert [decode_action(entry) for entry in record["actions"]] == list(ACTIONS)
    assert record["outcomes"] == [
        {
            "job_id": 1,
            "kind": "start",
            "done": False,
            "reason": {"code": "moved", "text": "elsewhere"},
        }
    ]
    assert record["took_s"] == {"decide": 0.25}


def test_the_journal_is_rotated_and_old_files_go(tmp_path: Path) -> None:
    journal = Journal(tmp_path, max_mib=1, keep=2)
    filler = {"x" * 400_000: 0.0}
    for _ in range(12):
        journal.append(snapshot(), plan(), (), (), filler)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["journal.1.jsonl", "journal.2.jsonl", "journal.jsonl"]
    assert all(file.stat().st_size <= 1024 * 1024 for file in tmp_path.iterdir())
    records = [line for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert all(json.loads(record)["round"] == 4 for record in records)


def test_records_of_which_nothing_was_written_stay_the_same_objects(
    state_dir: Path, clock: ManualClock
) -> None:
    with Ledger(state_dir, clock=clock) as ledger:
        for job_id in (1, 2, 3):
            ledger.remember_request(job_id, {"gpn": job_id})
        ledger.save_leases([stored(3, gpus=2)])
        first = ledger.read()
        clock.advance(10)
        ledger.next_round()
        ledger.save_progress([JobProgress(job_id=2, done_samples=5.0, samples_per_s=1.0, step=1)])
        second = ledger.read()
        assert second[1] is first[1]
        assert (first[2].done_samples, second[2].done_samples) == (0.0, 5.0)
        # Who holds something is served, but its lease need not be read anew.
        assert second[3].attained_service_gpu_s == first[3].attained_service_gpu_s + 20.0
        assert second[3].lease is first[3].lease
        ledger.end_lease(3)
        assert ledger.read()[3].lease is None
        ledger.forget_job(1)
        assert list(ledger.read()) == [2, 3]


def test_records_are_those_of_the_file_whatever_was_written(
    state_dir: Path, clock: ManualClock
) -> None:
    """The memory of a ledger that goes on, against one that reads the file anew."""

    def told(ledger: Ledger) -> None:
        found = ledger.read()
        copied = state_dir.parent / f"copy{secrets.token_hex(4)}"
        copied.mkdir()
        with (
            sqlite3.connect(state_dir / "ledger.sqlite") as db,
            sqlite3.connect(copied / "ledger.sqlite") as other,
        ):
            db.backup(other)
        with Ledger(copied, clock=clock) as anew:
            assert list(found.items()) == list(anew.read().items())

    with Ledger(state_dir, clock=clock) as ledger:
        told(ledger)
        for job_id in (9, 3, 5):
            ledger.remember_request(job_id, {"gpus": 1})
        told(ledger)
        ledger.save_leases([stored(3), stored(4)])
        clock.advance(7.0)
        told(ledger)
        ledger.save_progress([JobProgress(job_id=3, done_samples=5.0, samples_per_s=1.0, step=2)])
        ledger.set_profile_key(5, "mine")
        ledger.end_lease(4)
        told(ledger)
        with pytest.raises(ZeroDivisionError), ledger._transaction() as db:
            db.execute("DELETE FROM jobs")
            raise ZeroDivisionError
        told(ledger)
        ledger.forget_job(9)
        ledger.forget_job(3)
        told(ledger)
        with sqlite3.connect(state_dir / "ledger.sqlite") as db:
            db.execute("UPDATE jobs SET profile_key = 'theirs' WHERE job_id = 5")
        told(ledger)
        assert ledger.read()[5].profile_key == "theirs"


def test_a_profile_stays_the_same_object_until_another_is_written(
    state_dir: Path, clock: ManualClock
) -> None:
    with Ledger(state_dir, clock=clock) as ledger:
        assert ledger.profile("a") is None
        ledger.save_profile(Profile(key="a", sample_count=1))
        first = ledger.profile("a")
        ledger.next_round()
        assert first is not None
        assert ledger.profile("a") is first
        ledger.save_profile(Profile(key="a", sample_count=2))
        assert ledger.profile("a") == Profile(key="a", sample_count=2)
        for number in range(5000):  # users may make up as many keys as they like
            ledger.profile(f"made-up-{number}")
        assert ledger.profile("a") == Profile(key="a", sample_count=2)
