"""The shape of every tensor of a graph, as far as it can be known before a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from memory_saving_gradients.graph import calls

#: The sizes that may stand for a dimension that the graph leaves unknown (the batch, mostly); the
#: first that the graph's reshapes can divide is taken. Large enough that activations outweigh the
#: gradients of weights, as they do where memory is short.
NOMINAL_SIZES = (128, 840)


class Shapes:
    """The static shape of every tensor, with nominal sizes where the graph leaves them unknown.

    Args:
        operations: the ops of the step, of one graph.
    """

    def __init__(self, operations: Sequence[tf.Operation]) -> None:
        self._inferred: tf.Graph | None = None
        self._nominal_size = NOMINAL_SIZES[0]
        self._known: dict[str, list[int]] = {}
        outputs = (t for op in operations for t in op.outputs)
        if not all(t.shape.is_fully_defined() for t in outputs if t.dtype.size):
            for size in NOMINAL_SIZES:
                try:
                    self._inferred = _with_known_inputs(operations[0].graph, size)
                except ValueError:  # the size contradicts a shape that the graph demands
                    continue
                self._nominal_size = size
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
            known = {inside.op.name: self(t) for inside, t in given if t.dtype.size}
            try:
                graph = _with_shapes(body, known)
            except ValueError:  # an input of unknown rank counts as a scalar, and may be none
                continue
            inferred = Shapes(graph.get_operations())
            for output, inside in zip(op.outputs, body.outputs, strict=True):
                found[output.name] = inferred(graph.get_tensor_by_name(inside.name))
        return found

    def bytes(self, tensor: tf.Tensor) -> int:
        """The bytes of `tensor`'s buffer; 0 for handles and variants."""
        return math.prod(self(tensor)) * tensor.dtype.size


def _with_known_inputs(graph: tf.Graph, size: int) -> tf.Graph:
    """A copy of the graph whose inputs have known shapes, from which TensorFlow infers the rest."""
    known = {}
    for op in graph.get_operations():
        if op.type in ("Placeholder", "ReadVariableOp") and op.outputs[0].shape.rank is not None:
            sizes = op.outputs[0].shape.as_list()
            known[op.name] = [size if one is None else one for one in sizes]
    return _with_shapes(graph, known)


def _with_shapes(graph: tf.Graph, known: dict[str, list[int]]) -> tf.Graph:
    """A copy of the graph in which ops have outputs of the known shapes."""
    graph_def = graph.as_graph_def()
    for node in graph_def.node:
        if node.name in known:
            dtype = graph.get_tensor_by_name(f"{node.name}:0").dtype
            if dtype not in (tf.resource, tf.variant):
                node.CopyFrom(stand_in(node.name, dtype, known[node.name]))
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
