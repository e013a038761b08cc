"""What the columns of an assignment take of its rows, and what follows from that alone. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Rows", "rows_of"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_MOST_KEPT: Final = 2


class Rows:
    """What the columns take of the rows, and what follows from that alone."""

    __slots__ = ("_changes", "alone", "change", "numbers", "takes")

    def __init__(self, takes: Floats, limits: Floats) -> None:
        # Idleness is an extra last column.
        self.takes = np.hstack([takes, np.zeros((len(limits), 1))])
        # What a job takes more of each row when it moves from one column to another.
        self.change = self.takes[:, None, :] - self.takes[:, :, None]
        self._changes: list[list[list[float]]] | None = None
        # What columns take, as plain numbers.
        self.numbers: list[list[int]] = self.takes.T.astype(np.int64).tolist()
        # A configuration that no longer fits even alone cannot be part of any answer.
        alone: Bools = np.any(takes > limits[:, None], axis=0)
        self.alone: Bools | None = alone if alone.any() else None

    @property
    def changes(self) -> list[list[list[float]]]:
        """``change`` as plain numbers, by the columns from which and to which a job moves."""
        if self._changes is None:
            self._changes = self.change.transpose(1, 2, 0).tolist()
        return self._changes


@lru_cache(maxsize=_MOST_KEPT)
def rows_of(shape: tuple[int, ...], takes: bytes, limits: bytes) -> Rows:
    """Of the arrays with these bytes, of floats: they are the same in most rounds."""
    return Rows(np.frombuffer(takes).reshape(shape), np.frombuffer(limits))
