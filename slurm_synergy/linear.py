"""Linear programs, with or without integers, solved in this process by HiGHS through scipy.

For policies, which ask many small questions; :mod:`slurm_synergy.milp` asks a child process, which
can be killed but takes half a second to start. HiGHS looks at its time limit between steps of its
own, which are short for programs of this size.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.errors import SolverError

__all__ = ["Answer", "maximise"]

Floats = NDArray[np.float64]

_INFEASIBLE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The best ``values`` that were found; None when there are none.

    ``status`` is ``optimal``, ``feasible`` (the limit came first), ``infeasible`` or ``none``.
    """

    status: str
    values: Floats | None = None
    objective: float | None = None
    gap: float | None = None


def maximise(
    gains: Floats,
    rows: Floats,
    limits: Floats,
    *,
    most: Floats | float = np.inf,
    least: Floats | float = 0.0,
    row_least: Floats | float = -np.inf,
    whole: NDArray[np.bool_] | None = None,
    gap: float = 1e-6,
    limit_s: float = 15.0,
) -> Answer:
    """The ``v`` between ``least`` and ``most`` with the largest ``gains @ v``.

    ``row_least <= rows @ v <= limits`` holds, and ``v`` is an integer where ``whole`` says so.
    ``gap`` is how near to the best is near enough, relative. Raises SolverError without scipy.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError as err:
        raise SolverError(
            f"{err}: this policy needs scipy; install it with: "
            "pip install 'slurm-synergy[controller]'"
        ) from err
    count = len(gains)
    with contextlib.nullcontext() if whole is None else _quiet():
        found = milp(
            -np.asarray(gains, dtype=float),
            integrality=np.zeros(count) if whole is None else whole.astype(float),
            bounds=Bounds(np.broadcast_to(least, count), np.broadcast_to(most, count)),
            constraints=LinearConstraint(
                csr_array(rows), np.broadcast_to(row_least, len(rows)), limits
            ),
            options={"time_limit": limit_s, "mip_rel_gap": gap, "presolve": True},
        )
    if found.x is None:
        return Answer(status="infeasible" if found.status == _INFEASIBLE else "none")
    return Answer(
        status="optimal" if found.status == 0 else "feasible",
        values=np.asarray(found.x, dtype=float),
        objective=-float(found.fun),
        gap=None if found.mip_gap is None else float(found.mip_gap),
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep off standard output what HiGHS writes there while it looks for integers.

    It does so past its own setting for silence, and programs read what our commands print.
    """
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
