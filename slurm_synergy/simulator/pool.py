"""The simulated pool: nodes from a YAML file.

nodes:
  - name: gpu          # prefix; nodes are gpu-001, gpu-002, ...
    count: 16
    gpu_type: v100
    gpus: 8
    cpus: 24
    mem_gib: 500
    sockets: 2         # optional, default 1
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from slurm_synergy.core.model import Node
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import ConfigError

__all__ = ["MOST_NODES", "make_nodes", "read_nodes"]

_KEYS: Mapping[str, type | tuple[type, ...]] = {
    "name": str,
    "count": int,
    "gpu_type": str,
    "gpus": int,
    "cpus": int,
    "mem_gib": (int, float),
    "sockets": int,
}
_WANTED: Mapping[object, str] = {
    str: "a text",
    int: "a whole number from 1 to 1,000,000,000",
    (int, float): "a number above 0, at most 1,000,000,000",
}
_OPTIONAL = {"count": 1, "sockets": 1}
_MIB_PER_GIB = 1024
MOST_NODES = 100_000
"""Nodes of a simulated pool: some times what the largest clusters have."""
_MOST = 10**9


def make_nodes(
    *, name: str, count: int, gpu_type: str, gpus: int, cpus: int, mem_gib: float, sockets: int = 1
) -> list[Node]:
    """``count`` equal nodes, numbered from 1."""
    total = Resources(gpus=gpus, cpus=cpus, mem_mib=int(mem_gib * _MIB_PER_GIB))
    width = max(3, len(str(count)))
    return [
        Node(
            name=f"{name}-{index:0{width}d}",
            gpu_type=gpu_type,
            total=total,
            capacity=total,
            sockets=sockets,
        )
        for index in range(1, count + 1)
    ]


def read_nodes(path: Path) -> tuple[Node, ...]:
    """The nodes of a cluster file, by name. Raises ConfigError naming the key."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as err:
        raise ConfigError(
            f"cannot be read: {err}", file=str(path), remedy="name a readable YAML file"
        ) from err
    groups = content.get("nodes") if isinstance(content, dict) else None
    if not isinstance(groups, list) or not groups:
        raise ConfigError(
            "has no list of nodes",
            file=str(path),
            key="nodes",
            remedy=f"give a list of groups with {', '.join(_KEYS)} (examples/simulate)",
        )
    for key in content:
        if key != "nodes":
            raise ConfigError(
                "is unknown", file=str(path), key=str(key), remedy="the only key is nodes"
            )
    nodes: list[Node] = []
    for index, group in enumerate(groups):
        checked = _checked(group, str(path), f"nodes[{index}]")
        if len(nodes) + checked["count"] > MOST_NODES:
            raise ConfigError(
                f"makes more than {MOST_NODES} nodes in all",
                file=str(path),
                key=f"nodes[{index}].count",
                value=checked["count"],
                remedy="give fewer",
            )
        nodes += make_nodes(**checked)
    names = [node.name for node in nodes]
    if len(set(names)) != len(names):
        raise ConfigError(
            "two groups make nodes of the same name",
            file=str(path),
            key="nodes",
            remedy="rename one",
        )
    return tuple(sorted(nodes, key=lambda node: node.name))


def _checked(group: object, file: str, place: str) -> dict[str, Any]:
    if not isinstance(group, dict):
        raise ConfigError(
            "is not a mapping",
            file=file,
            key=place,
            value=group,
            remedy=f"give {', '.join(_KEYS)}, each with a value",
        )
    for key in group:
        if key not in _KEYS:
            raise ConfigError(
                "is unknown",
                file=file,
                key=f"{place}.{key}",
                remedy=f"known are {', '.join(_KEYS)}",
            )
    found: dict[str, Any] = {**_OPTIONAL, **group}
    for key, kind in _KEYS.items():
        value = found.get(key)
        if not _is_valid(value, kind):
            wanted = _WANTED[kind]
            raise ConfigError(
                f"must be {wanted}" if key in found else "is missing",
                file=file,
                key=f"{place}.{key}",
                value=value,
                remedy=f"give {wanted}",
            )
    return found


def _is_valid(value: Any, kind: object) -> bool:
    if kind is str:
        return isinstance(value, str) and bool(value)
    if kind is int:
        return type(value) is int and 0 < value <= _MOST
    return type(value) in (int, float) and 0 < value <= _MOST
