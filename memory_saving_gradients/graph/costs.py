"""Bytes and cost of each op, by TensorFlow's own estimators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from memory_saving_gradients.graph.devices import Device
from memory_saving_gradients.graph.tf_private import Estimator

#: The sizes that may stand for a dimension that the graph leaves unknown (the batch, mostly); the
#: first that the graph's reshapes can divide is taken. Large enough that activations outweigh the
#: gradients of weights, as they do where memory is short.
NOMINAL_SIZES = (128, 840)

# An integer vector of more elements than this is no shape.
_LARGEST_VALUE = 16


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


def estimate_seconds(
    operations: Sequence[tf.Operation], shapes: Shapes, device: Device
) -> dict[str, float]:
    """Estimated seconds of one run of each op.

    One op stands for all of the same type, attributes and input shapes, so that a deep network
    of equal layers costs no more to estimate than one layer. An op that calls a function has no
    estimate; it counts as the dearest of the others.

    Args:
        operations: the ops to estimate, of one graph.
        shapes: the shapes of their inputs.
        device: what runs them.

    Returns:
        Op name to seconds.
    """
    graph_def = tf.compat.v1.GraphDef()
    standing_for: dict[tuple, str] = {}
    stands_in: dict[str, str] = {}
    for op in operations:
        node = op.node_def
        node.attr.pop("_class", None)
        node.device = ""
        if any(value.WhichOneof("value") == "func" for value in node.attr.values()):
            continue
        attributes = tuple(sorted((k, v.SerializeToString()) for k, v in node.attr.items()))
        inputs = [(t.dtype, shapes(t), _shape_value(t, shapes)) for t in op.inputs]
        signature = (op.type, attributes, str(inputs))
        if signature not in standing_for:
            standing_for[signature] = node.name
            sources = [_source(f"{node.name}/in{i}", *known) for i, known in enumerate(inputs)]
            del node.input[:]
            node.input.extend(source.name for source in sources)
            graph_def.node.extend([*sources, node])
        stands_in[op.name] = standing_for[signature]
    seconds = {}
    if standing_for:
        graph_def.versions.CopyFrom(operations[0].graph.graph_def_versions)
        seconds = Estimator(graph_def, sorted(standing_for.values()), device).seconds()
    dearest = max(seconds.values(), default=0.0)
    return {op.name: seconds.get(stands_in.get(op.name, ""), dearest) for op in operations}


def _with_known_inputs(graph: tf.Graph, size: int) -> tf.Graph:
    """A copy of the graph whose inputs have known shapes, from which TensorFlow infers the rest."""
    graph_def = graph.as_graph_def()
    for node in graph_def.node:
        if node.op not in ("Placeholder", "ReadVariableOp"):
            continue
        tensor = graph.get_tensor_by_name(f"{node.name}:0")
        if tensor.shape.rank is not None and tensor.dtype not in (tf.resource, tf.variant):
            sizes = [size if known is None else known for known in tensor.shape.as_list()]
            node.CopyFrom(_stand_in(node.name, tensor.dtype, sizes))
    with tf.Graph().as_default() as inferred:
        tf.graph_util.import_graph_def(graph_def, name="")
    return inferred


def _shape_value(tensor: tf.Tensor, shapes: Shapes) -> np.ndarray | None:
    """The value of an integer vector that an op's cost may depend on, if the graph tells it."""
    if tensor.dtype not in (tf.int32, tf.int64) or (tensor.shape.rank or 0) > 1:
        return None
    if tensor.op.type in ("Shape", "ShapeN"):
        value = shapes(tensor.op.inputs[tensor.value_index])
    else:
        value = tf.get_static_value(tensor)
    if value is None or np.size(value) > _LARGEST_VALUE:
        return None
    return np.asarray(value, tensor.dtype.as_numpy_dtype)


def _source(
    name: str, dtype: tf.DType, sizes: Sequence[int], value: np.ndarray | None
) -> tf.compat.v1.NodeDef:
    """A node that yields what an input of an op yields, as far as an estimate needs it."""
    if value is None:
        return _stand_in(name, dtype, sizes)
    node = tf.compat.v1.NodeDef(name=name, op="Const")
    node.attr["dtype"].type = dtype.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
    return node


def _stand_in(name: str, dtype: tf.DType, sizes: Sequence[int]) -> tf.compat.v1.NodeDef:
    """A source of known shape. Not a `Placeholder`: the estimator would make a value to feed it."""
    node = tf.compat.v1.NodeDef(name=name, op="ImmutableConst")
    node.attr["dtype"].type = dtype.base_dtype.as_datatype_enum
    node.attr["memory_region_name"].s = b""
    dims = node.attr["shape"].shape.dim
    for size in sizes:
        dims.add(size=size)
    node.attr["shape"].shape.SetInParent()
    return node
