"""Settings: one YAML file to one frozen, validated value. The only reader of settings.

Defaults live in the types below; ``etc/synergy.yaml`` is generated from them
(``synergyctl config --default``) and a test keeps both equal.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Hashable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from slurm_synergy.errors import ConfigError
from slurm_synergy.policy_settings import (
    Flag,
    GavelSettings,
    PolluxSettings,
    Seconds,
    Section,
    ShockwaveSettings,
    SiaSettings,
    ThemisSettings,
)

__all__ = [
    "ANY_HOST",
    "DEFAULT_PATH",
    "ClientChoice",
    "ClusterSettings",
    "EnforcementChoice",
    "JournalSettings",
    "LeaseSettings",
    "LoadSettings",
    "LogLevel",
    "MetricsSettings",
    "Mode",
    "MungeSettings",
    "PoolSettings",
    "ProfilingSettings",
    "SchedulingSettings",
    "Settings",
    "SlurmSettings",
    "load_settings",
    "parse_address",
    "parse_settings",
    "render_default_yaml",
]

DEFAULT_PATH = Path("/etc/slurm-synergy/synergy.yaml")
"""Where the daemon and synergyctl look when no file is named."""

ANY_HOST = ("0.0.0.0", "::")
"""Addresses that mean every address of a machine: to listen on, not to call."""

_WIDTH = 100
# How alike a wrong key and a known one must be before we guess (0 to 1): one or two slips.
_NEAR = 0.7
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


def parse_address(text: str) -> tuple[str, int]:
    """``HOST:PORT`` (IPv6 in brackets) as host and port 0..65535. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or any(c.isspace() or c in "/[]" for c in bare):
        raise ValueError(f"{text!r} is not HOST:PORT")
    if ":" in bare and bare == host:
        raise ValueError(f"{text!r}: write an IPv6 address in brackets, as in [::1]:7737")
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"{text!r}: the port must be a number from 0 to 65535")
    return bare, int(port)


class EnforcementChoice(StrEnum):
    """How CPU shares are made real; ``auto`` chooses by what Slurm's controller says."""

    AUTO = "auto"
    SHARED = "shared"
    BORROW = "borrow"
    REQUEUE = "requeue"


class Mode(StrEnum):
    """What the controller may do to its partition: look, advise, or act (ADR 019)."""

    OBSERVE = "observe"
    ADVISE = "advise"
    ACT = "act"


class ClientChoice(StrEnum):
    """Through what Slurm is read: its commands, or the module pyslurm."""

    CLI = "cli"
    PYSLURM = "pyslurm"


class LogLevel(StrEnum):
    """Least severity that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _address(value: str) -> str:
    try:
        parse_address(value)
    except ValueError as err:
        raise PydanticCustomError("address", "{what}", {"what": str(err)}) from err
    return value


Name = Annotated[str, Field(pattern=_NAME)]


def _refuse_relative(value: object) -> object:
    if isinstance(value, str) and not value.startswith("/"):
        raise PydanticCustomError("absolute_path", "must be an absolute path")
    return value


AbsolutePath = Annotated[Path, BeforeValidator(_refuse_relative)]


class ClusterSettings(Section):
    """Names of the cluster and of this controller."""

    name: str = Field(
        default="", description="Slurm's ClusterName; empty: taken as Slurm reports it."
    )
    controller_name: Name = Field(
        default="synergy",
        description="Name of this controller. Controllers on one cluster need different names.",
    )


class LoadSettings(Section):
    """When slurmctld counts as busy, and how far readings are then spaced out."""

    look_every_s: Seconds = Field(
        default=30.0, description="Least time between two looks at sdiag, in seconds."
    )
    longest_pause_s: Seconds = Field(
        default=60.0,
        description="While slurmctld is busy, readings (and the rounds that follow them) are up to "
        "this far apart, in seconds.",
    )
    server_threads: Annotated[int, Field(strict=True, ge=1, le=10_000)] = Field(
        default=128,
        description="Busy with more threads than this serving RPCs (count; Slurm has 256).",
    )
    agent_queue: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = Field(
        default=500, description="Busy with more messages than this waiting for nodes (count)."
    )
    rpc_mean_s: Seconds = Field(
        default=0.5, description="Busy when an RPC takes longer than this on average, in seconds."
    )
    reading_s: Seconds = Field(
        default=5.0, description="Busy when our own last reading took longer than this, in seconds."
    )


class SlurmSettings(Section):
    """How Slurm is reached."""

    client: ClientChoice = Field(
        default=ClientChoice.CLI,
        description="Through what the queue is read: cli (Slurm's commands) or pyslurm (faster; "
        "needs the pyslurm of exactly the Slurm release that runs here).",
    )

    conf: AbsolutePath | None = Field(
        default=None, description="slurm.conf to use; null: SLURM_CONF or Slurm's own default."
    )
    bin_dir: AbsolutePath | None = Field(
        default=None, description="Directory of squeue, scontrol and sinfo; null: found on PATH."
    )
    command_timeout_s: Seconds = Field(
        default=30.0, description="Longest wait for one Slurm command, in seconds."
    )
    partition: Name = Field(
        default="synergy",
        description="The managed partition. Jobs of other partitions are never touched.",
    )
    load: LoadSettings = Field(
        default=LoadSettings(),
        description="When slurmctld counts as busy, and is asked less often.",
    )


class PoolSettings(Section):
    """The nodes that are scheduled."""

    nodes: str = Field(
        default="",
        description="Nodes of the pool as a Slurm host list, e.g. 'v100-[1-4],a100-1'; "
        "empty: all nodes of the partition.",
    )
    reservation: Flag = Field(
        default=True,
        description="Whether the controller keeps a reservation over the pool's nodes.",
    )
    reservation_name: str = Field(
        default="",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$",
        description="Name of that reservation; empty: 'synergy-' and the controller's name "
        "(just 'synergy' for the default name).",
    )
    reserve_least: Annotated[int, Field(strict=True, ge=0, le=100_000)] | None = Field(
        default=None,
        description="How many nodes are reserved whatever the demand (count); null: all of the "
        "pool. With a number the reservation follows the demand: it covers the nodes with our jobs "
        "and as many more as the waiting jobs need. A node on which others run is never taken.",
    )
    reserve_most: Annotated[int, Field(strict=True, ge=1, le=100_000)] | None = Field(
        default=None, description="How many nodes may be reserved at most (count); null: all."
    )
    reserve_idle_s: Annotated[float, Field(strict=True, ge=0, le=31_536_000)] = Field(
        default=600.0,
        description="With reserve_least: how long a node that is not needed stays reserved, in "
        "seconds.",
    )
    reserve_window_s: Annotated[float, Field(strict=True, ge=600, le=31_536_000)] | None = Field(
        default=None,
        description="The reservation ends by itself this long after the controller last renewed "
        "it, in seconds; running jobs go on. null: a year.",
    )

    type_partitions: Mapping[Name, Name] = Field(
        default={},
        description="Partitions that say who may use which GPUs, by GPU type, e.g. {a100: "
        "gpu-a100}: a job gets GPUs of that type only if AllowAccounts, DenyAccounts and "
        "AllowGroups of the partition admit its account and user, and not more nodes than its "
        "MaxNodes. Types that are not named are open to all jobs of the managed partition.",
    )
    node_helpers: Flag = Field(
        default=False,
        description="Whether every node of the pool runs slurm-synergyd --node, which moves the "
        "limits of jobs that Slurm confines to cores: enforcement borrow then works there too.",
    )

    @model_validator(mode="after")
    def _least_is_not_above_most(self) -> Self:
        least, most = self.reserve_least, self.reserve_most
        if least is not None and most is not None and least > most:
            raise PydanticCustomError(
                "least_over_most",
                "reserve_least ({least}) must not exceed reserve_most ({most})",
                {"least": least, "most": most},
            )
        return self


class SchedulingSettings(Section):
    """Rounds: who runs, where, and how often that is decided."""

    policy: Name = Field(
        default="srtf",
        description="Who runs: fifo, srtf, las, ftf or sia (gavel, themis, shockwave and pollux "
        "are rivals to compare with).",
    )
    mechanism: Name = Field(
        default="tune",
        description="Where, and with how much CPU and memory: proportional or tune "
        "(greedy, drf, tetris and opt are baselines to compare with).",
    )
    round_s: Seconds = Field(default=300.0, description="Time between periodic rounds, in seconds.")
    poll_s: Seconds = Field(
        default=2.0, description="Time between two readings of the queue, in seconds."
    )
    debounce_s: Annotated[float, Field(strict=True, ge=0, le=3600)] = Field(
        default=1.0,
        description="After an arrival or completion, wait this long for more of them before the "
        "early round, in seconds.",
    )
    start_deadline_s: Seconds = Field(
        default=60.0,
        description="A released job that does not start within this is held again, seconds.",
    )
    grace_s: Seconds = Field(
        default=120.0, description="How long a stopped job may take to checkpoint, in seconds."
    )
    retry_backoff_s: Seconds = Field(
        default=30.0,
        description="How long a job whose start failed is not planned again, in seconds; doubled "
        "with each further failure, up to an hour.",
    )
    sia: SiaSettings = Field(
        default=SiaSettings(), description="Used with policy sia: what it weighs."
    )
    gavel: GavelSettings = Field(
        default=GavelSettings(), description="Used with policy gavel: quantum and what counts."
    )
    themis: ThemisSettings = Field(
        default=ThemisSettings(), description="Used with policy themis: its quantum."
    )
    shockwave: ShockwaveSettings = Field(
        default=ShockwaveSettings(),
        description="Used with policy shockwave: its window, and what it weighs.",
    )
    pollux: PolluxSettings = Field(
        default=PolluxSettings(), description="Used with policy pollux: its search."
    )
    dry_run: Flag = Field(
        default=False, description="Decide and say what would be done, but change nothing in Slurm."
    )

    @model_validator(mode="after")
    def _round_is_not_shorter_than_poll(self) -> Self:
        if self.poll_s > self.round_s:
            raise PydanticCustomError(
                "poll_over_round",
                "poll_s ({poll_s} s) must not exceed round_s ({round_s} s)",
                {"poll_s": self.poll_s, "round_s": self.round_s},
            )
        return self


class MungeSettings(Section):
    """How credentials of callers are checked."""

    socket: AbsolutePath | None = Field(
        default=None,
        description="Socket of munged; null: SYNERGY_MUNGE_SOCKET, else munge's own default.",
    )


class LeaseSettings(Section):
    """The lease service that running jobs and synergyctl talk to."""

    listen: str = Field(
        default="0.0.0.0:7737",
        description="Address and port to listen on, HOST:PORT; port 0 takes any free one.",
    )
    advertise: str | None = Field(
        default=None,
        description="HOST:PORT that jobs are told to call; null: this host's name and the port.",
    )
    lease_s: Annotated[float, Field(strict=True, ge=1, le=86_400)] = Field(
        default=60.0,
        description="How long a job keeps its extra cores when the controller is silent, seconds.",
    )
    munge: MungeSettings = Field(default=MungeSettings(), description="Authentication of callers.")

    @field_validator("listen", "advertise")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        return None if value is None else _address(value)

    @field_validator("advertise")
    @classmethod
    def _can_be_called(cls, value: str | None) -> str | None:
        if value is not None and parse_address(value)[0] in ANY_HOST:
            raise PydanticCustomError(
                "any_host",
                "nobody can call that address: name this machine, as in head-node:7737, or use "
                "null for its host name",
            )
        return value


class JournalSettings(Section):
    """The round journal: one JSON record per round."""

    max_mib: Annotated[int, Field(strict=True, ge=1, le=65_536)] = Field(
        default=64, description="A journal file that reaches this size is rotated, in MiB."
    )
    keep: Annotated[int, Field(strict=True, ge=1, le=1000)] = Field(
        default=5, description="How many rotated journal files are kept (count)."
    )


class ProfilingSettings(Section):
    """Measuring how many cores a job can use, once, while it runs (a profiling lease)."""

    enabled: Flag = Field(
        default=True,
        description="Whether a job whose profile is not known yet is measured: it gets the free "
        "cores of its nodes for some minutes, and other numbers of cores one after the other, in "
        "place. Cores in another job's lease or floor are never used.",
    )
    min_free_cores: Annotated[int, Field(strict=True, ge=0, le=100_000)] = Field(
        default=1,
        description="Measuring begins when each of the job's nodes has this many free cores "
        "(count); with fewer it could not be seen what more cores bring.",
    )
    longest_s: Annotated[float, Field(strict=True, ge=1, le=86_400)] = Field(
        default=540.0, description="It takes this long at most, in seconds."
    )
    most_share: Annotated[float, Field(strict=True, gt=0, le=1)] = Field(
        default=0.03,
        description="And at most this share of the job's time limit (0 to 1), where it has one.",
    )
    points: Annotated[int, Field(strict=True, ge=3, le=24)] = Field(
        default=8, description="Numbers of cores that are tried at most (count)."
    )
    steps: Annotated[int, Field(strict=True, ge=4, le=10_000)] = Field(
        default=50, description="Steps of the training that are measured with each (count)."
    )
    read_s: Annotated[float, Field(strict=True, ge=0, le=60)] = Field(
        default=2.0,
        description="At its end some of the job's files are read past the page cache, for this "
        "long (0 to 60) and 200 MiB at most, in seconds: how fast the storage is says what memory "
        "brings. 0: never, and memory is not planned by what was measured.",
    )


class MetricsSettings(Section):
    """Figures for Prometheus."""

    listen: str | None = Field(
        default="127.0.0.1:9737",
        description="HOST:PORT at which /metrics is served, without authentication; null: not at "
        "all. Port 0 takes any free one, which the log names.",
    )
    job_labels: Annotated[int, Field(strict=True, ge=0, le=1000)] = Field(
        default=20,
        description="Of how many jobs at most, those worst off, figures are shown one by one "
        "(count); of all others only sums.",
    )

    @field_validator("listen")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        return None if value is None else _address(value)


class Settings(Section):
    """Everything that can be set. ``Settings()`` has the defaults."""

    cluster: ClusterSettings = Field(default=ClusterSettings(), description="Names.")
    slurm: SlurmSettings = Field(default=SlurmSettings(), description="How Slurm is reached.")
    mode: Mode = Field(
        default=Mode.OBSERVE,
        description="What may be done to the partition: observe (decide, say what would be done, "
        "write nothing to Slurm), advise (the same, and each job's AdminComment says what would "
        "be done with it) or act (hold, start, resize and stop jobs). job_submit.lua must agree: "
        "mode in synergy_site.lua.",
    )
    pool: PoolSettings = Field(default=PoolSettings(), description="The nodes that are scheduled.")
    scheduling: SchedulingSettings = Field(
        default=SchedulingSettings(),
        description="Rounds: who runs, where, and how often it is decided.",
    )
    enforcement: EnforcementChoice = Field(
        default=EnforcementChoice.AUTO,
        description="How CPU shares are made real: shared (partition with OverSubscribe=FORCE; "
        "cores move between running jobs in place), borrow (no job is confined to cores: each asks "
        "Slurm for its GPU-proportional share, and cores move in place), requeue (works "
        "everywhere; a change restarts the job), or auto (the first of these that works here).",
    )
    leases: LeaseSettings = Field(
        default=LeaseSettings(), description="The service that running jobs and synergyctl talk to."
    )
    operators: tuple[str | int, ...] = Field(
        default=("root",),
        min_length=1,
        description="Users (names or numeric ids) who may drain and resume, and see everything.",
    )
    state_dir: AbsolutePath = Field(
        default=Path("/var/lib/slurm-synergy"),
        description="Directory of the ledger and the journal, readable by the controller's user "
        "only; only one daemon may use it. Its file 'endpoint' says where leases are served; that "
        "one has mode 0644, so that it can be published.",
    )
    profiling: ProfilingSettings = Field(
        default=ProfilingSettings(),
        description="Measuring how many cores a job can use, while it runs.",
    )
    journal: JournalSettings = Field(
        default=JournalSettings(), description="One JSON record per round."
    )
    metrics: MetricsSettings = Field(
        default=MetricsSettings(), description="Figures for Prometheus (OpenMetrics)."
    )
    log_level: LogLevel = Field(
        default=LogLevel.INFO,
        description="Least severity that is logged: debug, info, warning, error.",
    )

    @property
    def reservation_name(self) -> str:
        """Name of the controller's reservation."""
        if self.pool.reservation_name:
            return self.pool.reservation_name
        name = self.cluster.controller_name
        return name if name == "synergy" else f"synergy-{name}"


def load_settings(path: Path | str) -> Settings:
    """The settings of a YAML file; an empty file means the defaults.

    Raises ConfigError naming the file, the key, the value and what to do.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as err:
        raise ConfigError(
            "there is no such file",
            file=str(file),
            remedy="name an existing file with --config, or write one with "
            "'synergyctl config --default'",
        ) from err
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(
            f"cannot be read: {err}", file=str(file), remedy="make it readable UTF-8 text"
        ) from err
    return parse_settings(text, file=str(file))


def parse_settings(text: str, *, file: str = "") -> Settings:
    """The settings of a YAML text; ``file`` is its name for messages. Raises ConfigError."""
    try:
        raw = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as err:
        mark = getattr(err, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(
            f"{place}not valid YAML: {getattr(err, 'problem', None) or err}",
            file=file,
            remedy="correct that line; see 'synergyctl config --default'",
        ) from err
    if raw is None:
        return Settings()
    if not isinstance(raw, Mapping):
        shown = "a list" if isinstance(raw, list) else repr(raw)
        raise ConfigError(
            f"must be a mapping of sections, not {shown}",
            file=file,
            remedy="see 'synergyctl config --default'",
        )
    try:
        return Settings.model_validate(dict(raw))
    except ValidationError as err:
        raise _config_error(err.errors()[0], file) from err


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice, where YAML would keep the last silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is written twice", key_node.start_mark
                )
            if isinstance(key, Hashable):
                seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _config_error(details: ErrorDetails, file: str) -> ConfigError:
    path = [str(part) for part in details["loc"]]
    value = details["input"]
    if details["type"] == "extra_forbidden":
        return _unknown_key(path, value, file)
    what = _in_words(details)
    # A union's branches append their own names to the location; the key ends where fields end.
    key, description = _described(path)
    shown = value if isinstance(value, (str, int, float, bool)) else None
    return ConfigError(what, file=file, key=key, value=shown, remedy=description)


_WORDS = {
    "model_type": "must be a section of keys",
    "model_attributes_type": "must be a section of keys",
    "dict_type": "must be a section of keys",
    "tuple_type": "must be a list, e.g. [root]",
    "string_type": "must be text",
    "string_pattern_mismatch": "must be a name: letters, digits and the characters . _ - , "
    "beginning with a letter or digit, at most 64 in all",
    "enum": "must be one of {expected}",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number, without quotes or letters",
    "finite_number": "must be a finite number",
    "path_type": "must be an absolute path",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "too_short": "must name at least {min_length}",
}
"""What is wrong, by the validator's type of error, in words of the settings file."""


def _in_words(details: ErrorDetails) -> str:
    words = _WORDS.get(details["type"])
    if words is not None:
        return words.format(**details.get("ctx", {})).replace("'", "")
    text = details["msg"].replace("Input should", "must")
    return text[:1].lower() + text[1:]


def _unknown_key(path: Sequence[str], value: object, file: str) -> ConfigError:
    model: type[BaseModel] = Settings
    for part in path[:-1]:
        model = type(model.model_fields[part].default)
    known = list(model.model_fields)
    near = difflib.get_close_matches(path[-1], known, n=1, cutoff=_NEAR)
    remedy = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
    shown = value if isinstance(value, (str, int, float, bool)) else None
    return ConfigError("unknown key", file=file, key=".".join(path), value=shown, remedy=remedy)


def _described(path: Sequence[str]) -> tuple[str, str]:
    model: type[BaseModel] = Settings
    key: list[str] = []
    description = ""
    for part in path:
        field = model.model_fields.get(part)
        if field is None:
            break
        key.append(part)
        description = field.description or ""
        if not isinstance(field.default, Section):
            break
        model = type(field.default)
    return ".".join(key), f"expected: {description}" if description else ""


def render_default_yaml() -> str:
    """The fully commented settings file with every key at its default."""
    lines = [
        "# Settings of slurm-synergy. Every key is shown with its default; a key that is left out",
        "# keeps it. Units are part of the names: _s seconds, _mib MiB.",
        "",
    ]
    for name, field in Settings.model_fields.items():
        lines.extend(_render_field(name, field.description or "", field.default, 0))
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def _render_field(name: str, description: str, default: object, depth: int) -> list[str]:
    pad = "  " * depth
    lines = [f"{pad}# {line}" for line in textwrap.wrap(description, width=_WIDTH - len(pad) - 2)]
    if not isinstance(default, Section):
        return [*lines, f"{pad}{name}: {_scalar(default)}"]
    lines.append(f"{pad}{name}:")
    for key, field in type(default).model_fields.items():
        lines.extend(_render_field(key, field.description or "", field.default, depth + 1))
    return lines


def _scalar(value: object) -> str:
    if isinstance(value, StrEnum | Path):
        value = str(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).strip()
    return text.removesuffix("...").strip()
