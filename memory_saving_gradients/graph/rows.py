"""Which ops work row by row: the same op on a slice of the rows gives a slice of the result.

The *rows* of a tensor are its leading dimensions, flattened: of logits of shape (batch, tokens,
words), `batch * tokens` rows of `words` elements, its *features*. In a piece, a tensor whose n
leading dimensions are rows has the shape (1, ..., 1, rows of the piece, *features): it keeps its
rank, so that broadcasting and axes mean the same as before.

An op is described by its *signature*: how many leading dimensions of each input and output are
rows. Ops without a signature, or with one that contradicts what is known of their tensors, need all
rows at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from memory_saving_gradients.graph import kinds
from memory_saving_gradients.graph.shapes import Shapes

#: The rows of a tensor: its number of leading dimensions that are rows; WHOLE for a tensor that is
#: the same for all rows; SUM for a sum over all rows; PARTIAL for products summed over the last
#: dimension of rows, where a sum over the other dimensions of rows follows.
Rows: TypeAlias = int
WHOLE, SUM, PARTIAL = 0, -1, -2

#: The values of an input in a piece; None stands for the number of rows of the piece.
Remade: TypeAlias = list[int | None]


@dataclasses.dataclass(frozen=True)
class Signature:
    """How an op works on rows.

    Attributes:
        inputs: the rows of each input.
        outputs: the rows of each output.
        remade: by index, inputs that hold sizes or axes, with their values in a piece.
        reshapes: whether the op only changes the shape of its first input, to that in `remade`.
    """

    inputs: tuple[Rows, ...]
    outputs: tuple[Rows, ...]
    remade: Mapping[int, Remade] = dataclasses.field(default_factory=dict)
    reshapes: bool = False


class RowShapes:
    """The shapes of a step's tensors, seen as rows.

    Args:
        shapes: the shapes for one batch size, or for two if the graph leaves it unknown.
        rows: the number of rows for each of them.
    """

    def __init__(self, shapes: Sequence[Shapes], rows: Sequence[int]) -> None:
        self.shapes = shapes
        self.rows = rows

    def dims(self, tensor: tf.Tensor) -> list[tuple[int, ...]]:
        """The sizes of each dimension, for each batch size."""
        return [*zip(*(shapes(tensor) for shapes in self.shapes), strict=True)]

    def count(self, dims: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The number of elements, for each batch size."""
        return tuple(math.prod(sizes) for sizes in zip(*dims, strict=True)) or self.ones

    @property
    def ones(self) -> tuple[int, ...]:
        return (1,) * len(self.shapes)

    def possible(self, tensor: tf.Tensor) -> Iterator[Rows]:
        """The numbers of leading dimensions that may be the rows, the smallest first."""
        dims = self.dims(tensor)
        for n in range(1, len(dims) + 1):
            if self.count(dims[:n]) == tuple(self.rows) and self.features(tensor, n) is not None:
                yield n

    def features(self, tensor: tf.Tensor, rows: Rows) -> list[int] | None:
        """The sizes behind the rows; None if they depend on the batch."""
        dims = self.dims(tensor)[rows:]
        return [sizes[0] for sizes in dims] if all(len({*s}) == 1 for s in dims) else None

    def piece(self, tensor: tf.Tensor, rows: Rows) -> Remade:
        """The shape of a tensor in a piece."""
        return [1] * (rows - 1) + [None] + [*(self.features(tensor, rows) or [])]

    def constant(self, tensor: tf.Tensor) -> Any:
        """The value of a tensor that holds sizes or axes; None if it depends on the batch."""
        values = [shapes.constant(tensor) for shapes in self.shapes]
        equal = all(v is not None and np.array_equal(v, values[0]) for v in values)
        return np.asarray(values[0]) if equal else None

    def aligned(self, tensor: tf.Tensor, like: tf.Tensor, rows: Rows) -> Rows | None:
        """The rows of an operand that is broadcast to `like`; None if it varies otherwise."""
        dims, target = self.dims(tensor), self.dims(like)
        missing = len(target) - len(dims)
        if missing < 0:
            return None
        own = max(rows - missing, 0)
        if self.count(dims[:own]) == self.ones:
            return WHOLE
        full = dims[:own] == target[missing:rows] and self.count(target[:missing]) == self.ones
        return own if full else None


#: Yields the signatures that an op may have.
Rule: TypeAlias = Callable[[tf.Operation, RowShapes], Iterator[Signature]]


def signatures(op: tf.Operation, shapes: RowShapes) -> Iterator[Signature]:
    """The signatures that an op may have, the likeliest first; none if it needs all rows."""
    return _RULES[op.type](op, shapes) if op.type in _RULES else iter(())


def _element_wise(op: tf.Operation, shapes: RowShapes) -> Iterator[Signature]:
    if len(op.inputs) == 1 and shapes.dims(op.inputs[0]) != shapes.dims(op.outputs[0]):
        return  # a `Bitcast` to a type of another size
    for n in shapes.possible(op.outputs[0]):
        rows = [shapes.aligned(t, op.outputs[0], n) for t in op.inputs]
        if None not in rows:
            yield Signature(tuple(r or WHOLE for r in rows), (n,) * len(op.outputs))


def _same_place(op: tf.Operation, shapes: RowShapes) -> Iterator[Signature]:
    """Each output has the rows of the input at its place."""
    found = [next(shapes.possible(t), None) for t in op.inputs]
    if None not in found:
        rows = tuple(n or WHOLE for n in found)
        yield Signature(rows, rows)


def _along_last(op: tf.Operation, shapes: RowShapes) -> Iterator[Signature]:
    rank = len(shapes.dims(op.inputs[0]))
    for found in _element_wise(op, shapes):
        if found.outputs[0] < rank:
            yield found


def _cross_entropy(op: tf.Operation, shapes: RowShapes) -> Iterator[Signature]:
    labels = op.inputs[1]
    if 1 in shapes.possible(op.inputs[0]) and 1 in shapes.possible(labels):
        yield Signature((1, 1), (1, 1))


def _product(op: tf.Operation, shapes: RowShapes) -> Iterator[Signature]:
    first, second = (op.get_attr(f"transpose_{name}") for name in "ab")
    rows = [1 in shapes.possible(t) for t in op.inputs]
    if rows[0] and not first:
        yield Signature((1, WHOLE), (1,))
    if rows[0] and rows[1] and first and not second:
        yield Signature((1, 1), (SUM,))


def _batch_product(op: tf.Operation, shapes: RowShapes) -> Iterator[Signature]:
    x, y = op.inputs
    (product,) = op.outputs
    rank = len(shapes.dims(product))
    for n in shapes.possible(product):
        if n <= rank - 2:
            rows = [_of_batch(shapes, t, product, n) for t in (x, y)]
            if None not in rows:
                yield Signature((rows[0] or WHOLE, rows[1] or WHOLE), (n,))
        elif n == rank - 1 and not op.get_attr("adj_x"):
            other = shapes.dims(y)
            if shapes.count(other[:-2]) == shapes.ones and n in shapes.possible(x):
                yield Signature((n, WHOLE), (n,))
    if op.get_attr("adj_x") and not op.get_attr("adj_y"):
        n = rank - 1
        if all(n in shapes.possible(t) and len(shapes.dims(t)) == rank for t in (x, y)):
            yield Signature((n, n), (PARTIAL if n > 1 else SUM,))


def _of_batch(shapes: RowShapes, tensor: tf.Tensor, like: tf.Tensor, rows: Rows) -> Rows | None:
    """The rows of an operand of a batch product whose dimensions of rows are all of the batch."""
    dims, target = shapes.dims(tensor)[:-2], shapes.dims(like)[:-2]
    missing = len(target) - len(dims)
    own = max(rows - missing, 0)
    if shapes.count(dims[:own]) == shapes.ones:
        return WHOLE
    full = dims[:own] == target[missing:rows] and shapes.count(target[:missing]) == shapes.ones
    return own if full else None


def _einsum(op: tf.Operation, shapes: RowShapes) -> Iterator[Signature]:
    equation = op.get_attr("equation").decode()
    before, _, after = equation.partition("->")
    labels = before.split(",")
    if "." in equation or any(len({*one}) < len(one) for one in [*labels, after]):
        return
    for tensor, own in zip([*op.outputs, *op.inputs], [after, *labels], strict=True):
        for n in shapes.possible(tensor):
            lead = own[:n]
            rows = [_led(one, lead) for one in labels]
            if None not in rows:
                made = SUM if {*lead}.isdisjoint(after) else _led(after, lead)
                if made:
                    yield Signature(tuple(r or WHOLE for r in rows), (made,))


def _led(labels: str, lead: str) -> Rows | None:
    """The rows of an operand, given the labels of the dimensions of rows."""
    if {*lead}.isdisjoint(labels):
        return WHOLE
    return len(lead) if labels.startswith(lead) else None


def _reduction(op: tf.Operation, shapes: RowShapes) -> Iterator[Signature]:
    axes = shapes.constant(op.inputs[1])
    if axes is None:
        return
    tensor = op.inputs[0]
    rank = len(shapes.dims(tensor))
    reduced = {int(axis) % max(rank, 1) for axis in axes.reshape(-1)}
    same: dict[int, Remade] = {1: axes.reshape(-1).tolist()} if axes.ndim else {}
    for n in shapes.possible(tensor):
        if all(axis >= n for axis in reduced):
            yield Signature((n, WHOLE), (n,), same)
        elif op.type == "Sum" and reduced.issuperset(range(n)):
            yield Signature((n, WHOLE), (SUM,), same)
    if op.type == "Sum" and reduced == {*range(rank - 2)}:
        yield Signature((PARTIAL, WHOLE), (SUM,), same)


def _of_bias(op: tf.Operation, shapes: RowShapes) -> Iterator[Signature]:
    if op.get_attr("data_format") == b"NHWC":
        for n in shapes.possible(op.inputs[0]):
            if n < len(shapes.dims(op.inputs[0])):
                yield Signature((n,), (SUM,))


def _bias(op: tf.Operation, shapes: RowShapes) -> Iterator[Signature]:
    if op.get_attr("data_format") == b"NHWC":
        for n in shapes.possible(op.outputs[0]):
            if n < len(shapes.dims(op.outputs[0])):
                yield Signature((n, WHOLE), (n,))


def _reshape(op: tf.Operation, shapes: RowShapes) -> Iterator[Signature]:
    others = (WHOLE,) * (len(op.inputs) - 1)
    for n in shapes.possible(op.inputs[0]):
        for m in shapes.possible(op.outputs[0]):
            shape = shapes.piece(op.outputs[0], m)
            yield Signature((n, *others), (m,), {1: shape}, reshapes=True)


def _to_shape(op: tf.Operation, shapes: RowShapes) -> Iterator[Signature]:
    """`BroadcastTo` and `Fill`."""
    value, sizes = (0, 1) if op.type == "BroadcastTo" else (1, 0)
    for n in shapes.possible(op.outputs[0]):
        rows = shapes.aligned(op.inputs[value], op.outputs[0], n)
        if rows is not None:
            inputs = [WHOLE, WHOLE]
            inputs[value] = rows
            yield Signature(tuple(inputs), (n,), {sizes: shapes.piece(op.outputs[0], n)})


def _tile(op: tf.Operation, shapes: RowShapes) -> Iterator[Signature]:
    before, after = shapes.dims(op.inputs[0]), shapes.dims(op.outputs[0])
    for n in shapes.possible(op.outputs[0]):
        times = [a[0] // max(b[0], 1) for a, b in zip(after[n:], before[n:], strict=True)]
        if before[:n] == after[:n]:
            yield Signature((n, WHOLE), (n,), {1: [*[1] * n, *times]})
        elif shapes.count(before[:n]) == shapes.ones:
            yield Signature((WHOLE, WHOLE), (n,), {1: [*[1] * (n - 1), None, *times]})


def _transpose(op: tf.Operation, shapes: RowShapes) -> Iterator[Signature]:
    order = shapes.constant(op.inputs[1])
    for n in shapes.possible(op.inputs[0]) if order is not None else ():
        if order[:n].tolist() == [*range(n)]:
            yield Signature((n, WHOLE), (n,))


def _gather(op: tf.Operation, shapes: RowShapes) -> Iterator[Signature]:
    table, indices = op.inputs[:2]
    axis = shapes.constant(op.inputs[2])
    together = op.get_attr("batch_dims")
    if axis is None:
        return
    if together == 0 and int(axis) == 0:
        for n in shapes.possible(indices):
            yield Signature((WHOLE, n, WHOLE), (n,))
    for n in shapes.possible(table):
        if n <= together and n in shapes.possible(indices):
            yield Signature((n, n, WHOLE), (n,))


def _one_hot(op: tf.Operation, shapes: RowShapes) -> Iterator[Signature]:
    if op.get_attr("axis") == -1:
        for n in shapes.possible(op.inputs[0]):
            yield Signature((n, WHOLE, WHOLE, WHOLE), (n,))


def _strided(op: tf.Operation, shapes: RowShapes) -> Iterator[Signature]:
    """Slices of features; all rows are in them."""
    back = op.type == "StridedSliceGrad"
    given, made = (op.inputs[4], op.outputs[0]) if back else (op.inputs[0], op.outputs[0])
    masks = [op.get_attr(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis")]
    steps = shapes.constant(op.inputs[3])
    if steps is None or masks[2] or masks[3]:
        return
    for n in shapes.possible(given):
        all_of = 2**n - 1
        whole = masks[0] & all_of == all_of and masks[1] & all_of == all_of
        kept = not op.get_attr("shrink_axis_mask") & all_of
        if whole and kept and (steps[:n] == 1).all() and n in shapes.possible(made):
            if back:
                yield Signature((WHOLE, WHOLE, WHOLE, WHOLE, n), (n,), {0: shapes.piece(made, n)})
            else:
                yield Signature((n, WHOLE, WHOLE, WHOLE), (n,))


def _band(op: tf.Operation, shapes: RowShapes) -> Iterator[Signature]:
    for n in shapes.possible(op.outputs[0]):
        if n <= len(shapes.dims(op.outputs[0])) - 2:
            yield Signature((n, WHOLE, WHOLE), (n,))


def _joined(op: tf.Operation, shapes: RowShapes) -> Iterator[Signature]:
    """Concatenation along features."""
    axis = shapes.constant(op.inputs[-1])
    rank = len(shapes.dims(op.outputs[0]))
    for n in shapes.possible(op.outputs[0]) if axis is not None else ():
        if int(axis) % rank >= n:
            yield Signature((n,) * (len(op.inputs) - 1) + (WHOLE,), (n,))


_ELEMENT_WISE = (
    kinds.IN_PLACE
    | kinds.VIEWS
    | frozenset(
        """Acos Acosh Asin Asinh Atan Atan2 Atanh BitwiseAnd BitwiseOr BitwiseXor Cast Cosh Digamma
        Equal Erfinv FloorDiv FloorMod Greater GreaterEqual IsFinite IsInf IsNan Less LessEqual
        Lgamma LogicalAnd LogicalNot LogicalOr Mod NotEqual OnesLike Rint Sinh SoftsignGrad Xlog1py
        ZerosLike""".split()
    )
) - frozenset(
    """BiasAdd ExpandDims IdentityN LogSoftmax MatrixBandPart RefIdentity Reshape Softmax
    SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits Squeeze""".split()
)

_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENT_WISE, _element_wise),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _along_last),
    **dict.fromkeys(("Reshape", "ExpandDims", "Squeeze"), _reshape),
    **dict.fromkeys(("BatchMatMulV2", "BatchMatMulV3", "BatchMatMul"), _batch_product),
    **dict.fromkeys(
        "Sum Max Min Mean Prod All Any ArgMax ArgMin EuclideanNorm".split(), _reduction
    ),
    **dict.fromkeys(
        ("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits"), _cross_entropy
    ),
    **dict.fromkeys(("BroadcastTo", "Fill"), _to_shape),
    **dict.fromkeys(("StridedSlice", "StridedSliceGrad"), _strided),
    "BiasAdd": _bias,
    "BiasAddGrad": _of_bias,
    "ConcatV2": _joined,
    "Einsum": _einsum,
    "GatherV2": _gather,
    "IdentityN": _same_place,
    "MatMul": _product,
    "MatrixBandPart": _band,
    "OneHot": _one_hot,
    "Tile": _tile,
    "Transpose": _transpose,
}
