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
    ops = problem.ops
    size = [tensor.bytes for tensor in problem.tensors]
    made_here = problem.made_here
    # Backwards: which copies die with an entry, and which of them can it write its output over?
    needed = set(problem.results)
    freed = [0] * len(schedule)
    reused = [0] * len(schedule)
    for entry in range(len(schedule) - 1, -1, -1):
        op = ops[schedule[entry]]
        for tensor in op.outputs:
            if tensor in needed:
                needed.discard(tensor)
            else:
                freed[entry] += size[tensor]
        for tensor in op.inputs:
            if tensor not in needed and tensor in made_here:
                needed.add(tensor)
                freed[entry] += size[tensor]
                fits = op.in_place and any(size[made] == size[tensor] for made in op.outputs)
                if fits and size[tensor] > reused[entry]:
                    reused[entry] = size[tensor]
    unmade = needed & made_here
    if unmade:
        name = problem.tensors[min(unmade)].name
        raise ValueError(f"the schedule reads {name} before any op has made it")
    live, cost, timeline = 0, 0.0, []
    for entry, index in enumerate(schedule):
        op = ops[index]
        for tensor in op.outputs:
            live += size[tensor]
        timeline.append(live + op.workspace - reused[entry])
        live -= freed[entry]
        cost += op.cost
    return Simulation(timeline, cost)
