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


def allocated(problem: Problem, schedule: Schedule, simulation: Simulation | None = None) -> int:
    """The bytes that a schedule takes: the most alive at once, or the block if they are laid out.

    Args:
        problem: the step.
        schedule: op indices in execution order.
        simulation: its simulation, if that is known.

    Example:
        >>> from memory_saving_gradients.planning.problem import Op, Problem, Tensor
        >>> ops = (Op("a", (), (0,)), Op("b", (0,), (1,)), Op("c", (0,), (2,)), Op("d", (2,), (3,)))
        >>> tensors = (Tensor("a:0", 2), Tensor("b:0", 5), Tensor("c:0", 1), Tensor("d:0", 5))
        >>> allocated(Problem(ops, tensors), range(4))
        7
        >>> allocated(Problem(ops, tensors, packed=True), range(4))
        8
    """
    simulation = simulation or simulate(problem, schedule)
    if not problem.packed:
        return simulation.peak
    buffers = _outside_results(problem, _buffers(problem, schedule, simulation), simulation)
    by_size = sorted(buffers, key=lambda b: (-b.size, b.first - b.last))
    by_life = sorted(buffers, key=lambda b: (b.first - b.last, -b.size))
    return min(_block(by_size), _block(by_life))


def _buffers(problem: Problem, schedule: Schedule, simulation: Simulation) -> list[_Buffer]:
    """All memory besides the results; a tensor written over another one shares its buffer."""
    runs, size = np.asarray(schedule, dtype=np.int64), problem.sizes[simulation.tensor].tolist()
    made, last = simulation.made.tolist(), simulation.last.tolist()
    over = _written_over(problem, runs, simulation)
    buffers = []
    for copy in set(range(len(size))).difference(over.values()):
        end = copy
        while end in over:
            end = over[end]
        if size[copy]:
            buffers.append(_Buffer(size[copy], made[copy], last[end]))
    scratch = enumerate(problem.workspaces[runs].tolist())
    return buffers + [_Buffer(bytes_, entry, entry) for entry, bytes_ in scratch if bytes_]


def _written_over(problem: Problem, runs: np.ndarray, simulation: Simulation) -> dict[int, int]:
    """The copy of a tensor that is written over each copy, by their numbers.

    Nothing is written over what passes a barrier.
    """
    tensor, made, last = simulation.tensor, simulation.made, simulation.last
    size, reads = problem.sizes[tensor], problem.reads
    made_at = {(int(made[i]), int(size[i])): i for i in reversed(range(len(tensor)))}
    cuts = parts(problem, runs.tolist()) if problem.barriers else []
    barriers = np.unique(np.array(cuts, dtype=np.int64))
    passes = np.searchsorted(barriers, made, "right") < np.searchsorted(barriers, last, "right")
    over: dict[int, int] = {}
    largest_first = np.argsort(-size, kind="stable")
    dying = (last > made) & (last < len(runs)) & (size > 0)
    taken: set[int] = set()
    for copy in largest_first[dying[largest_first]].tolist():
        entry = int(last[copy])
        op, edges = problem.ops[runs[entry]], slice(*reads.start[runs[entry] : runs[entry] + 2])
        fits = tensor[copy] in reads.tensor[edges][reads.fits[edges]]
        direct = not passes[copy] or tensor[copy] in op.freed_first or op.in_place_rewritten
        if fits and direct and entry not in taken:
            taken.add(entry)
            over[copy] = made_at[entry, int(size[copy])]
    return over


def _outside_results(
    problem: Problem, buffers: list[_Buffer], simulation: Simulation
) -> list[_Buffer]:
    """The buffers that do not lie in the memory of results."""
    made = zip(simulation.tensor.tolist(), simulation.made.tolist(), strict=True)
    spaces = sorted((problem.tensors[t].apart, at) for t, at in made if problem.tensors[t].apart)
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
