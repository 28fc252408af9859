"""The strategies by name: each makes a schedule of a problem."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from memory_saving_gradients.planning.articulation import sqrt_spaced
from memory_saving_gradients.planning.frontier import at_knee
from memory_saving_gradients.planning.keep import keeping
from memory_saving_gradients.planning.packing import allocated
from memory_saving_gradients.planning.problem import Problem, Schedule
from memory_saving_gradients.planning.search import (
    UNBOUNDED,
    lowest,
    within,
    without_expensive,
    without_third_runs,
)
from memory_saving_gradients.planning.simulate import simulate

# The overhead beyond which the frontier has no knee.
_KNEE = 0.25

# If tensors are laid out, schedules with so many times the fewest bytes alive are compared: gaps
# between tensors make more of a difference than these.
_AROUND = (1.0, 1.02, 1.05, 1.08, 1.1)
# Of schedules whose costs differ by at most this share, the one that takes the least is chosen.
_AS_CHEAP = 0.005

#: The share by which "memory" may exceed the lowest peak, as the last bytes are expensive to save.
NEAR = 0.05


def memory(problem: Problem, most_runs: int = UNBOUNDED) -> Schedule:
    """The cheapest schedule found near the lowest peak at the cost of one more forward pass."""
    forward = problem.costs[: problem.forward_count].sum()
    return _near_lowest(problem, most_runs, float(forward / max(problem.costs.sum(), 1e-300)))


def speed(problem: Problem, most_runs: int = UNBOUNDED) -> Schedule:
    """The cheapest schedule found near the lowest peak at which no expensive op runs twice."""
    return _near_lowest(without_expensive(problem), most_runs, _KNEE)


def auto(problem: Problem, most_runs: int = UNBOUNDED) -> Schedule:
    """The knee: most of what `memory` saves, for less."""
    if not problem.may_repeat.any():
        return range(len(problem.ops))
    return at_knee(problem, _near_lowest(problem, most_runs, _KNEE), most_runs)


def _near_lowest(problem: Problem, most_runs: int, max_overhead: float) -> Schedule:
    """The cheapest schedule found near the lowest peak within an overhead."""
    # A third run of a loop lowers the peak by little.
    floor = lowest(without_third_runs(problem), most_runs, max_overhead)
    fewest = simulate(problem, floor).peak
    if not problem.packed:
        return within(problem, int((1 + NEAR) * fewest), most_runs, floor)
    others = (within(problem, int(share * fewest), most_runs, floor) for share in _AROUND)
    simulated = [(each, simulate(problem, each)) for each in (floor, *others)]
    sizes = [(allocated(problem, each, known), known.cost, each) for each, known in simulated]
    most = (1 + NEAR) * min(size for size, _, _ in sizes)
    near = [one for one in sizes if one[0] <= most]
    as_cheap = (1 + _AS_CHEAP) * min(cost for _, cost, _ in near)
    return min((one for one in near if one[1] <= as_cheap), key=lambda one: one[0])[2]


def articulation(problem: Problem, most_runs: int = UNBOUNDED) -> Schedule:
    """The textbook checkpoints; no op runs more than twice."""
    return sqrt_spaced(problem) if most_runs > 1 else range(len(problem.ops))


def keep_given(problem: Problem, kept: Collection[int]) -> Schedule:
    """Keeps the given tensors; recomputes the others as far as that lowers the peak.

    Tensors made after the last given one are still there when the backward pass begins, so they are
    recomputed only if keeping them takes more memory.
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


#: What each strategy chooses, in one line.
WHAT = {
    "memory": "near the lowest peak at the cost of one more forward pass; auto, max_overhead= and "
    "memory_budget= cost less time",
    "speed": "near the lowest peak with only cheap ops recomputed",
    "auto": "the knee, beyond which saving memory costs much more time",
    "articulation": "√n of the tensors where the network is one tensor wide, the textbook method",
}

#: The strategies that choose checkpoints by themselves.
STRATEGIES: dict[str, Callable[..., Schedule]] = {
    "memory": memory,
    "speed": speed,
    "auto": auto,
    "articulation": articulation,
}
