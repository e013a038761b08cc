"""What the ranks of an adaptive job tell each other: a few numbers, without waiting for them.

Every rank must take the same learning rate and change the batch at the same step, so all decide by
the same numbers. They are gathered beside the training and looked at one step later.

Nothing here imports torch: all of it runs in programs that did so themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["Exchange", "Shared"]


def _torch() -> Any:
    return sys.modules["torch"]


class Shared:
    """Numbers of all ranks that are under way; ``take`` gives them as ``[rank][number]``."""

    __slots__ = ("_event", "_rows", "_work")

    def __init__(self, rows: list[Any], work: Any) -> None:
        self._work, self._event = work, None
        cuda = rows[0].is_cuda
        if cuda and work is not None:
            work.wait()  # the stream waits, not this process
            self._work = None
        table = _torch().stack(rows)
        if cuda:
            # By an event of their own: looking at them later must not wait for the next step.
            self._rows = table.to("cpu", non_blocking=True)
            self._event = _torch().cuda.Event()
            self._event.record()
        else:
            self._rows = rows

    def take(self) -> list[list[float]]:
        """The numbers; the same each time."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._event is not None:
            self._event.synchronize()
        return [[float(one) for one in row] for row in self._rows]


class Exchange:
    """The ranks of ``group`` (a process group of torch.distributed; None: this process alone)."""

    def __init__(self, device: Any, group: Any, ranks: int) -> None:
        self._device, self._group, self._ranks = device, group, ranks

    def share(self, numbers: Sequence[Any]) -> Shared:
        """Send ``numbers`` (tensors or plain) to all ranks; on all ranks at the same step."""
        torch = _torch()
        row = torch.stack(
            [torch.as_tensor(one, dtype=torch.float64, device=self._device) for one in numbers]
        )
        if self._ranks == 1:
            return Shared([row], None)
        rows = [torch.empty_like(row) for _ in range(self._ranks)]
        work = torch.distributed.all_gather(rows, row, group=self._group, async_op=True)
        return Shared(rows, work)
