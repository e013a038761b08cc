"""The helper on a node: whom it believes, what it may touch, and that it puts things back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_synergy.errors import ConfigError
from slurm_synergy.nodehelper.cgroups import JobPlace, read_cpus, show_cpus
from slurm_synergy.nodehelper.cpusets_v2 import CpusetsV2
from slurm_synergy.nodehelper.enforcer import Enforcer
from slurm_synergy.nodehelper.guard import Guard
from slurm_synergy.nodehelper.leases import JobLease, Standing
from slurm_synergy.nodehelper.memory import MemoryLimits, machine_mib
from slurm_synergy.nodehelper.originals import Originals
from slurm_synergy.nodehelper.parts import make_run_dir, user_ids

MIB = 1024**2
LEASE = JobLease(
    job_id=7,
    owner_uid=1000,
    incarnation=1,
    generation=5,
    until_s=100.0,
    cores=(0, 1),
    node_cores=8,
    mem_mib=300,
)


# -- what stands ---------------------------------------------------------------------------------


def test_a_lease_stands_until_its_time_is_over_or_it_is_not_named_any_more() -> None:
    standing = Standing()
    assert standing.take([LEASE]) == ()
    assert standing.in_force(99.0) == {7: LEASE}
    assert standing.in_force(100.0) == {}
    renewed = replace(LEASE, until_s=200.0)
    assert standing.take([renewed]) == ()
    assert standing.in_force(100.0) == {7: renewed}
    standing.take([])
    assert standing.in_force(0.0) == {}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"generation": 4}, "older than one heard before"),
        ({"incarnation": 0, "generation": 9}, "older than one heard before"),
        ({"cores": (0, 1, 2)}, "says another thing than before"),
        ({"owner_uid": 0}, "says another thing than before"),
    ],
)
def test_an_older_word_and_a_contradiction_are_refused_and_nothing_stands(
    change: Mapping[str, object], why: str
) -> None:
    standing = Standing()
    standing.take([LEASE])
    standing.take([])  # ended meanwhile: its number is remembered all the same
    (refused,) = standing.take([replace(LEASE, **change)])
    assert why in refused
    assert standing.in_force(0.0) == {}
    assert standing.take([replace(LEASE, generation=6)]) == ()
    assert standing.in_force(0.0).keys() == {7}


def test_a_job_that_is_named_twice_has_its_first_lease_alone() -> None:
    standing = Standing()
    (refused,) = standing.take([LEASE, replace(LEASE, generation=6, cores=(5,))])
    assert "named twice" in refused
    assert standing.in_force(0.0) == {7: LEASE}


def test_cpu_lists_are_read_and_written_as_the_kernel_does() -> None:
    for text in ("", "0", "0-3", "0-1,4,6-7"):
        assert show_cpus(read_cpus(f"{text}\n")) == text
    for text in ("a", "3-1", "-1", "0-99999999"):
        with pytest.raises(ValueError, match=r".+"):
            read_cpus(text)


# -- which CPUs a job gets -----------------------------------------------------------------------


class FakeCpusets:
    """Cpusets in memory that note what was done, in order."""

    def __init__(self, *places: JobPlace, cpus: int = 8) -> None:
        self.places = {place.job_id: place for place in places}
        self.cpus = cpus
        self.now: dict[int, frozenset[int]] = {}
        self.done: list[tuple[int, frozenset[int]]] = []
        self.broken: set[int] = set()

    def jobs(self) -> Mapping[int, JobPlace]:
        return self.places

    def machine(self) -> frozenset[int]:
        return frozenset(range(self.cpus))

    def held(self) -> Mapping[int, frozenset[int]]:
        return dict(self.now)

    def confine(self, job: JobPlace, cpus: frozenset[int]) -> bool:
        if job.job_id in self.broken:
            raise OSError("no")
        self.done.append((job.job_id, cpus))
        changed = self.now.get(job.job_id) != cpus
        self.now[job.job_id] = cpus
        return changed

    def give_back(self, job_id: int) -> bool:
        self.now.pop(job_id, None)
        return True

    def give_all_back(self) -> bool:
        self.now.clear()
        return True


def place(job_id: int, *cpus: int, uid: int = 1000) -> JobPlace:
    return JobPlace(job_id=job_id, uid=uid, cpus=frozenset(cpus))


@pytest.fixture
def no_memory(tmp_path: Path) -> MemoryLimits:
    """Limits of a node where Slurm limits no memory."""
    originals = Originals(tmp_path / "none.json")
    return MemoryLimits("n1", originals, unified=False, total_mib=1000, root=tmp_path / "nowhere")


def test_jobs_get_their_leases_and_get_back_what_slurm_gave_them(no_memory: MemoryLimits) -> None:
    cpusets = FakeCpusets(place(7, 0), place(8, 4))
    parts = Enforcer(cpusets, no_memory)
    parts.obey({7: LEASE, 8: replace(LEASE, job_id=8, cores=(4, 5, 6))})
    assert cpusets.now == {7: {0, 1}, 8: {4, 5, 6}}
    parts.obey({8: replace(LEASE, job_id=8, cores=())})
    assert cpusets.now == {}


def test_who_gets_narrower_goes_first(no_memory: MemoryLimits) -> None:
    cpusets = FakeCpusets(place(7, 0), place(8, 4))
    parts = Enforcer(cpusets, no_memory)
    parts.obey({8: replace(LEASE, job_id=8, cores=(1, 4))})
    cpusets.done.clear()
    parts.obey({7: LEASE, 8: replace(LEASE, job_id=8, cores=(4,))})
    assert cpusets.done == [(8, {4}), (7, {0, 1})]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"owner_uid": 1001}, "its lease names user id 1001, its cgroup 1000"),
        ({"job_id": 9}, ""),
        ({"node_cores": 64}, "8 of the node's 64 cores are visible here"),
        ({"cores": (8, 9)}, "outside the granted ones"),
        ({"cores": (3,)}, "the cores of its lease are those of other jobs"),
    ],
)
def test_what_is_not_the_jobs_is_never_touched(
    changed: Mapping[str, object],
    said: str,
    no_memory: MemoryLimits,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Job 3 is Slurm's alone: no lease names it.
    cpusets = FakeCpusets(place(7, 0), place(3, 2, 3))
    lease = replace(LEASE, **changed)
    parts = Enforcer(cpusets, no_memory)
    for _ in range(2):
        parts.obey({lease.job_id: lease})
    assert cpusets.done == []
    told = [one.getMessage() for one in caplog.records]
    assert len(told) == bool(said), "once, however often it is looked at"
    assert all(said in text for text in told)


def test_a_lease_never_takes_the_cores_of_a_job_without_one(no_memory: MemoryLimits) -> None:
    cpusets = FakeCpusets(place(7, 0, 3), place(3, 2, 3))
    Enforcer(cpusets, no_memory).obey({7: replace(LEASE, cores=(0, 1, 2, 3))})
    # Core 3 is in the cpusets of both, so it is as much its own.
    assert cpusets.now == {7: {0, 1, 3}}


def test_a_job_whose_lease_names_no_cores_keeps_its_own_for_itself(
    no_memory: MemoryLimits,
) -> None:
    # Job 3 has just begun without the wrapper: the others' leases do not know its cores yet.
    cpusets = FakeCpusets(place(7, 0), place(3, 1))
    leases = {7: LEASE, 3: replace(LEASE, job_id=3, cores=())}
    Enforcer(cpusets, no_memory).obey(leases)
    assert cpusets.now == {7: {0}}


def test_a_job_whose_cgroup_cannot_be_changed_keeps_what_slurm_gave_it(
    no_memory: MemoryLimits, caplog: pytest.LogCaptureFixture
) -> None:
    cpusets = FakeCpusets(place(7, 0), place(8, 4))
    cpusets.broken.add(7)
    both = {7: LEASE, 8: replace(LEASE, job_id=8, cores=(4, 5))}
    parts = Enforcer(cpusets, no_memory)
    parts.obey(both)
    parts.obey(both)
    assert cpusets.now == {8: {4, 5}}
    assert [one.message for one in caplog.records if one.levelname == "WARNING"] == [
        "job 7: its CPUs cannot be changed: no"
    ]


# -- cgroup v2, whose files a directory can stand for ----------------------------------------------


@pytest.fixture
def unified(tmp_path: Path) -> Iterator[Path]:
    """A tree as Slurm makes it on cgroup v2; job 7 has one step with a process of ours."""
    root = tmp_path / "cgroup"
    tasks = root / "system.slice/n1_slurmstepd.scope/job_7/step_0/user/task_0"
    tasks.mkdir(parents=True)
    scope = root / "system.slice/n1_slurmstepd.scope"
    (scope / "cpuset.cpus.effective").write_text("0-7\n")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (tasks / "cgroup.procs").write_text(f"{process.pid}\n")
        for part, cpus in (("", "0"), ("step_0", ""), ("step_0/user", "0"), (tasks.name, "")):
            folder = tasks if part == tasks.name else scope / "job_7" / part
            (folder / "cpuset.cpus").write_text(f"{cpus}\n")
            (folder / "memory.max").write_text("max\n" if not cpus else f"{256 * MIB}\n")
            (folder / "memory.current").write_text(f"{100 * MIB}\n")
            (folder / "memory.stat").write_text(f"anon 1\nfile {60 * MIB}\nshmem {10 * MIB}\n")
        yield root
        process.kill()


def of_job(root: Path, name: str) -> list[str]:
    job = root / "system.slice/n1_slurmstepd.scope/job_7"
    parts = ("", "step_0", "step_0/user", "step_0/user/task_0")
    return [(job / part / name).read_text().strip() for part in parts]


def test_v2_the_job_and_its_tasks_are_changed_and_nothing_else(
    unified: Path, tmp_path: Path
) -> None:
    cpusets = CpusetsV2("n1", Originals(tmp_path / "record.json"), unified)
    job = cpusets.jobs()[7]
    assert job == JobPlace(job_id=7, uid=os.getuid(), cpus=frozenset({0}))
    assert cpusets.confine(job, frozenset({0, 1, 2}))
    assert of_job(unified, "cpuset.cpus") == ["0-2", "", "0-2", ""]
    assert cpusets.jobs()[7].cpus == {0}, "Slurm's own is remembered"
    assert not cpusets.confine(job, frozenset({0, 1, 2})), "nothing to do"
    assert cpusets.give_back(7)
    assert of_job(unified, "cpuset.cpus") == ["0", "", "0", ""]
    assert cpusets.held() == {}


def test_v2_what_slurm_writes_anew_for_a_step_is_its_word_and_is_widened_again(
    unified: Path, tmp_path: Path
) -> None:
    cpusets = CpusetsV2("n1", Originals(tmp_path / "record.json"), unified)
    job = cpusets.jobs()[7]
    cpusets.confine(job, frozenset({0, 1}))
    file = unified / "system.slice/n1_slurmstepd.scope/job_7/cpuset.cpus"
    file.write_text("4\n")
    assert cpusets.jobs()[7].cpus == {4}
    assert cpusets.confine(job, frozenset({0, 1}))
    assert cpusets.give_back(7)
    assert of_job(unified, "cpuset.cpus") == ["4", "", "0", ""]


def test_v2_another_helper_gives_back_what_a_dead_one_changed(
    unified: Path, tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    first = CpusetsV2("n1", Originals(record), unified)
    first.confine(first.jobs()[7], frozenset({0, 1, 2}))
    assert record.stat().st_mode & 0o777 == 0o600
    second = CpusetsV2("n1", Originals(record), unified)
    assert second.give_all_back()
    assert of_job(unified, "cpuset.cpus") == ["0", "", "0", ""]


def test_v2_a_helper_that_dies_between_its_note_and_the_change_does_no_harm(
    unified: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "record.json"
    cpusets = CpusetsV2("n1", Originals(record), unified)
    job = cpusets.jobs()[7]
    write = Path.write_text

    def dying(self: Path, text: str, *args: object, **kwargs: object) -> int:
        if self.name == "cpuset.cpus":
            raise KeyboardInterrupt
        return write(self, text)

    monkeypatch.setattr(Path, "write_text", dying)
    with pytest.raises(KeyboardInterrupt):
        cpusets.confine(job, frozenset({0, 1, 2}))
    monkeypatch.undo()
    assert CpusetsV2("n1", Originals(record), unified).give_all_back()
    assert of_job(unified, "cpuset.cpus") == ["0", "", "0", ""]
    assert Originals(record).files() == ()


def test_v2_jobs_that_have_ended_leave_nothing_in_the_record(unified: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    originals = Originals(record)
    cpusets = CpusetsV2("n1", originals, unified)
    memory = MemoryLimits("n1", originals, unified=True, total_mib=1000, root=unified)
    parts = Enforcer(cpusets, memory)
    lease = replace(LEASE, owner_uid=os.getuid(), cores=(0, 1), node_cores=8)
    job = unified / "system.slice/n1_slurmstepd.scope/job_7"
    shutil.copytree(job / "step_0", job / "step_1")
    parts.obey({7: lease})
    assert len(Originals(record).files()) == 6, "cores and memory of the job and its steps"
    shutil.rmtree(job / "step_1")
    parts.obey({7: lease})
    assert len(Originals(record).files()) == 4
    shutil.rmtree(job)
    parts.obey({})
    assert Originals(record).files() == ()
    assert (cpusets.held(), memory.held()) == ({}, frozenset())


def test_a_damaged_record_is_refused_with_a_remedy_and_not_overwritten(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    record.write_text('{"/a": ["0"')
    with pytest.raises(ConfigError, match=r"record\.json.*cannot be read.*remove the file"):
        Originals(record)
    assert record.read_text() == '{"/a": ["0"'


# -- memory ----------------------------------------------------------------------------------------


def test_v2_memory_rises_with_the_lease_and_goes_back_as_far_as_the_job_allows(
    unified: Path, tmp_path: Path
) -> None:
    originals = Originals(tmp_path / "record.json")
    limits = MemoryLimits("n1", originals, unified=True, total_mib=1000, root=unified)
    assert limits.set_to(7, {7: 400})
    raised = str(400 * MIB)
    assert of_job(unified, "memory.max") == [raised, "max", raised, "max"]
    assert not limits.set_to(7, {7: 400})
    job = unified / "system.slice/n1_slurmstepd.scope/job_7"
    for part in ("", "step_0/user"):
        (job / part / "memory.current").write_text(f"{350 * MIB}\n")
    # 50 MiB of the use is cache of files, which the kernel frees by itself; 64 are left as air.
    assert not limits.give_back(7)
    assert of_job(unified, "memory.max")[0] == str(364 * MIB)
    assert limits.held() == {7}
    for part in ("", "step_0/user"):
        (job / part / "memory.current").write_text(f"{150 * MIB}\n")
    assert limits.give_back(7)
    slurms = str(256 * MIB)
    assert of_job(unified, "memory.max") == [slurms, "max", slurms, "max"]
    assert limits.held() == frozenset()


def test_memory_is_never_less_than_slurms_nor_more_than_the_machines(
    unified: Path, tmp_path: Path
) -> None:
    originals = Originals(tmp_path / "record.json")
    limits = MemoryLimits("n1", originals, unified=True, total_mib=1000, root=unified)
    before = of_job(unified, "memory.max")
    assert not limits.set_to(7, {7: 100}), "less than Slurm granted"
    assert not limits.set_to(7, {7: 1001}), "more than there is"
    other = unified / "system.slice/n1_slurmstepd.scope/job_8"
    other.mkdir()
    (other / "memory.max").write_text(f"{700 * MIB}\n")
    assert not limits.set_to(7, {7: 400}), "another job's limit is in the way"
    (other / "memory.max").write_text("max\n")
    assert not limits.set_to(7, {7: 400}), "a job without a limit can take all"
    assert of_job(unified, "memory.max") == before
    (other / "memory.max").write_text(f"{300 * MIB}\n")
    assert not limits.set_to(7, {7: 400, 8: 700}), "and so is what its lease says"
    assert limits.set_to(7, {7: 400, 8: 500})


MEMORY_V1 = Path("/sys/fs/cgroup/memory")
HOLDER = """
import sys
held = []
for line in sys.stdin:
    held = [bytearray(1024 * 1024) for _ in range(int(line))]
    for one in held:
        one[::4096] = b"x" * len(one[::4096])
    print("holds", flush=True)
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.access(MEMORY_V1 / "cgroup.procs", os.W_OK),
    reason="no memory hierarchy of cgroup v1 here that can be written to",
)
def test_v1_a_real_limit_is_raised_and_lowered_without_killing_anybody(tmp_path: Path) -> None:
    node = f"unit-{os.getpid()}"
    tree = MEMORY_V1 / f"slurm_{node}"
    step = tree / "uid_0" / "job_7" / "step_0"
    step.mkdir(parents=True)
    limits = MemoryLimits(
        node, Originals(tmp_path / "record.json"), unified=False, total_mib=machine_mib()
    )
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None

        def hold(mib: int) -> None:
            print(mib, file=holder.stdin)
            assert holder.stdout is not None
            assert holder.stdout.readline() == "holds\n"

        def limit() -> int:
            return int((step / "memory.limit_in_bytes").read_text()) // MIB

        try:
            for one in (step.parent, step):
                (one / "memory.limit_in_bytes").write_text(str(128 * MIB))
            (step / "cgroup.procs").write_text(str(holder.pid))
            assert limits.set_to(7, {7: 512})
            assert limit() == 512
            hold(300)  # more than Slurm's limit: it would be killed without ours
            assert not limits.give_back(7)
            assert 300 < limit() < 512
            assert holder.poll() is None
            hold(1)
            deadline_s = time.monotonic() + 60
            while not limits.give_back(7):
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
            assert limit() == 128
            hold(20)
        finally:
            holder.kill()
            holder.wait()
            for one in (step, step.parent, step.parent.parent, tree):
                one.rmdir()


# -- who may start it ------------------------------------------------------------------------------


def test_a_guard_that_was_killed_gets_a_successor(tmp_path: Path) -> None:
    with Guard(["--node", "--run-dir", str(tmp_path)]) as guard:
        first = guard.pid
        guard.alive()
        assert guard.pid == first
        os.kill(first, signal.SIGKILL)
        until_s = time.monotonic() + 60.0
        while guard.pid == first and time.monotonic() < until_s:
            guard.alive()
        second = guard.pid
        assert second != first
    assert not Path(f"/proc/{second}").exists()


def test_its_directory_is_roots_alone(tmp_path: Path) -> None:
    good = tmp_path / "run" / "node"
    make_run_dir(good)
    make_run_dir(good)
    assert good.stat().st_mode & 0o777 == 0o700
    good.chmod(0o722)
    with pytest.raises(ConfigError, match="nobody else may write"):
        make_run_dir(good)
    good.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(good)
    with pytest.raises(ConfigError, match="nobody else may write"):
        make_run_dir(link)


def test_accounts_of_the_controller_are_names_or_numbers() -> None:
    assert user_ids(["root", "123"]) == {0, 123}
    with pytest.raises(ConfigError, match=r"--controller-user.*no such account"):
        user_ids(["no-such-account"])


def test_a_compute_node_needs_nothing_of_the_controllers_installation() -> None:
    code = (
        "import sys\n"
        "from slurm_synergy.cli.synergyd import main\n"
        "try:\n    main(['--node', '--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "from slurm_synergy.nodehelper import guard\n"
        "found = {'pydantic', 'yaml', 'click', 'rich', 'numpy', 'torch'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--give-back" in done.stdout
