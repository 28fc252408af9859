"""Real steps made small: runs of ops become one op each."""

from __future__ import annotations

import itertools

import numpy as np

from memory_saving_gradients.planning.problem import Op, Problem, Tensor


def coarsened(problem: Problem, forward: int, backward: int) -> Problem:
    """`problem` with about so many forward and backward ops, each a stretch of the old ones.

    A stretch ends where few bytes are alive. It reads what it reads from outside, makes what others
    read, and takes the rest as workspace. Every schedule of it is one of `problem`.
    """
    last_read = np.full(len(problem.tensors), -1)
    for index, op in enumerate(problem.ops):
        last_read[list(op.inputs)] = index
    last_read[list(problem.results)] = len(problem.ops)
    alive = np.zeros(len(problem.ops) + 1)
    for tensor in problem.made_here:
        alive[problem.made_by[tensor] + 1 : last_read[tensor] + 1] += problem.tensors[tensor].bytes
    start, end = problem.forward_count, len(problem.ops)
    edges = [0, *_ends(alive, 0, start, forward), start, *_ends(alive, start, end, backward), end]
    groups = [range(a, b) for a, b in itertools.pairwise(edges) if b > a]
    group_of = {index: at for at, group in enumerate(groups) for index in group}
    read_in: dict[int, set[int]] = {}
    for index, op in enumerate(problem.ops):
        for tensor in op.inputs:
            read_in.setdefault(tensor, set()).add(group_of[index])

    crossing = [
        t
        for t in sorted(problem.made_here)
        if t in problem.results or read_in.get(t, set()) - {group_of[problem.made_by[t]]}
    ]
    new = {tensor: at for at, tensor in enumerate(crossing)}
    ops = []
    for at, group in enumerate(groups):
        members = [problem.ops[index] for index in group]
        made = {t for op in members for t in op.outputs}
        outputs = [t for t in new if t in made]
        inside = made - new.keys()
        ops.append(
            Op(
                name=f"group {at}",
                inputs=tuple(
                    new[t]
                    for t in dict.fromkeys(t for op in members for t in op.inputs)
                    if t in new and t not in made
                ),
                outputs=tuple(new[t] for t in outputs),
                cost=(cost := sum(op.cost for op in members)),
                reused=sum(op.cost * op.reused for op in members) / max(cost, 1e-300),
                workspace=_workspace(problem, group, inside, outputs),
                backward=members[0].backward,
                pinned=any(op.pinned for op in members),
            )
        )
    tensors = tuple(Tensor(problem.tensors[t].name, problem.tensors[t].bytes) for t in crossing)
    results = frozenset(new[t] for t in problem.results if t in new)
    return Problem(tuple(ops), tensors, results)


def _ends(alive, start, end, count):
    """Where to cut a range into about `count` stretches: where fewest bytes are alive nearby."""
    places = np.linspace(start, end, count + 1)[1:-1].astype(int)
    reach = max(1, (end - start) // (3 * count))
    found = {
        int(max(start + 1, p - reach) + np.argmin(alive[max(start + 1, p - reach) : p + reach]))
        for p in places
    }
    return sorted(p for p in found if start < p < end)


def _workspace(problem, group, inside, outputs):
    """The most bytes alive while the group runs, beside its inputs and outputs."""
    last = {t: i for i in group for t in problem.ops[i].inputs if t in inside}
    held = made = peak = 0
    size = problem.sizes
    for index in group:
        op = problem.ops[index]
        held += sum(int(size[t]) for t in op.outputs if t in inside)
        made += sum(int(size[t]) for t in op.outputs if t not in inside)
        peak = max(peak, held + made + op.workspace)
        held -= sum(int(size[t]) for t in inside if last.get(t, problem.made_by[t]) == index)
    return max(0, peak - sum(int(size[t]) for t in outputs))
