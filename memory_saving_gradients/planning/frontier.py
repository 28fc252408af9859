"""What memory costs: the knee of the frontier.

The frontier of a step is the cheapest schedule for every budget. It is found by planning for
budgets in between.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memory_saving_gradients.planning.anneal import annealed
from memory_saving_gradients.planning.nested import Nested
from memory_saving_gradients.planning.problem import Problem, Schedule
from memory_saving_gradients.planning.progress import reported
from memory_saving_gradients.planning.search import cheapest, most_moves, times_run, within
from memory_saving_gradients.planning.simulate import simulate

# The knee is looked for among so many budgets.
_BUDGETS = 8

# A point so little below the line, from 0 to 1, is no knee.
_A_KNEE = 0.05


def at_knee(problem: Problem, floor: Schedule, most_runs: int) -> Schedule:
    """The schedule beyond which memory gets dear.

    Of the frontier from the plain step to a low peak, with both axes from 0 to 1, it is the point
    farthest below the straight line between the two (Satopää et al., "Finding a Kneedle in a
    Haystack", 2011). Where none is, memory costs the same all along: it is the lowest peak.

    Args:
        problem: the step.
        floor: a schedule of a low peak.
        most_runs: how often an op may run.
    """
    points = [*_frontier(problem, simulate(problem, floor).peak, most_runs), floor]
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
    plain = max(1, simulate(problem, best).peak)
    nested = Nested(problem, plain)
    budgets = np.geomspace(plain, max(floor, 1), _BUDGETS + 1)[1:]
    for budget in reported(np.ceil(budgets).astype(int).tolist()):
        starts = [best, *nested.within(budget)]
        starts = [start for start in starts if times_run(problem, start) <= most_runs]
        moves = most_moves(problem) // (_BUDGETS * len(starts))
        schedules = [annealed(problem, start, budget, most_runs, moves) for start in starts]
        fitting = [schedule for schedule in schedules if schedule]
        if fitting:
            best = cheapest(problem, fitting)
            yield best
