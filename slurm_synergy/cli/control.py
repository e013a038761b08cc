"""``synergyctl status|jobs|drain|resume``: ask the running controller, authenticated by MUNGE."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from slurm_synergy.cli.holdings import holdings
from slurm_synergy.cli.tables import print_table
from slurm_synergy.config import DEFAULT_PATH, Settings, load_settings, parse_address
from slurm_synergy.core.wording import clipped, percent
from slurm_synergy.errors import ConfigError, LeaseError, NoControllerError, UnknownJobError

__all__ = [
    "ENDPOINT_FILE",
    "Target",
    "ask",
    "config_option",
    "drain",
    "find_target",
    "jobs",
    "local_settings",
    "options",
    "resume",
    "status",
    "without_settings",
]

ENDPOINT_FILE = Path("/etc/slurm-synergy/endpoint")
"""Text file with the controller's HOST:PORT, for machines without the settings file."""

_TIMEOUT_S = 15.0
_MIB_PER_GIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the controller is: ``HOST:PORT``, where that came from, and the munge socket."""

    endpoint: str
    source: str
    munge_socket: Path | None = None


def find_target(config: Path | None, environment: Mapping[str, str]) -> Target:
    """The controller to talk to: ``--config``, SYNERGY_ENDPOINT, the settings, the endpoint file.

    Raises ConfigError when none of them tells, or one of them is wrong.
    """
    named = environment.get("SYNERGY_MUNGE_SOCKET")
    socket = Path(named) if named else None
    if config is not None:
        return _of_settings(load_settings(config), config, socket)
    if endpoint := environment.get("SYNERGY_ENDPOINT"):
        return _checked(endpoint, "SYNERGY_ENDPOINT", socket)
    if DEFAULT_PATH.exists():
        return _of_settings(load_settings(DEFAULT_PATH), DEFAULT_PATH, socket)
    if endpoint := _endpoint_in(ENDPOINT_FILE):
        return _checked(endpoint, str(ENDPOINT_FILE), socket)
    raise ConfigError(
        "the controller's address is not known",
        remedy=f"set SYNERGY_ENDPOINT=HOST:PORT, name the settings with --config, or write "
        f"HOST:PORT to {ENDPOINT_FILE}",
    )


def local_settings(config: Path | None) -> Settings:
    """This machine's settings: ``--config``, else the default file, else the built-in defaults."""
    if config is None and not DEFAULT_PATH.exists():
        return Settings()
    return load_settings(config or DEFAULT_PATH)


def without_settings(config: Path | None) -> str:
    """A remark for messages where ``local_settings`` took the built-in defaults; else empty."""
    if config is not None or DEFAULT_PATH.exists():
        return ""
    return (
        f"there is no {DEFAULT_PATH}, so this is about the built-in defaults: name the "
        "controller's settings with --config FILE"
    )


def _of_settings(settings: Settings, path: Path, socket: Path | None) -> Target:
    socket = socket or settings.leases.munge.socket
    # The daemon writes what it is really bound to; the settings may say port 0.
    file = settings.state_dir / "endpoint"
    if endpoint := _endpoint_in(file):
        return _checked(endpoint, str(file), socket)
    for key, value in (
        ("advertise", settings.leases.advertise),
        ("listen", settings.leases.listen),
    ):
        if value is None:
            continue
        host, port = parse_address(value)
        if port:
            host = "localhost" if host in ("0.0.0.0", "::") else host
            shown = f"[{host}]" if ":" in host else host
            return Target(endpoint=f"{shown}:{port}", source=str(path), munge_socket=socket)
        if key == "listen":
            break
    raise ConfigError(
        "port 0 tells no address, and no controller has written one",
        file=str(path),
        key="leases.listen",
        value=settings.leases.listen,
        remedy=f"start slurm-synergyd (it writes {file}) or set a port",
    )


def _endpoint_in(file: Path) -> str | None:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    words = (line.strip() for line in lines)
    return next((word for word in words if word and not word.startswith("#")), None)


def _checked(endpoint: str, source: str, socket: Path | None) -> Target:
    try:
        parse_address(endpoint)
    except ValueError as err:
        raise ConfigError(
            str(err), file=source, remedy="write it as HOST:PORT, as in head-node:7737"
        ) from err
    return Target(endpoint=endpoint, source=source, munge_socket=socket)


def ask(target: Target, method: str, *, job: str = "", body: str = "") -> dict[str, Any]:
    """Call a method of ControlService (lower case) and return its JSON object.

    Raises NoControllerError when none answers there, LeaseError when it refuses.
    """
    import grpc

    from slurm_synergy.controller.auth import (
        control_payload,
        encode_credential,
        new_nonce,
    )
    from slurm_synergy.proto import lease_pb2 as pb
    from slurm_synergy.proto import lease_pb2_grpc as pb_grpc

    nonce = new_nonce(method)
    credential = encode_credential(control_payload(nonce, body), target.munge_socket)
    request = pb.ControlRequest(protocol=1, credential=credential, nonce=nonce, job=job, body=body)
    options = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 256 * 1024**2)]
    with grpc.insecure_channel(target.endpoint, options=options) as channel:
        stub = pb_grpc.ControlServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            reply = getattr(stub, method.capitalize())(request, timeout=_TIMEOUT_S)
        except grpc.RpcError as err:
            raise _refusal(err, target) from err
    content: dict[str, Any] = json.loads(reply.json)
    return content


def _refusal(err: Any, target: Target) -> LeaseError:
    code, details = err.code().name, err.details()
    if code == "UNAVAILABLE" and details.startswith("the controller"):
        return LeaseError(f"the controller at {target.endpoint} cannot answer: {details}")
    if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
        # gRPC names the address again, and each address that the name resolves to.
        why = details.rpartition(": ")[2] if details.startswith("failed to connect") else details
        return NoControllerError(
            f"no answer from the controller at {target.endpoint} (from {target.source}): "
            f"{why}; is slurm-synergyd running there?"
        )
    if code == "NOT_FOUND":
        return UnknownJobError(details)
    if code == "UNIMPLEMENTED":
        return LeaseError(f"the controller at {target.endpoint} is an older release: {details}")
    return LeaseError(f"the controller at {target.endpoint} refused: {details}")


def config_option(command: Callable[..., None]) -> Callable[..., None]:
    """The option --config."""
    return click.option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        default=None,
        help=f"Settings file.  [default: SYNERGY_ENDPOINT, else {DEFAULT_PATH}]",
    )(command)


def options(command: Callable[..., None]) -> Callable[..., None]:
    """The options --config and --json, which every command about the controller has."""
    return config_option(
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(command)
    )


def _answer(config: Path | None, method: str) -> dict[str, Any]:
    return ask(find_target(config, os.environ), method)


@click.command()
@options
def status(config: Path | None, as_json: bool) -> None:
    """Show the controller, its last round, and its nodes as they are now."""
    content = _answer(config, "status")
    if as_json:
        click.echo(json.dumps(content, indent=2))
        return
    if content["trouble"]:
        click.echo(f"trouble: {content['trouble']}")
    if content.get("slow"):
        click.echo(f"slow: {content['slow']}")
    words = {"observe": "only observing", "advise": "only advising"}
    mode = "dry run" if content["dry_run"] else words.get(content.get("mode", "act"), "running")
    click.echo(
        f"controller {content['controller']}: {'draining' if content['draining'] else mode}; "
        f"partition {content['partition']}, policy {content['policy']}, mechanism "
        f"{content['mechanism']}, enforcement {content['enforcement'] or 'not known yet'}"
    )
    if content["enforcement"] and content.get("enforcement_reason"):
        click.echo(f"enforcement {content['enforcement']}: {content['enforcement_reason']}")
    for one in content.get("missing_inputs", ()):
        click.echo(f"policy {content['policy']}: {one['what']}: {one['assumed']}; {one['remedy']}")
    if content["round"] is None:
        click.echo("no round yet")
    else:
        took_s = content["round_took_s"].get("total", 0.0)
        age_s = content["round_age_s"]
        click.echo(f"round {content['round']}, {age_s:.0f} s ago, took {took_s:.3f} s")
    if content["observed_age_s"] is None:
        return
    counts = ", ".join(f"{count} {phase}" for phase, count in content["jobs"].items() if count)
    click.echo(f"jobs: {counts or 'none'} (Slurm read {content['observed_age_s']:.0f} s ago)")
    print_table(
        ("NODE", "TYPE", "GPUS", "CPUS", "MEMORY", "STATE"),
        [
            (
                node["node"],
                node["gpu_type"],
                f"{node['gpus_used']}/{node['gpus']}",
                f"{node['cpus_used']}/{node['cpus']}",
                f"{_gib(node['mem_mib_used'])}/{_gib(node['mem_mib'])}G",
                _node_state(node),
            )
            for node in content["nodes"]
        ],
    )


def _node_state(node: Mapping[str, Any]) -> str:
    state = "up" if node["usable"] else "not usable"
    helper = node.get("helper")
    return f"{state}, no helper" if helper and helper["silent"] else state


_JOB_COLUMNS = (
    *("JOBID", "USER", "NAME", "PHASE", "GPUS", "CPUS", "MEMORY", "NODES", "RATE", "STALL"),
    "REASON",
)


@click.command()
@options
def jobs(config: Path | None, as_json: bool) -> None:
    """Show the managed jobs: where they run and with what, or why they wait.

    STALL is the share of the last minute in which a job waited for data; "-" where the program does
    not tell.
    """
    content = _answer(config, "jobs")
    if as_json:
        click.echo(json.dumps(content, indent=2))
        return
    if not content["jobs"]:
        click.echo("no jobs")
        return
    print_table(_JOB_COLUMNS, [_job_row(job) for job in content["jobs"]])


def _job_row(job: Mapping[str, Any]) -> tuple[str, ...]:
    lease = holdings(job)
    nodes = lease["nodes"] if lease else []
    rate = lease["progress"]["samples_per_s"] if lease else 0
    reason = (lease or {}).get("stop") or job["reason"]
    words = [text for text in (reason and reason["text"], job.get("note")) if text]
    return (
        job.get("array") or str(job["job_id"]),
        job["user"],
        clipped(job["name"] or "-"),
        job["phase"],
        _gpus(job, lease),
        str(sum(node["cpus"] for node in nodes)) if nodes else "-",
        f"{_gib(sum(node['mem_mib'] for node in nodes))}G" if nodes else "-",
        ",".join(node["node"] for node in nodes) or "-",
        f"{rate:.1f}/s" if rate else "-",
        percent(lease["progress"].get("data_stall")) if lease else "-",
        "; ".join(words) or "-",
    )


def _gpus(job: Mapping[str, Any], held: Mapping[str, Any] | None) -> str:
    """What the job asks for; of an elastic one what it holds, with the type, of how many at most.

    What it may have at most is for those who see its hints.
    """
    if job.get("elasticity", "rigid") == "rigid":
        return str(job["gpus"])
    has = f"{sum(node['gpus'] for node in held['nodes'])} {held['gpu_type']}" if held else "-"
    return f"{has} of {job['most_gpus']}" if "most_gpus" in job else has


def _gib(mem_mib: int) -> str:
    return f"{mem_mib / _MIB_PER_GIB:.0f}"


@click.command()
@options
def drain(config: Path | None, as_json: bool) -> None:
    """Start nothing more; running jobs run on. For operators."""
    content = _answer(config, "drain")
    click.echo(json.dumps(content) if as_json else "draining: no job is started until 'resume'")


@click.command()
@options
def resume(config: Path | None, as_json: bool) -> None:
    """Start jobs again after 'drain'. For operators."""
    content = _answer(config, "resume")
    click.echo(json.dumps(content) if as_json else "resumed: jobs are started again")
