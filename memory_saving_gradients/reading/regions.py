"""Regions: ops around a large tensor of a step that can run on slices of their rows.

Such a tensor is the logits of a language model. What enters a region by rows is sliced, what leaves
it is small: results by row, and sums over all rows, such as the gradients of weights.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import tensorflow as tf

from memory_saving_gradients.graph.rows import SUM, Rows, RowShapes, Signature
from memory_saving_gradients.planning.problem import Problem
from memory_saving_gradients.reading.read import Reading


@dataclasses.dataclass(frozen=True)
class Size:
    """Where a size is known from.

    Attributes:
        tensor: a tensor that has it, if there is one.
        axis: the axis of the tensor.
        value: without a tensor, the size; if negative, the rows of the region divided by it.
    """

    tensor: tf.Tensor | None
    axis: int
    value: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """Ops that can run in pieces.

    Attributes:
        largest: its largest tensor.
        shapes: the shapes of its tensors, with the number of rows.
        signatures: its ops, each after those that it reads, with how they work on rows.
        rows: by name, the rows of each tensor of the region.
        inputs: the tensors made outside that are sliced.
        outputs: the tensors by row that ops outside read.
        sums: the sums over rows that ops outside read, or that are results of the step.
        sizes: the ops that read only the shape of a tensor that needs the region.
        constants: the constants outside that wait for an op of the region by a control edge.
        backward: those of its ops that differentiation made.
        sources: those of its inputs whose shapes may be read instead of the region's.
        at_once: whether forward and backward ops run together, piece by piece: the gradients that
            enter the region do not depend on its outputs. Else they run in turns, and the backward
            pieces run the forward ops again.
    """

    largest: tf.Tensor
    shapes: RowShapes
    signatures: dict[tf.Operation, Signature]
    rows: dict[str, Rows]
    inputs: tuple[tf.Tensor, ...]
    outputs: tuple[tf.Tensor, ...]
    sums: tuple[tf.Tensor, ...]
    sizes: tuple[tf.Operation, ...]
    constants: tuple[tf.Operation, ...]
    backward: frozenset[tf.Operation]
    sources: tuple[tf.Tensor, ...]
    at_once: bool

    @property
    def name(self) -> str:
        return self.largest.op.name

    @functools.cached_property
    def bytes(self) -> int:
        """The bytes of its largest tensor."""
        return self.shapes.shapes[0].bytes(self.largest)

    def size(self, sizes: Sequence[int]) -> Size | None:
        """Where a size can be read that has these values, one for each batch size."""
        if len({*sizes}) == 1:
            return Size(None, 0, sizes[0])
        for tensor in self.sources:
            for axis, there in enumerate(self.shapes.dims(tensor)):
                if there == tuple(sizes):
                    return Size(tensor, axis)
        parts = {divmod(n, size) for n, size in zip(self.shapes.rows, sizes, strict=True) if size}
        factor, rest = parts.pop() if len(parts) == 1 else (0, 1)
        return None if rest else Size(None, 0, -factor)

    @property
    def count(self) -> int:
        """The number of rows; for an assumed batch, if the graph leaves it unknown."""
        return self.shapes.rows[0]


def with_pieces(reading: Reading, counts: Mapping[Region, int]) -> Problem:
    """The problem of a step as if regions ran in pieces: their tensors are those of one piece.

    While the pieces run, the sums over rows are there, and the parts that a piece adds to them.
    """
    problem = reading.problem
    sizes = [t.bytes for t in problem.tensors]
    beside: dict[str, int] = {}
    for region, count in counts.items():
        sums = 0
        left = {t.name for t in region.outputs}
        for op, signature in region.signatures.items():
            for tensor, n in zip(op.outputs, signature.outputs, strict=True):
                number = reading.tensor_of.get(tensor.name)
                if number is None or tensor.name in left:
                    continue
                if n == SUM:
                    sums += sizes[number]
                elif problem.tensors[number].name == tensor.name:
                    sizes[number] //= count
        of_pieces = region.signatures if region.at_once else region.backward
        beside |= {op.name: sums for op in of_pieces}
    tensors = zip(problem.tensors, sizes, strict=True)
    return dataclasses.replace(
        problem,
        tensors=tuple(dataclasses.replace(t, bytes=size) for t, size in tensors),
        ops=tuple(
            dataclasses.replace(op, workspace=op.workspace + beside.get(op.name, 0))
            for op in problem.ops
        ),
    )
