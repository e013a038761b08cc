"""The state directory of an embedded cluster: where it is, its folders and its files."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_synergy.devcluster import conf
from slurm_synergy.devcluster.accounting import slurmdbd_conf
from slurm_synergy.devcluster.programs import job_submit_source
from slurm_synergy.errors import DevClusterError

__all__ = ["LOCK", "claim_dir", "default_state_dir", "is_ours", "make_tree", "write_conf"]

LOCK = ".synergy-devcluster"
"""The lock file; it also tells our directories from others."""

_SOCKET_PATH_LIMIT = 107


def default_state_dir() -> Path:
    """Where ``synergyctl devcluster`` keeps its cluster unless told otherwise.

    Below XDG_STATE_HOME or ~/.local/state; for root below /tmp, because job owners must be able to
    reach the munge socket and root's home is closed to them.
    """
    base = os.environ.get("XDG_STATE_HOME")
    if base:
        return Path(base) / "slurm-synergy" / "devcluster"
    if os.geteuid() == 0:
        return Path("/tmp/slurm-synergy-0/devcluster")
    return Path.home() / ".local" / "state" / "slurm-synergy" / "devcluster"


def is_ours(state_dir: Path) -> bool:
    """Whether the directory is an embedded cluster's."""
    return (state_dir / LOCK).exists()


def claim_dir(state_dir: Path, node_names: Sequence[str]) -> None:
    """Make the directory, or take an empty one or one of ours.

    Raises DevClusterError for other content, for a path too long for Unix sockets, and for a place
    that cannot be written.
    """
    node = max((*node_names, "real-1"), key=len)
    step_socket = state_dir / "spool" / node / f"{node}_9999999.99999"
    if len(str(step_socket)) > _SOCKET_PATH_LIMIT:
        raise DevClusterError(f"{state_dir}: too long for Unix sockets; choose a shorter --dir")
    try:
        if state_dir.exists() and any(state_dir.iterdir()) and not is_ours(state_dir):
            raise DevClusterError(f"{state_dir} is not empty; choose another --dir")
        state_dir.mkdir(parents=True, exist_ok=True)
        # Job owners reach the munge socket and their GPU files through it.
        state_dir.chmod(0o755)
        (state_dir / LOCK).touch()
    except OSError as err:
        raise DevClusterError(
            f"{state_dir}: cannot be made or used: {err.strerror}; choose another --dir, a "
            "directory that you may write"
        ) from err


def make_tree(state_dir: Path, node_names: Sequence[str], gpus: int) -> None:
    """Folders, munge key and GPU files for a new cluster; an earlier one's logs stay."""
    # What an earlier cluster kept here belongs to another key and another cluster name.
    for name in ("state", "spool", "munge", "database"):
        shutil.rmtree(state_dir / name, ignore_errors=True)
    (state_dir / "state").mkdir(mode=0o700)
    for name in ("etc", "munge", "log", "run", "dev", "spool"):
        (state_dir / name).mkdir(mode=0o755, exist_ok=True)
    for name in node_names:
        (state_dir / "spool" / name).mkdir(mode=0o755)
    for index in range(gpus):
        # Slurm wants a character device; a link to one needs no right to make devices.
        device = state_dir / "dev" / f"nvidia{index}"
        if not device.is_symlink():
            device.symlink_to("/dev/null")
    key = state_dir / "munge" / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))


def write_conf(facts: conf.ClusterFacts, site: Mapping[str, object]) -> None:
    """Write the configuration of Slurm and of job_submit.lua."""
    etc = facts.state_dir / "etc"
    texts = {
        # The commands read slurm.conf: srun refuses --cpu-bind when it names no pinning plugin.
        "slurm.conf": conf.slurm_conf(facts, task_plugin=facts.real_task_plugin),
        "slurm-fake.conf": conf.slurm_conf(facts, task_plugin="task/none"),
        "gres.conf": conf.gres_conf(facts),
        "cgroup.conf": conf.cgroup_conf(facts),
        "synergy_site.lua": conf.site_lua(facts, os.geteuid(), site),
    }
    for name, text in texts.items():
        (etc / name).write_text(text, encoding="utf-8")
    if facts.accounting:
        path = etc / "slurmdbd.conf"
        path.touch(mode=0o600)
        path.write_text(
            slurmdbd_conf(facts.state_dir, port=facts.accounting_port, user=facts.user),
            encoding="utf-8",
        )
    shutil.copyfile(job_submit_source(), etc / "job_submit.lua")
