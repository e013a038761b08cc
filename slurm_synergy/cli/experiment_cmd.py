"""``synergyctl experiment``: a grid of simulations, resumable, with tables and figures."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurm_synergy.cli.number_options import FiniteRange
from slurm_synergy.errors import ConfigError, SynergyError

if TYPE_CHECKING:
    from slurm_synergy.cli.experiment_run import Done
    from slurm_synergy.simulator.cells import Cell, Outcome
    from slurm_synergy.simulator.experiment import Definition, Settings

__all__ = ["experiment"]

_SHIPPED = Path(__file__).resolve().parents[1] / "experiments"


@click.command()
@click.argument("what", metavar="FILE|NAME|list")
@click.option(
    "--out",
    "out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of results, tables and figures.  [default: ./NAME]",
)
@click.option(
    "--jobs",
    "jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many simulations at a time.",
)
@click.option("--slurm", "on_slurm", is_flag=True, help="Run them as an array of Slurm jobs.")
@click.option(
    "--slurm-option",
    "slurm_options",
    multiple=True,
    metavar="KEY=VALUE",
    help="For --slurm: partition=NAME, timeout_min=N, mem_gb=N, ... (repeatable).",
)
@click.option(
    "--only",
    "only",
    multiple=True,
    metavar="KEY=VALUE",
    help="Only the cells with this setting (repeatable; a repeated KEY is a choice).",
)
@click.option(
    "--scale",
    type=FiniteRange(min=0, max=1, min_open=True),
    default=1.0,
    show_default=True,
    help="A short cut: this part of the jobs, on as many fewer nodes if they are generated.",
)
@click.option("--fresh", is_flag=True, help="Simulate again what has a result already.")
@click.option(
    "--show", "only_show", is_flag=True, help="Simulate nothing: show the results that are there."
)
@click.option(
    "--report",
    "report",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the page with all tables and figures to this file; it is complete in itself.  "
    "[default: report.html in the directory]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def experiment(
    what: str,
    out: Path | None,
    jobs: int,
    on_slurm: bool,
    slurm_options: Sequence[str],
    only: Sequence[str],
    scale: float,
    fresh: bool,
    only_show: bool,
    report: Path | None,
    as_json: bool,
) -> None:
    """Run the simulations that FILE defines, or the shipped definition NAME.

    Results are kept in the directory: run the same command again and it goes on where it was.
    'list' shows the shipped definitions, which reproduce the figures and tables of Synergy and Sia.
    """
    if what == "list":
        _list(as_json)
        return
    if report is not None:
        from slurm_synergy.simulator.rows import check_rows_path

        check_rows_path(report)
    path = _find(what)
    if fresh and only_show:
        raise ConfigError("--show simulates nothing", key="--fresh", remedy="leave one out")
    if slurm_options and not on_slurm:
        raise ConfigError("means nothing without --slurm", key="--slurm-option", remedy="add that")
    definition, cells = _cells(path, only, scale)
    directory = out or Path(path.stem)
    if not only_show:
        _make(directory)
    outcomes = _load(list(cells.values()), directory, fresh)
    missing = [cell for cell in dict.fromkeys(cells.values()) if cell not in outcomes]
    options = slurm_options if on_slurm else None
    errors = {} if only_show else _run(missing, directory, jobs, options, len(cells))
    outcomes.update(_load([cell for cell in missing if cell not in errors], directory, False))
    settings = [cell.settings for cell in cells.values()]
    for cell, text in errors.items():
        click.echo(f"failed: {_words(cell.settings, settings)}: {text}", err=True)
    found = {one: outcomes[cell] for one, cell in cells.items() if cell in outcomes}
    if found:
        _finish(definition, found, directory, report or directory / "report.html", scale, as_json)
    if errors:
        text = f"{len(errors)} of {len(cells)} simulations failed"
        if found and as_json:  # standard output has its one object already
            click.echo(f"synergyctl: {text}", err=True)
            raise click.exceptions.Exit(1)
        raise SynergyError(text)
    if not found:
        raise SynergyError(
            f"there is no result in {directory}; the same command without --show simulates"
        )


def _cells(
    path: Path, only: Sequence[str], scale: float
) -> tuple[Definition, dict[Settings, Cell]]:
    """The definition and its cells by their settings there; a short cut's cells are smaller."""
    from slurm_synergy.cli.experiment_run import check_policy_settings
    from slurm_synergy.simulator.cells import Cell, code_version
    from slurm_synergy.simulator.experiment import expand, read_definition, shorten
    from slurm_synergy.simulator.experiment_charts import DISTRIBUTIONS
    from slurm_synergy.simulator.outcome import check_expected, check_names

    definition = read_definition(path)
    check_names(definition, tuple(DISTRIBUTIONS), str(path))
    defined = expand(definition, path)
    check_expected(definition, defined, str(path))
    chosen = [one for one in defined if _wanted(one, only)]
    if not chosen:
        raise ConfigError(
            "leaves no cell",
            key="--only",
            value=" ".join(only),
            remedy=f"the values are {_values(defined, only)}",
        )
    for one in chosen:
        check_policy_settings(one, str(path))
    code = code_version()
    return definition, {
        one: Cell.of(shorten(one, scale) if scale < 1 else one, code) for one in chosen
    }


def _finish(
    definition: Definition,
    found: dict[Settings, Outcome],
    directory: Path,
    report: Path,
    scale: float,
    as_json: bool,
) -> None:
    from slurm_synergy.cli.experiment_show import show, write_outputs
    from slurm_synergy.simulator.outcome import Results

    results = Results(definition, found)
    content = write_outputs(results, directory, report, scale)
    if as_json:
        click.echo(json.dumps(content))
    else:
        show(results, content, directory, report)


def _find(what: str) -> Path:
    path = Path(what)
    shipped = _SHIPPED / f"{what}.yaml"
    if path.is_file() or not shipped.is_file():
        if not path.exists():
            known = (one.stem for one in _SHIPPED.glob("*.yaml"))
            near = difflib.get_close_matches(what, known, 1)
            raise ConfigError(
                "is neither a file nor a shipped definition",
                key=what,
                remedy=f"did you mean '{near[0]}'?"
                if near
                else "`synergyctl experiment list` shows those",
            )
        return path
    return shipped


def _list(as_json: bool) -> None:
    from slurm_synergy.cli.tables import print_table
    from slurm_synergy.simulator.experiment import read_definition

    keys, rows = ("name", "title", "source"), []
    for path in sorted(_SHIPPED.glob("*.yaml")):
        definition = read_definition(path)
        rows.append((path.stem, definition.title, definition.source))
    if as_json:
        click.echo(json.dumps([dict(zip(keys, row, strict=True)) for row in rows]))
    else:
        print_table(("name", "what", "of"), rows)
        click.echo(f"\nThe files are in {_SHIPPED}; copy one to make your own.")


def _wanted(settings: Settings, only: Sequence[str]) -> bool:
    choices: dict[str, list[str]] = {}
    for text in only:
        key, equals, value = text.partition("=")
        if not equals or not hasattr(settings, key):
            raise ConfigError(
                "is not a setting and its value",
                key="--only",
                value=text,
                remedy=f"give KEY=VALUE with KEY of {', '.join(type(settings).model_fields)}",
            )
        choices.setdefault(key, []).append(value)
    return all(_is(getattr(settings, key), values) for key, values in choices.items())


def _is(found: object, values: Sequence[str]) -> bool:
    """Whether a setting has one of ``values``, which may be written as in the definition."""
    if str(found) in values or (isinstance(found, str) and Path(found).name in values):
        return True
    return any(_same(found, _as_yaml(text)) for text in values)


def _as_yaml(text: str) -> object:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _same(found: object, value: object) -> bool:
    return found == value and isinstance(found, bool) == isinstance(value, bool)


def _values(cells: Sequence[Settings], only: Sequence[str]) -> str:
    """The values that there are of the settings in ``only``."""
    from slurm_synergy.simulator.outcome import shown

    keys = dict.fromkeys(text.partition("=")[0] for text in only)
    found = {key: dict.fromkeys(str(shown(getattr(one, key))) for one in cells) for key in keys}
    return "; ".join(f"{key}: {', '.join(each)}" for key, each in found.items())


def _make(directory: Path) -> None:
    """Make the directory of the results. Raises ConfigError when nothing can be written there."""
    cells = directory / "cells"
    try:
        cells.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(cells, os.R_OK | os.W_OK | os.X_OK) else "permission denied"
    except OSError as err:
        why = str(err)
    if why:
        raise ConfigError(
            f"cannot be written: {why}",
            key="--out",
            value=str(directory),
            remedy="name a directory that you may write",
        )


def _load(cells: Sequence[Cell], directory: Path, fresh: bool) -> dict[Cell, Outcome]:
    """The results that are there; damaged ones are named, and removed to be made again."""
    from slurm_synergy.simulator.cells import Damaged, load

    found: dict[Cell, Outcome] = {}
    for cell in cells:
        if fresh:
            cell.path(directory).unlink(missing_ok=True)
            continue
        try:
            outcome = load(cell, directory)
        except Damaged as err:
            click.echo(f"{err}; it is simulated again", err=True)
            cell.path(directory).unlink(missing_ok=True)
        else:
            if outcome is not None:
                found[cell] = outcome
    return found


def _run(
    cells: Sequence[Cell],
    directory: Path,
    jobs: int,
    slurm_options: Sequence[str] | None,
    total: int,
) -> dict[Cell, str]:
    """Simulate ``cells``; those that failed, with the reason."""
    from slurm_synergy.cli.experiment_progress import Progress

    errors: dict[Cell, str] = {}
    if not cells:
        return errors
    progress = Progress(total=total, before=total - len(cells))
    names = [cell.settings for cell in cells]
    try:
        with progress:
            for done in _runner(cells, directory, jobs, slurm_options):
                progress.step(_words(done.cell.settings, names), done.error)
                if done.error:
                    errors[done.cell] = done.error
    except KeyboardInterrupt:
        text = f"stopped; results so far are kept in {directory}: the same command goes on"
        click.echo(text, err=True)
        raise
    return errors


def _runner(
    cells: Sequence[Cell], directory: Path, jobs: int, slurm_options: Sequence[str] | None
) -> Iterator[Done]:
    from slurm_synergy.cli.experiment_run import here, processes

    if slurm_options is not None:
        from slurm_synergy.cli.experiment_slurm import parse_options, slurm

        return slurm(cells, directory.resolve(), jobs, parse_options(slurm_options))
    return here(cells, directory) if jobs == 1 else processes(cells, directory, jobs)


def _words(settings: Settings, among: Sequence[Settings]) -> str:
    """What tells this cell from the others."""
    from slurm_synergy.simulator.outcome import shown, varying

    keys = varying(among) or ["policy", "mechanism"]
    return " ".join(f"{key}={shown(getattr(settings, key))}" for key in keys)
