"""``synergy-profile``: measure how fast a training command goes with more or fewer cores.

Outside Slurm, on any machine, with the base installation. The profile is printed and kept as a
JSON document, which ``synergyctl profile import`` brings into a cluster's store.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from slurm_synergy.core.pipeline import job_rate
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import LeaseError, ModelError
from slurm_synergy.jobside.binding import process_tree
from slurm_synergy.jobside.data_told import DataTold
from slurm_synergy.jobside.profiling import Limits, Profiled, profile_command
from slurm_synergy.jobside.profiling_lease import program_name
from slurm_synergy.jobside.storage_probe import (
    Bandwidth,
    OpenFiles,
    data_size,
    read_bandwidth,
    warm,
)
from slurm_synergy.profiler.documents import to_document
from slurm_synergy.profiler.evidence import UNTYPED, StoredProfile, checked_key, evidence_of
from slurm_synergy.profiler.filling import DataFacts, filled
from slurm_synergy.profiler.sweep import MOST_POINTS, Measurement, Sweep, SweepResult, SweepSpan

__all__ = ["DESCRIPTION", "argument_parser", "main", "profiles_folder"]

_USAGE = 2
_FAILED = 1
_WARM_SHARE = 0.5
_GPU_TYPE = re.compile(r"[A-Za-z0-9_.-]+")

DESCRIPTION = """\
Runs a training command, moves it between core counts of this machine while it trains, and measures
how fast it is with each. Prints and keeps the profile. The command needs no change where it
fetches its batches from a PyTorch DataLoader; other loops use synergy.iterate(). It is ended when
the profile is known (about a minute per core count, at most eight of these), and its checkpoints
are thrown away unless SYNERGY_CHECKPOINT_DIR is set.
"""
_EPILOG = """\
exit status: 0 measured; 1 not measured, or cut off before the end (the reason is printed, and a
profile of low confidence is kept); 2 wrong usage. Bring a profile into the cluster with
'synergyctl profile import FILE', and use it with --comment=synergy:profile=KEY.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the command; returns the exit status."""
    parser = argument_parser()
    options = parser.parse_args(argv)
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not words:
        parser.error("a command is needed, as in: synergy-profile python train.py")
    try:
        job = _job(options, words)
        return _measured(options, words, job)
    except (LeaseError, ModelError, OSError) as err:
        sys.stderr.write(f"synergy-profile: {err}\n")
        return _USAGE if isinstance(err, ModelError | FileNotFoundError) else _FAILED


def profiles_folder() -> Path:
    """Where this user's profiles are kept: XDG_DATA_HOME, else ~/.local/share."""
    root = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(root).expanduser() / "slurm-synergy" / "profiles"


def argument_parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = argparse.ArgumentParser(
        prog="synergy-profile",
        usage="%(prog)s [options] [--] command [arguments]",
        description=DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--key", help="key of the profile (default: made of command, script and directory)")
    add("--gpus", type=int, default=1, help="GPUs that the command trains on (default 1)")
    add("--gpu-type", default=UNTYPED, help="their type, as Slurm calls it (default: none)")
    add("--cpus", type=int, help="most cores to try (default: all that this process may use)")
    add("--proportional", type=int, metavar="CPUS", help="the command's GPU-proportional share")
    add("--step", type=int, default=0, metavar="CPUS", help="try multiples of this (default: GPUs)")
    add("--iterations", type=int, default=50, help="steps measured per core count (default 50)")
    add("--warmup", type=int, default=5, help="steps discarded before them (default 5)")
    add("--point-seconds", type=float, default=75.0, help="longest per core count (default 75)")
    add(
        "--start-seconds", type=float, default=300.0, help="longest to the first step (default 300)"
    )
    add(
        "--end-seconds",
        type=float,
        default=20.0,
        help="longest to its end, then it is killed (default 20)",
    )
    add("--points", type=int, default=MOST_POINTS, help=f"most core counts (default {MOST_POINTS})")
    add("--data", type=Path, action="append", default=[], metavar="PATH", help=_DATA_HELP)
    add("--samples", type=int, help="samples per epoch (default: one per file of --data)")
    add("--storage-mib-s", type=float, help="bandwidth of the storage (default: measured)")
    add("--no-warm", action="store_true", help="do not read --data into memory before")
    add("--keep-running", action="store_true", help="let the command run on to its own end")
    add("--output", type=Path, metavar="FILE", help="where to keep the profile (default: " + _KEPT)
    add("--no-store", action="store_true", help="only print the profile")
    add(
        "--json",
        action="store_true",
        help="print one JSON object; what the command prints goes to standard error then",
    )
    add("command", nargs=argparse.REMAINDER, metavar="command", help="what trains")
    return parser


_DATA_HELP = (
    "file or directory of the data set; may be repeated. Without it, and where the program does "
    "not tell, memory is taken not to matter"
)
_KEPT = "KEY.json in $XDG_DATA_HOME/slurm-synergy/profiles or ~/.local/share/...)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What is measured: its key, the span of the sweep, and the data that is known before."""

    key: str
    span: SweepSpan
    files: tuple[Path, ...]
    data_mib: float
    samples: int = 0


def _job(options: argparse.Namespace, words: Sequence[str]) -> _Job:
    for name in ("gpus", "iterations", "points", "cpus", "proportional", "samples"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ModelError(f"--{name} must be at least 1, not {value}")
    if (
        options.warmup < 0
        or min(options.point_seconds, options.start_seconds, options.end_seconds) <= 0
    ):
        raise ModelError(
            "--warmup must not be negative, and the limits in seconds must be positive"
        )
    if not _GPU_TYPE.fullmatch(options.gpu_type):
        raise ModelError(f"--gpu-type {options.gpu_type!r}: letters, digits, '_', '.' and '-'")
    if options.storage_mib_s is not None and not 0 < options.storage_mib_s < float("inf"):
        raise ModelError(f"--storage-mib-s must be positive, not {options.storage_mib_s:g}")
    visible = len(os.sched_getaffinity(0))
    most = options.cpus or visible
    if most > visible:
        raise ModelError(f"--cpus {most}: this process may use {visible} cores only")
    size = data_size(options.data)
    return _Job(
        key=checked_key(options.key or _own_key(words)),
        span=SweepSpan(
            gpus=options.gpus,
            most_cpus=most,
            proportional_cpus=options.proportional or most,
            step=options.step,
        ),
        files=size.files,
        data_mib=size.mib,
    )


def _own_key(words: Sequence[str]) -> str:
    """The key under which the controller keeps this command of this user, if it has none."""
    return f"u{os.getuid()}-{program_name(words, str(Path.cwd()))}"


def _measured(options: argparse.Namespace, words: Sequence[str], job: _Job) -> int:
    path = None if options.no_store else options.output or profiles_folder() / f"{job.key}.json"
    if path is not None:
        _check_place(path)
    if job.files and not options.no_warm:
        room = int(psutil.virtual_memory().available * _WARM_SHARE)
        _say(f"read {warm(job.files, room) / 2**20:.0f} MiB of the data set into memory")
    seen = OpenFiles()
    with _to_stderr() if options.json else contextlib.nullcontext():
        done = profile_command(
            words,
            dict(os.environ),
            Sweep(span=job.span, most_points=options.points),
            limits=Limits(
                iterations=options.iterations,
                warmup=options.warmup,
                point_s=options.point_seconds,
                start_s=options.start_seconds,
                sweep_s=options.point_seconds * options.points,
                end_s=options.end_seconds,
            ),
            told=_tell_point,
            watch=lambda: seen.look(process_tree(os.getpid())[1:]),
            ends=not options.keep_running,
        )
    if not done.sweep.points:
        _say(f"nothing was measured: {done.sweep.stopped}")
        return _FAILED
    result = done.sweep.result()
    job = _with_what_was_told(job, done.told)
    storage = _storage(options, job.files or seen.files, result)
    stored = _stored(options, job, done, result, storage)
    if path is not None:
        _keep(path, stored)
    if options.json:
        _show(json.dumps(_as_json(stored, result, storage, done, path), indent=2))
    else:
        _print_profile(stored, result, storage, path)
    return _FAILED if result.why else 0


@contextlib.contextmanager
def _to_stderr() -> Iterator[None]:
    """Meanwhile the standard output of this process and its children is standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _with_what_was_told(job: _Job, told: DataTold | None) -> _Job:
    """The job with the data set that its program has told, unless --data named one."""
    if job.files or told is None or not told.files:
        return job
    files = tuple(Path(name) for name in told.files)
    return replace(job, files=files, data_mib=told.mib(), samples=told.samples)


def _tell_point(point: Measurement) -> None:
    waits = "" if point.wait_share is None else f", {point.wait_share:.0%} waiting for data"
    cores = f"{point.cpus} core{'s' if point.cpus != 1 else ''}"
    _say(f"{cores}: {point.samples_per_s:.1f} samples/s{waits}")


def _storage(options: argparse.Namespace, files: Sequence[Path], result: SweepResult) -> Bandwidth:
    if options.storage_mib_s is not None:
        return Bandwidth(mib_s=options.storage_mib_s, how="as told")
    return read_bandwidth(files, readers=result.knee_cpus)


def _stored(
    options: argparse.Namespace,
    job: _Job,
    done: Profiled,
    result: SweepResult,
    storage: Bandwidth,
) -> StoredProfile:
    facts = DataFacts(
        dataset_mib=job.data_mib,
        samples_per_epoch=options.samples or job.samples or max(len(job.files), 1),
        storage_mib_s=storage.mib_s or float("inf"),
        process_mem_mib=done.own_mem_mib,
    )
    evidence = evidence_of(
        result,
        gpu_type=options.gpu_type,
        measured_s=time.time(),
        owner_uid=os.getuid(),
        source=f"synergy-profile on {socket.gethostname()}",
    )
    profile = filled(result, key=job.key, gpu_type=options.gpu_type, facts=facts)
    return StoredProfile(profile=profile, evidence=evidence)


def _check_place(path: Path) -> None:
    """Whether a file can be made there: minutes of measuring must not be for nothing."""
    parents = path.absolute().parents
    folder = next((one for one in parents if one.exists()), path)
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ModelError(f"no profile can be kept in {path}: name another --output, or --no-store")


def _keep(path: Path, stored: StoredProfile) -> None:
    """Write the document; whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(to_document(stored), indent=2) + "\n", encoding="utf-8")
    draft.replace(path)


# -- what is shown ---------------------------------------------------------------------------------


def _as_json(
    stored: StoredProfile,
    result: SweepResult,
    storage: Bandwidth,
    done: Profiled,
    path: Path | None,
) -> dict[str, Any]:
    return {
        "profile": to_document(stored),
        "gpu_bound": result.gpu_bound,
        "knee_cpus": result.knee_cpus,
        "predicted": [
            {"cpus": cpus, "samples_per_s": _predicted(stored, cpus)} for cpus in result.span.counts
        ],
        "storage": {"mib_s": storage.mib_s, "how": storage.how, "read_mib": storage.read_mib},
        "own_mem_mib": done.own_mem_mib,
        "file": str(path) if path else None,
    }


def _predicted(stored: StoredProfile, cpus: int) -> float | None:
    """Samples/s with the data set in memory."""
    evidence, pipeline = stored.evidence, stored.profile.pipeline
    assert evidence is not None
    assert pipeline is not None
    mem_mib = int(pipeline.process_mem_mib + pipeline.dataset_mib) + 1
    share = Resources(gpus=evidence.gpus, cpus=cpus, mem_mib=mem_mib)
    return job_rate(stored.profile, evidence.gpu_type, (share,))


def _print_profile(
    stored: StoredProfile, result: SweepResult, storage: Bandwidth, path: Path | None
) -> None:
    measured = {point.cpus: point for point in result.points}
    top = result.rate(result.span.counts[-1])
    rows = []
    for cpus in result.span.counts:
        point = measured.get(cpus)
        waits = point.wait_share if point else None
        rows.append(
            (
                str(cpus),
                f"{point.samples_per_s:.1f}" if point else "-",
                f"{_predicted(stored, cpus) or 0:.1f}",
                f"{result.rate(cpus) / top:.0%}",
                "-" if waits is None else f"{waits:.0%}",
            )
        )
    _table(("CORES", "MEASURED/s", "PROFILE/s", "OF TOP", "WAITING"), rows)
    for line in _words(stored, result, storage, path):
        _show(line)


def _words(
    stored: StoredProfile, result: SweepResult, storage: Bandwidth, path: Path | None
) -> list[str]:
    pace = "the GPUs set the pace" if result.gpu_bound else "the loader sets the pace"
    said = [
        f"{result.knee_cpus} cores reach 97 % of the top speed; with {result.span.counts[-1]} "
        f"{pace} ({result.gpu_samples_per_s:.1f} samples/s when data is always ready)",
    ]
    pipeline = stored.profile.pipeline
    assert pipeline is not None
    if storage.mib_s is None:
        said.append(f"storage: not measured ({storage.how}); reading is taken not to limit")
    else:
        said.append(f"storage: {storage.mib_s:.0f} MiB/s ({storage.how})")
    if not pipeline.dataset_mib:
        said.append("the size of the data set is not known (--data): memory is taken not to matter")
    said.append(f"the processes had {pipeline.process_mem_mib} MiB for themselves")
    if result.why:
        said.append(f"confidence is low: {result.why}")
    if stored.evidence is not None and stored.evidence.gpu_type == UNTYPED:
        said.append("the type of the GPUs is not known (--gpu-type): 'profile import' asks for it")
    said.append(f"profile {stored.profile.key}" + (f" is kept in {path}" if path else ""))
    return said


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A drawn table where the command line is installed, else plain columns."""
    try:
        from slurm_synergy.cli.tables import print_table
    except ImportError:
        for cells in (columns, *rows):
            _show("  ".join(cell.rjust(10) for cell in cells))
    else:
        print_table(columns, rows)


def _show(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _say(text: str) -> None:
    sys.stderr.write(f"synergy-profile: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
