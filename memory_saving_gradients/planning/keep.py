"""The schedule that keeps given tensors and recomputes the others when they are needed."""

from __future__ import annotations

from collections.abc import Collection

from memory_saving_gradients.planning.problem import Problem, Schedule


def keeping(problem: Problem, kept: Collection[int]) -> list[int]:
    """Recomputes every forward tensor that the backward pass reads, except the kept ones.

    The forward pass runs as it is. Before each backward op, what it reads and is not at hand is
    recomputed from what is; a recomputed tensor stays until its last use, so no op runs more
    than twice. Outputs of pinned ops and results of the step count as kept.

    Args:
        problem: the step.
        kept: tensors to keep.

    Returns:
        The schedule.
    """
    ops = problem.ops
    made_by = problem.made_by
    at_hand = set(kept) | problem.results
    for op in ops:
        if op.pinned or op.backward:
            at_hand.update(op.outputs)
    forward = problem.forward_count
    schedule = list(range(forward))
    for index in range(forward, len(ops)):
        missing: set[int] = set()
        waiting = [t for t in ops[index].inputs if t not in at_hand]
        while waiting:
            producer = made_by[waiting.pop()]
            if producer >= 0 and producer not in missing:
                missing.add(producer)
                waiting.extend(t for t in ops[producer].inputs if t not in at_hand)
        for producer in sorted(missing):
            schedule.append(producer)
            at_hand.update(ops[producer].outputs)
        schedule.append(index)
    return without_unread(problem, schedule)


def without_unread(problem: Problem, schedule: Schedule) -> list[int]:
    """The schedule without the runs whose outputs are made again before anything reads them."""
    ops = problem.ops
    needed = set(problem.results)
    again: set[int] = set()
    useful = []
    for index in reversed(schedule):
        op = ops[index]
        read = not op.outputs or not needed.isdisjoint(op.outputs)
        if not read and index in again:
            continue
        again.add(index)
        needed.difference_update(op.outputs)
        needed.update(op.inputs)
        useful.append(index)
    return useful[::-1]


def kept_tensors(problem: Problem, schedule: Schedule) -> list[int]:
    """The forward tensors whose first copy is read once the backward pass has begun."""
    ops = problem.ops
    in_backward = False
    ran: set[int] = set()
    first_copy: set[int] = set()
    found: dict[int, None] = {}
    for index in schedule:
        in_backward = in_backward or ops[index].backward or index in ran
        if in_backward:
            found.update((t, None) for t in ops[index].inputs if t in first_copy)
        if not ops[index].backward:
            if index in ran or in_backward:
                first_copy.difference_update(ops[index].outputs)
            else:
                first_copy.update(ops[index].outputs)
        ran.add(index)
    return list(found)
