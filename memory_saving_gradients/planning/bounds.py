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

# So many backward ops are looked at for the moment that binds most.
_MOMENTS = 16


@dataclasses.dataclass(frozen=True)
class OneCut:
    """The solution of the one-cut program.

    Attributes:
        overhead: no schedule within the budget has a lower overhead; infinite if there is none.
        kept: the share of each tensor that is in memory at the moment, from 0 to 1.
    """

    overhead: float
    kept: np.ndarray


def one_cut(problem: Problem, budget: int) -> OneCut:
    """Solves the one-cut linear program with HiGHS.

    Args:
        problem: the step.
        budget: the peak allowed, in bytes.

    Returns:
        The bound and the fractional choice that attains it.

    Example:
        >>> from memory_saving_gradients.planning.problem import Op, Problem, Tensor
        >>> ops = (
        ...     Op("a", (), (0,)), Op("b", (0,), (1,)),
        ...     Op("gradient of b", (1,), (2,), backward=True),
        ...     Op("gradient of a", (0, 2), (3,), backward=True),
        ... )
        >>> tensors = tuple(Tensor(name, 8) for name in "abcd")
        >>> round(one_cut(Problem(ops, tensors, frozenset({3})), 16).overhead, 3)
        0.25
    """
    if problem.forward_count == len(problem.ops):
        return OneCut(0.0, np.zeros(len(problem.tensors)))
    moment, before, wanted = _moment(problem)
    size, costs = problem.sizes, problem.costs
    tensors = sorted({t for index in before for t in problem.ops[index].outputs})
    column = {t: i for i, t in enumerate(tensors)}
    again = [index for index in sorted(before) if not problem.ops[index].pinned]
    run = {index: i for i, index in enumerate(again)}
    count = len(tensors)

    # Variables: kept[t] for every tensor, then run[v] for every op that may run again.
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    limits: list[float] = []

    def at_hand(tensor: int, needed_by: int | None) -> None:
        """kept[t] + run[op of t] >= run[needed_by], or >= 1 for a tensor that is wanted."""
        row = len(limits)
        entries = [(column[tensor], -1.0)]
        if problem.made_by[tensor] in run:
            entries.append((count + run[problem.made_by[tensor]], -1.0))
        if needed_by is not None:
            entries.append((count + run[needed_by], 1.0))
        for at, value in entries:
            rows.append(row)
            columns.append(at)
            values.append(value)
        limits.append(-1.0 if needed_by is None else 0.0)

    for tensor in tensors:
        if tensor in wanted:
            at_hand(tensor, None)
    for index in again:
        for tensor in problem.ops[index].inputs:
            if tensor in column:
                at_hand(tensor, index)
    row = len(limits)
    unit = max(1, int(size.max(initial=1)))  # so that the numbers suit the solver
    rows += [row] * count
    columns += range(count)
    values += (size[tensors] / unit).tolist()
    limits.append((budget - _beside(problem, moment)) / unit)
    needed = set(problem.ops[moment].inputs)
    at_least = [1.0 if tensor in needed else 0.0 for tensor in tensors]
    dearest = max(float(costs.max(initial=0.0)), 1e-300)
    solution = linprog(
        np.concatenate([np.zeros(count), costs[again] / dearest]),
        A_ub=sparse.csr_array((values, (rows, columns)), shape=(len(limits), count + len(again))),
        b_ub=limits,
        bounds=[(low, 1.0) for low in at_least] + [(0.0, 1.0)] * len(again),
        method="highs",
    )
    kept = np.zeros(len(problem.tensors))
    if not solution.success:
        return OneCut(np.inf, kept)
    kept[tensors] = solution.x[:count]
    return OneCut(max(0.0, float(solution.fun)) * dearest / float(costs.sum()), kept)


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
    best: tuple[int, set[int], set[int]] = forward, set(), set()
    for moment in range(forward, min(forward + _MOMENTS, len(problem.ops))):
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
