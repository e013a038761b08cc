"""TCP ports for several embedded clusters at once.

Ports are taken as one block. A claim is a small file that names the cluster's state directory; it
lives as long as that directory points back at it. Claims are taken under a lock, and every port of
the block is bound once to see that nobody else has it; who still loses the race (another user's
cluster) retries with the next block.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from slurm_synergy.errors import DevClusterError

__all__ = ["claim_block", "release_block"]

_CLAIM_FILE = "ports"
_FIRST_PORT = 20_000
_END_PORT = 32_000  # the kernel's ephemeral ports usually start at 32768
_GRAIN = 32


def _registry() -> Path:
    place = Path("/tmp") / f"slurm-synergy-ports-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.is_symlink() or place.stat().st_uid != os.getuid():
        raise DevClusterError(f"{place} belongs to somebody else; ask its owner to remove it")
    return place


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[None]:
    with (place / "lock").open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def _held(claim: Path) -> bool:
    try:
        owner = Path(claim.read_text(encoding="utf-8").strip())
        return (owner / _CLAIM_FILE).read_text(encoding="utf-8").strip() == claim.name
    except OSError:
        return False


def claim_block(state_dir: Path, count: int, *, avoid: frozenset[int] = frozenset()) -> int:
    """Claim ``count`` consecutive free ports for the cluster in ``state_dir``; the first of them.

    ``avoid`` lists blocks that turned out to be unusable. Raises DevClusterError when none is left.
    """
    place = _registry()
    size = -(-count // _GRAIN) * _GRAIN
    with _locked(place):
        taken: set[int] = set()
        for claim in place.glob("*-*"):
            if _held(claim):
                first, last = (int(part) for part in claim.name.split("-"))
                taken.update(range(first, last))
            else:
                claim.unlink(missing_ok=True)
        for first in range(_FIRST_PORT, _END_PORT - size, _GRAIN):
            block = range(first, first + size)
            if first in avoid or not taken.isdisjoint(block):
                continue
            if all(_free(port) for port in block[:count]):
                name = f"{first}-{first + size}"
                (state_dir / _CLAIM_FILE).write_text(name, encoding="utf-8")
                (place / name).write_text(str(state_dir), encoding="utf-8")
                return first
    raise DevClusterError(
        f"no {count} consecutive free TCP ports between {_FIRST_PORT} and {_END_PORT}; "
        "take other embedded clusters down (synergyctl devcluster down --dir DIR)"
    )


def release_block(state_dir: Path) -> None:
    """Give the ports of the cluster in ``state_dir`` back; harmless when it has none."""
    try:
        name = (state_dir / _CLAIM_FILE).read_text(encoding="utf-8").strip()
    except OSError:
        return
    with _locked(_registry()):
        (state_dir / _CLAIM_FILE).unlink(missing_ok=True)
        if name:
            (_registry() / name).unlink(missing_ok=True)
