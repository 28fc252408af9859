"""Checkpoints at cuts of the forward order, chosen for the lowest peak.

A cut is a position in the forward order; the tensors alive there are kept, and the ops between two
cuts (a segment) are recomputed together. A cut may hold several tensors, so a graph needs no
bottleneck. This is the prefix family of Kusumoto et al. (NeurIPS 2019), with the liveness inside
segments counted as well: the simulated backward pass gives the bytes that each segment needs.

The result need not be optimal: only cuts of one order are tried, and each segment is recomputed
whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from memory_saving_gradients.planning.liveness import alive
from memory_saving_gradients.planning.problem import Problem
from memory_saving_gradients.planning.simulate import simulate

#: The most positions that are tried as cuts.
MOST_CUTS = 400


def kept_at(problem: Problem, cuts: Iterable[int]) -> set[int]:
    """The tensors that cuts keep: those alive at a cut, and all that are made after the last one.

    Args:
        problem: the step.
        cuts: positions; cut p lies after the first p forward ops.
    """
    positions = sorted(cuts)
    made, last_read = problem.forward_spans
    after = np.searchsorted(positions, made, side="right")  # the first cut after the making
    bound = np.array([*positions, np.iinfo(np.int64).max])
    kept = (made >= 0) & ((after == len(positions)) | (last_read >= bound[after]))
    return set(np.flatnonzero(kept).tolist())


class Segments:
    """The bytes of segments between candidate cuts, read off the step without recomputation.

    Attributes:
        cuts: candidate positions, the first one 0 (the start, where nothing is kept).
        keep: `keep[p, q]`, the bytes that cut q keeps and no cut up to p does.
        take: `take[p, q]`, the peak of recomputing the segment between cuts p and q and running
            its backward pass, kept tensors not counted.
        last: `last[p]`, the same for the ops after cut p, which are not recomputed.
        held: for each cut, the bytes made before it that the backward pass reads.
        of_backward: the segment that each backward op belongs to.

    Args:
        problem: the step.
        most: the most candidate positions.
    """

    def __init__(self, problem: Problem, most: int = MOST_CUTS) -> None:
        made, last_read = problem.forward_spans
        size = np.array([tensor.bytes for tensor in problem.tensors], dtype=np.int64)
        self.cuts = cuts = _candidates(problem, made, last_read, size, most)
        count = len(cuts)
        forward = np.flatnonzero(made >= 0)
        size, made, last_read = size[forward], made[forward], last_read[forward]
        made_in = np.searchsorted(cuts, made, side="right") - 1
        read_in = np.searchsorted(cuts, last_read, side="right") - 1

        grid = np.zeros((count, count), dtype=np.int64)  # by segment of making and of last read
        np.add.at(grid, (made_in, np.maximum(read_in, made_in)), size)
        read_from = grid[:, ::-1].cumsum(axis=1)[:, ::-1]  # last read in this segment or later
        below = np.vstack([np.zeros(count, dtype=np.int64), read_from.cumsum(axis=0)])
        self.keep = np.diagonal(below[:count]) - below[:count]

        wanted = np.zeros(len(problem.tensors), dtype=bool)
        for op in problem.ops[problem.forward_count :]:
            wanted[list(op.inputs)] = True
        needed = np.bincount(made_in, weights=size * wanted[forward], minlength=count)
        self.held = held = np.concatenate([[0], needed.cumsum()[:-1]]).astype(np.int64)

        timeline = simulate(problem, range(len(problem.ops))).timeline
        ahead, back, gradient, self.of_backward = _by_segment(
            problem, timeline.tolist(), cuts, held
        )
        self.take = np.zeros((count, count), dtype=np.int64)
        for q in range(1, count):
            most_back = np.maximum.accumulate(back[:q][::-1])[::-1]
            most_ahead = np.maximum.accumulate(ahead[:q][::-1])[::-1]
            self.take[:q, q] = np.maximum(most_back, most_ahead + gradient[q]) - held[:q]
        self.last = np.maximum.accumulate(np.maximum(back, ahead)[::-1])[::-1] - held

    def lowest_aim(self) -> float:
        """The lowest peak for which there are cuts, to within half a percent."""
        low, high = 0.0, float(self.last[0])
        while high - low > 0.005 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.cuts_for(middle) is None else (low, middle)
        return high

    def cuts_for(self, peak: float) -> tuple[int, ...] | None:
        """The cuts that keep the fewest bytes within `peak`, or None if there are none."""
        count = len(self.cuts)
        kept = np.full(count, np.inf)  # bytes, with this cut as the last one
        before = np.zeros(count, dtype=np.int64)
        kept[0] = 0
        for q in range(1, count):
            sums = np.where(
                kept[:q] + self.take[:q, q] <= peak, kept[:q] + self.keep[:q, q], np.inf
            )
            before[q] = sums.argmin()
            kept[q] = sums[before[q]]
        total = np.where(kept + self.last <= peak, kept, np.inf)
        at = int(total.argmin())
        if not np.isfinite(total[at]):
            return None
        chosen = []
        while at:
            chosen.append(int(self.cuts[at]))
            at = int(before[at])
        return tuple(reversed(chosen))


def _candidates(
    problem: Problem, made: np.ndarray, last_read: np.ndarray, size: np.ndarray, most: int
) -> np.ndarray:
    """Positions to try as cuts: where the fewest bytes cross, in each stretch of the order."""
    count = problem.forward_count
    crosses = (made >= 0) & (last_read > made)
    crossing = alive(made[crosses] + 1, last_read[crosses], size[crosses], count + 1)
    edges = np.linspace(1, count, min(count, most) + 1).astype(np.int64)[:-1]
    stretches = np.split(np.arange(1, count), edges[1:] - 1) if count > 1 else []
    best = [int(s[crossing[s].argmin()]) for s in stretches if len(s)]
    return np.array([0, *best])


def _by_segment(
    problem: Problem, timeline: Sequence[int], cuts: np.ndarray, held: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The bytes that the plain step reaches in each segment.

    A backward op belongs to the segment of the latest activation that it or any later op reads;
    postponed ops are ignored.

    Returns:
        By segment: the peak in the forward pass, the peak in the backward pass, and the bytes of
        gradients as the backward pass enters it. Then the segment of each backward op.
    """
    made_by = problem.made_by
    forward = problem.forward_count
    count = len(cuts)
    ahead = np.zeros(count, dtype=np.int64)
    back = np.zeros(count, dtype=np.int64)
    gradient = np.zeros(count, dtype=np.int64)
    segment = np.searchsorted(cuts, np.arange(forward), side="right") - 1
    np.maximum.at(ahead, segment, timeline[:forward])
    of_backward = np.zeros(len(problem.ops) - forward, dtype=np.int64)
    latest = -1
    for index in reversed(range(forward, len(problem.ops))):
        read = [made_by[t] for t in problem.ops[index].inputs if made_by[t] < forward]
        if not problem.ops[index].postponed:
            latest = max(latest, *read, -1)
        at = of_backward[index - forward] = int(segment[latest]) if latest >= 0 else 0
        back[at] = max(back[at], timeline[index])
        # Going backwards in time, the earliest op of a segment is the last one written here.
        entered = int(np.searchsorted(cuts, latest, side="right"))
        gradient[entered:] = max(0, timeline[index] - held[min(entered, count - 1)])
    return ahead, back, gradient, of_backward
