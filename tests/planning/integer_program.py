"""Checkmate's integer program (Jain et al., MLSys 2020), solved exactly by HiGHS.

A stage ends with the first run of one op, in the order of the problem. In each stage any earlier
op may run again, in that order, and every tensor may be freed after its last use there. So the
optimum is over all schedules whose first runs keep the order of the problem.
"""

from __future__ import annotations

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from memory_saving_gradients.planning.problem import Problem


class _Program:
    """Rows and columns of a program, collected one at a time."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.whole: list[int] = []
        self._entries: list[tuple[int, int, float]] = []
        self._limits: list[float] = []

    def variable(self, upper=1.0, lower=0.0, cost=0.0, whole=False) -> int:
        self.costs.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.whole.append(int(whole))
        return len(self.costs) - 1

    def at_most(self, terms, limit: float) -> None:
        """The sum of (factor, variable) is at most `limit`."""
        self._entries += [(len(self._limits), at, factor) for factor, at in terms]
        self._limits.append(limit)

    def solve(self, seconds: float):
        row, at, factor = zip(*self._entries, strict=True)
        shape = (len(self._limits), len(self.costs))
        matrix = sparse.csr_array((factor, (row, at)), shape=shape)
        return milp(
            self.costs,
            constraints=LinearConstraint(matrix, -np.inf, self._limits),
            bounds=Bounds(self.lower, self.upper),
            integrality=self.whole,
            options={"time_limit": seconds, "mip_rel_gap": 1e-4},
        )


def least_cost(problem: Problem, budget: int, seconds: float) -> tuple[float, bool]:
    """The least cost of a schedule within `budget`, and whether it was proven in time.

    No op may have `in_place` set. Infinite if there is none.
    """
    ops, here = problem.ops, problem.made_here
    unit = float(problem.sizes.max())
    size = problem.sizes / unit
    dearest = float(problem.costs.max())
    inputs = [[t for t in op.inputs if t in here] for op in ops]
    readers: dict[int, list[int]] = {t: [] for t in here}
    for index, read in enumerate(inputs):
        for tensor in read:
            readers[tensor].append(index)
    count = len(ops)
    program = _Program()
    run, held = {}, {}
    for stage in range(count):
        for index in range(stage + 1):
            first = index == stage
            may = first or problem.may_repeat[index]
            cost = 0.0 if first else problem.costs_again[index] / dearest
            run[stage, index] = program.variable(float(may), float(first), cost, whole=True)
    for stage in range(count + 1):
        for tensor in here:
            if problem.made_by[tensor] < stage:
                wanted = stage == count and tensor in problem.results
                held[stage, tensor] = program.variable(1.0, float(wanted), whole=True)

    for (stage, tensor), kept in held.items():
        terms = [(1.0, kept), (-1.0, run[stage - 1, problem.made_by[tensor]])]
        if (stage - 1, tensor) in held:
            terms.append((-1.0, held[stage - 1, tensor]))
        program.at_most(terms, 0.0)
    for (stage, index), runs in run.items():
        for tensor in inputs[index]:
            terms = [(1.0, runs), (-1.0, run[stage, problem.made_by[tensor]])]
            if (stage, tensor) in held:
                terms.append((-1.0, held[stage, tensor]))
            program.at_most(terms, 0.0)

    for stage in range(count):
        used = [(size[t], held[stage, t]) for t in here if (stage, t) in held]
        for index in range(stage + 1):
            made = sum(size[t] for t in ops[index].outputs)
            used.append((made, run[stage, index]))
            running = [*used, (ops[index].workspace / unit, run[stage, index])]
            program.at_most(running, budget / unit)
            for tensor in {*inputs[index], *ops[index].outputs}:
                freed = program.variable()
                later = [i for i in readers[tensor] if index < i <= stage]
                barred = [run[stage, i] for i in later]
                barred.append(held[stage + 1, tensor])
                program.at_most([(1.0, freed), (-1.0, run[stage, index])], 0.0)
                for bar in barred:
                    program.at_most([(1.0, freed), (1.0, bar)], 1.0)
                used.append((-size[tensor], freed))

    solution = program.solve(seconds)
    if solution.status == 2:
        return np.inf, True
    if solution.x is None:
        return np.inf, False
    return float(problem.costs.sum() + solution.fun * dearest), solution.status == 0
