"""Lower bounds that certify a plan: no schedule of any order can do better.

The one-cut linear program looks at a single moment: the run of a backward op that the rest of the
backward pass waits for. By then its forward ancestors have run; every one of their tensors that is
read at that moment or later is in memory, or its op runs again. What is in memory fits the budget.
The cheapest such choice, with fractions allowed, costs no more than any schedule's recomputation.

What it does not see: later moments. A budget that only the bytes alive inside a segment make hard
to keep has a bound far below what is possible.
"""

from __future__ import annotations

import dataclasses

import networkx as nx
import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from memory_saving_gradients.planning.problem import Problem

# So many backward ops, those with the longest way to the end, are looked at for the moment that
# binds most.
_MOMENTS = 4


@dataclasses.dataclass(frozen=True)
class OneCut:
    """The solution of the one-cut program.

    Attributes:
        overhead: no schedule within the budget has a lower overhead; infinite if there is none.
        kept: the share of each tensor that is in memory at the moment, from 0 to 1.
    """

    overhead: float
    kept: np.ndarray


class OneCutProgram:
    """The one-cut linear program of a step, solved with HiGHS.

    Its variables are, for every tensor made before the moment, the share of it in memory, and for
    every op that ran before and may run again, whether it does.

    Args:
        problem: the step.

    Example:
        >>> from memory_saving_gradients.planning.problem import Op, Problem, Tensor
        >>> ops = (
        ...     Op("a", (), (0,)), Op("b", (0,), (1,)),
        ...     Op("gradient of b", (1,), (2,), backward=True),
        ...     Op("gradient of a", (0, 2), (3,), backward=True),
        ... )
        >>> tensors = tuple(Tensor(name, 8) for name in "abcd")
        >>> round(OneCutProgram(Problem(ops, tensors, frozenset({3}))).solve(16).overhead, 3)
        0.25
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        moment, before, wanted = _moment(problem)
        self._tensors = sorted({t for index in before for t in problem.ops[index].outputs})
        self._again = [index for index in sorted(before) if not problem.ops[index].pinned]
        self._column = {t: i for i, t in enumerate(self._tensors)}
        self._run = {index: len(self._tensors) + i for i, index in enumerate(self._again)}
        self._rows: list[list[tuple[int, float]]] = []
        self._limits: list[float] = []
        for tensor in self._tensors:
            if tensor in wanted:
                self._demand(tensor, None)
        for index in self._again:
            for tensor in problem.ops[index].inputs:
                if tensor in self._column:
                    self._demand(tensor, index)
        self._beside = _beside(problem, moment) if problem.ops[moment:] else 0
        read_now = set(problem.ops[moment].inputs) if problem.ops[moment:] else set()
        self._least = [float(tensor in read_now) for tensor in self._tensors]

    def _demand(self, tensor: int, needed_by: int | None) -> None:
        """The tensor is in memory or made again if the op runs again, or in any case."""
        row = [(self._column[tensor], -1.0)]
        maker = self._problem.made_by[tensor]
        if maker in self._run:
            row.append((self._run[maker], -1.0))
        if needed_by is not None:
            row.append((self._run[needed_by], 1.0))
        self._rows.append(row)
        self._limits.append(-1.0 if needed_by is None else 0.0)

    def solve(self, budget: int) -> OneCut:
        """The bound for a budget in bytes, and the fractional choice that attains it."""
        count, costs = len(self._tensors), self._problem.costs
        kept = np.zeros(len(self._problem.tensors))
        if not count:
            return OneCut(0.0, kept)
        size = self._problem.sizes[self._tensors]
        # Sizes and costs near 1 suit the solver.
        unit = max(1, int(size.max()))
        dearest = max(float(costs.max(initial=0.0)), 1e-300)
        rows = [*self._rows, list(enumerate(size / unit))]
        entries = [(row, at, value) for row, line in enumerate(rows) for at, value in line]
        row, at, value = zip(*entries, strict=True)
        solution = linprog(
            np.concatenate([np.zeros(count), costs[self._again] / dearest]),
            A_ub=sparse.csr_array((value, (row, at)), shape=(len(rows), count + len(self._again))),
            b_ub=[*self._limits, (budget - self._beside) / unit],
            bounds=[(least, 1.0) for least in [*self._least, *[0.0] * len(self._again)]],
            method="highs",
        )
        if not solution.success:
            return OneCut(np.inf, kept)
        kept[self._tensors] = solution.x[:count]
        return OneCut(max(0.0, float(solution.fun)) * dearest / float(costs.sum()), kept)


def least_peak(problem: Problem) -> int:
    """The bytes that no schedule can do without: those of the largest op, with all it touches."""
    size = problem.sizes
    most = 0
    for op in problem.ops:
        lent = max((int(size[t]) for t in op.inputs), default=0) if op.in_place else 0
        touched = [t for t in (*op.inputs, *op.outputs) if t in problem.made_here]
        most = max(most, op.workspace + int(size[touched].sum()) - lent)
    return most


def _moment(problem: Problem) -> tuple[int, set[int], set[int]]:
    """The backward op at which most must be kept, its forward ancestors, and what is wanted then.

    Returns:
        The op; the forward ops that have run by then in any schedule; the forward tensors that
        it, or an op that waits for it, reads.
    """
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(problem.ops)))
    for index, op in enumerate(problem.ops):
        graph.add_edges_from(
            (problem.made_by[t], index) for t in op.inputs if t in problem.made_here
        )
    forward, most = problem.forward_count, -1
    to_end = [0] * len(problem.ops)
    for index in range(len(problem.ops) - 1, -1, -1):
        to_end[index] = 1 + max((to_end[after] for after in graph.successors(index)), default=0)
    backward = sorted(range(forward, len(problem.ops)), key=to_end.__getitem__, reverse=True)
    best: tuple[int, set[int], set[int]] = forward, set(), set()
    for moment in backward[:_MOMENTS]:
        before = {index for index in nx.ancestors(graph, moment) if index < forward}
        later = {moment, *nx.descendants(graph, moment)}
        read = {t for index in later for t in problem.ops[index].inputs}
        wanted = {t for t in read if problem.made_by[t] in before}
        bytes_ = int(problem.sizes[list(wanted)].sum())
        if bytes_ > most:
            best, most = (moment, before, wanted), bytes_
    return best


def _beside(problem: Problem, moment: int) -> int:
    """The bytes that the op takes beside the forward tensors."""
    op = problem.ops[moment]
    size = problem.sizes
    gradients = [t for t in op.inputs if problem.made_by[t] >= problem.forward_count]
    lent = max((size[t] for t in op.inputs), default=0) if op.in_place else 0
    made = max(0, int(sum(size[t] for t in op.outputs)) - int(lent))
    return op.workspace + made + int(sum(size[t] for t in gradients))
