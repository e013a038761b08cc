"""``make demo``: slurm-synergy on a real Slurm, on this machine, in under four minutes.

Act one compares the GPU-proportional mechanism with tune on the motivating example of Synergy;
act two preempts a real PyTorch training and shows that nothing is lost. docs/demo.md tells what is
emulated and what is real. The last line printed is one JSON object; the exit status is 0 only if
every act that was played kept its promise.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from slurm_synergy.cli.demo_acts import run_motivating
from slurm_synergy.cli.demo_resume import run_resume
from slurm_synergy.cli.demo_screen import Screen
from slurm_synergy.cli.demo_stage import SHAPES, Stage, tail
from slurm_synergy.devcluster import DevCluster
from slurm_synergy.errors import SynergyError

__all__ = ["LEAST_RATIO", "Result", "main"]

LEAST_RATIO = 1.4
"""Average JCT under proportional over that under tune; the paper reports 1.5."""

ACTS = ("motivating", "resume")
_INTERRUPTED = 130
_LOG_WIDTH = 120
_Handler = Callable[[int, FrameType | None], object] | signal.Handlers


@dataclass(slots=True, kw_only=True)
class Result:
    """What the demonstration measured; None for an act that was not played (to its end)."""

    avg_jct_s: dict[str, float] | None = None
    resume_identical: bool | None = None
    restart_s: float | None = None
    wall_s: float = 0.0

    @property
    def ratio(self) -> float | None:
        """How many times better the average JCT is under tune."""
        if self.avg_jct_s is None:
            return None
        return self.avg_jct_s["proportional"] / self.avg_jct_s["tune"]

    def broken(self, acts: Sequence[str]) -> list[str]:
        """The promises of ``acts`` that were not kept, in words."""
        found = []
        ratio = self.ratio or 0.0
        if "motivating" in acts and ratio < LEAST_RATIO:
            found.append(
                f"the ratio {ratio:.2f} is below {LEAST_RATIO:g}. On a busy machine starting the "
                "jobs takes longer than what tune saves: play it again when it is quiet"
            )
        if "resume" in acts and self.resume_identical is not True:
            found.append("the resumed training differs from the uninterrupted one")
        return found

    def kept(self, acts: Sequence[str]) -> bool:
        """Whether each of ``acts`` showed what it promises."""
        return not self.broken(acts)

    def to_json(self) -> str:
        """The last line of the demonstration."""
        averages, ratio = self.avg_jct_s, self.ratio
        return json.dumps(
            {
                "avg_jct_s": averages and {name: round(jct, 2) for name, jct in averages.items()},
                "ratio": None if ratio is None else round(ratio, 3),
                "resume_identical": self.resume_identical,
                "restart_s": None if self.restart_s is None else round(self.restart_s, 2),
                "wall_s": round(self.wall_s, 1),
            }
        )


@click.command(name="demo")
@click.option("--only", type=click.Choice(ACTS), help="Play this act only.")
@click.option("--keep", is_flag=True, help="Keep the working directory with logs and outputs.")
@click.option(
    "--time-scale",
    type=click.FloatRange(min=0.2, max=100),
    default=1.0,
    show_default=True,
    help="How much longer the emulated trainings of act one take.",
)
def command(only: str | None, keep: bool, time_scale: float) -> None:
    """Show slurm-synergy at work on a real Slurm of its own on this machine."""
    begun_s = time.monotonic()
    console = Console()
    if not console.is_terminal:
        console = Console(width=_LOG_WIDTH)
    screen = Screen(console)
    acts = (only,) if only else ACTS
    _warn_of_load(screen)
    result = Result()
    status = 1
    with _terminable():
        try:
            with _stage(screen, keep=keep) as stage:
                _play(stage, screen, acts, result, time_scale=time_scale)
            status = 0 if result.kept(acts) else 1
            for broken in result.broken(acts):
                screen.say(f"\nThe demonstration failed: {broken}")
        except SynergyError as err:
            screen.say(f"\nThe demonstration failed: {err}")
        except KeyboardInterrupt:
            screen.say("\nInterrupted; everything that was started has been ended.")
            status = _INTERRUPTED
    result.wall_s = time.monotonic() - begun_s
    click.echo(result.to_json())
    raise SystemExit(status)


def _warn_of_load(screen: Screen) -> None:
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores:
        screen.say(
            f"This machine is busy (load {load:.1f} on {cores} cores): jobs start slowly, and the "
            "ratio of the completion times shrinks. Better play this when it is quiet."
        )


def _play(
    stage: Stage, screen: Screen, acts: Sequence[str], result: Result, *, time_scale: float
) -> None:
    try:
        if "motivating" in acts:
            result.avg_jct_s = run_motivating(stage, screen, time_scale=time_scale)
        if "resume" in acts:
            resumed = run_resume(stage, screen)
            result.resume_identical, result.restart_s = resumed.identical, resumed.restart_s
    except SynergyError:
        _show_logs(stage, screen)
        raise


@contextlib.contextmanager
def _stage(screen: Screen, *, keep: bool) -> Iterator[Stage]:
    """A cluster in a temporary directory; both are gone afterwards (``keep``: the files stay)."""
    work = Path(tempfile.mkdtemp(prefix="synergy-demo-"))
    work.chmod(0o755)  # whoever the jobs run as reads the scripts and the munge socket here
    try:
        cluster = DevCluster(dir=work / "slurm", nodes=SHAPES, real_node=False)
        try:
            begun_s = time.monotonic()
            cluster.up()
            took_s = time.monotonic() - begun_s
            version = cluster.status().slurm
            screen.say(
                f"{version} is up after {took_s:.1f} s: {', '.join(cluster.node_names)} "
                f"(pretended GPUs and cores, real daemons)"
            )
            yield Stage(work, cluster)
        finally:
            with _undisturbed():
                cluster.down(keep=True)
    finally:
        if keep:
            screen.say(f"\nLogs and outputs are kept in {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)


def _show_logs(stage: Stage, screen: Screen) -> None:
    """The ends of the logs of the last act, so that a stranger can see why it failed."""
    acts = sorted(
        (path for path in stage.work.iterdir() if (path / "examples").is_dir()),
        key=lambda path: path.stat().st_mtime,
    )
    for path in acts[-1:]:
        for log in [path / "controller.log", *sorted(path.glob("*.out"))]:
            screen.say(f"\n--- {log.relative_to(stage.work)} ends:\n{tail(log)}")
    screen.say(f"\n--- slurmctld.log ends:\n{stage.cluster.log('slurmctld', 15)}")


@contextlib.contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: _Handler) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _terminable() -> contextlib.AbstractContextManager[None]:
    """Inside, SIGTERM and SIGHUP end the demonstration as Ctrl-C does: with everything undone."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    return _handled((signal.SIGTERM, signal.SIGHUP), interrupt)


def _undisturbed() -> contextlib.AbstractContextManager[None]:
    """Inside, a second Ctrl-C does not keep us from ending what we started (it is quick)."""
    return _handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIG_IGN)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; raises SystemExit."""
    command(args=list(sys.argv[1:] if argv is None else argv), prog_name="demo")


if __name__ == "__main__":
    main()
