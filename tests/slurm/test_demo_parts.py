"""The pieces of the demonstration; `make demo` itself plays them together."""

from __future__ import annotations

import io
import json
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from forks import Forks
from rich.console import Console

from slurm_synergy.cli.demo import LEAST_RATIO, Result
from slurm_synergy.cli.demo_acts import MOTIVATING_JOBS, progress
from slurm_synergy.cli.demo_resume import StepClock, first_difference, read_training
from slurm_synergy.cli.demo_screen import Finished, Row, Screen, comparison
from slurm_synergy.cli.demo_stage import Stage, last_json_line, tail
from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.pipeline import loader_rate
from slurm_synergy.devcluster import DevCluster
from slurm_synergy.errors import DemoError
from slurm_synergy.slurm.facts import Hold

ROOT = Path(__file__).resolve().parents[2]
MODEL = "m5-audio"


def emulate(forks: Forks, *options: str, **variables: str) -> str:
    """What it prints."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SYNERGY_", "SLURM_"))}
    process = forks.start(
        [str(ROOT / "examples" / "emulated_train.py"), *options],
        {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
    )
    output, errors = process.communicate(120)
    assert process.returncode == 0, errors
    return output


def lines_of(output: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def steady_rate(output: str) -> float:
    """Samples/s between the first report and the last, so without the filling of the pipeline."""
    first, *_, last = lines_of(output)
    return (last["samples"] - first["samples"]) / (last["seconds"] - first["seconds"])


@pytest.mark.parametrize(
    ("workers", "memory_mib"),
    [(2, 250_000), (8, 40_000)],
    ids=["cores limit", "memory limits"],
)
def test_emulated_training_runs_at_the_rate_of_its_pipeline(
    torch_forks: Forks, workers: int, memory_mib: int
) -> None:
    pipeline = CATALOGUE[MODEL].pipeline
    assert pipeline is not None
    expected = loader_rate(pipeline, workers, memory_mib)
    output = emulate(
        torch_forks,
        *("--model", MODEL, "--gpus", "4", "--batch", "64", "--samples", str(round(expected * 4))),
        *("--workers", str(workers)),
        SYNERGY_LEASE_MEM_MIB=str(memory_mib),
    )
    assert steady_rate(output) == pytest.approx(expected, rel=0.2)
    assert lines_of(output)[-1]["finished"] is True


def test_emulated_gpus_are_never_outrun_by_the_loader(torch_forks: Forks) -> None:
    rate = CATALOGUE["gnmt-wmt16"].gpu_rate_per_gpu["v100"]
    output = emulate(
        torch_forks,
        *("--model", "gnmt-wmt16", "--gpus", "1", "--batch", "128", "--workers", "2"),
        *("--samples", str(round(rate * 4))),
    )
    assert 0.7 * rate <= steady_rate(output) <= 1.02 * rate


def test_what_is_overslept_is_made_up_for() -> None:
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds + 0.3  # a busy machine wakes us late

    pretended = runpy.run_path(str(ROOT / "examples" / "emulated_train.py"))["Pretended"]
    pretended.use.__globals__["time"] = SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep)
    hardware = pretended()
    for _ in range(10):
        hardware.use(1.0)
    assert now_s[0] == pytest.approx(10.3)


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        (("--model", "nosuch"), {}, "resnet18-openimages"),
        (("--model", MODEL, "--gpu-type", "h100"), {}, "no figures for GPU type h100; known: a100"),
        (("--model", MODEL, "--batch", "0"), {}, "--batch must be at least 1"),
        (("--model", MODEL), {"EMULATED_TIME_SCALE": "soon"}, "for example 0.5"),
    ],
)
def test_emulated_training_refuses_what_makes_no_sense(
    options: tuple[str, ...],
    variables: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    main = runpy.run_path(str(ROOT / "examples" / "emulated_train.py"))["main"]
    with pytest.raises(SystemExit) as ended:
        main(list(options))
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_each_script_of_the_motivating_example_is_admitted_held(
    cluster: DevCluster, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    stage = Stage(tmp_path, cluster)
    directory = stage.directory("scripts")
    ids = []
    try:
        for name in MOTIVATING_JOBS:
            done = cluster.run(["sbatch", "--parsable", f"examples/{name}.sbatch"], cwd=directory)
            ids.append(int(done.stdout))
        jobs = stage.jobs(ids)
        assert sorted(jobs) == sorted(ids)
        for job in jobs.values():
            assert job.held is not Hold.NONE
            assert job.gpus_asked == {"v100": 4}
            assert "wrapper=yes" in job.admin_comment
            (profile,) = (
                hint.partition("=")[2]
                for hint in job.comment.removeprefix("synergy:").split(",")
                if hint.startswith("profile=")
            )
            assert profile in CATALOGUE
    finally:
        stage.cancel(ids)


def test_one_act_after_the_other_finds_the_stage_empty(
    cluster: DevCluster, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    tmp_path.chmod(0o755)
    stage = Stage(tmp_path, cluster)
    script = "#!/bin/bash\nif false; then synergy-srun true; fi\nsleep 300\n"
    for act, mechanism in (("first", "proportional"), ("second", "tune")):
        directory = stage.directory(act)
        (directory / "job.sbatch").write_text(script)
        ids: list[int] = []
        with stage.controller(
            directory, policy="fifo", mechanism=mechanism, nodes="v100-1"
        ) as controller:
            try:
                job = stage.submit(
                    controller, directory, "--partition=synergy", "--gres=gpu:1", "job.sbatch"
                )
                ids.append(job.job_id)
                eventually(
                    lambda ids=ids: stage.jobs(ids)[ids[0]].running,
                    timeout_s=90,
                    what=f"the job of the {act} act runs",
                )
                assert "ReservationName=synergy " in reservations(cluster)
            finally:
                stage.cancel(ids)
                eventually(
                    lambda ids=ids: all(one.state.finished for one in stage.jobs(ids).values()),
                    timeout_s=90,
                    what=f"the job of the {act} act has ended",
                )
        assert "ReservationName=synergy " not in reservations(cluster), f"after the {act} act"


def reservations(cluster: DevCluster) -> str:
    return cluster.run(["scontrol", "show", "reservation", "-o"], check=False).stdout


def test_ratio_below_the_promise_fails_the_demonstration() -> None:
    good = Result(avg_jct_s={"proportional": 70.0, "tune": 50.0}, resume_identical=True)
    poor = Result(avg_jct_s={"proportional": 69.9, "tune": 50.0}, resume_identical=True)
    assert good.ratio == pytest.approx(LEAST_RATIO)
    assert good.kept(("motivating", "resume"))
    assert not poor.kept(("motivating", "resume"))
    assert poor.kept(("resume",))


def test_unequal_or_missing_second_act_fails_the_demonstration() -> None:
    averages = {"proportional": 80.0, "tune": 50.0}
    assert not Result(avg_jct_s=averages, resume_identical=False).kept(("resume",))
    assert not Result(avg_jct_s=averages).kept(("motivating", "resume"))
    assert not Result(resume_identical=True).kept(("motivating",))


def test_last_line_has_the_promised_keys() -> None:
    result = Result(
        avg_jct_s={"proportional": 75.5, "tune": 50.0},
        resume_identical=True,
        restart_s=6.789,
        wall_s=170.04,
    )
    assert json.loads(result.to_json()) == {
        "avg_jct_s": {"proportional": 75.5, "tune": 50.0},
        "ratio": 1.51,
        "resume_identical": True,
        "restart_s": 6.79,
        "wall_s": 170.0,
    }
    assert json.loads(Result().to_json())["ratio"] is None


def test_progress_is_read_from_the_last_whole_line(tmp_path: Path) -> None:
    output = tmp_path / "job.out"
    output.write_text(
        'srun: hello\n{"samples": 50, "of": 200, "samples_per_s": 25.0, "data_wait": 0.5}\n{"samp'
    )
    assert progress(last_json_line(output)).startswith(" 25%  25 samples/s, waits for data 50%")
    assert progress(last_json_line(tmp_path / "absent")) == ""
    assert "No such file" in tail(tmp_path / "absent")


def test_table_puts_both_mechanisms_side_by_side() -> None:
    def run(cpus: tuple[int, ...], jct_s: float) -> tuple[Finished, ...]:
        mem_mib = (102_400,) * len(cpus)
        return (Finished(name="image", node="n1", cpus=cpus, mem_mib=mem_mib, jct_s=jct_s),)

    console = Console(file=io.StringIO(), width=120)
    console.print(comparison([("proportional", run((12,), 80.0)), ("tune", run((23, 24), 40.0))]))
    assert isinstance(console.file, io.StringIO)
    row = console.file.getvalue().splitlines()[-1].split()
    assert row == ["image", "n1", "12", "100", "80", "n1", "23→24", "100", "40", "2.00x"]


def test_lines_are_shown_where_no_table_can_be_redrawn() -> None:
    console = Console(file=io.StringIO(), width=60)
    screen = Screen(console)
    row = Row(
        job_id=7, name="image", state="running", node="n1", cpus=3, mem_mib=2048, progress="50%"
    )
    with screen.watching():
        screen.show([row])
        screen.show([row])  # at once again: not another line
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("image n1 3 CPUs 2 GiB 50%") == 1


def results(path: Path, *losses: float, weights: str = "ab12") -> Path:
    lines: list[dict[str, object]] = [
        {"step": step, "epoch": 0, "loss": loss} for step, loss in enumerate(losses, start=1)
    ]
    if weights:
        lines.append({"step": len(losses), "weights_sha256": weights})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_trainings_are_equal_only_to_the_last_bit(tmp_path: Path) -> None:
    one = read_training(results(tmp_path / "one", 2.5, 1.25))
    assert first_difference(one, read_training(results(tmp_path / "same", 2.5, 1.25))) == ""
    almost = read_training(results(tmp_path / "almost", 2.5, 1.2500000000000002))
    assert "step 2 is 1.25 and 1.2500000000000002" in first_difference(one, almost)
    longer = read_training(results(tmp_path / "longer", 2.5, 1.25, 1.0))
    assert first_difference(one, longer) == "2 steps and 3 steps"
    other = read_training(results(tmp_path / "other", 2.5, 1.25, weights="cd34"))
    assert "ab12 and cd34" in first_difference(one, other)


def test_training_that_did_not_end_is_no_proof(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="did not come to its end"):
        read_training(results(tmp_path / "cut", 2.5, weights=""))
    repeated = results(tmp_path / "twice", 2.5)
    repeated.write_text(repeated.read_text() + repeated.read_text())
    with pytest.raises(DemoError, match="step 1 is there twice"):
        read_training(repeated)
    with pytest.raises(DemoError, match="not the results"):
        read_training(tmp_path / "absent")


def test_step_clock_notes_when_a_step_appeared(
    tmp_path: Path, eventually: Callable[..., None]
) -> None:
    path = tmp_path / "losses"
    clock = StepClock(path)
    with clock.running():
        assert clock.last() == 0
        results(path, 2.5, 1.25, weights="")
        eventually(lambda: clock.last() == 2, what="step 2 is seen")
        results(path, 2.5, 1.25, 1.0, weights="")
        eventually(lambda: clock.last() == 3, what="step 3 is seen")
    assert clock.first_after(2) == 3
    assert clock.at_s(3) >= clock.at_s(2)
    assert clock.at_s(3) == pytest.approx(path.stat().st_mtime)
