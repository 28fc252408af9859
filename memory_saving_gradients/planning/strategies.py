"""The strategies by name: each makes a schedule of a problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable

from memory_saving_gradients.planning.articulation import articulation_tensors, sqrt_spaced
from memory_saving_gradients.planning.cuts import lowest_peak
from memory_saving_gradients.planning.keep import keeping
from memory_saving_gradients.planning.problem import Problem, Schedule
from memory_saving_gradients.planning.search import lowered, restored
from memory_saving_gradients.planning.simulate import simulate

# The peak to search for after the cuts, as a share of theirs, by simulating so many ops.
_AIM = 0.9
_SIMULATED_OPS = 15_000


def memory(problem: Problem) -> Schedule:
    """The lowest peak found with every op run at most twice."""
    if not problem.may_repeat.any():
        return range(len(problem.ops))
    found = best(problem, [lowest_peak(problem), sqrt_spaced(problem)])
    aim = int(_AIM * simulate(problem, found).peak)
    found = lowered(problem, found, aim, 2, _SIMULATED_OPS // (1 + len(problem.ops)))
    return restored(problem, found, simulate(problem, found).peak)


def speed(problem: Problem) -> Schedule:
    """The lowest peak found without running an expensive op twice.

    The outputs of expensive ops are kept. What lies between them is recomputed from articulation
    points, or from cuts where that takes less memory.
    """
    cheap = without_expensive(problem)
    points = articulation_tensors(problem)
    return best(problem, [keeping(cheap, points), lowest_peak(cheap)])


def without_expensive(problem: Problem) -> Problem:
    """The problem in which no expensive op may run twice."""
    ops = tuple(dataclasses.replace(op, pinned=op.pinned or op.expensive) for op in problem.ops)
    return dataclasses.replace(problem, ops=ops)


def keep_given(problem: Problem, kept: Collection[int]) -> Schedule:
    """Keeps the given tensors; recomputes the others as far as that lowers the peak.

    What follows the last given tensor in the forward pass is at hand when the backward pass
    begins, so it is recomputed only if keeping it takes more memory.
    """
    made_by = problem.made_by
    last = max((made_by[t] for t in kept), default=-1)
    tail = {t for op in problem.ops[last + 1 : problem.forward_count] for t in op.outputs}
    return best(problem, [keeping(problem, {*kept, *tail}), keeping(problem, kept)])


def best(problem: Problem, schedules: Iterable[Schedule]) -> Schedule:
    """The schedule of the lowest peak; of two equal ones the cheaper, then the earlier."""

    def value(schedule: Schedule) -> tuple[int, float]:
        simulation = simulate(problem, schedule)
        return simulation.peak, simulation.cost

    return min(schedules, key=value)


#: The strategies that choose checkpoints by themselves.
STRATEGIES: dict[str, Callable[[Problem], Schedule]] = {"memory": memory, "speed": speed}
