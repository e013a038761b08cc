"""Where the launcher's process tree runs: pinned to the lease's cores, and kept there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from slurm_synergy.jobside import binding

__all__ = ["TreePins"]

_REPIN_EVERY_S = 2.0


class TreePins:
    """The CPUs of this process and all that it started.

    ``granted`` is what Slurm gave. Where it only binds tasks, and confines none, a lease reaches
    beyond that, unless ``keep_binding``. ``cpus`` is the place of the tree, empty while it has all
    that was granted; ``pinned`` how many CPUs that are, 0 where some threads could not be moved.
    """

    def __init__(self, *, keep_binding: bool, say: Callable[[str], None]) -> None:
        self.granted = frozenset(os.sched_getaffinity(0))
        self.cpus: frozenset[int] = frozenset()
        self.pinned = 0
        self._keep_binding, self._say = keep_binding, say
        self._reach: frozenset[int] = frozenset()
        self._repin_s = 0.0

    def move(self, cores: tuple[int, ...], node_cores: int) -> None:
        """To these cores of the node's ``node_cores``, as far as this machine has them."""
        mask = self.granted
        if cores and len(mask) < node_cores and not self._keep_binding:
            mask = self._reach = self._reach or binding.widest_mask()
        choice = binding.choose_cpus(cores, mask, node_cores)
        if choice.why:
            self._say(f"not pinned ({choice.why}); the lease gives {len(cores)} cores")
        if choice.cpus == self.cpus:
            return
        self.cpus = choice.cpus
        self._pin(strays_only=False)

    def keep(self) -> None:
        """Masks do not always last: a library may widen its own, a cgroup change may reset them."""
        if self.cpus and time.monotonic() >= self._repin_s:
            self._pin(strays_only=True)

    def has(self, cores: tuple[int, ...], node_cores: int) -> bool:
        """Whether the tree really has these cores and no others.

        Where the node is only pretended, with more cores than the machine, nobody is pinned and
        the program alone goes by their number.
        """
        if not self.cpus:
            return (os.cpu_count() or 0) < node_cores
        return self.pinned == len(cores)

    def _pin(self, *, strays_only: bool) -> None:
        # Without a place of its own any more the tree goes back to all that Slurm gave.
        cpus = self.cpus or self.granted
        result = binding.pin_tree(os.getpid(), cpus, strays_only=strays_only)
        self._repin_s = time.monotonic() + _REPIN_EVERY_S
        if result.wrong:
            self._say(f"{result.wrong} of {result.threads} threads could not be pinned")
        self.pinned = 0 if result.wrong else len(self.cpus)
