"""Finds regions: grows them from the largest tensors of a step.

A region takes in all ops that make or read a tensor as large as its largest, in the forward and in
the backward pass, as long as they work row by row, and the ops between them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

import tensorflow as tf

from memory_saving_gradients.graph import kinds, order, tf_private
from memory_saving_gradients.graph.rows import (
    PARTIAL,
    SUM,
    WHOLE,
    Rows,
    RowShapes,
    Signature,
    signatures,
)
from memory_saving_gradients.graph.shapes import InputSizes, Shapes
from memory_saving_gradients.reading.read import Reading
from memory_saving_gradients.reading.regions import Region

# A region takes in the ops that touch a tensor with at least this share of its largest's elements.
_LARGE = 0.5
# The most ops between those of a region that are taken in.
_MOST_BETWEEN = 100
# Ops that read only shapes of tensors.
_OF_SHAPES = kinds.SHAPE_ONLY - {"BroadcastGradientArgs"}  # which reads shapes
_WAIT_FOR_NOTHING = _OF_SHAPES | {"Const"}


class NeedsAllRows(Exception):
    """An op of a region cannot run on slices of the rows."""


def regions_of(
    reading: Reading, least_bytes: int, only: Container[str] | None = None
) -> tuple[list[Region], dict[str, str]]:
    """The regions of a step, those of the largest tensors first.

    Args:
        reading: the step.
        least_bytes: the bytes of the smallest tensor that is worth a region.
        only: the names of the regions that are wanted; None for all.

    Returns:
        The regions, and by name the reason why other large tensors stay whole.
    """
    search = _Search(reading)
    regions: list[Region] = []
    whole: dict[str, str] = {}
    taken: set[tf.Operation] = set()
    largest = sorted(reading.problem.tensors, key=lambda t: -t.bytes)
    for tensor in (t for t in largest if t.bytes >= least_bytes):
        seed = reading.step.graph.get_tensor_by_name(tensor.name)
        wanted = only is None or seed.op.name in only
        of_weights = (
            seed.op.type in kinds.SOURCES
            or seed.op in reading.step.after
            or reading.tensor_of[seed.name] in reading.roles.of_weights
        )
        if seed.op in taken or not seed.dtype.is_floating or of_weights or not wanted:
            continue
        try:
            region = search.region(seed, taken)
        except NeedsAllRows as why:
            whole[tensor.name] = str(why)
            continue
        regions.append(region)
        taken.update(region.signatures)
    return regions, whole


class _Search:
    """What the search for regions knows of a step."""

    def __init__(self, reading: Reading) -> None:
        self.step = reading.step
        self.ours = self.step.needed | self.step.beside | self.step.after
        operations = self.step.graph.get_operations()
        self.shapes = [Shapes(operations, reading.sizes)]
        if (other := _other_sizes(operations, self.shapes[0])) is not None:
            self.shapes.append(Shapes(operations, other))
        self.waiting: dict[tf.Operation, list[tf.Operation]] = {}
        for op in self.ours:
            for other in op.control_inputs:
                self.waiting.setdefault(other, []).append(op)
        self.created = {op: i for i, op in enumerate(operations)}
        names = tf_private.returned(self.step.graph) if self.step.traced else set()
        self.returned = {*names, *(t.name for t in self.step.to_end)}

    def after(self, op: tf.Operation) -> Iterator[tf.Operation]:
        """The ops that wait for `op`; what reads only shapes will read those of other tensors."""
        readers = (reader for t in op.outputs for reader in t.consumers())
        waiting = itertools.chain(readers, self.waiting.get(op, ()))
        return (other for other in waiting if other.type not in _WAIT_FOR_NOTHING)

    def before(self, op: tf.Operation) -> Iterator[tf.Operation]:
        """The ops that `op` waits for."""
        waits = () if op.type in _WAIT_FOR_NOTHING else order.waits_for(op)
        return (other for other in waits if other.type not in _WAIT_FOR_NOTHING)

    def region(self, seed: tf.Tensor, taken: set[tf.Operation]) -> Region:
        """The region around a tensor.

        Raises:
            NeedsAllRows: there is none.
        """
        sizes = [shapes(seed) for shapes in self.shapes]
        why = NeedsAllRows("it has no rows")
        for n in range(len(sizes[0]) - 1, 0, -1):  # as many rows as possible
            rows = [math.prod(each[:n]) for each in sizes]
            if min(rows) < 2:
                continue
            try:
                return _Growth(self, RowShapes(self.shapes, rows), seed, n, taken).region()
            except NeedsAllRows as refused:
                why = refused
        raise why


def _other_sizes(operations: Sequence[tf.Operation], shapes: Shapes) -> InputSizes | None:
    """Other sizes for the dimensions of inputs that the graph leaves unknown; None if it knows all.

    A size of the step that is the same for both is one that the graph determines.
    """
    others = []
    for op in operations:
        shape = op.outputs[0].shape if op.type == "Placeholder" else tf.TensorShape([])
        if shape.rank and not shape.is_fully_defined():
            likely = shapes(op.outputs[0])
            known = shape.as_list()
            factors = [1 if size else 5 if axis else 3 for axis, size in enumerate(known)]
            others.append((op.name, tuple(s * f for s, f in zip(likely, factors, strict=True))))
    if not others:
        return None
    return InputSizes(3 * (shapes.batch_size or 1), tuple(others), assumed=True)


class _Growth:
    """A region as it grows from its largest tensor."""

    def __init__(
        self,
        search: _Search,
        shapes: RowShapes,
        seed: tf.Tensor,
        rows: Rows,
        taken: set[tf.Operation],
    ) -> None:
        self.search, self.shapes, self.seed, self.taken = search, shapes, seed, taken
        self.rows: dict[str, Rows] = {seed.name: rows}
        self.signatures: dict[tf.Operation, Signature] = {}
        self.large = _LARGE * math.prod(shapes.shapes[0](seed))

    def region(self) -> Region:
        self._grow([self.seed])
        new = self.search.step.new
        self._fill(lambda op: op not in new)
        self._fill(lambda op: op in new)
        self._fill_all()
        self._check()
        step = self.search.step
        created = self.search.created
        ops = sorted(self.signatures, key=created.__getitem__)
        outputs, sums = self._leaving(ops)
        inputs = {t.name: t for op in ops for t in self._sliced(op)}
        later = _reached(ops, self.search.after)
        sizes = [*self._of_shapes({*ops, *later})]
        sources = [t for t in inputs.values() if t.op not in step.new]
        sources = [t for t in sources if order.needed([t.op]).keys().isdisjoint(sizes)]
        if not sources and len({*self.shapes.rows}) > 1:
            raise NeedsAllRows("no tensor that enters it tells the number of rows")
        region = Region(
            self.seed,
            self.shapes,
            {op: self.signatures[op] for op in ops},
            self.rows,
            tuple(inputs.values()),
            tuple(outputs),
            tuple(sums),
            tuple(sizes),
            tuple(self._constants(ops)),
            frozenset(op for op in ops if op in step.new),
            tuple(sources),
            self._at_once(ops, later.difference(ops)),
        )
        self._check_sizes(region)
        return region

    def _grow(self, waiting: list[tf.Tensor]) -> None:
        """Takes in all ops that make or read large tensors."""
        while waiting:
            tensor = waiting.pop()
            if tensor.name in self.search.returned:
                raise NeedsAllRows(f'the step returns "{tensor.name}"')
            for op in dict.fromkeys([tensor.op, *tensor.consumers()]):
                if op.type in _OF_SHAPES or not self._is_outside(op):
                    continue
                if not self._take_in(op, waiting) and op is not tensor.op and self._runs(op):
                    raise NeedsAllRows(f'"{op.name}" ({op.type}) reads all rows of it at once')

    def _runs(self, op: tf.Operation) -> bool:
        """Whether an op that reads a tensor of the region is executed with the step."""
        step = self.search.step
        return op in self.search.ours or (step.traced and op not in step.new)

    def _take_in(self, op: tf.Operation, waiting: list[tf.Tensor]) -> bool:
        """Adds an op to the region, if it works row by row."""
        if op in self.taken or tf_private.in_control_flow(op):
            return False
        for found in signatures(op, self.shapes):
            pairs = [*zip(op.inputs, found.inputs, strict=True)]
            pairs += zip(op.outputs, found.outputs, strict=True)
            by_row = [(t, n) for t, n in pairs if n not in (WHOLE, SUM)]
            known = [t for t, n in by_row if t.name in self.rows]
            agrees = all(self.rows.get(t.name, n) == n for t, n in pairs)
            if known and agrees:
                self.signatures[op] = found
                for tensor, n in [*by_row, *((t, n) for t, n in pairs if n == SUM)]:
                    if tensor.name not in self.rows:
                        self.rows[tensor.name] = n
                        if n == PARTIAL or (n > 0 and self._is_large(tensor)):
                            waiting.append(tensor)
                return True
        return False

    def _is_large(self, tensor: tf.Tensor) -> bool:
        return math.prod(self.shapes.shapes[0](tensor)) >= self.large

    def _fill(self, alike: Callable[[tf.Operation], bool]) -> None:
        """Takes in the ops between those of the region.

        Args:
            alike: which ops to look at: those of the forward pass, of the backward pass, or all.

        Raises:
            NeedsAllRows: one of these needs all rows.
        """
        search = self.search
        while True:
            own = [op for op in self.signatures if alike(op)]
            after = _reached(own, lambda op: filter(alike, search.after(op)))
            before = _reached(own, lambda op: filter(alike, search.before(op)))
            between = (after & before).difference(self.signatures)
            if not between:
                return
            ordered = sorted(between, key=search.created.__getitem__)
            waiting: list[tf.Tensor] = []
            if len(between) > _MOST_BETWEEN or not any(
                self._take_in(op, waiting) for op in ordered
            ):
                raise NeedsAllRows(
                    f'"{ordered[0].name}" ({ordered[0].type}) reads all rows at once'
                )
            self._grow(waiting)

    def _fill_all(self) -> None:
        """Takes in the ops between the forward and the backward ops of the region, if it can."""
        before = {**self.rows}, {**self.signatures}
        try:
            self._fill(lambda op: True)
        except NeedsAllRows:
            self.rows, self.signatures = before

    def _check(self) -> None:
        """Raises if the region does not make its largest tensor, or reads its own tensors whole."""
        if self.seed.op not in self.signatures:
            raise NeedsAllRows(
                f'"{self.seed.op.name}" ({self.seed.op.type}) makes all rows at once'
            )
        for op, signature in self.signatures.items():
            for tensor, n in zip(op.inputs, signature.inputs, strict=True):
                if n == WHOLE and tensor.op in self.signatures:
                    raise NeedsAllRows(
                        f'"{op.name}" ({op.type}) reads all rows of a tensor at once'
                    )

    def _sliced(self, op: tf.Operation) -> Iterator[tf.Tensor]:
        """The inputs of an op of the region that are made outside and sliced."""
        for tensor, n in zip(op.inputs, self.signatures[op].inputs, strict=True):
            if n != WHOLE and tensor.op not in self.signatures:
                yield tensor

    def _leaving(self, ops: Sequence[tf.Operation]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """What ops outside read: tensors by row, and sums."""
        outputs, sums = [], []
        for op in ops:
            for tensor, n in zip(op.outputs, self.signatures[op].outputs, strict=True):
                readers = filter(self._is_outside, tensor.consumers())
                read = any(r.type not in _OF_SHAPES for r in readers)
                if not read and tensor.name not in self.search.returned:
                    continue
                if n == SUM:
                    sums.append(tensor)
                elif n == PARTIAL:
                    raise NeedsAllRows(f'"{op.name}" ({op.type}) sums over some rows only')
                elif not self._is_large(tensor):  # else ops beside the step read the original
                    outputs.append(tensor)
        return outputs, sums

    def _of_shapes(self, later: Iterable[tf.Operation]) -> Iterator[tf.Operation]:
        """The ops that read the shapes of tensors that need the region."""
        readers = {reader for op in later for t in op.outputs for reader in t.consumers()}
        of_shapes = (op for op in readers if op.type in _OF_SHAPES)
        yield from sorted(of_shapes, key=self.search.created.__getitem__)

    def _check_sizes(self, region: Region) -> None:
        """Raises if a shape is needed that only tensors that need the region have."""
        before = order.needed(t.op for t in region.inputs)
        for op in region.sizes:
            if op not in before and not any(t.op in self.signatures for t in op.inputs):
                continue
            for tensor in op.inputs:
                if any(region.size(sizes) is None for sizes in self.shapes.dims(tensor)):
                    raise NeedsAllRows(f'"{op.name}" reads the shape of "{tensor.name}"')
        for tensor in region.outputs:
            if any(region.size(sizes) is None for sizes in self.shapes.dims(tensor)):
                raise NeedsAllRows(f'the shape of "{tensor.name}" is unknown')

    def _is_outside(self, op: tf.Operation) -> bool:
        """Whether an op is not in the region, and somebody may need it."""
        unused = op in self.search.step.new and op not in self.search.ours
        return op not in self.signatures and not unused

    def _constants(self, ops: Sequence[tf.Operation]) -> Iterator[tf.Operation]:
        """The constants that wait for an op of the region.

        Raises:
            NeedsAllRows: another op does.
        """
        waiting = {w: op for op in ops for w in self.search.waiting.get(op, ())}
        for waits, op in waiting.items():
            if waits.type == "Const":
                yield waits
            elif waits not in self.signatures and waits.type not in _OF_SHAPES:
                raise NeedsAllRows(f'"{waits.name}" ({waits.type}) waits for "{op.name}"')

    def _at_once(self, own: Sequence[tf.Operation], outside: Container[tf.Operation]) -> bool:
        """Whether no op of the region needs an op outside that needs the region.

        Raises:
            NeedsAllRows: a forward op does.
        """
        new = self.search.step.new
        late = [op for op in own if any(o in outside for o in self.search.before(op))]
        if any(op not in new for op in late):
            raise NeedsAllRows("a forward op reads what depends on the backward pass")
        return not late


def _reached(
    ops: Iterable[tf.Operation], after: Callable[[tf.Operation], Iterable[tf.Operation]]
) -> set[tf.Operation]:
    """What a walk from these ops reaches, without them unless it leads back to them."""
    reached: set[tf.Operation] = set()
    waiting = [*ops]
    while waiting:
        for other in after(waiting.pop()):
            if other not in reached:
                reached.add(other)
                waiting.append(other)
    return reached
