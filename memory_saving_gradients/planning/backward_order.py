"""The order of the backward pass.

The readers of one gradient run together, as soon as all of them can, if they free as many bytes as
they allocate: the slices of a concatenation's gradient, a running sum and its next term, the
updates of a variable. Gradients of weights that allocate more than they free come last, unless that
raises the peak.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from memory_saving_gradients.planning.liveness import alive
from memory_saving_gradients.planning.problem import Problem

# The most orders that are simulated to find the ops that should not come last.
_JUDGED = 200


def backward_order(
    problem: Problem, waits: Sequence[Collection[int]]
) -> tuple[list[int], set[int]]:
    """An order of the backward pass in which fewer bytes are alive.

    Args:
        problem: the step, its backward ops in the reverse order of the activations that they read.
        waits: for each op the backward ops that it waits for.

    Returns:
        The backward ops in order, and those of them that are postponed to the end.
    """
    together = _Together(problem, waits).order()
    late = _worth_postponing(problem, waits, together)
    place = {op: float(i) for i, op in enumerate(together)}
    readers: dict[int, list[int]] = {op: [] for op in late}
    for op in together:
        for before in waits[op]:
            if before in readers:
                readers[before].append(op)
    order = _with_last(place, readers, late)
    allowed = _held(problem, together)
    if _held(problem, order) <= allowed:
        return order, set(late)
    postponed: list[int] = []
    for op in late[:_JUDGED]:
        if _held(problem, _with_last(place, readers, [*postponed, op])) <= allowed:
            postponed.append(op)
    return _with_last(place, readers, postponed), set(postponed)


class _Together:
    """Takes ops in the given order, and after each the groups that add no bytes if they run now."""

    def __init__(self, problem: Problem, waits: Sequence[Collection[int]]) -> None:
        self._problem = problem
        self._first = problem.forward_count
        self._size = problem.sizes.tolist()
        self._made_by = problem.made_by
        self._order: list[int] = []
        self._done = [i < self._first for i in range(len(problem.ops))]
        self._waits_for = [len(before) for before in waits]
        self._after: list[list[int]] = [[] for _ in problem.ops]
        for op, before in enumerate(waits):
            for other in before:
                self._after[other].append(op)
        self._readers: list[list[int]] = [[] for _ in problem.tensors]
        for op in range(self._first, len(problem.ops)):
            for tensor in problem.ops[op].inputs:
                self._readers[tensor].append(op)
        self._unread = [len(readers) for readers in self._readers]
        # By op, the earliest and the latest activation that it reads. One counts as long as the
        # forward pass reads it: there it is alive in any case.
        none = len(problem.ops)
        _, last_read = problem.forward_spans
        reads = [
            [t for t in op.inputs if 0 <= self._made_by[t] < self._first] for op in problem.ops
        ]
        self._earliest_read = [
            min((max(self._made_by[t], int(last_read[t])) for t in read), default=none)
            for read in reads
        ]
        self._latest_read = [max((self._made_by[t] for t in read), default=none) for read in reads]
        # The backward pass reads the activations in reverse; no group may read earlier ones yet.
        self._latest = len(problem.ops)

    def order(self) -> list[int]:
        for op in range(self._first, len(self._problem.ops)):
            if not self._done[op]:
                self._latest = min(self._latest, self._latest_read[op])
                self._take([op])
        return self._order

    def _take(self, ops: Iterable[int]) -> None:
        """Runs ops, and then the groups that have become worth running."""
        touched = collections.deque(self._run(ops))
        while touched:
            tensor = touched.popleft()
            group = self._group(tensor)
            if group:
                touched.extend(self._run(group))

    def _run(self, ops: Iterable[int]) -> list[int]:
        """Runs ops; returns the tensors whose readers may now be worth running."""
        touched: dict[int, None] = {}
        for op in ops:
            self._done[op] = True
            self._order.append(op)
            for tensor in self._problem.ops[op].inputs:
                self._unread[tensor] -= 1
                touched[tensor] = None
            touched.update(dict.fromkeys(self._problem.ops[op].outputs))
            for after in self._after[op]:
                self._waits_for[after] -= 1
                if not self._waits_for[after]:
                    touched.update(dict.fromkeys(self._problem.ops[after].inputs))
        return [t for t in touched if self._unread[t]]

    def _group(self, tensor: int) -> list[int]:
        """The readers of a gradient and the ops that follow them, if running all adds no bytes."""
        if self._made_by[tensor] < self._first or tensor in self._problem.results:
            return []
        group = [op for op in self._readers[tensor] if not self._done[op]]
        if not all(self._may_run(op, set()) for op in group):
            return []
        taken: collections.Counter[int] = collections.Counter()
        chosen: list[int] = []
        net = 0
        for op in group:
            for member in (op, *self._dying(op, chosen, taken)):
                net += self._net(member, taken)
                taken.update(self._problem.ops[member].inputs)
                chosen.append(member)
        return chosen if net <= 0 else []

    def _dying(self, op: int, before: Sequence[int], taken: collections.Counter[int]) -> list[int]:
        """The ops that follow an op until bytes are freed: the rest of an update, the next sum."""
        inside, taken = {*before, op}, taken + collections.Counter(self._problem.ops[op].inputs)
        followers: list[int] = []
        net = 0
        while net >= 0:
            after = [i for i in self._after[op] if i not in inside and self._may_run(i, inside)]
            after = [i for i in after if self._net(i, taken) <= 0]
            if not after:
                return []
            op = after[0]
            net += self._net(op, taken)
            taken.update(self._problem.ops[op].inputs)
            followers.append(op)
            inside.add(op)
        return followers

    def _may_run(self, op: int, inside: Collection[int]) -> bool:
        if self._earliest_read[op] < self._latest:
            return False
        waits = self._waits_for[op]
        return not waits or (bool(inside) and waits == sum(op in self._after[i] for i in inside))

    def _net(self, op: int, taken: collections.Counter[int]) -> int:
        """The bytes that an op adds if, of each tensor, `taken` more readers have run."""
        results = self._problem.results
        node = self._problem.ops[op]
        made = sum(self._size[t] for t in node.outputs if self._unread[t] or t in results)
        freed = sum(
            self._size[t]
            for t in node.inputs
            if self._made_by[t] >= self._first
            and t not in results
            and self._unread[t] - taken[t] == 1
        )
        return made - freed


def _worth_postponing(
    problem: Problem, waits: Sequence[Collection[int]], order: Sequence[int]
) -> list[int]:
    """The ops that make more bytes than they free and could run later, the largest first."""
    place = {op: i for i, op in enumerate(order)}
    until = _latest_places(waits, place, len(order))
    last_read: dict[int, list[int]] = {}
    for op in order:
        for tensor in problem.ops[op].inputs:
            last_read.setdefault(tensor, []).append(place[op])
    sizes = problem.sizes
    gains = []
    for op in reversed(order):
        later = until[op]
        if later <= place[op] + 1:
            continue
        node = problem.ops[op]
        made = int(sizes[list(node.outputs)].sum())
        held = sum(
            int(sizes[t])
            for t in node.inputs
            if t not in problem.results
            and all(at < later for at in last_read[t] if at != place[op])
        )
        if made > held:
            gains.append((made - held, op))
            for tensor in node.inputs:  # for the ops that follow: the tensor now lives that long
                last_read[tensor].append(later)
    return [op for _, op in sorted(gains, reverse=True)]


def _latest_places(
    waits: Sequence[Collection[int]], place: dict[int, int], end: int
) -> dict[int, int]:
    """The place before which each op must run."""
    until = dict.fromkeys(place, end)
    for op, at in place.items():
        for before in waits[op]:
            until[before] = min(until[before], at)
    return until


def _with_last(
    place: Mapping[int, float], readers: Mapping[int, Sequence[int]], late: Iterable[int]
) -> list[int]:
    """The ops in the order of their places, but some as late as their readers allow."""
    moved = dict(place)
    for op in sorted(late, key=place.__getitem__, reverse=True):
        moved[op] = min((moved[after] for after in readers[op]), default=len(place)) - 0.5
    return sorted(moved, key=moved.__getitem__)


def _held(problem: Problem, order: Sequence[int]) -> int:
    """The peak of a backward pass in which every activation is alive from its first read on.

    That is the case when each activation is recomputed when it is first needed.
    """
    runs = np.asarray(order, dtype=np.int64)
    count = len(runs)
    read_at, read_edge = problem.reads.of(runs)
    made_at, made_edge = problem.makes.of(runs)
    tensors = np.concatenate([problem.reads.tensor[read_edge], problem.makes.tensor[made_edge]])
    entries = np.concatenate([read_at, made_at])
    begins = np.full(len(problem.tensors), count)
    ends = np.full(len(problem.tensors), -1)
    np.minimum.at(begins, tensors, entries)
    np.maximum.at(ends, tensors, entries)
    used = np.flatnonzero(ends >= 0)
    ends = np.where(problem.is_result, count - 1, ends)
    live = alive(begins[used], ends[used], problem.sizes[used], count)
    lent = np.zeros(count, dtype=np.int64)
    read = problem.reads.tensor[read_edge]
    over = problem.reads.fits[read_edge] & (ends[read] == read_at) & ~problem.is_result[read]
    np.maximum.at(lent, read_at[over], problem.sizes[read[over]])
    return int((live + problem.workspaces[runs] - lent).max(initial=0))
