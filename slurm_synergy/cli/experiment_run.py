"""Running the cells of an experiment: here, over processes, or as jobs of a Slurm cluster.

Whoever runs a cell writes its result to the experiment's directory. So whatever is killed, what was
done is there, and the same command goes on with the rest.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurm_synergy.core.model import Node
from slurm_synergy.errors import ConfigError, SynergyError
from slurm_synergy.simulator.cells import Cell, Outcome, store
from slurm_synergy.simulator.experiment import DEFAULT_JOBS, Settings
from slurm_synergy.simulator.experiment_policies import OF_POLICIES

__all__ = [
    "Done",
    "check_policy_settings",
    "here",
    "processes",
    "simulate_cell",
    "study_of",
    "work",
]

_CPUS_PER_GPU = 3.0  # as in Synergy's evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A cell that came to its end; ``error`` says why there is no result."""

    cell: Cell
    error: str = ""


def check_policy_settings(settings: Settings, file: str) -> None:
    """Raise ConfigError for a setting of another policy than the cell's: it would do nothing."""
    own = OF_POLICIES.get(settings.policy, {})
    for key in dict.fromkeys(key for names in OF_POLICIES.values() for key in names):
        value = getattr(settings, key)
        if key in own or value == Settings.model_fields[key].default:
            continue
        theirs = " and ".join(name for name, keys in OF_POLICIES.items() if key in keys)
        raise ConfigError(
            f"means nothing to policy {settings.policy}",
            file=file,
            key=key,
            value=value,
            remedy=f"it is a setting of {theirs}: give it in a grid of their own",
        )


def study_of(settings: Settings) -> Any:
    """The simulation of ``settings``. Raises ConfigError for what it names and is not there."""
    from slurm_synergy.mechanisms import MECHANISMS
    from slurm_synergy.policies import POLICIES
    from slurm_synergy.simulator.cluster import Costs
    from slurm_synergy.simulator.generate import generate
    from slurm_synergy.simulator.study import Semantics, Study
    from slurm_synergy.simulator.traces import read_trace

    if settings.trace is None:
        trace = generate(_recipe(settings), settings.seed)
    else:
        trace = read_trace(_trace_name(settings))
        most = max(1, math.ceil(len(trace.jobs) * settings.part))
        trace = replace(trace, jobs=trace.jobs[: min(most, settings.jobs or most)])
    return Study(
        nodes=_nodes(settings),
        trace=trace,
        policy=_policy(settings, POLICIES),
        mechanism=_pick("mechanism", settings.mechanism, MECHANISMS),
        round_s=settings.round_s,
        event_delay_s=settings.event_delay_s,
        semantics=Semantics(settings.semantics),
        costs=Costs(
            restart_s=settings.restart_s,
            checkpoint_s=settings.checkpoint_s,
            profiling_s=settings.profiling_s,
        ),
        split=settings.split,
        measured=settings.measured(),
        profile_error=settings.profile_error,
        seed=settings.seed,
        stopwatch=time.perf_counter,
    )


def _recipe(settings: Settings) -> str:
    return (
        f"philly-derived:load={settings.load!r},split={settings.split},gpus={settings.sizes},"
        f"arrivals={settings.arrivals},jobs={settings.jobs or DEFAULT_JOBS},seed={settings.seed}"
    )


def _trace_name(settings: Settings) -> str:
    """The trace with the options that are settings of their own."""
    name = settings.trace_name or ""
    if not settings.elastic:
        return name
    return (
        f"{name},elastic=full,rigid={settings.rigid!r},scale={settings.scale!r},"
        f"profiling={settings.profiling},pipelines={settings.pipelines},tuned={settings.tuned}"
    )


def _policy(settings: Settings, known: Mapping[str, Any]) -> Any:
    found = _pick("policy", settings.policy, known)
    values = {
        field: getattr(settings, key) for key, field in OF_POLICIES.get(settings.policy, {}).items()
    }
    own = {field: value for field, value in values.items() if value is not None}
    return replace(found, **own) if own else found


def _nodes(settings: Settings) -> tuple[Node, ...]:
    from slurm_synergy.simulator.pool import make_nodes, read_nodes

    if settings.cluster is not None:
        nodes = read_nodes(Path(settings.cluster))
        ratio = settings.cpus_per_gpu
        return nodes if ratio is None else tuple(_with_cores(node, ratio) for node in nodes)
    return tuple(
        make_nodes(
            name="node",
            count=settings.nodes,
            gpu_type=settings.gpu_type,
            gpus=settings.gpus_per_node,
            cpus=max(round(settings.gpus_per_node * (settings.cpus_per_gpu or _CPUS_PER_GPU)), 1),
            mem_gib=settings.mem_gib,
        )
    )


def _with_cores(node: Node, per_gpu: float) -> Node:
    total = replace(node.total, cpus=max(round(node.total.gpus * per_gpu), 1))
    return replace(node, total=total, capacity=total)


def _pick(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise ConfigError(
            f"there is no such {kind}",
            key=kind,
            value=name,
            remedy=f"choose one of {', '.join(sorted(known))}",
        )
    return known[name]


def simulate_cell(settings: Settings) -> Outcome:
    """Simulate one cell. Raises SynergyError for what cannot be simulated."""
    from slurm_synergy.simulator.recorder import Recorder
    from slurm_synergy.simulator.study import run_study

    study = study_of(settings)
    recorder = Recorder(study.mechanism)
    result = run_study(replace(study, mechanism=recorder))
    world = result.played.world
    span_s = max(world.now_s - result.played.began_s, 1e-9)
    cpus = sum(node.total.cpus for node in world.nodes)
    return Outcome(
        summary=result.summary,
        jobs={
            "id": [one.job_id for one in result.jobs],
            "jct_s": [round(one.jct_s, 3) for one in result.jobs],
            "run_s": [round(one.run_s, 3) for one in result.jobs],
            "speedup": [round(one.speedup, 4) for one in result.jobs],
        },
        cpu_used=recorder.until(world.now_s) / span_s / cpus,
        assumptions=result.assumptions,
    )


def work(cell: Cell, directory: Path) -> str:
    """Simulate a cell and write its result; empty, or why it could not be."""
    try:
        store(cell, simulate_cell(cell.settings), directory)
    except SynergyError as err:
        return str(err)
    return ""


def here(cells: Sequence[Cell], directory: Path) -> Iterator[Done]:
    """One cell after another in this process."""
    for cell in cells:
        yield Done(cell=cell, error=work(cell, directory))


def _end_with_parent() -> None:
    """Let this process end when the one that started it does: nobody would collect its work."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Processes that are started here never see a terminal's Ctrl-C, and this one sees it later.

    It reaches all of them, and this one decides what becomes of the others.
    """
    came: list[int] = []
    usual = signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # children inherit it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, usual)
    if came:
        raise KeyboardInterrupt


def processes(cells: Sequence[Cell], directory: Path, count: int) -> Iterator[Done]:
    """``count`` cells at a time, each in a process of its own making. Raises SynergyError."""
    # Fresh interpreters: threads that draw the progress do not survive a fork.
    context = multiprocessing.get_context("spawn")
    others = multiprocessing.active_children()
    pool = concurrent.futures.ProcessPoolExecutor(
        count, mp_context=context, initializer=_end_with_parent
    )
    try:
        with _interrupts_later():
            pending = {pool.submit(work, cell, directory): cell for cell in cells}
        for future in concurrent.futures.as_completed(pending):
            yield Done(cell=pending[future], error=future.result())
    except BrokenProcessPool as err:
        raise SynergyError(
            "a process that simulated was killed, perhaps for want of memory; results so far are "
            f"kept in {directory}: run the same command again with a smaller --jobs"
        ) from err
    except (KeyboardInterrupt, GeneratorExit):
        for one in multiprocessing.active_children():
            if one not in others:
                one.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
