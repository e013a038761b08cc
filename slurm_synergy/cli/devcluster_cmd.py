"""``synergyctl devcluster up|down|status|env``."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

import click

from slurm_synergy.config import parse_address
from slurm_synergy.core.wording import counted
from slurm_synergy.devcluster import DevCluster, default_state_dir, load_shapes, parse_shape
from slurm_synergy.errors import ConfigError

__all__ = ["devcluster"]

_dir_option = click.option(
    "--dir",
    "state_dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="State directory.  [default: slurm-synergy/devcluster below XDG_STATE_HOME]",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def _address(text: str) -> str:
    try:
        _, port = parse_address(text)
    except ValueError as err:
        raise ConfigError(f"{err}", key="--endpoint", remedy="write e.g. 127.0.0.1:7737") from err
    if not port:
        raise ConfigError(f"{text!r}: port 0 tells no address", key="--endpoint")
    return text


@click.group()
def devcluster() -> None:
    """A real Slurm with pretended GPU nodes on this machine, for trying things out."""


@devcluster.command()
@_dir_option
@_json_option
@click.option(
    "--nodes",
    "shapes",
    multiple=True,
    metavar="NODES:KEY=VALUE,...",
    help="Nodes to pretend, repeatable: 'v100-[1-4]:gpus=8,cores=24,mem=500000' "
    "(also type=, sockets=; mem in MiB).",
)
@click.option(
    "--file",
    "shape_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML file with the nodes: 'nodes: {v100-[1-4]: {gpus: 8, cores: 24, mem: 500000}}'.",
)
@click.option(
    "--real-node/--no-real-node",
    default=True,
    show_default=True,
    help="Add node real-1, whose cores are this machine's.",
)
@click.option(
    "--accounting",
    is_flag=True,
    help="With slurmdbd and a database of its own: limits of accounts and QOS are enforced. Needs "
    "slurmdbd and mariadb-server-core.",
)
@click.option(
    "--endpoint",
    metavar="HOST:PORT",
    help="Where the controller's leases.listen will be, e.g. 127.0.0.1:7737; jobs get it as "
    "SYNERGY_ENDPOINT.",
)
@click.option("--quiet", "-q", is_flag=True, help="Print nothing when it worked.")
def up(
    state_dir: Path | None,
    as_json: bool,
    shapes: tuple[str, ...],
    shape_file: Path | None,
    real_node: bool,
    accounting: bool,
    endpoint: str | None,
    quiet: bool,
) -> None:
    """Start the cluster; nothing happens when it is up already."""
    if quiet and as_json:
        raise ConfigError("give either --quiet or --json", key="--quiet")
    if shapes and shape_file:
        raise ConfigError("give either --nodes or --file", key="--nodes")
    nodes = load_shapes(shape_file) if shape_file else tuple(map(parse_shape, shapes)) or None
    cluster = DevCluster(
        dir=state_dir or default_state_dir(),
        nodes=nodes,
        real_node=real_node,
        accounting=accounting,
        site={"endpoint": _address(endpoint)} if endpoint is not None else None,
    )
    begun_s = time.monotonic()
    cluster.up()
    took_s = time.monotonic() - begun_s
    status = cluster.status()
    if quiet:
        return
    if as_json:
        click.echo(json.dumps({**status.to_json(), "took_s": round(took_s, 3)}))
        return
    click.echo(
        f"{status.slurm} is up with {counted(len(status.nodes), 'node')} in {status.state_dir}"
    )
    for note in status.notes:
        click.echo(f"note: {note}")
    given = f" --dir {shlex.quote(str(state_dir))}" if state_dir else ""
    click.echo(f'use it:  eval "$(synergyctl devcluster env{given})"; sinfo')


@devcluster.command()
@_dir_option
@_json_option
@click.option("--keep", is_flag=True, help="Keep the state directory with its logs.")
def down(state_dir: Path | None, as_json: bool, keep: bool) -> None:
    """End the cluster's daemons and jobs, and remove its state directory."""
    cluster = DevCluster(dir=state_dir or default_state_dir())
    ended = cluster.down(keep=keep)
    if as_json:
        click.echo(json.dumps({"state_dir": str(cluster.state_dir), "ended": list(ended)}))
    else:
        click.echo(f"ended {len(ended)} processes of {cluster.state_dir}")


@devcluster.command()
@_dir_option
@_json_option
def status(state_dir: Path | None, as_json: bool) -> None:
    """Tell what runs. Exit status 1 when the cluster is not up."""
    found = DevCluster(dir=state_dir or default_state_dir()).status()
    if as_json:
        click.echo(json.dumps(found.to_json()))
    else:
        click.echo(f"{found.state_dir}: {'up' if found.up else 'down'}")
        for name, runs in found.daemons.items():
            click.echo(f"  {name:<16} {'runs' if runs else 'does not run'}")
        for name, state in found.nodes.items():
            click.echo(f"  node {name:<11} {state}")
        for note in found.notes:
            click.echo(f"  note: {note}")
    raise SystemExit(0 if found.up else 1)


@devcluster.command()
@_dir_option
@_json_option
def env(state_dir: Path | None, as_json: bool) -> None:
    """Print the variables that point commands at the cluster, for a shell's eval."""
    cluster = DevCluster(dir=state_dir or default_state_dir())
    found = cluster.env
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, value in found.items():
        click.echo(f"export {name}={shlex.quote(value)}")
