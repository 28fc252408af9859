"""The shape of every tensor of a graph, as far as it can be known before a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

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
                shape = self._inferred.get_tensor_by_name(name).shape
            sizes = shape.as_list() if shape.rank is not None else []
            self._known[name] = [self._nominal_size if size is None else size for size in sizes]
        return self._known[name]

    def bytes(self, tensor: tf.Tensor) -> int:
        """The bytes of `tensor`'s buffer; 0 for handles and variants."""
        return math.prod(self(tensor)) * tensor.dtype.size


def _with_known_inputs(graph: tf.Graph, size: int) -> tf.Graph:
    """A copy of the graph whose inputs have known shapes, from which TensorFlow infers the rest."""
    graph_def = graph.as_graph_def()
    for node in graph_def.node:
        if node.op not in ("Placeholder", "ReadVariableOp"):
            continue
        tensor = graph.get_tensor_by_name(f"{node.name}:0")
        if tensor.shape.rank is not None and tensor.dtype not in (tf.resource, tf.variant):
            sizes = [size if known is None else known for known in tensor.shape.as_list()]
            node.CopyFrom(stand_in(node.name, tensor.dtype, sizes))
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
