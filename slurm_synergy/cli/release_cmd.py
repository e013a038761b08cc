"""``synergyctl release-all``: give every managed job back to Slurm; with the controller stopped."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click

from slurm_synergy.cli.control import ask, find_target, local_settings, options, without_settings
from slurm_synergy.cli.release_journal import ReleaseJournal
from slurm_synergy.cli.tables import print_table
from slurm_synergy.config import Settings
from slurm_synergy.controller.ledger import Ledger, holder_of
from slurm_synergy.errors import ClusterError, LedgerError, SynergyError
from slurm_synergy.slurm.client import SlurmClient
from slurm_synergy.slurm.modes import clear_advice
from slurm_synergy.slurm.release_all import (
    GivenJob,
    Remembers,
    original_request,
    plan_release,
    release_all,
)

__all__ = ["release_all_command"]

_PAUSE_S = 0.5
# Beyond KillWait, after which Slurm ends what does not end by itself.
_PATIENCE_S = 30.0


@dataclass(slots=True)
class _Result:
    partition: str
    dry_run: bool
    controller_running: str | None
    jobs: list[GivenJob] = field(default_factory=list)
    reservation: str = ""
    reservation_deleted: bool = False
    advice_cleared: int = 0
    ending: tuple[int, ...] = ()
    new_jobs_are_held: bool = False
    journal: str | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing is left to do."""
        return not self.ending and not any(one.error for one in self.jobs)


class _NoMemory:
    """Where there is no ledger: jobs are known by their marks alone."""

    def request(self, job_id: int) -> Mapping[str, object] | None:
        return None


@click.command(name="release-all")
@options
@click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--force", is_flag=True, help="Go on while a controller runs, which may hold the jobs again."
)
def release_all_command(
    config: Path | None, as_json: bool, dry_run: bool, yes: bool, force: bool
) -> None:
    """Give every job of the managed partition back to Slurm.

    Waiting jobs get their owners' requests back and are released, running ones run on untouched
    and are no longer held at their next requeue, and the controller's reservation is deleted.
    Stop the controller first. What is done is written to released.jsonl in state_dir; doing it
    again does no harm. Exit status: 0 all is given back, 1 something is left, 2 wrong usage.
    """
    from slurm_synergy.slurm.clients import make_client

    settings = local_settings(config)
    if remark := without_settings(config):
        click.echo(f"synergyctl: {remark}", err=True)
    client = make_client(settings.slurm)
    running = _running(settings, config)
    if running and not (force or dry_run):
        raise ClusterError(
            f"{running}; it would hold the jobs again: stop it first (systemctl stop "
            "slurm-synergyd), or say --force"
        )
    if not (dry_run or yes or sys.stdin.isatty()):  # before a state directory is made
        raise click.UsageError("say --yes: there is nobody to ask (or look first: --dry-run)")
    result = _Result(
        partition=settings.slurm.partition,
        dry_run=dry_run,
        controller_running=running,
        reservation=settings.reservation_name if settings.pool.reservation else "",
    )
    with contextlib.ExitStack() as stack:
        memory = _memory(stack, settings, running is not None, dry_run)
        _plan(client, settings, memory, result)
        if not dry_run:
            if not yes:
                _ask(result)
            _release(client, settings, memory, result)
    _tell(result, as_json=as_json)
    if not result.ok and not dry_run:
        raise SystemExit(1)


def _running(settings: Settings, config: Path | None) -> str | None:
    """The controller that is running, in words; None when there is none as far as one can tell."""
    if holder := holder_of(settings.state_dir):
        return f"a controller uses {settings.state_dir} (process {holder})"
    try:
        target = find_target(config, os.environ)
        name = ask(target, "status")["controller"]
    except SynergyError:
        return None
    if name != settings.cluster.controller_name:
        return None
    return f"controller {name} answers at {target.endpoint}"


def _memory(
    stack: contextlib.ExitStack, settings: Settings, in_use: bool, dry_run: bool
) -> Remembers:
    """What the ledger remembers of the jobs. Its lock keeps a controller from starting now."""
    from slurm_synergy.controller.daemon import SystemClock

    if in_use or (dry_run and not (settings.state_dir / "ledger.sqlite").exists()):
        return _NoMemory()
    try:
        return stack.enter_context(Ledger(settings.state_dir, clock=SystemClock()))
    except LedgerError as err:
        click.echo(f"synergyctl: {err}", err=True)
        click.echo("synergyctl: going on by the jobs' own marks, without the ledger", err=True)
        return _NoMemory()


def _begun(memory: Remembers) -> Collection[int]:
    """Jobs with a lease: what a killed controller had begun to start is among them."""
    if not isinstance(memory, Ledger):
        return ()
    return {stored.lease.job_id for stored in memory.load_leases()}


def _plan(client: SlurmClient, settings: Settings, memory: Remembers, result: _Result) -> None:
    result.jobs = list(
        plan_release(
            client,
            result.partition,
            result.reservation,
            lambda facts: original_request(facts, memory),
            _begun(memory),
        )
    )
    plugins = client.read_config().raw.get("JobSubmitPlugins", "")
    result.new_jobs_are_held = "lua" in plugins.split(",")


def _ask(result: _Result) -> None:
    waiting = sum(one.waits for one in result.jobs)
    click.confirm(
        f"Release {_jobs(waiting, 'waiting')} of partition {result.partition} to Slurm, leave "
        f"{len(result.jobs) - waiting} running ones to themselves"
        + (f", and delete reservation {result.reservation}?" if result.reservation else "?"),
        abort=True,
    )


def _release(client: SlurmClient, settings: Settings, memory: Remembers, result: _Result) -> None:
    """Release in passes: a job that is being requeued can be changed only when that is over."""
    done: dict[int, GivenJob] = {}
    with ReleaseJournal(settings.state_dir) as journal:
        result.journal = str(journal.path)
        journal.write("begin", partition=result.partition, reservation=result.reservation)

        def tell(one: GivenJob) -> None:
            done[one.job_id] = one
            journal.write("job", **asdict(one))

        deadline_s = time.monotonic() + client.read_config().kill_wait_s + _PATIENCE_S
        while True:
            left = _pass(client, memory, result, tell)
            result.ending = _ending(client, result.partition)
            if not result.ending or time.monotonic() > deadline_s:
                break
            time.sleep(_PAUSE_S)
        result.jobs = [done[job_id] for job_id in sorted(done)]
        result.advice_cleared = clear_advice(client, client.read_queue(result.partition))
        journal.write(
            "end",
            reservation_deleted=result.reservation_deleted,
            advice_cleared=result.advice_cleared,
            ending=result.ending,
            problem=str(left) if left else None,
        )
    if left is not None:
        raise left


def _pass(
    client: SlurmClient,
    memory: Remembers,
    result: _Result,
    tell: Callable[[GivenJob], None],
) -> ClusterError | None:
    """One go over all jobs; why the reservation could not be deleted, if so."""
    try:
        given = release_all(
            client,
            result.partition,
            result.reservation,
            lambda facts: original_request(facts, memory),
            tell,
            _begun(memory),
        )
    except ClusterError as err:
        return err
    result.reservation_deleted |= bool(given.reservation)
    return None


def _ending(client: SlurmClient, partition: str) -> tuple[int, ...]:
    return tuple(
        facts.job_id
        for facts in client.read_queue(partition)
        if facts.partition == partition and facts.completing and not facts.state.finished
    )


def _tell(result: _Result, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({**asdict(result), "ok": result.ok}, indent=2))
        return
    if result.jobs:
        print_table(
            ("JOBID", "USER", "STATE", "WHAT"), [_row(one, result.dry_run) for one in result.jobs]
        )
    would = "would be " if result.dry_run else ""
    waiting = sum(one.waits for one in result.jobs)
    click.echo(
        f"{_jobs(waiting, 'waiting')} {would}released, {len(result.jobs) - waiting} running ones "
        f"{would}left to Slurm"
    )
    if result.reservation_deleted:
        click.echo(f"reservation {result.reservation} deleted")
    if result.ending:
        ids = ", ".join(map(str, result.ending))
        click.echo(f"still ending, and not given back: {ids}; call release-all again in a minute")
    if result.new_jobs_are_held:
        click.echo(
            f"note: job_submit.lua may still hold new jobs of partition {result.partition}: set "
            "mode = 'observe' in synergy_site.lua, or take lua off JobSubmitPlugins"
        )
    if result.journal:
        click.echo(f"what was done is in {result.journal}")


def _jobs(count: int, which: str) -> str:
    return f"{count} {which} job{'s' if count != 1 else ''}"


def _row(one: GivenJob, dry_run: bool) -> tuple[str, ...]:
    state = "waits" if one.waits else "runs"
    what = " ".join(one.fields) or ("as it was asked for" if one.waits else "as it runs")
    if not one.request_known and one.waits:
        what += " (its owner's request is not known)"
    if one.error:
        what = f"NOT given back: {one.error}"
    elif not one.given and not dry_run:
        what = "has ended"
    return str(one.job_id), one.user, state, what
