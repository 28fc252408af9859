"""The referee: peak memory and cost of a schedule, by liveness."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from memory_saving_gradients.planning.problem import Problem, Schedule, baseline


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a schedule takes.

    A copy of a tensor lives from the run that makes it to the last run that reads it before the
    next copy is made. The arrays `tensor`, `made` and `last` have one element a copy.

    Attributes:
        timeline: bytes alive while each entry of the schedule runs.
        cost: seconds of all runs together.
        tensor: which tensor each copy is of, in ascending order.
        made: the entry of the schedule that makes the copy.
        last: the last entry that reads it; the length of the schedule for a result of the step.
        events: the entries that make or read each copy, copy by copy in ascending order.
        begins: where in `events` those of each copy begin.
    """

    timeline: np.ndarray
    cost: float
    tensor: np.ndarray
    made: np.ndarray
    last: np.ndarray
    events: np.ndarray
    begins: np.ndarray

    @functools.cached_property
    def copies_of_events(self) -> np.ndarray:
        """Which copy each of `events` belongs to."""
        return np.repeat(
            np.arange(len(self.begins)), np.diff(np.append(self.begins, len(self.events)))
        )

    @functools.cached_property
    def is_first_copy(self) -> np.ndarray:
        """Whether each copy is the first of its tensor."""
        return np.diff(self.tensor, prepend=-1) != 0

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return int(self.timeline.max(initial=0))


def simulate(problem: Problem, schedule: Schedule) -> Simulation:
    """Runs a schedule on paper.

    Args:
        problem: the step.
        schedule: op indices in the order of running.

    Returns:
        The bytes alive at each entry, the cost, and the lives of all copies.

    Raises:
        ValueError: an op reads a tensor that was never made.

    Example:
        >>> from memory_saving_gradients.planning.problem import Op, Problem, Tensor
        >>> ops = (Op("a", (), (0,)), Op("b", (0,), (1,)))
        >>> step = Problem(ops, (Tensor("a:0", 4), Tensor("b:0", 8)), frozenset({1}))
        >>> simulate(step, [0, 1]).timeline.tolist()
        [4, 12]
    """
    runs = np.asarray(schedule, dtype=np.int64)
    size = problem.sizes
    reads, makes = problem.reads, problem.makes
    read_at, read_edge = reads.of(runs)
    made_at, made_edge = makes.of(runs)

    # All that happens to a tensor, in the order of time: each copy begins with its making.
    tensors = np.concatenate([reads.tensor[read_edge], makes.tensor[made_edge]])
    entries = np.concatenate([read_at, made_at])
    order = np.argsort(tensors * (len(runs) + 1) + entries, kind="stable")
    tensors, entries = tensors[order], entries[order]
    begins = np.flatnonzero(order >= len(read_at))
    first = np.flatnonzero(np.diff(tensors, prepend=-1))
    unmade = first[order[first] < len(read_at)]
    missing = set(problem.results & problem.made_here) - set(tensors.tolist())
    if len(unmade) or missing:
        name = problem.tensors[int(tensors[unmade[0]]) if len(unmade) else min(missing)].name
        raise ValueError(f"the schedule reads {name} before any op has made it")
    ends = np.append(begins[1:], len(tensors))[: len(begins)] - 1
    tensor, made, last = tensors[begins], entries[begins], entries[ends]

    final = problem.is_result[tensor] & (np.append(tensor[1:], -1) != tensor)

    # A dying input may lend its buffer to an output of equal size.
    reused = np.zeros(len(runs), dtype=np.int64)
    lent = (last > made) & ~final
    fits = reads.fits[read_edge[order[ends[lent]]]]
    np.maximum.at(reused, last[lent], np.where(fits, size[tensor[lent]], 0))

    last = np.where(final, len(runs), last)
    live = np.zeros(len(runs) + 2, dtype=np.int64)
    np.add.at(live, made, size[tensor])
    np.subtract.at(live, last + 1, size[tensor])
    timeline = live[: len(runs)].cumsum() + problem.workspaces[runs] - reused
    cost = float(problem.costs[runs].sum())
    return Simulation(timeline, cost, tensor, made, last, entries, begins)


def plain_peak(problem: Problem) -> int:
    """The most bytes alive at once in the step without recomputation, where ops may overlap."""
    return int(plain_timeline(problem).max(initial=0))


def plain_timeline(problem: Problem) -> np.ndarray:
    """Bytes alive as each op of `baseline(problem)` begins, where ops may overlap.

    What an op makes, and its scratch space, is there from its beginning; what it reads last goes
    with its end.
    """
    if not problem.as_executed:
        return simulate(problem, baseline(problem)).timeline
    reads = [[t for t in op.inputs if t in problem.made_here] for op in problem.ops]
    left = [0] * len(problem.tensors)  # readers that have not ended
    for tensors in reads:
        for tensor in tensors:
            left[tensor] += 1
    size = problem.sizes.tolist()
    owed = [0] * len(problem.ops)  # what an op gives back at its end
    held, timeline = 0, []
    for event in problem.as_executed:
        index = event if event >= 0 else ~event
        op = problem.ops[index]
        if event >= 0:
            dying = [t for t in reads[index] if left[t] == 1 and t not in problem.results]
            made = [size[t] for t in op.outputs]
            lent = [size[t] for t in dying if op.in_place and size[t] in made]
            unread = sum(size[t] for t in op.outputs if not left[t] and t not in problem.results)
            owed[index] = op.workspace + unread - max(lent, default=0)
            held += sum(made) + op.workspace - max(lent, default=0)
            timeline.append(held)
        else:
            for tensor in reads[index]:
                left[tensor] -= 1
                if not left[tensor] and tensor not in problem.results:
                    held -= size[tensor]
            held -= owed[index]
    return np.array(timeline, dtype=np.int64)
