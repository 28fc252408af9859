"""The shape of every tensor of a graph, as far as it can be known before a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from memory_saving_gradients.graph import calls
from memory_saving_gradients.graph.tf_private import Refusal

#: The sizes that may stand for a dimension that the graph leaves unknown (the batch, mostly); the
#: first that the graph's reshapes can divide is taken. Large enough that activations outweigh the
#: gradients of weights, as they do where memory is short.
NOMINAL_SIZES = (128, 840)


class WrongSize(Refusal, ValueError):
    """A size that was given contradicts the graph."""


@dataclasses.dataclass(frozen=True)
class InputSizes:
    """What is known of the inputs of a step beside what its graph says.

    Attributes:
        batch: the first dimension of all inputs for which the graph leaves it unknown.
        shapes: whole shapes of inputs, by the name of the op.
        assumed: whether nobody said so.
    """

    batch: int | None = None
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    assumed: bool = False

    def of(self, name: str, shape: Sequence[int | None], nominal: int) -> list[int]:
        """The shape of an input, of which the graph knows `shape`."""
        given = dict(self.shapes).get(name)
        if given is not None:
            return list(given)
        first = [nominal if self.batch is None else self.batch]
        sizes = [nominal if size is None else size for size in shape]
        return first + sizes[1:] if shape and shape[0] is None else sizes

    def times(self, factor: int, batch: int) -> InputSizes:
        """The same for a batch so many times as large as `batch`."""
        shapes = tuple(
            (name, (factor * batch, *sizes[1:]) if sizes[:1] == (batch,) else sizes)
            for name, sizes in self.shapes
        )
        return InputSizes(factor * batch, shapes)


#: No size is known beside the graph.
NOTHING_GIVEN = InputSizes()


class Shapes:
    """The static shape of every tensor, with nominal sizes where the graph leaves them unknown.

    Args:
        operations: the ops of the step, of one graph.
        given: what is known of its inputs.

    Attributes:
        given: the same.
        batch_size: the size that stands for the first dimension of inputs where the graph leaves
            that unknown; None if it leaves none.

    Raises:
        WrongSize: what is given contradicts the graph.
    """

    def __init__(
        self, operations: Sequence[tf.Operation], given: InputSizes = InputSizes()
    ) -> None:
        self.given = given
        self.batch_size: int | None = None
        self._inferred: tf.Graph | None = None
        self._nominal_size = NOMINAL_SIZES[0]
        self._known: dict[str, list[int]] = {}
        if operations and any(map(_is_open, operations[0].graph.get_operations())):
            for size in NOMINAL_SIZES:
                try:
                    self._inferred = _with_known_inputs(operations[0].graph, size, given)
                except ValueError as error:  # the size contradicts a shape that the graph demands
                    contradiction = error
                    continue
                self._nominal_size = size
                break
            if self._inferred is None and (given.batch or given.shapes):
                raise WrongSize(
                    f"batch_size={given.batch or dict(given.shapes)} contradicts the graph: "
                    f"{contradiction}"
                )
        if operations:
            graph = self._inferred or operations[0].graph
            for _ in range(_ROUNDS):
                ops = graph.get_operations()
                known = {op.name: found for op in ops if (found := _by_data(op))}
                if not known:
                    break
                self._inferred = graph = _with_shapes(graph, known)
        for op in operations:
            if op.type == "Placeholder" and op.outputs[0].shape.rank:
                sizes = op.outputs[0].shape.as_list()
                if sizes[0] is None:
                    self.batch_size = given.of(op.name, sizes, self._nominal_size)[0]
                    break

    def __call__(self, tensor: tf.Tensor) -> list[int]:
        """The shape of `tensor`; a tensor of unknown rank counts as a scalar."""
        name = tensor.name
        if name not in self._known:
            shape = tensor.shape
            if self._inferred is not None and not shape.is_fully_defined():
                inferred = self._inferred.get_tensor_by_name(name).shape
                # Of two unknown dimensions one is rarely as large as the other.
                partly = shape.rank is not None and shape.as_list().count(None) == 1
                shape = shape if partly and inferred.rank is None else inferred
            if not shape.is_fully_defined():
                self._known.update(self._of_call(tensor.op))
            sizes = shape.as_list() if shape.rank is not None else []
            nominal = [self._nominal_size if size is None else size for size in sizes]
            self._known.setdefault(name, nominal)
        return self._known[name]

    def _of_call(self, op: tf.Operation) -> dict[str, list[int]]:
        """The shapes of the outputs of a call, by name: those of the function for its inputs."""
        found: dict[str, list[int]] = {}
        if op.type == "SymbolicGradient":  # of a `Defun`, by its inputs
            return {y.name: self(x) for y, x in zip(op.outputs, op.inputs, strict=False)}
        for body in calls.bodies(op) if calls.is_plain_call(op) else []:
            given = zip(body.inputs, op.inputs, strict=True)
            known = {inside.op.name: [self(t)] for inside, t in given if t.dtype.size}
            try:
                graph = _with_shapes(body, known)
            except ValueError:  # an input of unknown rank counts as a scalar, and may be none
                continue
            inferred = Shapes(graph.get_operations(), self.given)
            for output, inside in zip(op.outputs, body.outputs, strict=True):
                found[output.name] = inferred(graph.get_tensor_by_name(inside.name))
        return found

    def bytes(self, tensor: tf.Tensor) -> int:
        """The bytes of `tensor`'s buffer; 0 for handles and variants."""
        return math.prod(self(tensor)) * tensor.dtype.size


def _is_open(op: tf.Operation) -> bool:
    """Whether `op` is an input of which the graph leaves a dimension unknown."""
    shape = op.outputs[0].shape if op.type in _INPUTS else tf.TensorShape([])
    return shape.rank is not None and not shape.is_fully_defined()


_INPUTS = ("Placeholder", "ReadVariableOp")


def _with_known_inputs(graph: tf.Graph, size: int, given: InputSizes) -> tf.Graph:
    """A copy of the graph whose inputs have known shapes, from which TensorFlow infers the rest."""
    known = {}
    for op in graph.get_operations():
        if op.type in _INPUTS and op.outputs[0].shape.rank is not None:
            sizes = op.outputs[0].shape.as_list()
            known[op.name] = [given.of(op.name, sizes, size)]
    return _with_shapes(graph, known)


# Of ops whose sizes depend on data, some depend on others: so often is looked for more.
_ROUNDS = 4


def _by_data(op: tf.Operation) -> list[list[int]]:
    """The likely shapes of the outputs of an op whose data tell them; none if it is no such op.

    The parts of a partition are taken to be of equal size, and a mask to leave all in.
    """
    if op.type not in ("DynamicPartition", "Where") or op.outputs[0].shape.is_fully_defined():
        return []
    if not all(t.shape.is_fully_defined() for t in op.inputs):
        return []
    shape = op.inputs[0].shape.as_list()
    if op.type == "Where":
        return [[math.prod(shape), len(shape)]]
    by = op.inputs[1].shape.rank
    return [[math.prod(shape[:by]) // len(op.outputs), *shape[by:]] for _ in op.outputs]


def _with_shapes(graph: tf.Graph, known: dict[str, list[list[int]]]) -> tf.Graph:
    """A copy of the graph in which the outputs of ops have the known shapes."""
    graph_def = graph.as_graph_def()
    for node in [*graph_def.node]:
        outputs = graph.get_operation_by_name(node.name).outputs if node.name in known else []
        dtypes = [t.dtype for t in outputs]
        if not outputs or tf.resource in dtypes or tf.variant in dtypes:
            continue
        parts = [f"{node.name}/{i}" for i in range(len(outputs))]
        graph_def.node.extend(map(stand_in, parts, dtypes, known[node.name]))
        node.CopyFrom(tf.compat.v1.NodeDef(name=node.name, op="IdentityN", input=parts))
        node.attr["T"].list.type.extend(dtype.base_dtype.as_datatype_enum for dtype in dtypes)
    with tf.Graph().as_default() as inferred:
        tf.graph_util.import_graph_def(graph_def, name="")
    return inferred


def stand_in(name: str, dtype: tf.DType, sizes: Sequence[int]) -> tf.compat.v1.NodeDef:
    """A source of known shape. Not a `Placeholder`: the estimator would make a value to feed it."""
    node = tf.compat.v1.NodeDef(name=name, op="ImmutableConst")
    node.attr["dtype"].type = dtype.base_dtype.as_datatype_enum
    node.attr["memory_region_name"].s = b""
    dims = node.attr["shape"].shape.dim
    for size in sizes:
        dims.add(size=size)
    node.attr["shape"].shape.SetInParent()
    return node
