"""The Slurm client that the settings ask for."""

from __future__ import annotations

from slurm_synergy.config import ClientChoice, SlurmSettings
from slurm_synergy.slurm.cli_client import CliSlurmClient
from slurm_synergy.slurm.commands import SlurmCommands
from slurm_synergy.slurm.pace import BusyLimits, Pacer

__all__ = ["make_client", "make_pacer"]


def make_client(settings: SlurmSettings) -> CliSlurmClient:
    """The client, without asking slurmctld. Raises ConfigError when pyslurm cannot be used."""
    conf = str(settings.conf) if settings.conf else None
    commands = SlurmCommands(
        slurm_conf=conf, bin_dir=str(settings.bin_dir) if settings.bin_dir else None
    )
    if settings.client is ClientChoice.PYSLURM:
        from slurm_synergy.slurm.pyslurm_client import PyslurmClient, open_pyslurm

        process = open_pyslurm(commands, conf)
        return PyslurmClient(commands, process, timeout_s=settings.command_timeout_s)
    return CliSlurmClient(commands, timeout_s=settings.command_timeout_s)


def make_pacer(client: CliSlurmClient, settings: SlurmSettings) -> Pacer:
    """What stretches the pauses between readings while slurmctld is busy."""
    load = settings.load
    return Pacer(
        client,
        limits=BusyLimits(
            server_threads=load.server_threads,
            agent_queue=load.agent_queue,
            rpc_mean_s=load.rpc_mean_s,
            reading_s=load.reading_s,
        ),
        look_every_s=load.look_every_s,
        longest_s=load.longest_pause_s,
    )
