"""The strategies by name: each makes a schedule of a problem."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from memory_saving_gradients.planning.articulation import sqrt_spaced
from memory_saving_gradients.planning.frontier import at_knee
from memory_saving_gradients.planning.keep import keeping
from memory_saving_gradients.planning.problem import Problem, Schedule
from memory_saving_gradients.planning.search import lowest, within, without_expensive
from memory_saving_gradients.planning.simulate import simulate

# The last bytes cost most: the peak may exceed the lowest one by this share.
_NEAR = 0.01
_AGAIN = 4


def memory(problem: Problem) -> Schedule:
    """The cheapest schedule found at the lowest peak, with every op run at most twice."""
    found = floor = lowest(problem, 2)
    budget = int((1 + _NEAR) * simulate(problem, floor).peak)
    for _ in range(_AGAIN):  # what a budget of the peak that was found leads to may be better still
        other = within(problem, budget, 2, floor)
        (peak, cost), (_, least) = _value(problem, other), _value(problem, found)
        if peak > budget or cost >= least:
            break
        found = other
        if peak == budget:
            break
        budget = peak
    return found


def speed(problem: Problem) -> Schedule:
    """The cheapest schedule found at the lowest peak without running an expensive op twice."""
    return memory(without_expensive(problem))


def auto(problem: Problem) -> Schedule:
    """The knee: most of what `memory` saves, for less, with every op run at most twice."""
    return at_knee(problem, 2) if problem.may_repeat.any() else range(len(problem.ops))


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
    return min(schedules, key=lambda schedule: _value(problem, schedule))


def _value(problem: Problem, schedule: Schedule) -> tuple[int, float]:
    simulation = simulate(problem, schedule)
    return simulation.peak, simulation.cost


#: What each chooses, in a line.
WHAT = {
    "memory": "the lowest peak with every op run at most twice; auto, max_overhead= and "
    "memory_budget= pay less",
    "speed": "the lowest peak with only cheap ops run twice",
    "auto": "the knee, where memory begins to get dear",
    "articulation": "√n of the tensors where the network is one tensor wide; the textbook's",
}

#: The strategies that choose checkpoints by themselves.
STRATEGIES: dict[str, Callable[[Problem], Schedule]] = {
    "memory": memory,
    "speed": speed,
    "auto": auto,
    "articulation": sqrt_spaced,
}
