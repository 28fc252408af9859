"""Which runs of a schedule may overlap or swap places without raising the peak."""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from memory_saving_gradients.planning.problem import Problem, Schedule
from memory_saving_gradients.planning.simulate import simulate

# The most runs in a wave: enough for the threads of a session, few enough to need no order.
_MOST = 16


def waves(
    problem: Problem, schedule: Schedule, first: int, alone: Container[int] = ()
) -> list[range]:
    """Divides a schedule into waves: entries that may run in any order, or at once.

    A wave begins when the previous one has ended. We assume the worst within a wave: nothing is
    freed, and the outputs and scratch space of all runs are alive at once. A wave is as long as
    these bytes stay within the peak of the schedule, so where memory is short entries run one by
    one.

    Args:
        problem: the step.
        schedule: the schedule.
        first: the entry to begin with.
        alone: the ops that wait for all ops before them, by index.

    Returns:
        The entries of each wave.
    """
    simulation = simulate(problem, schedule)
    count = len(simulation.timeline)
    size = problem.sizes[simulation.tensor]
    made = np.bincount(simulation.made, size, count + 1).cumsum()
    died = np.bincount(simulation.last + 1, size, count + 2).cumsum()
    scratch = problem.workspaces[np.asarray(schedule, dtype=np.int64)].cumsum()
    parts = []
    begin = first
    while begin < count:
        gone = died[begin] + (scratch[begin - 1] if begin else 0)
        end = begin + 1
        while (
            end < min(count, begin + _MOST)
            and schedule[end] not in alone
            and made[end] + scratch[end] - gone <= simulation.peak
        ):
            end += 1
        parts.append(range(begin, end))
        begin = end
    return parts


def runs_ahead(problem: Problem, schedule: Schedule, first: int) -> bool:
    """Whether the forward pass would raise the peak of a schedule if nothing ordered it.

    Args:
        problem: the step.
        schedule: the schedule.
        first: the first entry of the backward pass.
    """
    begins = (index for index in problem.as_executed if index >= 0)
    place = {index: i for i, index in enumerate(begins)}
    forward = sorted(schedule[:first], key=lambda index: place.get(index, 0))
    unordered = simulate(problem, [*forward, *schedule[first:]])
    return unordered.peak > _NEGLIGIBLE * simulate(problem, schedule).peak


_NEGLIGIBLE = 1.01
