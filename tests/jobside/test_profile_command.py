"""``synergy-profile`` outside Slurm: on real processes, with real pinning."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_synergy.jobside.board import Report
from slurm_synergy.jobside.profiling import Limits, SweepSource
from slurm_synergy.jobside.profiling_lease import Answer
from slurm_synergy.jobside.storage_probe import OpenFiles, data_size, read_bandwidth, warm
from slurm_synergy.profiler.command import main
from slurm_synergy.profiler.documents import from_document
from slurm_synergy.profiler.sweep import Confidence, Measurement, Sweep, SweepSpan

ROOT = Path(__file__).resolve().parents[2]
CPUS = sorted(os.sched_getaffinity(0))
two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="moving between CPUs needs two of them")

# A loader whose pace is 20 batches/s on each core that the process has at the moment.
EMULATED = """
import os, time
import slurm_synergy.jobside as synergy
def batches():
    while True:
        time.sleep(0.05 / len(os.sched_getaffinity(0)))
        yield None
synergy.describe_data([__file__], samples=1000)
for _ in synergy.iterate(batches(), batch_size=8):
    pass
"""


class World:
    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SYNERGY"))}
        self.env = {**kept, "PYTHONPATH": str(ROOT), "XDG_DATA_HOME": str(tmp / "data")}

    def profile(self, code: str, *options: str) -> subprocess.CompletedProcess[str]:
        script = self.tmp / "train.py"
        script.write_text(textwrap.dedent(code), encoding="utf-8")
        return subprocess.run(
            [
                *(sys.executable, "-m", "slurm_synergy.profiler.command", *options),
                *("--", sys.executable, str(script)),
            ],
            env={**self.env, "TMPDIR": str(self.tmp)},
            cwd=self.tmp,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def left_over(self) -> list[Path]:
        return list(self.tmp.glob("synergy-*"))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    yield World(tmp_path)


# -- the source of the lease -----------------------------------------------------------------------


class Machine:
    """A source with a clock and a board that the test turns."""

    def __init__(self, most: int = 4, **limits: float) -> None:
        self.now_s = 0.0
        self.report = Report()
        self.source = SweepSource(
            Sweep(span=SweepSpan(gpus=1, most_cpus=most, proportional_cpus=2)),
            report=lambda: self.report,
            limits=Limits(**limits),  # type: ignore[arg-type]
            ends=False,
            clock=lambda: self.now_s,
        )

    def ordered(self) -> tuple[int, int]:
        """Cores and number of the order that the source wants carried out."""
        update = self.source.take()
        assert update is not None
        assert update.grant is not None
        assert update.order is not None
        return len(update.grant.cores), update.order.number

    def answer(self, number: int, rate: float | None, cpus: int) -> None:
        found = None
        if rate is not None:
            found = Measurement(cpus=cpus, samples_per_s=rate, iterations=50)
        self.source.answer = Answer(number=number, found=found)
        self.source.kick()


def test_the_source_orders_point_after_point_once_the_command_trains() -> None:
    machine = Machine()
    first = machine.source.take()
    assert first is not None
    assert first.order is None
    assert machine.source.take() is None
    machine.report = Report(step=1)
    assert machine.ordered() == (4, 1)
    assert machine.source.take() is None
    machine.answer(1, 400.0, 4)
    machine.answer(1, 999.0, 4)  # the answer to an order that is no longer in force
    assert machine.ordered() == (1, 2)
    machine.answer(2, 100.0, 1)
    assert machine.ordered() == (2, 3)
    machine.answer(3, 200.0, 2)
    while not machine.source.sweep.done:
        cpus, number = machine.ordered()
        machine.answer(number, 100.0 * cpus, cpus)
    after = machine.source.take()
    assert after is not None
    assert after.order is None
    assert after.grant is not None
    assert len(after.grant.cores) == 4
    assert machine.source.sweep.result().knee_cpus == 4


def test_a_command_that_never_steps_and_a_sweep_that_takes_too_long_are_given_up() -> None:
    silent = Machine(start_s=30.0)
    silent.source.take()
    silent.now_s = 31.0
    silent.source.take()
    assert "told no step within 30 s" in silent.source.sweep.stopped
    slow = Machine(sweep_s=100.0)
    slow.report = Report(step=1)
    assert slow.ordered() == (4, 1)
    slow.answer(1, 10.0, 4)
    slow.now_s = 101.0
    slow.source.take()
    assert slow.source.sweep.stopped == "100 s were over"
    assert slow.source.sweep.result().confidence is Confidence.LOW


def test_a_point_that_cannot_be_measured_and_an_early_end_cut_the_sweep() -> None:
    stuck = Machine()
    stuck.report = Report(step=1)
    stuck.ordered()
    stuck.answer(1, None, 4)
    assert "with 4 cores the command made too few steps" in stuck.source.sweep.stopped
    ended = Machine()
    ended.source.finish(exit_code=3, checkpointed=False, report=Report(), timeout_s=1)
    assert "ended before that, with status 3" in ended.source.sweep.stopped


# -- the command -----------------------------------------------------------------------------------


@two_cpus
def test_a_command_is_measured_in_place_and_its_profile_kept(world: World) -> None:
    # The base installation has no numpy.
    (world.tmp / "numpy.py").write_text("raise ImportError('there is none')\n", encoding="utf-8")
    world.env["PYTHONPATH"] += f":{world.tmp}"
    code = f"import os\nprint('loss 0.1', flush=True)\nos.system('echo of a child')\n{EMULATED}"
    done = world.profile(code, "--json", "--iterations", "20", "--cpus", "2")
    assert done.returncode == 0, done.stderr
    assert "loss 0.1\nof a child\n" in done.stderr
    content = json.loads(done.stdout)
    rates = {
        point["cpus"]: point["samples_per_s"] for point in content["profile"]["evidence"]["points"]
    }
    assert set(rates) == {1, 2}
    # The machine may be busy, so that the emulated pace is missed; more cores still go faster.
    assert rates[2] > 1.3 * rates[1]
    assert rates[1] < 8 / 0.05 * 1.05
    # Its data set is the one that the program tells, for want of --data.
    pipeline = content["profile"]["pipeline"]
    script_mib = (world.tmp / "train.py").stat().st_size / 2**20
    assert pipeline["dataset_mib"] == pytest.approx(script_mib)
    assert pipeline["samples_per_epoch"] == 1000
    assert [one["cpus"] for one in content["predicted"]] == [1, 2]
    for one in content["predicted"]:
        assert one["samples_per_s"] == pytest.approx(rates[one["cpus"]], rel=0.01)
    kept = Path(content["file"])
    assert kept.parent == world.tmp / "data" / "slurm-synergy" / "profiles"
    stored = from_document(json.loads(kept.read_text(encoding="utf-8")))
    assert stored.profile.key == kept.stem
    assert stored.evidence is not None
    assert stored.evidence.confidence is Confidence.HIGH
    assert world.left_over() == []
    assert "synergy-profile: 2 cores:" in done.stderr


def test_a_command_without_steps_is_ended_and_the_reason_told(world: World) -> None:
    done = world.profile("import time\ntime.sleep(600)\n", "--start-seconds", "0.5")
    assert done.returncode == 1
    assert "nothing was measured: the command told no step within 0.5 s" in done.stderr
    assert world.left_over() == []


def test_a_command_that_ignores_the_request_to_end_is_killed(world: World) -> None:
    code = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    """
    done = world.profile(code, "--start-seconds", "0.5", "--end-seconds", "0.5")
    assert done.returncode == 1
    assert world.left_over() == []


def test_a_command_that_fails_leaves_no_profile(world: World) -> None:
    done = world.profile("raise SystemExit(3)\n")
    assert done.returncode == 1
    assert "ended before that, with status 3" in done.stderr
    assert not (world.tmp / "data").exists()


def test_a_profile_that_was_cut_off_is_kept_with_low_confidence(world: World) -> None:
    code = EMULATED.replace("while True", "for _ in range(200)")
    done = world.profile(
        code, "--key", "short", "--iterations", "15", "--keep-running", "--output", "here.json"
    )
    # Whether two points or one came before the end depends on the machine; it ended in between.
    assert done.returncode in (0, 1)
    stored = from_document(json.loads((world.tmp / "here.json").read_text(encoding="utf-8")))
    assert stored.profile.key == "short"
    assert stored.evidence is not None
    if done.returncode:
        assert stored.evidence.confidence is Confidence.LOW
        assert "confidence is low: the command ended before that" in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpus", "0"], "--gpus must be at least 1"),
        (["--cpus", "100000"], "this process may use"),
        (["--key", "no such key"], "is no profile key"),
        (["--gpu-type", "a b"], "--gpu-type 'a b'"),
        (["--warmup", "-1"], "must not be negative"),
        (["--data", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--storage-mib-s", "0"], "--storage-mib-s must be positive"),
        (["--storage-mib-s", "nan"], "--storage-mib-s must be positive"),
        (["--output", "/"], "no profile can be kept in /:"),
        (["--output", "/dev/null/p.json"], "name another --output, or --no-store"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    ran = tmp_path / "ran"
    assert main([*options, "--", "touch", str(ran)]) == 2
    assert words in capfd.readouterr().err
    assert not ran.exists()


def test_the_program_of_a_source_tree_runs() -> None:
    argv = [str(ROOT / "wrapper" / "synergy-profile"), "--help"]
    env = {**os.environ, "SYNERGY_PYTHON": sys.executable}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: synergy-profile [options] [--] command [arguments]")


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        # What every launcher starts with.
        ("slurm_synergy.jobside.profiling", "numpy click rich pydantic yaml torch"),
        ("slurm_synergy.profiler.command", "numpy click rich pydantic yaml torch"),
    ],
)
def test_it_runs_with_what_a_training_environment_has(
    world: World, module: str, heavy: str
) -> None:
    code = f"import sys, {module}; print(sorted(set({heavy!r}.split()) & set(sys.modules)))"
    argv = [sys.executable, "-c", code]
    out = subprocess.run(argv, env=world.env, capture_output=True, text=True, check=True).stdout
    assert out == "[]\n"


def test_nothing_of_the_job_side_needs_numpy(world: World) -> None:
    folder = ROOT / "slurm_synergy" / "jobside"
    # Injected code is no module of the package; integrations are for programs that have torch.
    modules = [
        f"slurm_synergy.jobside.{path.stem}" for path in folder.glob("*.py") if path.stem[0] != "_"
    ]
    assert len(modules) > 30
    code = (
        "import importlib, sys; sys.modules['numpy'] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)"
    )
    subprocess.run([sys.executable, "-c", code], env=world.env, check=True, timeout=240)


# -- storage ---------------------------------------------------------------------------------------


def test_the_size_of_a_data_set_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name, size in (("a/1", 1 << 20), ("a/2", 2 << 20), ("3", 1 << 19)):
        (tmp_path / name).write_bytes(bytes(size))
    size = data_size([tmp_path])
    assert ([path.name for path in size.files], size.mib) == (["3", "1", "2"], 3.5)
    assert data_size([tmp_path / "3"]).mib == 0.5
    assert data_size([]).files == ()
    with pytest.raises(FileNotFoundError):
        data_size([tmp_path / "none"])
    assert warm(size.files, 1 << 30) == 7 << 19
    assert warm(size.files, 1 << 20) >= 1 << 20


def test_storage_is_read_past_the_page_cache(tmp_path: Path) -> None:
    files = []
    for number in range(4):
        path = tmp_path / str(number)
        path.write_bytes(os.urandom(1 << 20))
        files.append(path)
    found = read_bandwidth(files, readers=2)
    if found.mib_s is None:  # the place of temporary files is a tmpfs
        assert "in memory" in found.how
        return
    assert found.how in ("O_DIRECT", "dropped from the page cache before")
    assert (found.files, found.read_mib) == (4, 4.0)
    assert found.mib_s == pytest.approx(4.0 / found.seconds)


def test_where_nothing_can_be_read_past_the_page_cache_it_is_dropped_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_open = os.open

    def refuse_direct(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not on this file system")
        return plain_open(path, flags)

    file = tmp_path / "data"
    file.write_bytes(os.urandom(1 << 20))
    if read_bandwidth([file], readers=1).mib_s is None:
        pytest.skip("temporary files are in memory here")
    monkeypatch.setattr(os, "open", refuse_direct)
    # A file system holds on to what was only just written, until its journal has it.
    deadline_s = time.monotonic() + 60
    while (found := read_bandwidth([file], readers=1)).mib_s is None:
        assert found.how == "the data files cannot be read"
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert (found.how, found.read_mib) == ("dropped from the page cache before", 1.0)
    assert found.mib_s is not None


def test_data_in_memory_has_no_bandwidth(tmp_path: Path) -> None:
    assert read_bandwidth([], readers=1).how == "no data files are known"
    missing = read_bandwidth([tmp_path / "gone"], readers=1)
    assert (missing.mib_s, missing.how) == (None, "the data files cannot be read")
    place = Path("/dev/shm")
    if not place.is_dir():
        pytest.skip("this machine has no /dev/shm")
    file = place / f"synergy-test-{os.getpid()}"
    try:
        file.write_bytes(bytes(1 << 20))
        found = read_bandwidth([file], readers=1)
        assert (found.mib_s, found.in_memory) == (None, True)
    finally:
        file.unlink()


def test_the_files_that_a_process_reads_are_seen(tmp_path: Path) -> None:
    data, log, small = tmp_path / "data.bin", tmp_path / "log.bin", tmp_path / "small.bin"
    data.write_bytes(bytes(8192))
    small.write_bytes(b"x")
    seen = OpenFiles()
    with data.open("rb"), small.open("rb"), log.open("wb") as written:
        written.write(bytes(8192))
        written.flush()
        seen.look([os.getpid(), 2**22 + 1])
    assert [path for path in seen.files if path.is_relative_to(tmp_path)] == [data]
