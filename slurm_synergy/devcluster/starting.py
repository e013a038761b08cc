"""Starting the daemons of an embedded cluster, in the order in which they need each other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_synergy.devcluster import processes
from slurm_synergy.devcluster.accounting import Accounting
from slurm_synergy.devcluster.daemons import Ask, Daemons
from slurm_synergy.devcluster.programs import need
from slurm_synergy.devcluster.shapes import NodeShape
from slurm_synergy.errors import DevClusterError

__all__ = ["Starting"]

# sinfo's words for a node whose slurmd has reported and can be used, or was drained by somebody.
_READY = frozenset(
    ("idle", "mixed", "allocated", "completing", "reserved", "drained", "draining", "planned")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Starting:
    """Starts daemons that do not run yet. Methods raise DevClusterError, with what a daemon said.

    ``marker`` is the variable, ``NAME=value``, by which all that the daemons start is told.
    ``accounting`` is None for a cluster without slurmdbd. Deadlines are on the monotonic clock.
    """

    state_dir: Path
    daemons: Daemons
    shapes: Sequence[NodeShape]
    marker: str
    ask: Ask
    accounting: Accounting | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All daemons of the cluster."""
        kept = self.accounting.names if self.accounting else ()
        return ("munged", *kept, "slurmctld", *(f"slurmd-{node}" for node in self._nodes()))

    def begin_all(self, deadline_s: float) -> None:
        """Start what does not run; slurmctld and the slurmds may not be ready yet."""
        if not self.daemons.runs("munged"):
            self.munged(deadline_s)
        if self.accounting is not None:
            self.accounting.start(self.daemons, self._spawn, self.ask, deadline_s)
        self.slurmctld()
        for node in self._nodes():
            self.slurmd(node)

    def await_all(self, deadline_s: float) -> None:
        """Wait until slurmctld answers and every node is ready."""
        self.await_slurmctld(deadline_s)
        self.await_nodes(deadline_s)

    def munged(self, deadline_s: float) -> None:
        """Start munged and wait for its socket."""
        place = self.state_dir / "munge"
        server = place / "munge.socket"
        server.unlink(missing_ok=True)
        self._spawn(
            "munged",
            [
                need("munged"),
                "--foreground",
                "--force",
                "--num-threads=2",
                f"--key-file={place}/munge.key",
                f"--socket={server}",
                f"--pid-file={self.state_dir}/run/munged.pid",
                f"--log-file={self.state_dir}/log/munged.log",
                f"--seed-file={place}/munged.seed",
            ],
        )
        self.daemons.await_ready("munged", server.exists, deadline_s)

    def slurmctld(self) -> None:
        """Start slurmctld unless it runs."""
        if not self.daemons.runs("slurmctld"):
            self._spawn("slurmctld", [need("slurmctld"), "-D", "-f", str(self._conf())])

    def slurmd(self, node: str) -> None:
        """Start the slurmd of one node unless it runs."""
        if self.daemons.runs(f"slurmd-{node}"):
            return
        nodes = self._nodes()
        if node not in nodes:
            raise DevClusterError(f"no node {node}; there are {', '.join(nodes)}")
        real = any(shape.real and node in shape.names() for shape in self.shapes)
        chosen = self._conf() if real else self._conf().with_name("slurm-fake.conf")
        self._spawn(f"slurmd-{node}", [need("slurmd"), "-D", "-N", node, "-f", str(chosen)])

    def await_slurmctld(self, deadline_s: float) -> None:
        """Wait until slurmctld answers."""

        def answers() -> bool:
            return self.ask([need("scontrol"), "ping"]).returncode == 0

        self.daemons.await_ready("slurmctld", answers, deadline_s)

    def await_nodes(self, deadline_s: float) -> None:
        """Wait until every node can be used."""
        waiting = set(self._nodes())

        def ready() -> bool:
            for name in waiting:
                if not self.daemons.runs(f"slurmd-{name}"):
                    raise DevClusterError(
                        f"slurmd-{name} ended:\n{self.daemons.why(f'slurmd-{name}')}"
                    )
            told = self.ask([need("sinfo"), "-h", "-N", "-o", "%N %T"]).stdout
            for line in told.splitlines():
                name, _, state = line.partition(" ")
                if state in _READY:
                    waiting.discard(name)
            return not waiting

        if not processes.wait_until(ready, max(0.0, deadline_s - time.monotonic()), pause_s=0.1):
            name = min(waiting)
            raise DevClusterError(
                f"nodes not ready in time: {', '.join(sorted(waiting))}; slurmd-{name} says:\n"
                f"{self.daemons.why(f'slurmd-{name}')}"
            )

    def _nodes(self) -> tuple[str, ...]:
        return tuple(name for shape in self.shapes for name in shape.names())

    def _conf(self) -> Path:
        return self.state_dir / "etc" / "slurm.conf"

    def _spawn(self, name: str, argv: Sequence[str], **more: str) -> None:
        marker, _, value = self.marker.partition("=")
        env = {"SLURM_CONF": str(self._conf()), marker: value, **more}
        self.daemons.spawn(name, argv, env)
