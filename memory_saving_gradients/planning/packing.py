"""The memory of a schedule whose tensors are laid out in advance, as XLA does.

XLA gives each tensor one place for its whole life, in one block of memory. Some bytes between them
stay unused, so the block can be larger than the most bytes alive at once; on the other hand, a
tensor may lie in the memory of a result that is made only later.

This follows XLA's `BufferAssigner`: the results come first, each tensor goes into the smallest of
them that has room for it, and all others into the block, each into the smallest gap that fits
(`GlobalDecreasingSizeBestFitHeap`). XLA does that twice, with the largest tensor first and with
the longest lived one first, and takes the smaller block.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from memory_saving_gradients.planning.problem import Problem, Schedule
from memory_saving_gradients.planning.simulate import Simulation, simulate
from memory_saving_gradients.planning.stretches import parts


@dataclasses.dataclass(frozen=True, slots=True)
class _Buffer:
    """Memory for tensors that are written one over the other, and the entries that it is used in.

    Attributes:
        size: its bytes.
        first: the entry that first writes to it.
        last: the entry that last reads it.
    """

    size: int
    first: int
    last: int


def allocated(problem: Problem, schedule: Schedule) -> int:
    """The bytes that a schedule takes: the most alive at once, or the block if they are laid out.

    Args:
        problem: the step.
        schedule: op indices in execution order.

    Example:
        >>> from memory_saving_gradients.planning.problem import Op, Problem, Tensor
        >>> ops = (Op("a", (), (0,)), Op("b", (0,), (1,)), Op("c", (0,), (2,)), Op("d", (2,), (3,)))
        >>> tensors = (Tensor("a:0", 2), Tensor("b:0", 5), Tensor("c:0", 1), Tensor("d:0", 5))
        >>> allocated(Problem(ops, tensors), range(4))
        7
        >>> allocated(Problem(ops, tensors, packed=True), range(4))
        8
    """
    simulation = simulate(problem, schedule)
    if not problem.packed:
        return simulation.peak
    buffers = _outside_results(problem, _buffers(problem, schedule, simulation), simulation)
    by_size = sorted(buffers, key=lambda b: (-b.size, b.first - b.last))
    by_life = sorted(buffers, key=lambda b: (b.first - b.last, -b.size))
    return min(_block(by_size), _block(by_life))


def _buffers(problem: Problem, schedule: Schedule, simulation: Simulation) -> list[_Buffer]:
    """All memory besides the results; a tensor written over another one shares its buffer."""
    runs, size = np.asarray(schedule, dtype=np.int64), problem.sizes
    tensor, made, last = simulation.tensor, simulation.made, simulation.last
    makes: dict[tuple[int, int], int] = {}  # copy by the entry that makes it, and its size
    for copy in range(len(tensor) - 1, -1, -1):
        makes[int(made[copy]), int(size[tensor[copy]])] = copy
    reads = problem.reads
    written_over: dict[int, int] = {}  # copy to the one that is written over it
    ends_of: dict[int, list[int]] = {}
    for copy in np.flatnonzero((last > made) & (last < len(runs)) & (size[tensor] > 0)).tolist():
        ends_of.setdefault(int(last[copy]), []).append(copy)
    barriers = np.array(
        sorted({p for part in parts(problem, runs.tolist()) for p in part})
        if problem.barriers
        else []
    )
    passed = np.searchsorted(barriers, made, side="right") < np.searchsorted(
        barriers, last, side="right"
    )
    for entry, copies in ends_of.items():
        op = problem.ops[runs[entry]]
        edges = slice(reads.start[runs[entry]], reads.start[runs[entry] + 1])
        fits = set(reads.tensor[edges][reads.fits[edges]].tolist())
        candidates = [
            copy
            for copy in copies
            if int(tensor[copy]) in fits
            and (not passed[copy] or int(tensor[copy]) in op.freed_first or op.in_place_rewritten)
        ]
        if candidates:
            largest = max(candidates, key=lambda copy: int(size[tensor[copy]]))
            written_over[largest] = makes[entry, int(size[tensor[largest]])]
    buffers = [
        _Buffer(scratch, entry, entry)
        for entry, scratch in enumerate(problem.workspaces[runs].tolist())
        if scratch
    ]
    for copy in set(range(len(tensor))).difference(written_over.values()):
        end = copy
        while end in written_over:
            end = written_over[end]
        if size[tensor[copy]]:
            buffers.append(_Buffer(int(size[tensor[copy]]), int(made[copy]), int(last[end])))
    return buffers


def _outside_results(
    problem: Problem, buffers: list[_Buffer], simulation: Simulation
) -> list[_Buffer]:
    """The buffers that do not lie in the memory of results."""
    made = zip(simulation.tensor.tolist(), simulation.made.tolist(), strict=True)
    results = {t: entry for t, entry in made if problem.tensors[t].apart}  # as last made
    spaces = [(problem.tensors[t].apart, entry) for t, entry in results.items()]
    spaces.sort()  # the smallest first
    sizes = np.array([size for size, _ in spaces], dtype=np.int64)
    used: list[list[tuple[int, int]]] = [[] for _ in spaces]
    left = []
    for buffer in sorted(buffers, key=lambda b: (-b.size, b.first)):
        for space in range(int(np.searchsorted(sizes, buffer.size)), len(spaces)):
            in_time = buffer.last < spaces[space][1]
            if in_time and all(
                buffer.last < first or buffer.first > last for first, last in used[space]
            ):
                used[space].append((buffer.first, buffer.last))
                break
        else:
            left.append(buffer)
    return left


def _block(buffers: list[_Buffer]) -> int:
    """The size of the block if each buffer goes into the smallest gap, in the order given."""
    first, last, start, end = np.zeros((4, len(buffers)), dtype=np.int64)
    for count, buffer in enumerate(buffers):
        at_once = (first[:count] <= buffer.last) & (last[:count] >= buffer.first)
        starts, ends = start[:count][at_once], end[:count][at_once]
        order = np.argsort(starts)
        below = np.maximum.accumulate(np.concatenate([[0], ends[order]]))
        gaps = np.append(starts[order], _UNLIMITED) - below
        gaps[gaps < buffer.size] = _UNLIMITED
        place = below[gaps.argmin()]
        first[count], last[count] = buffer.first, buffer.last
        start[count], end[count] = place, place + buffer.size
    return int(end.max(initial=0))


_UNLIMITED = np.iinfo(np.int64).max // 2
