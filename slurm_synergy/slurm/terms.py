"""What holds for the managed partition from a start or reload on: read once, then relied on."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from slurm_synergy.config import EnforcementChoice, Settings
from slurm_synergy.errors import ConfigError, SlurmCommandError, SlurmParseError
from slurm_synergy.slurm import hostlist
from slurm_synergy.slurm.access import Access
from slurm_synergy.slurm.client import SlurmClient
from slurm_synergy.slurm.enforcing import Chosen, choose_enforcement
from slurm_synergy.slurm.facts import PartitionFacts

__all__ = ["Terms", "chosen_nodes", "read_terms"]

_LOG = logging.getLogger(__name__)


def chosen_nodes(settings: Settings) -> frozenset[str]:
    """The names in pool.nodes; empty for all of the partition. Raises ConfigError."""
    try:
        return frozenset(hostlist.expand(settings.pool.nodes))
    except SlurmParseError as err:
        raise ConfigError(
            f"not a host list: {err.what}",
            key="pool.nodes",
            value=settings.pool.nodes,
            remedy="write it as Slurm does, as in v100-[1-4],a100-1",
        ) from err


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How shares are made real, who may use which nodes, and how long a job may take.

    ``default_limit_s`` is what Slurm takes for the limit of a job that has none of its own, in
    seconds; None: no limit.
    """

    chosen: Chosen
    access: Access
    default_limit_s: float | None


def read_terms(client: SlurmClient, settings: Settings, *, leaving: bool) -> Terms:
    """Ask Slurm. Raises ClusterError, and ConfigError for settings that do not suit it.

    ``leaving``: nothing is planned any more, and nothing must be in the way.
    """
    name = settings.slurm.partition
    partition = _partition(
        client,
        name,
        key="slurm.partition",
        remedy="create it in slurm.conf (see slurm.conf.d/synergy.conf) or name another",
    )
    choice = settings.enforcement
    told = partition.oversubscribe[0] == "FORCE" and choice is not EnforcementChoice.BORROW
    config = None if told else client.read_config()
    chosen = choose_enforcement(choice, partition, config, node_helpers=settings.pool.node_helpers)
    _LOG.info("enforcement %s: %s", chosen.enforcement.value, chosen.why)
    return Terms(
        chosen=chosen,
        access=Access() if leaving else _access(client, settings, partition.max_nodes),
        default_limit_s=partition.default_time_s or partition.max_time_s,
    )


def _access(client: SlurmClient, settings: Settings, max_nodes: int | None) -> Access:
    by_type = {
        kind: _partition(
            client,
            name,
            key=f"pool.type_partitions.{kind}",
            remedy="name the partition whose users may have GPUs of that type",
        )
        for kind, name in sorted(settings.pool.type_partitions.items())
    }
    return Access(by_type=by_type, max_nodes=max_nodes)


def _partition(client: SlurmClient, name: str, *, key: str, remedy: str) -> PartitionFacts:
    try:
        return client.read_partition(name)
    except SlurmCommandError as err:
        if err.kind != "not_found":
            raise
        raise ConfigError(
            "Slurm has no such partition", key=key, value=name, remedy=remedy
        ) from err
