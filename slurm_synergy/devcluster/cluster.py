"""A real Slurm on one machine: munged, slurmctld, and one slurmd for each pretended node.

Nothing of it touches a Slurm or munge that the machine already runs: key, socket, ports, state and
logs are its own, all in one state directory. Every daemon is known by pid and start time, and
``down`` ends these, the step daemons, and the jobs' processes, and nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from slurm_synergy.devcluster import conf, confinement, ports
from slurm_synergy.devcluster.accounting import Accounting, need_accounting
from slurm_synergy.devcluster.layout import LOCK, claim_dir, is_ours, make_tree, write_conf
from slurm_synergy.devcluster.programs import (
    clean_environment,
    hardware,
    missing_programs,
    need,
    slurm_version,
    slurm_version_text,
    tail,
)
from slurm_synergy.devcluster.record import Record, as_json
from slurm_synergy.devcluster.shapes import DEFAULT_SHAPES, NodeShape, check_distinct, real_shape
from slurm_synergy.devcluster.starting import Starting
from slurm_synergy.devcluster.status import Status
from slurm_synergy.errors import DevClusterError

__all__ = ["DevCluster"]

_PORT_TRIES = 3
_ASK_S = 30.0


class DevCluster:
    """One embedded cluster; as a context manager it is up inside and gone afterwards.

    ``dir`` is the state directory (by default a fresh one in /tmp). ``nodes`` are the pretended
    nodes; ``real_node`` adds ``real-1``, whose cores are the machine's; ``constrain_cores`` puts
    its jobs into cpusets (ConstrainCores=yes; needs task/cgroup, see ``status().notes``). With
    ``accounting`` it has slurmdbd and enforces the limits of associations and QOS: users other than
    the cluster's own need an association (``sacctmgr add user``). ``site`` goes into
    synergy_site.lua, ``extra_conf`` at the end of slurm.conf. Methods raise DevClusterError, with
    the tail of the daemon's log where there is one.
    """

    def __init__(
        self,
        *,
        dir: Path | str | None = None,
        nodes: Sequence[NodeShape] | None = None,
        real_node: bool = True,
        constrain_cores: bool = False,
        accounting: bool = False,
        site: Mapping[str, object] | None = None,
        extra_conf: Sequence[str] = (),
    ) -> None:
        self.state_dir = (
            Path(tempfile.mkdtemp(prefix="synergy-dev-")) if dir is None else Path(dir).absolute()
        )
        self._asked = None if nodes is None else tuple(nodes)
        self.shapes = DEFAULT_SHAPES if self._asked is None else self._asked
        self._real_node = real_node
        self._constrain_cores, self._keeps_accounts = constrain_cores, accounting
        self.site = dict(site or {})
        self.extra_conf = tuple(extra_conf)
        self._record = Record(self.state_dir)
        self._reread()

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    # -- what others use -------------------------------------------------------------------------

    @property
    def conf_path(self) -> Path:
        """The slurm.conf of slurmctld and of all commands."""
        return self.state_dir / "etc" / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        """The socket of this cluster's munged."""
        return self.state_dir / "munge" / "munge.socket"

    @property
    def env(self) -> dict[str, str]:
        """The variables that point commands at this cluster, and at its controller if known."""
        found = {
            "SLURM_CONF": str(self.conf_path),
            "SYNERGY_MUNGE_SOCKET": str(self.munge_socket),
            "SYNERGY_DEVCLUSTER_DIR": str(self.state_dir),
        }
        site = self._record.get("site") or self.site
        if isinstance(site, dict) and site.get("endpoint"):
            found["SYNERGY_ENDPOINT"] = str(site["endpoint"])
        return found

    @property
    def pids(self) -> dict[str, int]:
        """Pids of the daemons that run: ``munged``, ``slurmctld``, ``slurmd-NODE``."""
        return self._record.daemons.pids

    @property
    def node_names(self) -> tuple[str, ...]:
        """All nodes, the real one last."""
        return tuple(name for shape in self.shapes for name in shape.names())

    def run(
        self,
        argv: Sequence[str],
        *,
        check: bool = True,
        timeout_s: float = 60.0,
        input: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command against this cluster; with ``check`` a non-zero exit is DevClusterError."""
        whole = {**clean_environment(), **self.env, **(env or {})}
        try:
            done = subprocess.run(
                list(argv),
                capture_output=True,
                text=True,
                timeout=timeout_s,
                input=input,
                stdin=subprocess.DEVNULL if input is None else None,
                env=whole,
                cwd=cwd,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as err:
            raise DevClusterError(f"{' '.join(argv)}: {err}") from err
        if check and done.returncode != 0:
            raise DevClusterError(
                f"{' '.join(argv)}: exit status {done.returncode}: "
                f"{(done.stderr or done.stdout).strip()}"
            )
        return done

    def log(self, daemon: str, lines: int = 50) -> str:
        """The last lines of a daemon's log (``slurmctld``, ``slurmd-NODE``, ``munged``)."""
        return tail(self.state_dir / "log" / f"{daemon}.log", lines)

    def is_up(self) -> bool:
        """Whether all daemons run."""
        return bool(self._record) and all(map(self._record.daemons.runs, self._expected()))

    def status(self) -> Status:
        """What runs now; asks slurmctld for the nodes' states."""
        daemons = {name: self._record.daemons.runs(name) for name in self._expected()}
        nodes: dict[str, str] = {}
        if daemons.get("slurmctld"):
            done = self.run([need("sinfo"), "-h", "-N", "-o", "%N %T"], check=False)
            nodes = dict(line.split() for line in done.stdout.splitlines() if line.count(" ") == 1)
        return Status(
            state_dir=str(self.state_dir),
            up=bool(daemons) and all(daemons.values()),
            slurm=str(self._record.get("slurm", "")),
            daemons=daemons,
            nodes=nodes,
            task_plugin=str(self._record.get("task_plugin", "")),
            notes=self._record.notes,
        )

    # -- up and down -----------------------------------------------------------------------------

    def up(self, *, timeout_s: float = 60.0) -> None:
        """Start what does not run yet and wait until every node is ready.

        A failure takes down what was started and leaves the logs.
        """
        for name in missing_programs():
            need(name)
        if self._keeps_accounts:
            need_accounting()
        claim_dir(self.state_dir, self.node_names)
        with self._locked():
            self._reread()
            if not self._record:
                self._up_anew(timeout_s)
                return
            if self._asked is not None and self._asked != self._pretended():
                raise DevClusterError(
                    f"{self.state_dir} has a cluster with other nodes; take it down first "
                    "(synergyctl devcluster down)"
                )
            if self._keeps_accounts and not self._record.get("accounting"):
                raise DevClusterError(
                    f"{self.state_dir} has a cluster without accounting; take it down first "
                    "(synergyctl devcluster down)"
                )
            if self.site and as_json(self.site) != self._record.get("site", {}):
                raise DevClusterError(
                    f"{self.state_dir} has a cluster with other settings for jobs (such as the "
                    "endpoint); take it down first (synergyctl devcluster down)"
                )
            if not self.is_up():
                self._start_all(timeout_s)

    def _pretended(self) -> tuple[NodeShape, ...]:
        asked = self._asked or ()
        return tuple(shape for shape in self.shapes if not shape.real or shape in asked)

    def _up_anew(self, timeout_s: float) -> None:
        avoid: set[int] = set()
        while True:
            try:
                avoid.add(self._prepare(frozenset(avoid)))
                self._start_all(timeout_s)
                return
            except BaseException as err:  # also when the user interrupts: leave nothing running
                self._end_everything()
                self._forget()
                # Somebody may have taken a port between our look and our start.
                raced = isinstance(err, DevClusterError) and "ddress already in use" in str(err)
                if not raced or len(avoid) == _PORT_TRIES:
                    raise

    def _forget(self) -> None:
        ports.release_block(self.state_dir)
        if self._record.get("constrain_cores"):
            for node in self._real_nodes():
                confinement.remove_cpusets(node)
        self._record.remove()

    def down(self, *, keep: bool = False) -> tuple[int, ...]:
        """End the daemons and all jobs; remove the state directory unless ``keep``.

        Returns the pids that were ended. Harmless when nothing runs.
        """
        if not self.state_dir.exists():
            return ()
        if any(self.state_dir.iterdir()) and not is_ours(self.state_dir):
            raise DevClusterError(f"{self.state_dir} is no embedded cluster; left untouched")
        with self._locked():
            self._reread()
            ended = self._end_everything()
            self._forget()
            if not keep:
                shutil.rmtree(self.state_dir, ignore_errors=True)
        return ended

    def munged_stop(self) -> None:
        """Stop munged: from now on nobody can authenticate to anybody."""
        self._record.daemons.stop("munged", grace_s=5.0)

    def munged_start(self, *, timeout_s: float = 20.0) -> None:
        """Start munged again."""
        self._starting().munged(time.monotonic() + timeout_s)
        self._record.save()

    def slurmctld_stop(self) -> None:
        """Stop slurmctld in good order (it saves its state)."""
        self._record.daemons.stop("slurmctld", grace_s=20.0)

    def slurmctld_kill(self) -> None:
        """End slurmctld at once, as a crash would."""
        self._record.daemons.stop("slurmctld", grace_s=0.0)

    def slurmctld_start(self, *, timeout_s: float = 30.0) -> None:
        """Start slurmctld again and wait until it answers."""
        starting = self._starting()
        starting.slurmctld()
        starting.await_slurmctld(time.monotonic() + timeout_s)
        self._record.save()

    def slurmd_stop(self, node: str) -> None:
        """Stop the slurmd of one node; jobs there run on."""
        self._record.daemons.stop(f"slurmd-{node}", grace_s=10.0)

    def slurmd_kill(self, node: str) -> None:
        """End the slurmd of one node at once."""
        self._record.daemons.stop(f"slurmd-{node}", grace_s=0.0)

    def slurmd_start(self, node: str) -> None:
        """Start the slurmd of one node again."""
        self._starting().slurmd(node)
        self._record.save()

    # -- internals -------------------------------------------------------------------------------

    def _reread(self) -> None:
        self._record.load()
        if self._record:
            self.shapes = self._record.shapes

    def _expected(self) -> tuple[str, ...]:
        return self._starting().names if self._record else ()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.state_dir / LOCK).open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _prepare(self, avoid: frozenset[int]) -> int:
        """Claim ports and write every file; the first port."""
        if self._real_node and not any(shape.real for shape in self.shapes):
            self.shapes = (*self.shapes, real_shape(hardware()))
        check_distinct(self.shapes)
        make_tree(self.state_dir, self.node_names, max(shape.gpus for shape in self.shapes))
        task_plugin, note = self._choose_task_plugin()
        count = 1 + len(self.node_names) + self._keeps_accounts
        first = ports.claim_block(self.state_dir, count, avoid=avoid)
        facts = conf.ClusterFacts(
            name=f"synergy-{secrets.token_hex(4)}",
            state_dir=self.state_dir,
            user=pwd.getpwuid(os.geteuid()).pw_name,
            host=socket.gethostname().split(".")[0],
            first_port=first,
            shapes=self.shapes,
            slurm_version=slurm_version(),
            real_task_plugin=task_plugin,
            constrain_cores=self._constrain_cores,
            accounting=self._keeps_accounts,
            extra=self.extra_conf,
        )
        write_conf(facts, self.site)
        self._record.begin(
            self.shapes,
            {
                "name": facts.name,
                "slurm": slurm_version_text(),
                "task_plugin": task_plugin,
                "constrain_cores": self._constrain_cores,
                "accounting": self._keeps_accounts,
                "notes": [note] if note else [],
                "marker": f"SYNERGY_DEVCLUSTER_NAME={facts.name}",
                "site": as_json(self.site),
            },
        )
        return first

    def _choose_task_plugin(self) -> tuple[str, str]:
        real = self._real_nodes()
        if not real:
            if self._constrain_cores:
                raise DevClusterError("cores can be constrained only on a node with real cores")
            return "task/none", ""
        plugin, note = confinement.choose_task_plugin()
        if self._constrain_cores:
            if note:
                raise DevClusterError(f"cores cannot be constrained: {note}")
            for node in real:
                confinement.claim_cpusets(node)
        return plugin, note

    def _real_nodes(self) -> tuple[str, ...]:
        return tuple(name for shape in self.shapes if shape.real for name in shape.names())

    def _starting(self) -> Starting:
        return Starting(
            state_dir=self.state_dir,
            daemons=self._record.daemons,
            shapes=self.shapes,
            marker=str(self._record["marker"]),
            ask=lambda argv: self.run(argv, check=False, timeout_s=_ASK_S),
            accounting=self._accounting(),
        )

    def _accounting(self) -> Accounting | None:
        if not self._record.get("accounting"):
            return None
        return Accounting(state_dir=self.state_dir, cluster_name=str(self._record["name"]))

    def _start_all(self, timeout_s: float) -> None:
        deadline_s, starting = time.monotonic() + timeout_s, self._starting()
        try:
            starting.begin_all(deadline_s)
        finally:
            self._record.save()
        starting.await_all(deadline_s)

    def _end_everything(self) -> tuple[int, ...]:
        if not self._record:
            return ()
        return self._record.daemons.end_all(str(self._record["name"]), str(self._record["marker"]))
