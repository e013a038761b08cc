"""The configuration files of the embedded cluster, as text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_synergy.devcluster.shapes import NodeShape
from slurm_synergy.errors import ConfigError

__all__ = ["ClusterFacts", "cgroup_conf", "gres_conf", "lua_value", "site_lua", "slurm_conf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """All that the generated files depend on.

    ``first_port`` is slurmctld's, each node's slurmd has one of the ports after it, in node order,
    and slurmdbd the one after those, if there is ``accounting``.
    ``slurm_version`` is (major, minor), for instance (22, 5).
    """

    name: str
    state_dir: Path
    user: str
    host: str
    first_port: int
    shapes: tuple[NodeShape, ...]
    slurm_version: tuple[int, int]
    real_task_plugin: str
    constrain_cores: bool = False
    accounting: bool = False
    extra: tuple[str, ...] = ()

    @property
    def accounting_port(self) -> int:
        """The port for slurmdbd."""
        return self.first_port + 1 + sum(len(shape.names()) for shape in self.shapes)


_STOCK = """\
AuthType=auth/munge
CredType=cred/munge
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
# A machine of one's own: look for work at once instead of collecting it.
SchedulerParameters=batch_sched_delay=0,sched_interval=10,bf_interval=5,bf_continue
SlurmdParameters=config_overrides
# The slurmds read two variants of this file on purpose.
DebugFlags=NO_CONF_HASH
GresTypes=gpu
ReturnToService=2
JobRequeue=1
JobFileAppend=1
MpiDefault=none
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/none
JobSubmitPlugins=lua
SlurmctldDebug=info
SlurmdDebug=info
"""


def _node_lines(facts: ClusterFacts) -> list[str]:
    lines = []
    port = facts.first_port + 1
    for shape in facts.shapes:
        count = len(shape.names())
        ports = str(port) if count == 1 else f"[{port}-{port + count - 1}]"
        port += count
        per_socket = shape.cores // shape.sockets // shape.threads_per_core
        gres = f" Gres=gpu:{shape.gpu_type}:{shape.gpus}" if shape.gpus else ""
        lines.append(
            f"NodeName={shape.nodes} NodeAddr=127.0.0.1 Port={ports} CPUs={shape.cores} Boards=1 "
            f"SocketsPerBoard={shape.sockets} CoresPerSocket={per_socket} "
            f"ThreadsPerCore={shape.threads_per_core} RealMemory={shape.mem_mib}"
            f"{gres} Feature={shape.gpu_type}"
        )
    return lines


def _accounting_lines(facts: ClusterFacts) -> list[str]:
    if not facts.accounting:
        return ["AccountingStorageType=accounting_storage/none"]
    types = sorted({shape.gpu_type for shape in facts.shapes if shape.gpus})
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePort={facts.accounting_port}",
        # With munge this is no password: it is the socket of the munged to ask.
        f"AccountingStoragePass={facts.state_dir}/munge/munge.socket",
        "AccountingStorageEnforce=limits,qos",
        f"AccountingStorageTRES={','.join(['gres/gpu', *(f'gres/gpu:{one}' for one in types)])}",
    ]


def slurm_conf(facts: ClusterFacts, *, task_plugin: str) -> str:
    """slurm.conf; ``task_plugin`` is the only line in which the slurmds' variants differ."""
    state = facts.state_dir
    sharing = max(1, *(shape.gpus for shape in facts.shapes))
    lines = [
        "# Written by synergyctl devcluster; changes are lost at the next start.",
        f"ClusterName={facts.name}",
        f"SlurmctldHost={facts.host}(127.0.0.1)",
        f"SlurmUser={facts.user}",
        f"SlurmdUser={facts.user}",
        f"AuthInfo=socket={state}/munge/munge.socket",
        f"SlurmctldPort={facts.first_port}",
        f"StateSaveLocation={state}/state",
        f"SlurmdSpoolDir={state}/spool/%n",
        f"SlurmctldPidFile={state}/run/slurmctld.pid",
        f"SlurmdPidFile={state}/run/slurmd-%n.pid",
        f"SlurmctldLogFile={state}/log/slurmctld.log",
        f"SlurmdLogFile={state}/log/slurmd-%n.log",
        f"TaskPlugin={task_plugin}",
        *_STOCK.splitlines(),
        *_accounting_lines(facts),
        *_node_lines(facts),
        # As many jobs share a node's cores as it has GPUs; GPUs and memory stay exclusive.
        f"PartitionName=synergy Nodes=ALL Default=NO State=UP OverSubscribe=FORCE:{sharing}",
        "PartitionName=main Nodes=ALL Default=YES State=UP OverSubscribe=NO",
        *facts.extra,
    ]
    return "\n".join(lines) + "\n"


def gres_conf(facts: ClusterFacts) -> str:
    """gres.conf; the device files are plain files in the state directory."""
    lines = [line for shape in facts.shapes if shape.gpus for line in _gres_lines(facts, shape)]
    return "\n".join(lines) + "\n"


def _gres_lines(facts: ClusterFacts, shape: NodeShape) -> Iterator[str]:
    parts = shape.sockets if shape.gpus_by_socket else 1
    each, cores = shape.gpus // parts, shape.cores // shape.threads_per_core // parts
    for part in range(parts):
        first, last = part * each, (part + 1) * each - 1
        device = f"[{first}-{last}]" if last > first else str(first)
        near = f" Cores={part * cores}-{(part + 1) * cores - 1}" if shape.gpus_by_socket else ""
        yield (
            f"NodeName={shape.nodes} Name=gpu Type={shape.gpu_type} "
            f"File={facts.state_dir}/dev/nvidia{device}{near}"
        )


def cgroup_conf(facts: ClusterFacts) -> str:
    """cgroup.conf for a machine that may have no systemd.

    With task/cgroup the real node's jobs are confined only when asked for. Without it slurmd needs
    nothing of cgroups: from 24.05 on they can be switched off altogether; before, naming v1 keeps
    slurmd from looking for systemd, and works even where no v1 is mounted (measured, 22.05).
    """
    if "task/cgroup" in facts.real_task_plugin:
        cores = "yes" if facts.constrain_cores else "no"
        return f"CgroupPlugin=cgroup/v1\nConstrainCores={cores}\nConstrainRAMSpace=no\n"
    if facts.slurm_version >= (24, 5):
        return "CgroupPlugin=disabled\n"
    return "CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\n"


def lua_value(value: object) -> str:
    """A Lua literal for None, bool, int, float, str, and lists and mappings of them.

    Raises ConfigError for anything else.
    """
    if value is None:
        return "nil"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        quoted = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{quoted}"'
    if isinstance(value, Mapping):
        items = (f"[{lua_value(key)}] = {lua_value(item)}" for key, item in value.items())
        return "{ " + ", ".join(items) + " }"
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return "{ " + ", ".join(lua_value(item) for item in value) + " }"
    raise ConfigError("cannot be written to Lua", key="site", value=value)


def site_lua(facts: ClusterFacts, uid: int, settings: Mapping[str, object]) -> str:
    """synergy_site.lua: the nodes' shapes, who may operate, and the caller's own ``settings``."""
    table: dict[str, object] = {
        "partition": "synergy",
        "operators": [0] if uid == 0 else [0, uid],
        "shapes": [
            {
                "type": shape.gpu_type,
                "nodes": len(shape.names()),
                "gpus": shape.gpus,
                "cores": shape.cores,
                "mem_mib": shape.mem_mib,
            }
            for shape in facts.shapes
            if shape.gpus
        ],
        **settings,
    }
    lines = [f"  {key} = {lua_value(value)}," for key, value in table.items() if value is not None]
    return "return {\n" + "\n".join(lines) + "\n}\n"
