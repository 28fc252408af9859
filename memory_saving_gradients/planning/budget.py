"""The cheapest schedule within a budget.

Several schedules are made that promise to be cheap (no recomputation at all; what the one-cut
program keeps; cuts), each is brought within the budget by added runs, and each then gives up the
runs that the budget leaves room to save. The cheapest of them are improved further.

What is not optimal: every stage is greedy. `bounds` tells how far from the optimum that can be.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Collection, Iterable, Iterator

import numpy as np

from memory_saving_gradients.planning.bounds import OneCutProgram, least_peak
from memory_saving_gradients.planning.cuts import Segments, kept_at
from memory_saving_gradients.planning.keep import keeping
from memory_saving_gradients.planning.problem import Problem, Schedule, baseline
from memory_saving_gradients.planning.progress import reported
from memory_saving_gradients.planning.search import improved, lowered, restored
from memory_saving_gradients.planning.simulate import simulate

# What the starting schedules aim at, as multiples of the budget (for the one-cut program, which
# sees no transient bytes) and of the lowest peak that cuts reach.
_KEPT = (1.0, 0.9, 0.7)
_CUTS = (1.0, 1.2, 1.5, 2.0)
_WIDE_CUTS = (1.0, 2.0)  # others lead to no lower peak

# The solver takes longer than all the rest for problems of more ops than this.
_LARGEST_PROGRAM = 30_000

# So many ops are simulated for each start, and so many times more to find the lowest peak, in steps
# of such a share of it.
_SIMULATED_OPS = 200_000
_LAST_RESORT = 5
_STEP = 0.97

# So many of the cheapest schedules are improved, if the problem has no more ops than this and the
# cheapest is not within this share of the optimum already.
_IMPROVED = 2
_LARGEST_IMPROVED = 1_500
_CLOSE = 0.002

# Problems of no more forward ops than this are tried with every subset of them kept, and this
# many of those are brought within the budget.
_LARGEST_SUBSETS = 8
_TRIED_SUBSETS = 24

#: The runs an op may have where nothing bounds them.
UNBOUNDED = 2**31


def within(problem: Problem, budget: int, most_runs: int = UNBOUNDED) -> Schedule:
    """The cheapest schedule found within a budget.

    Args:
        problem: the step.
        budget: the peak allowed, in bytes.
        most_runs: how often an op may run.

    Returns:
        The schedule. If none was found within the budget, the one of the lowest peak found.
    """
    plain = baseline(problem)
    if simulate(problem, plain).peak <= budget:
        return plain
    tries = max(1, _SIMULATED_OPS // len(problem.ops))
    kept, bound = _one_cut(problem, budget)
    if bound == np.inf or budget < least_peak(problem):
        return lowest(problem, most_runs)
    starts = [*_starts(problem, kept), *_subsets(problem, budget)]
    fitting = []
    for start in reported(starts):
        found = lowered(problem, start, budget, most_runs, tries)
        if simulate(problem, found).peak <= budget:
            fitting.append(restored(problem, found, budget))
    if not fitting:
        found = lowest(problem, most_runs)
        if simulate(problem, found).peak > budget:
            return found
        fitting.append(restored(problem, found, budget))

    def cost(schedule: Schedule) -> float:
        return simulate(problem, schedule).cost

    fitting.sort(key=cost)
    optimum = (1 + bound) * problem.costs.sum()
    if len(problem.ops) > _LARGEST_IMPROVED or cost(fitting[0]) < optimum * (1 + _CLOSE):
        return fitting[0]
    swung = [
        improved(problem, schedule, budget, most_runs, tries // 4)
        for schedule in reported(fitting[:_IMPROVED])
    ]
    return min(swung, key=cost)


def lowest(problem: Problem, most_runs: int = UNBOUNDED) -> Schedule:
    """The schedule of the lowest peak found; `within` meets any budget down to it.

    Args:
        problem: the step.
        most_runs: how often an op may run.
    """
    tries = max(1, _LAST_RESORT * _SIMULATED_OPS // len(problem.ops))
    found = [
        lowered(problem, start, 0, most_runs, tries, _STEP)
        for start in reported([*_starts(problem, [], _WIDE_CUTS)])
    ]
    return min(found, key=lambda schedule: simulate(problem, schedule).peak)


def pinning(problem: Problem, tensors: Collection[int]) -> Problem:
    """The problem in which the ops that make `tensors` run once, so that these are kept."""
    makers = {problem.made_by[t] for t in tensors}
    ops = tuple(
        dataclasses.replace(op, pinned=op.pinned or index in makers)
        for index, op in enumerate(problem.ops)
    )
    return dataclasses.replace(problem, ops=ops)


def _one_cut(problem: Problem, budget: int) -> tuple[list[set[int]], float]:
    """Sets of tensors that the one-cut program keeps, and its bound on the overhead."""
    if len(problem.ops) > _LARGEST_PROGRAM:
        return [], 0.0
    program = OneCutProgram(problem)
    cuts = [program.solve(int(budget * factor)) for factor in _KEPT]
    sets = [set(np.flatnonzero(cut.kept > 0.5).tolist()) for cut in cuts]
    return [kept for kept in sets if kept], cuts[0].overhead


def _starts(
    problem: Problem, kept_sets: Iterable[set[int]], cut_at: Iterable[float] = _CUTS
) -> Iterator[Schedule]:
    yield range(len(problem.ops))
    for kept in kept_sets:
        yield keeping(problem, kept)
    segments = Segments(problem)
    floor = segments.lowest_aim()
    for factor in cut_at:
        cuts = segments.cuts_for(floor * factor)
        if cuts is not None:
            yield keeping(problem, kept_at(problem, cuts))


def _subsets(problem: Problem, budget: int) -> list[Schedule]:
    """Of a small problem: all choices of the ops to keep, the most promising of them."""
    ops = [op for op in problem.ops if not (op.pinned or op.backward) and op.outputs]
    if len(ops) > _LARGEST_SUBSETS:
        return []

    def badness(schedule: Schedule) -> float:
        simulation = simulate(problem, schedule)
        return simulation.cost * max(1.0, simulation.peak / max(1, budget)) ** 2

    schedules = (
        keeping(problem, {t for op in kept for t in op.outputs})
        for count in range(len(ops) + 1)
        for kept in itertools.combinations(ops, count)
    )
    return heapq.nsmallest(_TRIED_SUBSETS, schedules, key=badness)
