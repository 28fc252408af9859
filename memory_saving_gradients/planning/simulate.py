"""The referee: peak memory and cost of a schedule, by liveness."""

from __future__ import annotations

import dataclasses

from memory_saving_gradients.planning.problem import Problem, Schedule


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a schedule takes.

    Attributes:
        timeline: bytes alive while each entry of the schedule runs.
        cost: seconds of all runs together.
    """

    timeline: list[int]
    cost: float

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return max(self.timeline, default=0)


def simulate(problem: Problem, schedule: Schedule) -> Simulation:
    """Runs a schedule on paper.

    A copy of a tensor lives from the run that makes it to the last run that reads it before the
    next copy is made; results live to the end. A copy that nothing reads is freed at once.

    Args:
        problem: the step.
        schedule: op indices in the order of running.

    Returns:
        The bytes alive at each entry, and the cost.

    Raises:
        ValueError: an op reads a tensor that was never made.

    Example:
        >>> from memory_saving_gradients.planning.problem import Op, Problem, Tensor
        >>> ops = (Op("a", (), (0,)), Op("b", (0,), (1,)))
        >>> step = Problem(ops, (Tensor("a:0", 4), Tensor("b:0", 8)), frozenset({1}))
        >>> simulate(step, [0, 1]).timeline
        [4, 12]
    """
    ops, tensors = problem.ops, problem.tensors
    made_here = {tensor for op in ops for tensor in op.outputs}
    # A first pass over the schedule backwards: at which entries does a copy have its last use?
    needed = set(problem.results)
    dies: list[list[int]] = [[] for _ in schedule]
    for entry in range(len(schedule) - 1, -1, -1):
        op = ops[schedule[entry]]
        for tensor in op.outputs:
            if tensor in needed:
                needed.discard(tensor)
            else:
                dies[entry].append(tensor)
        for tensor in op.inputs:
            if tensor not in needed and tensor in made_here:
                needed.add(tensor)
                dies[entry].append(tensor)
    unmade = {tensor for tensor in needed if tensor in made_here}
    if unmade:
        name = tensors[min(unmade)].name
        raise ValueError(f"the schedule reads {name} before any op has made it")
    live, cost, timeline = 0, 0.0, []
    for entry, index in enumerate(schedule):
        op = ops[index]
        made = [tensors[tensor].bytes for tensor in op.outputs]
        live += sum(made)
        during = live + op.workspace
        if op.in_place:
            dying = (tensors[t].bytes for t in dies[entry] if t not in op.outputs)
            during -= max((size for size in dying if size in made), default=0)
        timeline.append(during)
        live -= sum(tensors[tensor].bytes for tensor in dies[entry])
        cost += op.cost
    return Simulation(timeline, cost)
