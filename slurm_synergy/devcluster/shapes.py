"""What the embedded cluster's nodes look like: names, GPUs, cores, memory.

A shape is given in Python, in a YAML file, or as text: ``v100-[1-4]:gpus=8,cores=24,mem=500000``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_synergy.errors import ConfigError

__all__ = [
    "DEFAULT_SHAPES",
    "NodeShape",
    "check_distinct",
    "load_shapes",
    "parse_shape",
    "real_shape",
]

_NAME = re.compile(r"^(?P<prefix>[A-Za-z][A-Za-z0-9._-]*?)(?:\[(?P<ranges>[0-9,-]+)\])?$")
_TYPE = re.compile(r"^[A-Za-z][A-Za-z0-9_.-]*$")
_EXAMPLE = "for example v100-[1-4]:gpus=8,cores=24,mem=500000,type=v100,sockets=2"
_MAX_NODES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShape:
    """One or more equal nodes.

    ``nodes`` is a Slurm node list with at most one bracket (``v100-[1-4]``), ``mem_mib`` what Slurm
    calls RealMemory. A ``real`` shape has the machine's own cores and its slurmd pins tasks; the
    others pretend. With ``gpus_by_socket`` gres.conf tells which socket each GPU is near, an equal
    number for each. Raises ConfigError when a value makes no sense.
    """

    nodes: str
    gpus: int
    cores: int
    mem_mib: int
    gpu_type: str
    sockets: int = 1
    threads_per_core: int = 1
    real: bool = False
    gpus_by_socket: bool = False

    def __post_init__(self) -> None:
        for key, least in (("cores", 1), ("mem_mib", 1), ("sockets", 1), ("threads_per_core", 1)):
            self._require(getattr(self, key) >= least, key, f"must be at least {least}")
        self._require(0 <= self.gpus <= 64, "gpus", "must be between 0 and 64")
        self._require(bool(_TYPE.match(self.gpu_type)), "type", "must be a word such as v100")
        divisor = self.sockets * self.threads_per_core
        self._require(
            self.cores % divisor == 0,
            "cores",
            f"must be a multiple of {divisor} (sockets × threads)",
        )
        whole = not self.gpus_by_socket or self.gpus % self.sockets == 0
        self._require(whole, "gpus", f"must be a multiple of {self.sockets} (sockets)")
        self.names()

    def _require(self, holds: bool, key: str, what: str) -> None:
        if not holds:
            shown = getattr(self, {"type": "gpu_type"}.get(key, key))
            raise ConfigError(f"{what}", file=self.nodes, key=key, value=shown, remedy=_EXAMPLE)

    def names(self) -> tuple[str, ...]:
        """The node names, in order."""
        match = _NAME.match(self.nodes)
        if match is None:
            raise ConfigError("not a node list", key="nodes", value=self.nodes, remedy=_EXAMPLE)
        if match["ranges"] is None:
            return (self.nodes,)
        return tuple(
            f"{match['prefix']}{number}" for number in _numbers(self.nodes, match["ranges"])
        )


def _numbers(nodes: str, ranges: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        low, dash, high = part.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise ConfigError("not a node list", key="nodes", value=nodes, remedy=_EXAMPLE)
        first, last = int(low), int(high) if dash else int(low)
        if last < first or last - first >= _MAX_NODES:
            raise ConfigError(
                f"the range {part} must rise and hold at most {_MAX_NODES} nodes",
                key="nodes",
                value=nodes,
                remedy=_EXAMPLE,
            )
        width = len(low) if low.startswith("0") else 0
        numbers.extend(f"{number:0{width}d}" for number in range(first, last + 1))
    return numbers


DEFAULT_SHAPES: tuple[NodeShape, ...] = (
    NodeShape(nodes="v100-[1-4]", gpus=8, cores=24, mem_mib=500_000, gpu_type="v100", sockets=2),
    NodeShape(nodes="a100-[1-2]", gpus=8, cores=64, mem_mib=1_000_000, gpu_type="a100", sockets=2),
)


_KEYS = {
    "gpus": "gpus",
    "cores": "cores",
    "mem": "mem_mib",
    "type": "gpu_type",
    "sockets": "sockets",
}


def _from_mapping(nodes: str, given: Mapping[str, object], where: str) -> NodeShape:
    unknown = sorted(set(given) - set(_KEYS))
    if unknown:
        raise ConfigError(
            f"unknown key {unknown[0]}", file=where, key=nodes, remedy=f"known: {', '.join(_KEYS)}"
        )
    missing = sorted({"gpus", "cores", "mem"} - set(given))
    if missing:
        raise ConfigError(f"{missing[0]} is missing", file=where, key=nodes, remedy=_EXAMPLE)
    numbers: dict[str, int] = {}
    for key in ("gpus", "cores", "mem", "sockets"):
        if key not in given:
            continue
        text = str(given[key])
        if isinstance(given[key], bool) or not text.isdigit():
            raise ConfigError(
                "must be a whole number",
                file=where,
                key=f"{nodes}.{key}",
                value=text,
                remedy=_EXAMPLE,
            )
        numbers[_KEYS[key]] = int(text)
    gpu_type = str(given.get("type") or re.split(r"[-\[]", nodes)[0])
    return NodeShape(
        nodes=nodes,
        gpu_type=gpu_type,
        gpus=numbers["gpus"],
        cores=numbers["cores"],
        mem_mib=numbers["mem_mib"],
        sockets=numbers.get("sockets", 1),
    )


def parse_shape(text: str) -> NodeShape:
    """Read ``NODES:key=value,...``; keys gpus, cores, mem (MiB), type, sockets.

    The type defaults to the name up to the first dash. Raises ConfigError.
    """
    nodes, colon, rest = text.rpartition(":") if "=" in text else (text, "", "")
    if not colon:
        raise ConfigError("no ':' after the node names", key="--nodes", value=text, remedy=_EXAMPLE)
    given: dict[str, object] = {}
    for item in rest.split(","):
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(
                f"{item!r} is not key=value", key="--nodes", value=text, remedy=_EXAMPLE
            )
        given[key.strip()] = value.strip()
    return _from_mapping(nodes.strip(), given, "--nodes")


def load_shapes(path: Path) -> tuple[NodeShape, ...]:
    """Read shapes from YAML: a mapping ``nodes:`` of node lists to shapes.

    The keys of a shape are those of ``parse_shape``. Raises ConfigError, naming file and key.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as err:
        raise ConfigError(f"cannot be read: {err}", file=str(path)) from err
    table = content.get("nodes") if isinstance(content, Mapping) else None
    if not isinstance(table, Mapping) or not table:
        raise ConfigError(
            "must be a mapping of node lists to shapes",
            file=str(path),
            key="nodes",
            remedy="for example nodes: {'v100-[1-4]': {gpus: 8, cores: 24, mem: 500000}}",
        )
    shapes = []
    for nodes, given in table.items():
        if not isinstance(given, Mapping):
            raise ConfigError("must be a mapping", file=str(path), key=f"nodes.{nodes}")
        shapes.append(_from_mapping(str(nodes), given, str(path)))
    return tuple(shapes)


def real_shape(topology: Mapping[str, int] | None = None, *, gpus: int = 2) -> NodeShape:
    """The node with this machine's own cores, named ``real-1``; its GPUs are pretended.

    ``topology`` is what ``slurmd -C`` prints (CPUs, SocketsPerBoard, ThreadsPerCore); it is used
    only when this process may run on all of these CPUs.
    """
    cpus = len(os.sched_getaffinity(0))
    found = topology or {}
    whole = found.get("CPUs") == cpus and found.get("Boards", 1) == 1
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return NodeShape(
        nodes="real-1",
        gpus=gpus,
        cores=cpus,
        mem_mib=pages // (1 << 20),
        gpu_type="v100",
        sockets=found.get("SocketsPerBoard", 1) if whole else 1,
        threads_per_core=found.get("ThreadsPerCore", 1) if whole else 1,
        real=True,
    )


def check_distinct(shapes: Sequence[NodeShape]) -> None:
    """Raise ConfigError when there is no node or a node name occurs twice."""
    seen: set[str] = set()
    for shape in shapes:
        for name in shape.names():
            if name in seen:
                raise ConfigError("node name given twice", key="nodes", value=name)
            seen.add(name)
    if not seen:
        raise ConfigError("the cluster has no node", key="nodes", remedy=_EXAMPLE)
