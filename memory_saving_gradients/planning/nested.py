"""Schedules of nested segments, for budgets that segments run twice cannot meet.

A segment that is too large is recomputed up to a cut inside it, and the part before the cut once
more when the backward pass reaches it. Or the part that fits is kept at once: all of it, or only
the outputs of expensive ops and the tensors that later segments read. This is the dynamic program
of Beaumont et al. ("Optimal checkpointing for heterogeneous chains", 2019), over the cuts of any
graph instead of the layers of a chain.

The result need not be optimal: only cuts of one order are tried, bytes are counted in coarse steps,
and the transient memory of forward runs is not counted.
"""

from __future__ import annotations

import numpy as np

from memory_saving_gradients.planning.cuts import Segments
from memory_saving_gradients.planning.keep import without_unread
from memory_saving_gradients.planning.native import compiled
from memory_saving_gradients.planning.problem import Problem

#: The most positions that are tried as cuts.
MOST_CUTS = 64

# The number of steps that the budget is divided into.
_STEPS = 300


class Nested:
    """The cheapest nested segments of a step for every budget up to a given one.

    Args:
        problem: the step.
        budget: the most bytes to plan for.
    """

    def __init__(self, problem: Problem, budget: int) -> None:
        self._problem = problem
        self._unit = unit = max(1, budget) / _STEPS
        segments = Segments(problem, MOST_CUTS)
        self._cuts = segments.cuts

        def steps(bytes_: np.ndarray) -> np.ndarray:
            return np.rint(np.minimum(bytes_, 2 * budget) / unit).astype(np.int64)

        forward = problem.ops[: problem.forward_count]
        ends = np.append(self._cuts[1:], len(forward))
        ends = ends.repeat(np.diff(self._cuts, append=len(forward)))
        _, last_read = problem.forward_spans
        self._again = [not op.pinned for op in forward]
        # A tensor that is read after the next cut stays for what is recomputed from there.
        self._cheap = [
            not (op.pinned or op.expensive) and all(last_read[t] < end for t in op.outputs)
            for op, end in zip(forward, ends, strict=True)
        ]

        def by_segment(values: np.ndarray | list[float]) -> np.ndarray:
            return np.add.reduceat(np.asarray(values), self._cuts)

        seconds = problem.costs_again[: len(forward)]
        cost, cheap = by_segment(seconds * self._again), by_segment(seconds * self._cheap)
        made = [float(problem.sizes[list(op.outputs)].sum()) for op in forward]
        dear = by_segment([b * (not is_) for b, is_ in zip(made, self._cheap, strict=True)])
        whole = np.diff(segments.held, append=segments.held[-1])
        self._keep = steps(segments.keep)
        self._kept = np.stack([steps(whole), steps(dear)])
        shape = (len(self._cuts) + 1, len(self._cuts) + 1, _STEPS + 1)
        self._cost, self._choice = np.full(shape, np.inf), np.zeros(shape, np.int16)
        _cheapest(
            self._keep,
            steps(np.maximum(segments.take, 0)),
            steps(np.maximum(segments.last, 0)),
            self._kept,
            np.append(0.0, cost.cumsum()),
            np.stack([np.zeros_like(cheap), cheap]),
            self._cost,
            self._choice,
        )
        self._slots = [
            problem.forward_count + int(np.argmax(segments.of_backward < q))
            for q in range(len(self._cuts) + 1)
        ]

    def within(self, budget: float) -> list[list[int]]:
        """The cheapest schedule for a budget in bytes, if there is one."""
        room = min(_STEPS, int(budget / self._unit))
        return [self._schedule(room)] if np.isfinite(self._cost[0, -1, room]) else []

    def lowest(self, most: float) -> list[list[int]]:
        """The schedule for the smallest budget that costs at most `most` seconds more, if any."""
        rooms = np.flatnonzero(self._cost[0, -1] <= most)
        return [self._schedule(int(rooms[0]))] if len(rooms) else []

    def _schedule(self, room: int) -> list[int]:
        """The schedule for a budget of `room` steps."""
        end = len(self._cuts)
        forward = self._problem.forward_count
        again: dict[int, set[int]] = {}

        def run(slot: int, p: int, q: int, those: list[bool]) -> None:
            stop = self._cuts[q] if q < end else forward
            ops = (i for i in range(self._cuts[p], stop) if those[i])
            again.setdefault(self._slots[slot], set()).update(ops)

        waiting = [(0, end, room)]
        while waiting:
            p, q, room = waiting.pop()
            choice = int(self._choice[p, q, room])
            if q < end:
                run(q, p, choice if choice > 0 else p + 1 if choice < 0 else q, self._again)
            if choice > 0:
                waiting += [(choice, q, room - int(self._keep[p, choice])), (p, choice, room)]
            elif choice < 0:
                way = -1 - choice
                waiting.append((p + 1, q, room - int(self._kept[way, p])))
                if way:
                    run(p + 1, p, p + 1, self._cheap)
        schedule = list(range(forward))
        for index in range(forward, len(self._problem.ops)):
            schedule += sorted(again.get(index, ()))
            schedule.append(index)
        return without_unread(self._problem, schedule)


@compiled
def _cheapest(
    keep: np.ndarray,
    take: np.ndarray,
    last: np.ndarray,
    kept: np.ndarray,
    cost: np.ndarray,
    again: np.ndarray,
    least: np.ndarray,
    choice: np.ndarray,
) -> None:
    """For segments p up to q and a budget `room`: the least cost of recomputing them, and how.

    They are written to `least` and `choice`. The choice is 0 to run all of them; s to run them up
    to cut s, and come back to them; -1 to run the first one and keep its outputs; -2 to keep only
    those that cannot be recomputed cheaply, and run the rest `again`. The first run, up to the end,
    costs nothing.
    """
    count = len(last)
    for length in range(1, count + 1):
        for p in range(count - length + 1):
            q = p + length
            to_end = q == count
            needs = last[p] if to_end else take[p, q]
            for room in range(least.shape[2]):
                best, how = np.inf, 0
                if needs <= room:
                    best = 0.0 if to_end else cost[q] - cost[p]
                else:
                    for s in range(p + 1, q):
                        left = room - keep[p, s]
                        if left >= 0:
                            run = 0.0 if to_end else cost[s] - cost[p]
                            total = run + least[s, q, left] + least[p, s, room]
                            if total < best:
                                best, how = total, s
                    for way in range(2):
                        left = room - kept[way, p]
                        if left >= 0 and length > 1 and take[p, p + 1] <= room:
                            run = 0.0 if to_end else cost[p + 1] - cost[p]
                            total = run + again[way, p] + least[p + 1, q, left]
                            if total < best:
                                best, how = total, -1 - way
                least[p, q, room] = best
                choice[p, q, room] = how
