"""Estimated seconds of each op, by TensorFlow's own estimator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from memory_saving_gradients.graph import calls, cpu_kernels
from memory_saving_gradients.graph.devices import Device
from memory_saving_gradients.graph.shapes import Shapes, stand_in
from memory_saving_gradients.graph.tf_private import Estimator

# An integer vector of more elements than this is no shape.
_LARGEST_VALUE = 16

# The input that gives the shape of the output, on which the cost depends.
_OUTPUT_SIZES = {
    "Conv2DBackpropInput": 0,
    "Conv2DBackpropFilter": 1,
    "DepthwiseConv2dNativeBackpropInput": 0,
    "DepthwiseConv2dNativeBackpropFilter": 1,
}


# Convolutions of volumes, which the estimator does not know: where they have the kernel and the
# output of the convolution, or the gradient for it. None is their own output.
_VOLUMES: dict[str, tuple[int | None, int | None]] = {
    "Conv3D": (1, None),
    "Conv3DBackpropInputV2": (1, 2),
    "Conv3DBackpropFilterV2": (None, 2),
}


def estimate_seconds(
    operations: Sequence[tf.Operation], shapes: Shapes, device: Device
) -> dict[str, float]:
    """Estimated seconds of one run of each op.

    We estimate one op for all of the same type, attributes and input shapes, so that a deep network
    of equal layers takes no longer than one layer. An op that calls a function has no estimate; it
    counts as the most expensive of the others.

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
        if calls.calls(op):
            continue
        inputs = [(t.dtype, shapes(t), _shape_value(t, shapes)) for t in op.inputs]
        if op.type in _OUTPUT_SIZES:  # often computed from the batch
            place = _OUTPUT_SIZES[op.type]
            dtype, sizes, _ = inputs[place]
            value = np.asarray(shapes(op.outputs[0]), dtype.as_numpy_dtype)
            inputs[place] = (dtype, sizes, value)
        node = op.node_def
        if op.type in _VOLUMES:
            node, inputs = _as_product(op, shapes)
        node.attr.pop("_class", None)
        node.name = node.device = ""
        del node.input[:]
        read = (
            (dtype, tuple(sizes), None if value is None else value.tobytes())
            for dtype, sizes, value in inputs
        )
        signature = (node.SerializeToString(deterministic=True), *read)
        if signature not in standing_for:
            standing_for[signature] = node.name = op.name
            sources = [_source(f"{op.name}/in{i}", *known) for i, known in enumerate(inputs)]
            node.input.extend(source.name for source in sources)
            graph_def.node.extend([*sources, node])
        stands_in[op.name] = standing_for[signature]
    seconds = {}
    if standing_for:
        graph_def.versions.CopyFrom(operations[0].graph.graph_def_versions)
        seconds = Estimator(graph_def, sorted(standing_for.values()), device).seconds()
    dearest = max(seconds.values(), default=0.0)
    slower = cpu_kernels.times_estimate if device["type"] == "CPU" else lambda op: 1.0
    return {
        op.name: seconds.get(stands_in.get(op.name, ""), dearest) * slower(op) for op in operations
    }


def _as_product(
    op: tf.Operation, shapes: Shapes
) -> tuple[tf.compat.v1.NodeDef, list[tuple[tf.DType, list[int], np.ndarray | None]]]:
    """A product of square matrices that takes as many multiplications as a 3-D convolution."""
    kernel, output = (
        shapes(op.outputs[0] if place is None else op.inputs[place]) for place in _VOLUMES[op.type]
    )
    multiplications = math.prod(output) * math.prod(kernel[:4])
    side = max(1, round(multiplications ** (1 / 3)))
    node = tf.compat.v1.NodeDef(op="MatMul")
    node.attr["T"].type = op.outputs[0].dtype.as_datatype_enum
    return node, [(op.outputs[0].dtype, [side, side], None) for _ in range(2)]


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
    """A node that stands in for an input of an op, as far as an estimate needs it."""
    if value is None:
        return stand_in(name, dtype, sizes)
    node = tf.compat.v1.NodeDef(name=name, op="Const")
    node.attr["dtype"].type = dtype.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
    return node
