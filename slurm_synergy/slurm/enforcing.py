"""How CPU shares can be made real on a Slurm, from what its controller says. Pure.

* ``shared``: the partition lets jobs have the same cores (OverSubscribe=FORCE), so that all of them
  get all cores of their nodes, and leases say whose each core is.
* ``borrow``: Slurm confines nobody to cores (no task/cgroup, or ConstrainCores=no), or helpers on
  the nodes move what jobs are confined to, so that a job that was given its proportional share can
  be pinned to other cores as well.
* ``requeue``: neither; other cores take a restart.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_synergy.config import EnforcementChoice
from slurm_synergy.core.model import Enforcement
from slurm_synergy.errors import ConfigError
from slurm_synergy.slurm.facts import ConfigFacts, PartitionFacts

__all__ = ["Chosen", "choose_enforcement", "confinement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """An enforcement, and in words why it is this one.

    ``helped``: it works only on nodes whose helper is there.
    """

    enforcement: Enforcement
    why: str
    helped: bool = False


def confinement(config: ConfigFacts) -> tuple[bool, str]:
    """Whether jobs must be taken to be confined to their cores, and by what it is known."""
    if "task/cgroup" not in config.task_plugins:
        return False, f"TaskPlugin={','.join(config.task_plugins) or 'task/none'} confines no job"
    constrained = config.raw.get("ConstrainCores", "").lower()
    if constrained == "no":
        return False, "ConstrainCores=no"
    if constrained == "yes":
        return True, "ConstrainCores=yes confines jobs to their cores"
    # Each node has a cgroup.conf of its own, and not every controller prints one.
    return True, "TaskPlugin has task/cgroup, and the controller does not show ConstrainCores"


def choose_enforcement(
    choice: EnforcementChoice,
    partition: PartitionFacts,
    config: ConfigFacts | None,
    *,
    node_helpers: bool = False,
) -> Chosen:
    """The enforcement for ``choice`` in this partition.

    ``config`` may be None where OverSubscribe=FORCE makes it needless. ``node_helpers``: whether
    the nodes run ``slurm-synergyd --node``. Raises ConfigError for one that cannot work here.
    """
    word = partition.oversubscribe[0]
    seen = f"partition {partition.name!r} has OverSubscribe={word}"
    if choice is EnforcementChoice.REQUEUE:
        return Chosen(enforcement=Enforcement.REQUEUE, why="as configured")
    if choice is EnforcementChoice.SHARED and word != "FORCE":
        raise ConfigError(
            seen,
            key="enforcement",
            value=str(choice),
            remedy="set OverSubscribe=FORCE:N in slurm.conf (N: GPUs per node), "
            "or choose enforcement: auto, borrow or requeue",
        )
    if choice is not EnforcementChoice.BORROW and word == "FORCE":
        return Chosen(enforcement=Enforcement.SHARED, why=seen)
    confined, why = (True, "Slurm's configuration is not known")
    if config is not None:
        confined, why = confinement(config)
    helped = confined and node_helpers
    if helped:
        confined, why = False, "helpers on the nodes move what jobs are confined to"
    if choice is EnforcementChoice.BORROW and confined:
        raise ConfigError(
            why,
            key="enforcement",
            value=str(choice),
            remedy="set ConstrainCores=no in cgroup.conf of all nodes, or run "
            "slurm-synergyd --node on all of them and set pool.node_helpers, or choose "
            "enforcement: auto, shared (with OverSubscribe=FORCE) or requeue",
        )
    if confined:
        return Chosen(enforcement=Enforcement.REQUEUE, why=f"{seen}, and {why}")
    return Chosen(enforcement=Enforcement.BORROW, why=f"{seen}, but {why}", helped=helped)
