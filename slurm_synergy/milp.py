"""The only place that talks to a solver: PuLP with HiGHS, in a child process that can be killed.

A solver checks its time limit between steps of its own, and a step may take long. The child is
killed when the limit and a grace have passed, so a caller always gets an answer in time. Needs the
extra ``solver``; without it ``solve`` raises SolverError with the remedy.

    python -m slurm_synergy.milp < problem.json > solution.json
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slurm_synergy.errors import SolverError

__all__ = ["Constraint", "Problem", "Solution", "Status", "Variable", "solve"]

# Starting Python and loading the solver takes about half a second on a free machine.
_GRACE_S = 5.0

Status = str
"""``optimal``, ``feasible`` (the limit came first), ``infeasible``, or ``none`` (no answer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """An integer from 0 to ``most`` that adds ``gain`` to the objective for each unit."""

    gain: float
    most: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The sum of coefficient times variable, by number, is at most (or equals) ``limit``."""

    terms: tuple[tuple[int, float], ...]
    limit: float
    equal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A linear problem over integers; the objective is maximised."""

    variables: tuple[Variable, ...]
    constraints: tuple[Constraint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What came of it.

    ``values`` by variable, None without a feasible answer; ``bound`` is what no answer can exceed
    (None if unknown), ``gap`` how far below it the objective is, relative; ``took_s`` the seconds
    of the whole call.
    """

    status: Status
    values: tuple[int, ...] | None = None
    objective: float | None = None
    bound: float | None = None
    gap: float | None = None
    took_s: float = 0.0


def solve(problem: Problem, *, limit_s: float, gap: float = 0.0) -> Solution:
    """Maximise within ``limit_s`` seconds; good enough when within ``gap`` of the bound.

    Returns after at most ``limit_s`` and a grace of five seconds. Raises SolverError when the
    solver is not installed or fails.
    """
    began_s = time.monotonic()
    text = json.dumps({"problem": asdict(problem), "limit_s": limit_s, "gap": gap})
    child = subprocess.Popen(
        [sys.executable, "-m", "slurm_synergy.milp"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(text, timeout=limit_s + _GRACE_S)
    except subprocess.TimeoutExpired:
        return Solution(status="none", took_s=time.monotonic() - began_s)
    finally:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    if child.returncode < 0:  # killed from outside, most likely for its memory
        return Solution(status="none", took_s=time.monotonic() - began_s)
    if child.returncode != 0:
        last = (err.strip().splitlines() or ["(no message)"])[-1]
        raise SolverError(f"the solver ended with status {child.returncode}: {last}")
    found = json.loads(out.splitlines()[-1])
    values = found.pop("values")
    return Solution(
        values=None if values is None else tuple(values),
        took_s=time.monotonic() - began_s,
        **found,
    )


def _solve_here(problem: Mapping[str, Any], limit_s: float, gap: float) -> dict[str, object]:
    """Solve in this process. ``problem`` is a ``Problem`` as JSON."""
    try:
        import highspy
        import pulp
    except ImportError as err:
        raise SolverError(
            f"{err}: the mechanism opt needs PuLP and HiGHS; "
            "install them with: pip install 'slurm-synergy[solver]'"
        ) from err
    model, variables = _model(pulp, problem)
    model.solve(pulp.HiGHS(msg=False, timeLimit=limit_s, gapRel=gap, threads=1))
    highs = model.solverModel
    info, status = highs.getInfo(), highs.getModelStatus()
    if int(info.primal_solution_status) != int(highspy.SolutionStatus.kSolutionStatusFeasible):
        infeasible = status == highspy.HighsModelStatus.kInfeasible
        return {"status": "infeasible" if infeasible else "none", "values": None}
    objective = float(pulp.value(model.objective))
    # PuLP hands HiGHS the negative of what is to be maximised.
    negated = highs.getObjectiveSense()[1] == highspy.ObjSense.kMinimize
    bound = -float(info.mip_dual_bound) if negated else float(info.mip_dual_bound)
    known = math.isfinite(bound)
    return {
        "status": "optimal" if status == highspy.HighsModelStatus.kOptimal else "feasible",
        "values": [round(one.value() or 0.0) for one in variables],
        "objective": objective,
        "bound": bound if known else None,
        "gap": max(bound - objective, 0.0) / max(abs(objective), 1e-9) if known else None,
    }


def _model(pulp: Any, problem: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """The problem in PuLP's words, and its variables by number."""
    model = pulp.LpProblem("slurm_synergy", pulp.LpMaximize)
    rows = problem["variables"]
    variables = [
        pulp.LpVariable(f"v{number}", 0, row["most"], cat="Integer")
        for number, row in enumerate(rows)
    ]
    model += pulp.LpAffineExpression(
        [(one, row["gain"]) for one, row in zip(variables, rows, strict=True)]
    )
    for constraint in problem["constraints"]:
        total = pulp.LpAffineExpression(
            [(variables[number], each) for number, each in constraint["terms"]]
        )
        limit = constraint["limit"]
        model += (total == limit) if constraint["equal"] else (total <= limit)
    return model, variables


def main() -> int:
    """The child: one problem from standard input, its solution as the last line of output."""
    asked = json.load(sys.stdin)
    try:
        found = _solve_here(asked["problem"], asked["limit_s"], asked["gap"])
    except SolverError as err:
        print(err, file=sys.stderr)  # noqa: T201 - the parent reads it
        return 1
    print("\n" + json.dumps(found))  # noqa: T201 - HiGHS may have written a line of its own
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
