"""Which socket each GPU of a node is near, from the ``Cores=`` of gres.conf.

``scontrol`` names only the sockets of all GPUs of a node together, so the file is read. Where it
says nothing (AutoDetect, no file on this machine, several sockets for one GPU) nothing is known,
and cores are chosen without regard to GPUs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from slurm_synergy.errors import SlurmParseError
from slurm_synergy.slurm import hostlist
from slurm_synergy.slurm.facts import NodeFacts
from slurm_synergy.slurm.fields import parse_id_set

__all__ = ["UNKNOWN", "GresConf", "read_gres_conf"]

UNKNOWN = -1
"""The socket of a GPU of which nothing is known."""

_FIELD = re.compile(r"(\w+)\s*=\s*(\S+)")


class GresConf:
    """A gres.conf. Lines that cannot be read count as saying nothing."""

    def __init__(self, text: str) -> None:
        self._lines: list[Mapping[str, str]] = []
        for line in text.replace("\\\n", " ").splitlines():
            fields = {key.lower(): value for key, value in _FIELD.findall(line.partition("#")[0])}
            if fields.get("name", "").lower() == "gpu":
                self._lines.append(fields)

    def gpu_sockets(self, node: NodeFacts) -> tuple[int, ...]:
        """The socket near each GPU by its index, ``UNKNOWN`` for some; empty when for all."""
        found: list[int] = []
        try:
            for fields in self._lines:
                if "nodename" in fields and node.name not in hostlist.expand(fields["nodename"]):
                    continue
                found += [self._socket(fields, node)] * _count(fields)
        except SlurmParseError:
            return ()
        if len(found) != sum(node.gpus.values()) or set(found) == {UNKNOWN}:
            return ()
        return tuple(found)

    @staticmethod
    def _socket(fields: Mapping[str, str], node: NodeFacts) -> int:
        text = fields.get("cores") or fields.get("cpus")
        if not text:
            return UNKNOWN
        cores = parse_id_set(text, "gres.conf Cores")
        sockets = {core // max(1, node.cores_per_socket) for core in cores}
        one = min(sockets, default=UNKNOWN)
        return one if len(sockets) == 1 and one < max(1, node.sockets) else UNKNOWN


def _count(fields: Mapping[str, str]) -> int:
    files = fields.get("file") or fields.get("multiplefiles")
    if files:
        return len(hostlist.expand(files.replace("/", "_")))
    count = fields.get("count", "1")
    return int(count) if count.isdigit() else 0


def read_gres_conf(slurm_conf: Path | None) -> GresConf:
    """The gres.conf beside ``slurm_conf`` (None: where Slurm looks for it), or an empty one."""
    place = slurm_conf or Path(os.environ.get("SLURM_CONF") or "/etc/slurm/slurm.conf")
    try:
        return GresConf((place.parent / "gres.conf").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return GresConf("")
