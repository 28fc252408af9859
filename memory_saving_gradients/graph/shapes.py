"""The shape of every tensor of a graph, as far as it can be known before a run."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients.graph import calls
from memory_saving_gradients.graph.inferred import (
    Inferred,
    Sizes,
    filled,
    merged,
    taken,
    tells_more,
    told,
)
from memory_saving_gradients.graph.tf_private import Refusal, constant

#: The sizes assumed for dimensions that the graph leaves unknown (mostly the batch): the first one
#: that the graph's reshapes can divide. They are large enough for activations to outweigh the
#: gradients of weights, as they do where memory is short.
NOMINAL_SIZES = (128, 840)


class WrongSize(Refusal, ValueError):
    """A given size contradicts the graph."""


@dataclasses.dataclass(frozen=True)
class InputSizes:
    """What is known of the shapes of a step's inputs, in addition to its graph.

    Attributes:
        batch: the first dimension of all inputs for which the graph leaves it unknown.
        shapes: whole shapes of inputs, by the name of the op.
        assumed: whether these sizes are assumed by us, not given by the user.
    """

    batch: int | None = None
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    assumed: bool = False

    def of(self, name: str, shape: Sizes | None) -> Sizes | None:
        """The shape of an input, whose shape in the graph is `shape`."""
        stated = dict(self.shapes).get(name)
        if stated is not None or not shape:
            return shape if stated is None else list(stated)
        return [self.batch if shape[0] is None else shape[0], *shape[1:]]

    def times(self, factor: int, batch: int) -> InputSizes:
        """The same for a batch `factor` times as large as `batch`, assumed."""
        shapes = tuple(
            (name, (factor * batch, *sizes[1:]) if sizes[:1] == (batch,) else sizes)
            for name, sizes in self.shapes
        )
        return InputSizes(factor * batch, shapes, assumed=True)

    def inside(self) -> InputSizes:
        """The sizes to assume in a function that the step calls, whose inputs may be anything."""
        return InputSizes(self.batch, assumed=True)


def bytes_of(shape: Sequence[int | None], dtype: Any) -> int:
    """The bytes of a tensor of a shape; an unknown size counts as one."""
    return math.prod(filled(shape, 1)) * tf.as_dtype(dtype).size


#: Nothing is known in addition to the graph.
NOTHING_GIVEN = InputSizes()


class Shapes:
    """The static shape of every tensor, with likely sizes where the graph leaves them unknown.

    Args:
        operations: the ops of the step, of one graph.
        given: what is known of its inputs.
        known: in a function, the shapes of its inputs by name, as far as the caller knows them.

    Attributes:
        given: the same.
        batch_size: the size used for the first dimension of inputs if the graph leaves it unknown;
            None if the graph knows all.
        caller: in a function, the op that calls it and the shapes of the graph of that; else None.

    Raises:
        WrongSize: a given size contradicts the graph.
    """

    def __init__(
        self,
        operations: Sequence[tf.Operation],
        given: InputSizes = InputSizes(),
        known: Mapping[str, Sizes] | None = None,
    ) -> None:
        self.given = given
        self.batch_size: int | None = None
        self.caller: tuple[tf.Operation, Shapes] | None = None
        self._inferred: Inferred | None = None
        self._nominal_size = NOMINAL_SIZES[0]
        self._known: dict[str, list[int]] = {}
        self._constants: dict[str, Any] = {}
        unknown = [
            t
            for op in operations
            for t in op.outputs
            if t.dtype.size and not t.shape.is_fully_defined()
        ]
        if any(_may_be_told(t) for t in unknown):
            self._infer([op for op in operations if _may_tell(op)], known or {})
        for op in operations:
            own = told(op.outputs[0]) if op.type == "Placeholder" else None
            if own and own[0] is None:
                self.batch_size = self(op.outputs[0])[0]
                break
        for tensor in unknown:  # in graph order, so that the recursion stays shallow
            self(tensor)

    def _infer(self, operations: Sequence[tf.Operation], known: Mapping[str, Sizes]) -> None:
        """Makes the copy of the graph on which the shapes of ops are inferred."""
        graph = operations[0].graph
        inputs = [op for op in graph.get_operations() if _is_input(op)]
        ranked = {op.name: told(op.outputs[0]) for op in inputs}
        own = {name: sizes for name, sizes in ranked.items() if sizes is not None}
        every = {name: self.given.of(name, sizes) for name, sizes in ranked.items()} | {**known}
        stated = {name: sizes for name, sizes in every.items() if sizes is not None}
        for guess, size in itertools.product((True, False), NOMINAL_SIZES):
            with contextlib.suppress(ValueError):  # it contradicts a shape that the graph demands
                self._inferred = Inferred(graph, _all_filled(stated, size), operations, guess)
                self._nominal_size = size
                return
        certain = own if self.given.assumed else stated
        try:
            self._inferred = Inferred(graph, certain, operations, guess=False)
        except ValueError as error:
            if self.given.assumed or not (self.given.batch or self.given.shapes):
                return
            given = self.given.batch or dict(self.given.shapes)
            raise WrongSize(f"batch_size={given} contradicts the graph: {error}") from None
        fitting = [_fitting(graph, certain, _all_filled(stated, size)) for size in NOMINAL_SIZES]
        most = max(fitting, key=_known_sizes)
        self._nominal_size = NOMINAL_SIZES[fitting.index(most)]
        self._inferred = Inferred(graph, most, operations, guess=False)

    def __call__(self, tensor: tf.Tensor) -> list[int]:
        """The shape of `tensor`; a tensor of unknown rank counts as a scalar."""
        name = tensor.name
        if name not in self._known:
            sizes = self._inferred_sizes(tensor)
            self._known[name] = filled(sizes, self._by_default)
            if None in sizes:  # if a loop leads back to this tensor, it finds the default
                self._known[name] = self._likely(tensor, sizes)
        return self._known[name]

    def _inferred_sizes(self, tensor: tf.Tensor) -> Sizes:
        """The shape of `tensor`, as far as TensorFlow infers it."""
        if self._inferred is not None and not tensor.shape.is_fully_defined():
            return self._inferred(tensor) or []
        return told(tensor) or []

    def _likely(self, tensor: tf.Tensor, sizes: Sizes) -> list[int]:
        """The likely shape of a tensor, guessed from the inputs of its op.

        Args:
            tensor: any tensor.
            sizes: its shape, as far as it is known.
        """
        op = tensor.op
        if op.type in _INPUTS:
            return filled(self.given.of(op.name, sizes) or [], self._nominal_size)
        read = [t for t in op.inputs if t.dtype.size]
        if op.type in _LIKE_INPUTS:
            read = [op.inputs[tensor.value_index]]
        if op.type in _BY_INDEX:  # the size is that of the indices, not of the table
            read = [op.inputs[1]]
        largest = max((self(t) for t in read), key=math.prod, default=[])
        if op.type in _SAME_ELEMENTS:
            return _spread(sizes, self(read[0]), math.prod(self(read[0])))
        alike = [t for t in read if len(self._inferred_sizes(t)) == len(sizes)]
        likely: list[int | None] = [*sizes]
        for axis in range(len(sizes)):
            if sizes[axis] is None:
                unknown = [t for t in alike if self._inferred_sizes(t)[axis] is None]
                # A sum over axes that only a run knows takes sizes from its operand, too.
                others = [t for t in alike if t.dtype == tensor.dtype and t.dtype.is_floating]
                likely[axis] = max((self(t)[axis] for t in unknown or others), default=None)
        if likely.count(None) > 1:  # two unknown sizes are rarely both as large as the batch
            known = math.prod(size or 1 for size in likely)
            return _spread(likely, largest, max(math.prod(largest), self._by_default * known))
        return filled(likely, self._by_default)

    @property
    def _by_default(self) -> int:
        """The default for an unknown size: mostly it is the batch."""
        return self.given.batch or self._nominal_size

    def within(
        self, op: tf.Operation, body: tf.Graph, operations: Sequence[tf.Operation]
    ) -> Shapes:
        """The shapes inside a function that an op calls.

        Args:
            op: the op, of this graph.
            body: the function.
            operations: the ops of the function to look at.
        """
        passed = [*op.inputs][-len(body.inputs) :]  # the first input of a branch is the condition
        known: dict[str, Sizes] = {}
        for inside, tensor in zip(body.inputs, passed, strict=True) if body.inputs else []:
            own = told(inside)
            if own is not None and None in own and len(self(tensor)) == len(own):
                known[inside.op.name] = merged(own, self(tensor)) or own
        shapes = Shapes(operations, self.given.inside(), known)
        shapes.caller = (op, self)
        return shapes

    def constant(self, tensor: tf.Tensor) -> Any:
        """The value of `tensor` if constants and sizes determine it, else None."""
        name = tensor.name
        if name not in self._constants:
            copy = self._inferred
            find = constant if copy is None or tensor not in copy else copy.constant
            self._constants[name] = find(tensor)
        return self._constants[name]

    def bodies(self, op: tf.Operation) -> list[tf.Graph]:
        """The functions that `op` may call; only the branch that is taken, if that is known."""
        functions = calls.bodies(op)
        return (
            taken(functions, self.constant(op.inputs[0]))
            if op.type in calls.BRANCHES
            else functions
        )

    def bytes(self, tensor: tf.Tensor) -> int:
        """The bytes of `tensor`'s buffer; 0 for handles and variants."""
        return math.prod(self(tensor)) * tensor.dtype.size


# The inputs of a graph.
_INPUTS = ("Placeholder", "ReadVariableOp")

# Ops whose output has the elements of the first input; ops whose first two inputs are a table and
# indices; ops whose outputs are each like the input at the same index (axes: at most that).
_SAME_ELEMENTS = frozenset(
    "Reshape Transpose ConjugateTranspose ExpandDims Squeeze SpaceToDepth DepthToSpace".split()
)
_BY_INDEX = frozenset({"Gather", "GatherV2", "GatherNd", "ResourceGather"})
_LIKE_INPUTS = frozenset(
    """BroadcastGradientArgs IdentityN While StatelessWhile SymbolicGradient
    XlaOptimizationBarrier""".split()
)


def _may_be_told(tensor: tf.Tensor) -> bool:
    """Whether more of an unknown shape may follow from sizes of inputs.

    It does not where the op reads only numbers of known shape: the reserve space of
    `FusedBatchNormV3` is the only unknown shape of many networks.
    """
    op = tensor.op
    return op.type != "BroadcastGradientArgs" and (
        not op.inputs
        or tells_more(op)
        or any(not (t.dtype.is_floating and t.shape.is_fully_defined()) for t in op.inputs)
    )


def _may_tell(op: tf.Operation) -> bool:
    """Whether an op has or reads an unknown shape, or makes a number that may follow from one.

    In a training step most ops are the optimizer's, which do not.
    """
    return any(
        t.dtype.size and not t.shape.is_fully_defined() for t in (*op.outputs, *op.inputs)
    ) or any(t.dtype.is_integer or t.dtype.is_bool for t in op.outputs)


def _is_input(op: tf.Operation) -> bool:
    return op.type in _INPUTS and op.outputs[0].dtype not in (tf.resource, tf.variant)


def _all_filled(shapes: Mapping[str, Sizes], size: int) -> dict[str, Sizes]:
    return {name: filled(sizes, size) for name, sizes in shapes.items()}


def _spread(sizes: Sizes, like: Sequence[int], elements: int) -> list[int]:
    """A shape with `elements` elements, or a few more.

    Unknown sizes are taken from the shape `like`, from the last axis on, where they divide the
    number of elements; the first unknown size then takes the rest.
    """
    left = max(elements // max(math.prod(size for size in sizes if size is not None), 1), 1)
    first = sizes.index(None)
    likely = filled(sizes, 1)
    for axis in range(len(sizes) - 1, first, -1):
        place = axis - len(sizes) + len(like)
        if sizes[axis] is None and place >= 0 and like[place] and left % like[place] == 0:
            likely[axis] = like[place]
            left //= like[place]
    known = math.prod(likely)
    likely[first] = -(-elements // max(known, 1))
    return likely


def _known_sizes(shapes: Mapping[str, Sizes]) -> int:
    return sum(size is not None for sizes in shapes.values() for size in sizes)


def _fitting(
    graph: tf.Graph, known: Mapping[str, Sizes], likely: Mapping[str, Sizes]
) -> dict[str, Sizes]:
    """The known shapes of inputs, plus as many likely sizes as do not contradict the graph.

    Args:
        graph: the graph.
        known: shapes that the graph accepts, partly unknown.
        likely: the same with all sizes.
    """
    fitting = {name: [*sizes] for name, sizes in known.items()}
    # First axes, mostly the batch, come first.
    wanted = sorted(
        (axis, name, likely[name][axis])
        for name, sizes in known.items()
        for axis, size in enumerate(sizes)
        if size is None
    )

    def add(some: Sequence[tuple[int, str, int | None]]) -> None:
        """Adds the sizes that fit: all at once, or else by halves."""
        for axis, name, size in some:
            fitting[name][axis] = size
        try:
            Inferred(graph, fitting, guess=False)
        except ValueError:
            for axis, name, _ in some:
                fitting[name][axis] = None
            if len(some) > 1:
                add(some[: len(some) // 2])
                add(some[len(some) // 2 :])

    add(wanted)
    return {**fitting}


def stand_in(name: str, dtype: tf.DType, sizes: Sequence[int]) -> tf.compat.v1.NodeDef:
    """A source of known shape. The estimator would allocate a value to feed a `Placeholder`."""
    node = tf.compat.v1.NodeDef(name=name, op="ImmutableConst")
    node.attr["dtype"].type = dtype.base_dtype.as_datatype_enum
    node.attr["memory_region_name"].s = b""
    dims = node.attr["shape"].shape.dim
    for size in sizes:
        dims.add(size=size)
    node.attr["shape"].shape.SetInParent()
    return node
