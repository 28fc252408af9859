"""The referee: peak memory and cost of a schedule, by liveness."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from memory_saving_gradients.planning.liveness import alive
from memory_saving_gradients.planning.problem import Problem, Schedule, baseline


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The memory and the cost of a schedule.

    The live range of a copy of a tensor goes from the run that makes it to the last run that reads
    it before the next copy is made. The arrays `tensor`, `made` and `last` have an element for each
    copy.

    Attributes:
        timeline: bytes alive while each entry of the schedule runs.
        live: the same without scratch space and without the reuse of input buffers for outputs.
        cost: seconds of all runs together.
        tensor: the tensor of each copy, in ascending order.
        made: the entry of the schedule that makes the copy.
        last: the last entry that reads it; the length of the schedule for a result of the step.
        events: the entries that make or read each copy, copy by copy in ascending order.
        begins: where the events of each copy begin in `events`.
    """

    timeline: np.ndarray
    live: np.ndarray
    cost: float
    tensor: np.ndarray
    made: np.ndarray
    last: np.ndarray
    events: np.ndarray
    begins: np.ndarray

    @functools.cached_property
    def copies_of_events(self) -> np.ndarray:
        """The copy that each of `events` belongs to."""
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
    """Simulates a schedule.

    Args:
        problem: the step.
        schedule: op indices in execution order.

    Returns:
        The bytes alive at each entry, the cost, and the live ranges of all copies.

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

    # The events of each tensor in the order of time; a copy begins with the op that makes it.
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
    live = alive(made, last, size[tensor], len(runs))
    timeline = live + problem.workspaces[runs] - reused
    cost = math.fsum(problem.seconds_of(runs))  # the same in any order
    return Simulation(timeline, live, cost, tensor, made, last, entries, begins)


def plain_peak(problem: Problem) -> int:
    """The most bytes alive at once in the step without recomputation, where ops may overlap."""
    return int(plain_timeline(problem).max(initial=0))


def plain_timeline(problem: Problem) -> np.ndarray:
    """Bytes alive as each op of `baseline(problem)` begins, where ops may overlap.

    Outputs and scratch space are allocated as an op begins; an input that it is the last to read is
    freed as it ends.
    """
    if not problem.as_executed:
        return simulate(problem, baseline(problem)).timeline
    events = np.array(problem.as_executed, dtype=np.int64)
    begins, ends = np.flatnonzero(events >= 0), np.flatnonzero(events < 0)
    ops = np.arange(len(problem.ops))
    begin, end = np.empty_like(ops), np.empty_like(ops)
    begin[events[begins]], end[~events[ends]] = begins, ends
    maker, made = problem.makes.of(ops)
    reader, read = problem.reads.of(ops)
    reads = (dataclasses.replace(problem, barriers=False) if problem.barriers else problem).reads
    made, tensor, fits = problem.makes.tensor[made], reads.tensor[read], reads.fits
    # The readers of each tensor in the order in which they end; the last one may write over it if
    # all others have ended before it begins.
    order = np.lexsort((end[reader], tensor))
    tensor, reader, fits = tensor[order], reader[order], fits[read][order]
    is_last = np.append(tensor[1:] != tensor[:-1], True)[: len(tensor)]
    before = np.where(np.diff(tensor, prepend=-1) == 0, np.roll(end[reader], 1), -1)
    fits &= is_last & (before < begin[reader]) & ~problem.is_result[tensor]
    fits &= ~np.array([op.in_place_rewritten for op in problem.ops], dtype=bool)[reader]
    lent = np.zeros_like(ops)
    np.maximum.at(lent, reader[fits], problem.sizes[tensor[fits]])

    last = np.zeros(len(problem.tensors), dtype=np.int64)
    last[made] = end[maker]
    last[tensor[is_last]] = end[reader[is_last]]
    last[problem.is_result] = len(events)
    live = alive(
        np.concatenate([begin[maker], begin]),
        np.concatenate([last[made], end]),
        np.concatenate([problem.sizes[made], problem.workspaces - lent]),
        len(events),
    )
    return live[begins]
