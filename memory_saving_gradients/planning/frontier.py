"""The trade-off between memory and cost, and its knee.

The frontier of a step is the cheapest schedule for every budget. We sample it by planning for a few
budgets.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memory_saving_gradients.planning.anneal import annealed
from memory_saving_gradients.planning.nested import Nested
from memory_saving_gradients.planning.problem import Problem, Schedule
from memory_saving_gradients.planning.progress import reported
from memory_saving_gradients.planning.search import (
    cheapest,
    lowest_of_cheap,
    most_moves,
    times_run,
    within,
)
from memory_saving_gradients.planning.simulate import simulate

# The number of budgets at which the frontier is sampled.
_BUDGETS = 8

# A knee lies at least this far below the line, on axes from 0 to 1.
_A_KNEE = 0.05


def at_knee(problem: Problem, floor: Schedule, most_runs: int) -> Schedule:
    """The schedule at the knee: to save more memory than it does costs much more.

    We scale the frontier from the plain step to a low peak to axes from 0 to 1. The knee is the
    point farthest below the straight line between the two ends (Satopää et al., "Finding a Kneedle
    in a Haystack", 2011). Without a knee every byte costs about the same, and we return the
    schedule of the lowest peak.

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
    """Schedules of falling peaks, down to `floor`; each search starts from the previous one."""
    best: Schedule = range(len(problem.ops))
    yield best
    plain = max(1, simulate(problem, best).peak)
    nested = Nested(problem, plain)
    cheap = lowest_of_cheap(problem, most_runs)
    budgets = np.geomspace(plain, max(floor, 1), _BUDGETS + 1)[1:]
    for budget in reported(np.ceil(budgets).astype(int).tolist()):
        starts = [best, cheap, *nested.within(budget)]
        starts = [start for start in starts if times_run(problem, start) <= most_runs]
        moves = most_moves(problem) // (_BUDGETS * len(starts))
        schedules = [annealed(problem, start, budget, most_runs, moves) for start in starts]
        fitting = [schedule for schedule in schedules if schedule]
        if fitting:
            best = cheapest(problem, fitting)
            yield best
