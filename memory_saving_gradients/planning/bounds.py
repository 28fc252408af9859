"""Lower bounds that certify a plan.

A program has variables for a few moments, the runs of some backward ops. Before the first moment,
the forward ancestors of its op have run. A tensor that is read between a moment and the next is in
memory at that moment, or its op runs again in between; so are the inputs of ops that run again. At
each moment, the tensors in memory fit the budget together with the gradients that are alive. The
cheapest solution costs no more than the recomputation of any schedule. With fractions allowed this
is a linear program; as an integer program it gives a tighter bound. The idea and the constraints
are those of Checkmate (Jain et al., MLSys 2020), at some of its stages.

There are two kinds of bound. `one_cut` uses one moment, the run of an op that all later ones wait
for: its bound holds for every order of the ops. The others hold for schedules whose backward ops
run in the order of the problem (the problem of a plan is in the plan's own order): more is then
known to be alive at each moment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import TypeAlias

import networkx as nx
import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from memory_saving_gradients.planning.liveness import alive
from memory_saving_gradients.planning.problem import Op, Problem

# `one_cut` tries this many backward ops, those with the longest path to the end, and takes the
# moment that needs most bytes.
_LONGEST = 4

# The number of moments, those with the highest rough bounds, that get a linear program each.
_PROGRAMS = 6

# The number of moments in an integer program.
_MOMENTS = 12

# The tolerance of the solver for integers and constraints.
_TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True)
class Bound:
    """The solution of a program.

    Attributes:
        overhead: no schedule within the budget has a lower overhead; infinite if there is none.
        kept: the share of each tensor that is kept in memory up to the first moment, from 0 to 1.
        is_exact: whether the program was solved to its optimum in time.
    """

    overhead: float
    kept: np.ndarray
    is_exact: bool = True


@dataclasses.dataclass(frozen=True)
class Moment:
    """The run of a backward op.

    Attributes:
        op: the op.
        read: the forward tensors that are read from then until the next moment, or the end.
        other_bytes: the bytes of all but forward tensors: gradients, outputs, workspace.
    """

    op: int
    read: frozenset[int]
    other_bytes: int


#: The terms of a constraint: variables and their factors.
_Row: TypeAlias = list[tuple[int, float]]


class Program:
    """A program of some moments, solved with HiGHS.

    For every moment it has a variable for each forward tensor, the share of it in memory, and one
    for each op that may run again: whether it does before the next moment.

    Args:
        problem: the step.
        before: the forward ops that have run by the first moment in any schedule.
        moments: in the order of time.

    Example:
        >>> from memory_saving_gradients.planning.problem import Op, Problem, Tensor
        >>> ops = (
        ...     Op("a", (), (0,)), Op("b", (0,), (1,)),
        ...     Op("gradient of b", (1,), (2,), backward=True),
        ...     Op("gradient of a", (0, 2), (3,), backward=True),
        ... )
        >>> tensors = tuple(Tensor(name, 8) for name in "abcd")
        >>> round(one_cut(Problem(ops, tensors, frozenset({3}))).solve(16).overhead, 3)
        0.25
    """

    def __init__(
        self, problem: Problem, before: Collection[int], moments: Sequence[Moment]
    ) -> None:
        self._problem = problem
        self._moments = moments
        self._tensors = sorted({t for index in before for t in problem.ops[index].outputs})
        self._again = [index for index in sorted(before) if not problem.ops[index].pinned]
        self._held = {t: i for i, t in enumerate(self._tensors)}
        self._runs = {index: len(self._tensors) + i for i, index in enumerate(self._again)}
        self._width = len(self._tensors) + len(self._again)
        self._rows: list[_Row] = []
        self._limits: list[float] = []
        for i, moment in enumerate(moments):
            for tensor in moment.read:
                if tensor in self._held:
                    self._demand(i, tensor, None)
            for index in self._again:
                for tensor in problem.ops[index].inputs:
                    if tensor in self._held:
                        self._demand(i, tensor, index)
            for tensor in self._tensors if i else ():
                # In memory now only if it was at the previous moment, or was recomputed since.
                row = [(i * self._width + self._held[tensor], 1.0), *self._made(i - 1, tensor)]
                self._rows.append(row)
                self._limits.append(0.0)

    def _made(self, i: int, tensor: int) -> list[tuple[int, float]]:
        """The terms that make a tensor available after a moment: in memory, or its op runs."""
        row = [(i * self._width + self._held[tensor], -1.0)]
        maker = self._problem.made_by[tensor]
        if maker in self._runs:
            row.append((i * self._width + self._runs[maker], -1.0))
        return row

    def _demand(self, i: int, tensor: int, needed_by: int | None) -> None:
        """Demands a tensor after a moment: if the op `needed_by` runs again, or (None) always."""
        row = self._made(i, tensor)
        if needed_by is not None:
            row.append((i * self._width + self._runs[needed_by], 1.0))
        self._rows.append(row)
        self._limits.append(-1.0 if needed_by is None else 0.0)

    def solve(self, budget: int, whole: bool = False, seconds: float | None = None) -> Bound:
        """The bound for a budget.

        Args:
            budget: the peak allowed, in bytes.
            whole: whether the variables are integers: each tensor is kept whole or not at all.
            seconds: the time that the solver may take; the bound is what it has proven by then.
        """
        if not self._tensors:
            return Bound(0.0, self._shares(None))
        (prices, dearest), unit = self._prices(), self._unit()
        rows, limits, least = self._with_bytes(unit)
        limits[len(self._rows) :] += budget / unit
        solution = milp(
            prices,
            constraints=LinearConstraint(_matrix(rows, len(prices)), -np.inf, limits),
            bounds=Bounds(least, 1.0),
            integrality=np.full(len(prices), int(whole)),
            options={} if seconds is None else {"time_limit": seconds},
        )
        if solution.status == _INFEASIBLE:
            return Bound(np.inf, self._shares(None))
        kept = self._shares(solution.x)
        proven = solution.mip_dual_bound if whole else solution.fun
        if proven is None or not np.isfinite(proven):
            return Bound(0.0, kept, is_exact=False)
        extra = max(0.0, float(proven) - _TOLERANCE) * dearest
        return Bound(extra, kept, solution.status == 0)

    def kept_for(self, max_overhead: float) -> np.ndarray:
        """The share of each tensor that is kept where the overhead is bounded, not the peak."""
        if not self._tensors:
            return self._shares(None)
        prices, dearest = self._prices()
        rows, limits, least = self._with_bytes(self._unit())
        peak = len(prices)  # one more variable
        for row in rows[len(self._rows) :]:
            row.append((peak, -1.0))
        rows.append([*enumerate(prices)])
        solution = milp(
            np.append(np.zeros(peak), 1.0),
            constraints=LinearConstraint(
                _matrix(rows, peak + 1), -np.inf, np.append(limits, max_overhead / dearest)
            ),
            bounds=Bounds(np.append(least, 0.0), np.append(np.ones(peak), np.inf)),
        )
        return self._shares(solution.x)

    def _prices(self) -> tuple[np.ndarray, float]:
        """The cost of each variable, near 1 as suits the solver, and the overhead that 1 is."""
        again = self._problem.costs_again[self._again]
        dearest = max(float(again.max(initial=0.0)), 1e-300)
        prices = np.concatenate([np.zeros(len(self._tensors)), again / dearest])
        overhead = dearest / max(float(self._problem.costs.sum()), 1e-300)
        return np.tile(prices, len(self._moments)), overhead

    def _unit(self) -> int:
        """The unit of bytes: sizes near 1 suit the solver."""
        return max(1, int(self._problem.sizes[self._tensors].max(initial=0)))

    def _with_bytes(self, unit: int) -> tuple[list[_Row], np.ndarray, np.ndarray]:
        """The rows and their limits, with those for the bytes last; and the least values."""
        rows, limits = list(self._rows), list(self._limits)
        least: list[float] = []
        for i, moment in enumerate(self._moments):
            sizes = self._problem.sizes[self._tensors] / unit
            rows.append([(i * self._width + at, size) for at, size in enumerate(sizes)])
            limits.append(-moment.other_bytes / unit)
            read_now = set(self._problem.ops[moment.op].inputs)
            least += [float(tensor in read_now) for tensor in self._tensors]
            least += [0.0] * len(self._again)
        return rows, np.array(limits), np.array(least)

    def _shares(self, solution: np.ndarray | None) -> np.ndarray:
        """The share of each tensor of the problem that is kept; nothing without a solution."""
        kept = np.zeros(len(self._problem.tensors))
        if solution is not None:
            kept[self._tensors] = solution[: len(self._tensors)]
        return kept


def _matrix(rows: Sequence[_Row], width: int) -> sparse.csr_array:
    entries = [(row, at, value) for row, line in enumerate(rows) for at, value in line]
    row, at, value = zip(*entries, strict=True)
    return sparse.csr_array((value, (row, at)), shape=(len(rows), width))


_INFEASIBLE = 2


def one_cut(problem: Problem) -> Program:
    """The program of one moment, whose bound holds for any order of the ops."""
    graph = _graph(problem)
    forward, most = problem.forward_count, -1
    to_end = [0] * len(problem.ops)
    for index in range(len(problem.ops) - 1, -1, -1):
        to_end[index] = 1 + max((to_end[after] for after in graph.successors(index)), default=0)
    backward = sorted(range(forward, len(problem.ops)), key=to_end.__getitem__, reverse=True)
    best: tuple[set[int], list[Moment]] = set(), []
    for op in backward[:_LONGEST]:
        before = {index for index in nx.ancestors(graph, op) if index < forward}
        later = {op, *nx.descendants(graph, op)}
        read = {t for index in later for t in problem.ops[index].inputs}
        wanted = frozenset(t for t in read if problem.made_by[t] in before)
        bytes_ = int(problem.sizes[list(wanted)].sum())
        if bytes_ > most:
            gradients = [t for t in problem.ops[op].inputs if problem.made_by[t] >= forward]
            held = int(problem.sizes[gradients].sum())
            moment = Moment(op, wanted, _other_bytes(problem, op, held))
            best, most = (before, [moment]), bytes_
    return Program(problem, *best)


def lower_bound(problem: Problem, budget: int) -> float:
    """A lower bound on the overhead of schedules whose backward ops run in this order.

    We compute a rough bound for every moment, and solve linear programs for the highest ones.

    Args:
        problem: the step.
        budget: the peak allowed, in bytes.
    """
    highest = one_cut(problem).solve(budget).overhead
    rough = _rough_bounds(problem, budget)
    for op in sorted(rough, key=rough.__getitem__, reverse=True)[:_PROGRAMS]:
        if rough[op] > 0:
            highest = max(highest, _program(problem, [op]).solve(budget).overhead)
    return highest


def certified(problem: Problem, budget: int, seconds: float) -> Bound:
    """The bound of an integer program of several moments, for backward ops in this order.

    Args:
        problem: the step.
        budget: the peak allowed, in bytes.
        seconds: the time that the solver may take.
    """
    rough = _rough_bounds(problem, budget)
    parts = np.array_split(np.array(sorted(rough)), _MOMENTS)
    chosen = [max(part.tolist(), key=rough.__getitem__) for part in parts if len(part)]
    return _program(problem, chosen).solve(budget, whole=True, seconds=seconds)


def least_peak(problem: Problem) -> int:
    """A lower bound on the peak of any schedule: the most bytes that a single op needs."""
    size = problem.sizes
    most = 0
    for op in problem.ops:
        lent = _lent(problem, op)
        touched = [t for t in (*op.inputs, *op.outputs) if t in problem.made_here]
        most = max(most, op.workspace + int(size[touched].sum()) - lent)
    return most


def _lent(problem: Problem, op: Op) -> int:
    """The most bytes of inputs that the outputs of an op can take over."""
    if not (op.in_place or op.freed_first):
        return 0
    return max((problem.tensors[t].bytes for t in op.inputs), default=0)


def _graph(problem: Problem) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(problem.ops)))
    for index, op in enumerate(problem.ops):
        graph.add_edges_from(
            (problem.made_by[t], index) for t in op.inputs if t in problem.made_here
        )
    return graph


def _program(problem: Problem, ops: Sequence[int]) -> Program:
    """The program of the runs of some backward ops, which run in the order of the problem."""
    forward = problem.forward_count
    # The forward ops that must have run by the first of them.
    ran = set(range(forward, ops[0] + 1))
    for index in range(ops[0], -1, -1):
        if index in ran:
            ran.update(problem.made_by[t] for t in problem.ops[index].inputs)
    before = {index for index in ran if 0 <= index < forward}
    gradients = _gradients_alive(problem)
    ends = [*ops[1:], len(problem.ops)]
    moments = []
    for op, end in zip(ops, ends, strict=True):
        read = {t for index in range(op, end) for t in problem.ops[index].inputs}
        wanted = frozenset(t for t in read if problem.made_by[t] in before)
        moments.append(Moment(op, wanted, _other_bytes(problem, op, int(gradients[op]))))
    return Program(problem, before, moments)


def _gradients_alive(problem: Problem) -> np.ndarray:
    """For each op, the bytes of gradients made before it that are still needed by it or later."""
    forward, count = problem.forward_count, len(problem.ops)
    makers, last_read = problem.makers, _last_reads(problem)
    last = np.where(problem.is_result, count - 1, last_read)
    mine = (makers >= forward) & (last > makers)
    return alive(makers[mine] + 1, last[mine], problem.sizes[mine], count)


def _last_reads(problem: Problem) -> np.ndarray:
    """The last op that reads each tensor, or -1."""
    last = np.full(len(problem.tensors), -1)
    for index, op in enumerate(problem.ops):
        last[list(op.inputs)] = index
    return last


def _other_bytes(problem: Problem, moment: int, gradients: int) -> int:
    """The bytes alive as a backward op runs, forward tensors not counted."""
    op = problem.ops[moment]
    size = problem.sizes
    lent = _lent(problem, op)
    made = max(0, int(size[list(op.outputs)].sum()) - lent)
    return op.workspace + made + gradients


def _rough_bounds(problem: Problem, budget: int) -> dict[int, float]:
    """For each backward op, a lower bound on the cost of fitting the budget as it runs.

    Of the forward tensors that are read then or later, those with the least cost per byte are
    dropped and recomputed, as if all inputs of the recomputation were available.
    """
    forward, makers = problem.forward_count, problem.makers
    mine = np.flatnonzero((makers >= 0) & (makers < forward))
    size, maker = problem.sizes[mine], makers[mine]
    price = np.where(problem.may_repeat[maker], problem.costs_again[maker], np.inf)
    order = np.argsort(price / np.maximum(size, 1), kind="stable")
    mine, size, price = mine[order], size[order], price[order]
    last_read, gradients = _last_reads(problem)[mine], _gradients_alive(problem)
    bounds: dict[int, float] = {}
    for index in range(forward, len(problem.ops)):
        later = last_read >= index
        excess = (
            int(size[later].sum()) + _other_bytes(problem, index, int(gradients[index])) - budget
        )
        may_go = later & ~np.isin(mine, problem.ops[index].inputs)
        bytes_ = size[may_go]
        dropped = np.clip(excess - (bytes_.cumsum() - bytes_), 0, bytes_)
        part = dropped > 0
        shares = dropped[part] / bytes_[part]
        bounds[index] = float((shares * price[may_go][part]).sum())
    return bounds
