"""A training step as data, and schedules of it. No TensorFlow in here."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import operator
from collections.abc import Container, Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """One op of a step; tensors are named by their index in `Problem.tensors`.

    Attributes:
        name: the op's name in its graph.
        inputs: the tensors it reads, each once.
        outputs: the tensors it makes.
        cost: estimated seconds of one run.
        reused: the share of the cost that a second run saves, as it reads what the first run has
            computed on the way (the statistics of a normalisation).
        workspace: bytes of scratch space while it runs, on top of inputs and outputs.
        backward: True for an op of the backward pass, which nothing may recompute.
        pinned: True for an op that must not run twice (random, stateful, side effects).
        postponed: True for a backward op that could run earlier, but makes more bytes than it
            frees.
        in_place: True where the kernel can write an output into the buffer of an input of equal
            size that nothing reads later.
        in_place_rewritten: True where it can do so only once the step is rewritten.
        overwritable: False where no op can write over the outputs.
        freed_first: inputs that it no longer needs when it allocates its outputs.
        expensive: True where the output is worth keeping (matrix products and the like).
        again: True for a loop whose gradient recomputes its rounds, so that a second run of the
            loop is the third of its rounds.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cost: float = 1.0
    _: dataclasses.KW_ONLY
    reused: float = 0.0
    workspace: int = 0
    backward: bool = False
    pinned: bool = False
    postponed: bool = False
    in_place: bool = False
    in_place_rewritten: bool = False
    overwritable: bool = True
    freed_first: tuple[int, ...] = ()
    expensive: bool = False
    again: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """A buffer of the step.

    Attributes:
        name: its name.
        bytes: its bytes.
        apart: the bytes of a result that lies in memory of the caller, and so has no `bytes`.
    """

    name: str
    bytes: int
    apart: int = 0


@dataclasses.dataclass(frozen=True)
class Edges:
    """Which tensors each op reads (or makes), as flat arrays.

    Attributes:
        start: the edges of op i are those from `start[i]` up to `start[i + 1]`.
        tensor: the tensor of each edge.
        fits: True where the op can write an output over this input.
    """

    start: np.ndarray
    tensor: np.ndarray
    fits: np.ndarray

    def of(self, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The edges of a sequence of ops: for each its position in `runs`, and the edge."""
        count = self.start[runs + 1] - self.start[runs]
        position = np.repeat(np.arange(len(runs)), count)
        skipped = np.repeat(count.cumsum() - count, count)
        return position, np.arange(len(position)) - skipped + self.start[runs][position]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A training step: ops in an order in which they can run, forward before backward.

    Views (reshape, identity) and tensors too small to matter are left out: a view stands for the
    tensor that it shows, and a tensor that is left out is always available.

    Attributes:
        ops: forward ops, then backward ops; every input is made by an earlier op, or is there
            from the start.
        tensors: every tensor that an op reads or makes.
        results: tensors that live to the end of the step (the gradients).
        as_executed: the events of the step without recomputation, in the order of time: i where
            op i begins, ~i where it ends. By default the ops run one by one.
        waits: for each op the ops that it waits for, directly or through ops that are left out
            here; None where the order of the ops is fixed.
        barriers: whether backward ops of the rewritten step read what the forward pass makes
            through barriers: nothing is written over what lies behind one.
        packed: whether each tensor has one place in a block of memory for the whole step, so that
            gaps between tensors count: see `planning.packing`.
    """

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    results: frozenset[int] = frozenset()
    as_executed: tuple[int, ...] = ()
    waits: tuple[tuple[int, ...], ...] | None = None
    barriers: bool = False
    packed: bool = False

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal for two problems with the same ops and tensors; ignores order and costs."""
        facts = sorted((op.name, op.inputs, op.outputs, op.backward) for op in self.ops)
        buffers = [(tensor.name, tensor.bytes) for tensor in self.tensors]
        return hashlib.sha256(repr((facts, buffers, sorted(self.results))).encode()).hexdigest()

    @functools.cached_property
    def structure(self) -> str:
        """Equal for two problems that differ only in names."""
        ops = [_all_but_the_name(op) for op in self.ops]
        sizes = [(tensor.bytes, tensor.apart) for tensor in self.tensors]
        kept = sorted(self.results)
        facts = ops, sizes, kept, self.as_executed, self.waits, self.barriers, self.packed
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    @functools.cached_property
    def forward_count(self) -> int:
        """The number of forward ops, which come first."""
        return sum(not op.backward for op in self.ops)

    @functools.cached_property
    def made_by(self) -> list[int]:
        """The op that makes each tensor, -1 for a tensor that is there from the start."""
        made_by = [-1] * len(self.tensors)
        for index, op in enumerate(self.ops):
            for tensor in op.outputs:
                made_by[tensor] = index
        return made_by

    @functools.cached_property
    def makers(self) -> np.ndarray:
        """`made_by` as an array."""
        return np.array(self.made_by, dtype=np.int64)

    @functools.cached_property
    def may_repeat(self) -> np.ndarray:
        """Whether each op may run more than once."""
        return np.array([not op.pinned and not op.backward for op in self.ops], dtype=bool)

    @functools.cached_property
    def runs_within(self) -> np.ndarray:
        """How often other ops run each op again."""
        return np.array([op.again for op in self.ops], dtype=np.int64)

    @functools.cached_property
    def forward_spans(self) -> tuple[np.ndarray, np.ndarray]:
        """The forward op that makes each tensor and the last forward op that reads it, or -1."""
        made = np.full(len(self.tensors), -1)
        last_read = np.full(len(self.tensors), -1)
        for index, op in enumerate(self.ops[: self.forward_count]):
            made[list(op.outputs)] = index
            last_read[list(op.inputs)] = index
        return made, last_read

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """The bytes of each tensor."""
        return np.array([tensor.bytes for tensor in self.tensors], dtype=np.int64)

    @functools.cached_property
    def is_result(self) -> np.ndarray:
        """Whether each tensor lives to the end."""
        is_result = np.zeros(len(self.tensors), dtype=bool)
        is_result[list(self.results)] = True
        return is_result

    @functools.cached_property
    def costs(self) -> np.ndarray:
        """The seconds of the first run of each op."""
        return np.array([op.cost for op in self.ops], dtype=np.float64)

    @functools.cached_property
    def costs_again(self) -> np.ndarray:
        """The seconds of every later run of each op."""
        return self.costs * (1.0 - np.array([op.reused for op in self.ops], dtype=np.float64))

    def seconds_of(self, schedule: Schedule) -> np.ndarray:
        """The seconds of each entry of a schedule."""
        runs = np.asarray(schedule, dtype=np.int64)
        seconds = self.costs_again[runs]
        ops, first = np.unique(runs, return_index=True)
        seconds[first] = self.costs[ops]
        return seconds

    @functools.cached_property
    def workspaces(self) -> np.ndarray:
        """The workspace of each op, in bytes."""
        return np.array([op.workspace for op in self.ops], dtype=np.int64)

    @functools.cached_property
    def reads(self) -> Edges:
        """The tensors that each op reads and that an op of the step makes."""
        here, size = self.made_here, self.sizes.tolist()
        rows = [[t for t in op.inputs if t in here] for op in self.ops]
        fits = [
            any(size[made] == size[t] for made in op.outputs)
            and (t in op.freed_first or self._overwrites(op, t))
            for op, row in zip(self.ops, rows, strict=True)
            for t in row
        ]
        return _edges(rows, fits)

    def _overwrites(self, op: Op, tensor: int) -> bool:
        """Whether the rewritten op can write over an input, once nothing else reads that."""
        maker = self.ops[self.made_by[tensor]]
        behind_barrier = self.barriers and op.backward and not maker.backward
        direct = op.in_place_rewritten or not behind_barrier
        return op.in_place and direct and maker.overwritable

    @functools.cached_property
    def makes(self) -> Edges:
        """The tensors that each op makes."""
        rows = [op.outputs for op in self.ops]
        return _edges(rows, [False] * sum(map(len, rows)))

    @functools.cached_property
    def first_wanted(self) -> np.ndarray:
        """The first backward op that reads each tensor; `len(ops)` where none does."""
        first = np.full(len(self.tensors), len(self.ops))
        for index in range(len(self.ops) - 1, self.forward_count - 1, -1):
            first[list(self.ops[index].inputs)] = index
        return first

    @functools.cached_property
    def forward_readers(self) -> list[list[int]]:
        """The forward ops that read each tensor."""
        readers: list[list[int]] = [[] for _ in self.tensors]
        for index, op in enumerate(self.ops[: self.forward_count]):
            for tensor in op.inputs:
                readers[tensor].append(index)
        return readers

    @functools.cached_property
    def made_here(self) -> frozenset[int]:
        """The tensors that an op of the step makes."""
        return frozenset(tensor for op in self.ops for tensor in op.outputs)

    def reordered(self, order: Sequence[int], postponed: Container[int] | None = None) -> Problem:
        """The same step with its ops in another valid order.

        Args:
            order: the ops, by index.
            postponed: the ops that come later than they could, by index; by default unchanged.
        """
        if postponed is None and list(order) == list(range(len(self.ops))):
            return self
        place = {op: i for i, op in enumerate(order)}
        events = (place[e] if e >= 0 else ~place[~e] for e in self.as_executed)
        ops = [self.ops[i] for i in order]
        if postponed is not None:
            ops = [
                dataclasses.replace(op, postponed=i in postponed)
                for op, i in zip(ops, order, strict=True)
            ]
        waits = self.waits and tuple(tuple(place[w] for w in self.waits[i]) for i in order)
        return dataclasses.replace(self, ops=tuple(ops), as_executed=tuple(events), waits=waits)

    def order_of(self, schedule: Schedule) -> list[int]:
        """All ops in the order in which a schedule runs them for the first time.

        If the schedule orders the forward pass differently than the problem, forward ops that first
        run in its backward pass come last in the forward pass.
        """
        order = list(dict.fromkeys(np.asarray(schedule).tolist()))
        first = next((i for i, op in enumerate(order) if self.ops[op].backward), len(order))
        forward = order[:first]
        if forward == sorted(forward):
            forward = list(range(self.forward_count))
        else:
            forward += sorted(set(range(self.forward_count)).difference(forward))
        return [*forward, *(op for op in order[first:] if self.ops[op].backward)]

    def in_order_of(self, schedule: Schedule) -> tuple[Problem, np.ndarray, np.ndarray]:
        """The problem in the `order_of` a schedule, the schedule re-indexed, and that order."""
        order = np.array(self.order_of(schedule), dtype=np.int64)
        moved = np.argsort(order)[np.asarray(schedule, dtype=np.int64)]
        return self.reordered(order.tolist()), moved, order

    def grown(self, growth: Mapping[str, float], more: float) -> Problem:
        """The step for a larger batch (a smaller one, if `more` is negative), at the same costs.

        Args:
            growth: the bytes per example of tensors, and of the scratch space of ops, by name.
            more: how many examples to add.
        """

        def larger(name: str, bytes_: int) -> int:
            return max(0, round(bytes_ + more * growth.get(name, 0.0)))

        tensors = tuple(dataclasses.replace(t, bytes=larger(t.name, t.bytes)) for t in self.tensors)
        ops = tuple(
            dataclasses.replace(op, workspace=larger(op.name, op.workspace)) for op in self.ops
        )
        return dataclasses.replace(self, tensors=tensors, ops=ops)

    def toward(self, other: Problem, share: float) -> Problem:
        """The step at another batch, with bytes and costs on the line through two batches.

        Args:
            other: the same step at another batch.
            share: how far to go: 0 is the batch of this one, 1 that of the other.
        """
        size = {tensor.name: tensor.bytes for tensor in other.tensors}
        there = {op.name: op for op in other.ops}
        growth = {t.name: size.get(t.name, t.bytes) - t.bytes for t in self.tensors}
        growth |= {op.name: there.get(op.name, op).workspace - op.workspace for op in self.ops}
        costs = (op.cost + share * (there.get(op.name, op).cost - op.cost) for op in self.ops)
        grown = self.grown(growth, share)
        pairs = zip(grown.ops, costs, strict=True)
        ops = tuple(dataclasses.replace(op, cost=max(0.0, cost)) for op, cost in pairs)
        return dataclasses.replace(grown, ops=ops)


_all_but_the_name = operator.attrgetter(
    *(field.name for field in dataclasses.fields(Op) if field.name != "name")
)


def _edges(rows: Sequence[Sequence[int]], fits: Sequence[bool]) -> Edges:
    start = np.cumsum([0, *map(len, rows)])
    tensor = np.array([t for row in rows for t in row], dtype=np.int64)
    return Edges(start, tensor, np.array(fits, dtype=bool))


#: Indices into `Problem.ops` in execution order, with repeats. An op always reads the newest copy
#: of each input.
Schedule = Sequence[int] | np.ndarray


def baseline(problem: Problem) -> Schedule:
    """The schedule without recomputation: every op once, in the order in which they begin."""
    return [i for i in problem.as_executed if i >= 0] or range(len(problem.ops))


def copied(problem: Problem, schedule: Schedule) -> tuple[int, list[bool]]:
    """The first entry of the backward pass, and for each entry whether it runs a copy of its op.

    A forward op that runs for the first time in the backward pass is copied too: the original
    stays where it is, as ops that are not in the problem may wait for it. (If none does and the
    loss needs the op, the rewriter has the original run there.)
    """
    ran: set[int] = set()
    first, is_copy = len(schedule), []
    for place, index in enumerate(schedule):
        again = index in ran
        ran.add(index)
        if again or problem.ops[index].backward:
            first = min(first, place)
        is_copy.append(again or (place > first and not problem.ops[index].backward))
    return first, is_copy
