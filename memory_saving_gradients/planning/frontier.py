"""What memory costs: the lowest peak for an extra cost, and the knee of the curve.

The frontier of a step is the cheapest schedule for every budget. Both questions are asked of it by
planning for budgets in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from memory_saving_gradients.planning.anneal import annealed, lowered
from memory_saving_gradients.planning.bounds import least_peak
from memory_saving_gradients.planning.nested import Nested
from memory_saving_gradients.planning.problem import Problem, Schedule
from memory_saving_gradients.planning.progress import reported
from memory_saving_gradients.planning.reorder import reordered
from memory_saving_gradients.planning.search import (
    UNBOUNDED,
    cheapest,
    lowest,
    lowest_of,
    most_moves,
    times_run,
    within,
)
from memory_saving_gradients.planning.simulate import simulate

# What lies between the plain peak and the least one is halved so many times, or until they are so
# close. Searches for the lowest peak go on from there.
_HALVINGS = 5
_FINE = 0.005

# The knee is looked for among so many budgets.
_BUDGETS = 8

# A point so little below the line, from 0 to 1, is no knee.
_A_KNEE = 0.05


def cheaper_than(problem: Problem, max_overhead: float, most_runs: int = UNBOUNDED) -> Schedule:
    """The lowest peak found at no more than an extra cost.

    Args:
        problem: the step.
        max_overhead: the extra cost allowed, as a share of the cost of the plain step.
        most_runs: how often an op may run.
    """
    if not problem.may_repeat.any():
        return range(len(problem.ops))
    allowed = (1 + max_overhead) * problem.costs.sum()
    best: Schedule = range(len(problem.ops))
    plain, peak, least = best, simulate(problem, best).peak, least_peak(problem)
    for _ in reported(range(_HALVINGS)):
        if peak - least <= _FINE * peak:
            break
        budget = int(math.sqrt(peak * least))
        found = _tried(problem, best, budget, most_runs)
        if found is not None and simulate(problem, found).cost <= allowed:
            best, peak = found, simulate(problem, found).peak
        else:
            least = budget

    def lower(start: Schedule) -> Schedule:
        moves = most_moves(problem) // 4
        return lowered(problem, start, most_runs, moves, most_cost=allowed)

    best = lowest_of(problem, [lower(start) for start in (best, plain)])
    return lower(lowest_of(problem, [best, reordered(problem, best)]))


def at_knee(problem: Problem, most_runs: int) -> Schedule:
    """The schedule beyond which memory gets dear.

    Of the frontier from the plain step to the lowest peak, with both axes from 0 to 1, it is the
    point farthest below the straight line between the two (Satopää et al., "Finding a Kneedle in a
    Haystack", 2011). Where none is, memory costs the same all along: it is the lowest peak.

    Args:
        problem: the step.
        most_runs: how often an op may run.
    """
    floor = simulate(problem, lowest(problem, most_runs)).peak
    points = list(_frontier(problem, floor, most_runs))
    peaks = np.array([simulate(problem, schedule).peak for schedule in points], dtype=float)
    costs = np.array([simulate(problem, schedule).cost for schedule in points])
    saved = (peaks[0] - peaks) / max(peaks[0] - peaks.min(), 1.0)
    paid = (costs - costs[0]) / max(costs.max() - costs[0], 1e-300)
    below = saved - paid
    knee = int(below.argmax()) if below.max() > _A_KNEE else int(peaks.argmin())
    return within(problem, int(peaks[knee]), most_runs, points[knee])


def _frontier(problem: Problem, floor: int, most_runs: int) -> Iterator[Schedule]:
    """Schedules of ever lower peaks, down to `floor`, each made from the one before."""
    best: Schedule = range(len(problem.ops))
    yield best
    plain = simulate(problem, best).peak
    budgets = np.geomspace(max(plain, 1), max(floor, 1), _BUDGETS + 1)[1:]
    for budget in reported(np.ceil(budgets).astype(int).tolist()):
        found = _tried(problem, best, budget, most_runs)
        if found is not None:
            best = found
            yield best


def _tried(problem: Problem, start: Schedule, budget: int, most_runs: int) -> Schedule | None:
    """The cheaper of the schedules that short searches find within a budget."""
    nested = Nested(problem, budget).schedule(1.0)
    few = nested and times_run(problem, nested) <= most_runs
    starts = [start, nested] if nested and few else [start]
    moves = most_moves(problem) // (_BUDGETS * len(starts))
    found = [annealed(problem, one, budget, most_runs, moves) for one in starts]
    fitting = [schedule for schedule in found if schedule]
    return cheapest(problem, fitting) if fitting else None
