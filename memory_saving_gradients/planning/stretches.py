"""Fewer stretches of recomputation, for runtimes in which it is expensive to delay each one."""

from __future__ import annotations

import numpy as np

from memory_saving_gradients.planning.problem import Problem, Schedule, copied
from memory_saving_gradients.planning.simulate import simulate


def stretches(problem: Problem, schedule: Schedule) -> list[tuple[int, int]]:
    """The stretches in which a schedule recomputes: the first entry of each, and its end."""
    _, again = copied(problem, schedule)
    steps = np.diff([0, *again, 0])
    return list(
        zip(np.flatnonzero(steps > 0).tolist(), np.flatnonzero(steps < 0).tolist(), strict=True)
    )


def parts(problem: Problem, schedule: Schedule) -> list[tuple[int, int]]:
    """The stretches, each cut where an expensive op needs nothing of what comes before it there.

    Else XLA would run all expensive ops of a stretch first, and then compute what is made of them
    in one kernel. A cheap op that reads an expensive one must come before the cut.
    """
    found = []
    for start, end in stretches(problem, schedule):
        made: set[int] = set()  # by expensive ops, or of what they make
        is_read = False
        for place in range(start, end):
            op = problem.ops[schedule[place]]
            depends = not made.isdisjoint(op.inputs)
            if op.expensive and is_read and not depends:
                found.append((start, place))
                start, made, is_read = place, set(), False
            is_read |= depends and not op.expensive
            if op.expensive or depends:
                made.update(op.outputs)
        found.append((start, end))
    return found


def fewer_stretches(problem: Problem, schedule: Schedule, most: int) -> Schedule:
    """Moves each stretch to right after the previous one, where the peak allows it.

    Copies read nothing that the backward pass makes, so they may run earlier; they then live
    longer. Ops that both stretches recompute run once.

    Args:
        problem: the step.
        schedule: a schedule of it.
        most: the bytes that may be alive from the earlier stretch up to the next one.

    Returns:
        A schedule with the same runs, or fewer.
    """
    runs = np.asarray(schedule).tolist()
    places = stretches(problem, runs)
    ends = [*(start for start, _ in places), len(runs)][1:]
    merged: list[tuple[list[int], list[int]]] = []  # a stretch, and what comes before the next one
    head = runs[: places[0][0]] if places else runs
    for (start, after), end in zip(places, ends, strict=True):
        stretch, then = runs[start:after], runs[after:end]
        if merged:
            *others, (before, between) = merged
            joined = [*before, *(op for op in stretch if op not in before)], [*between, *then]
            until, tried = _joined(head, others), _joined(head, [*others, joined])
            timeline = simulate(problem, [*tried, *runs[end:]]).timeline
            if timeline[len(until) : len(tried)].max() <= most:
                merged[-1] = joined
                continue
        merged.append((stretch, then))
    return _joined(head, merged)


def _joined(head: list[int], parts: list[tuple[list[int], list[int]]]) -> list[int]:
    return [*head, *(op for part in parts for runs in part for op in runs)]
