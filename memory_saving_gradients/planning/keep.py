"""The schedule that keeps given tensors and recomputes the others when they are needed."""

from __future__ import annotations

from collections.abc import Collection

from memory_saving_gradients.planning.problem import Problem, Schedule


def keeping(problem: Problem, kept: Collection[int]) -> list[int]:
    """Recomputes every forward tensor that the backward pass reads, except the kept ones.

    The forward pass runs unchanged. Before each backward op, those of its inputs that are not
    available are recomputed from those that are; a recomputed tensor stays until its last use, so
    no op runs more than twice. Outputs of pinned ops and results of the step count as kept.

    Args:
        problem: the step.
        kept: tensors to keep.

    Returns:
        The schedule.
    """
    at_hand = set(kept) | problem.results
    forward, end = problem.forward_count, len(problem.ops)
    due = [end] * forward  # the backward op before which each forward op is run again
    wanted = problem.first_wanted.tolist()
    for index in range(forward - 1, -1, -1):
        op = problem.ops[index]
        if op.pinned:
            continue
        for tensor in op.outputs:
            if tensor not in at_hand:
                again = (due[reader] for reader in problem.forward_readers[tensor])
                due[index] = min(due[index], wanted[tensor], *again)
    late: dict[int, list[int]] = {}
    for index, before in enumerate(due):
        if before < end:
            late.setdefault(before, []).append(index)
    schedule = list(range(forward))
    for index in range(forward, end):
        schedule += late.get(index, ())
        schedule.append(index)
    return without_unread(problem, schedule)


def without_unread(problem: Problem, schedule: Schedule) -> list[int]:
    """The schedule without runs whose outputs are recomputed before anything reads them."""
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
    """The residuals: forward tensors whose first copy is read after the forward pass."""
    ops = problem.ops
    in_backward = False
    ran: set[int] = set()
    first_copy: set[int] = set()
    kept: dict[int, None] = {}
    for index in schedule:
        in_backward = in_backward or ops[index].backward or index in ran
        if in_backward:
            kept.update((t, None) for t in ops[index].inputs if t in first_copy)
        if not ops[index].backward:
            if index in ran or in_backward:
                first_copy.difference_update(ops[index].outputs)
            else:
                first_copy.update(ops[index].outputs)
        ran.add(index)
    return list(kept)
