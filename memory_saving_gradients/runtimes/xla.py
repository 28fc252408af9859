"""XLA: the memory that its programs use."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import networkx as nx
import tensorflow as tf

from memory_saving_gradients.graph import kinds, normalisation
from memory_saving_gradients.runtimes import fusion
from memory_saving_gradients.runtimes.execution_order import Event
from memory_saving_gradients.runtimes.partial_sums import partial_sums
from memory_saving_gradients.runtimes.runtime import Runtime, ShapeOf

CONVOLUTIONS = frozenset({"Conv2D", "Conv3D"})

#: Gradients of convolutions. XLA transposes their operands before it multiplies.
TRANSPOSES = frozenset(
    """Conv2DBackpropInput Conv3DBackpropInputV2 Conv2DBackpropFilter Conv3DBackpropFilterV2
    DepthwiseConv2dNativeBackpropInput DepthwiseConv2dNativeBackpropFilter""".split()
)

GRADIENTS_OF_MAX_POOLING = frozenset({"MaxPoolGrad", "MaxPoolGradV2", "MaxPool3DGrad"})


class Xla(Runtime):
    """XLA, which compiles a graph as a whole."""

    obeys_control_edges = False
    runs_in_sessions = False
    results_apart = True
    has_gates = True
    copies_gathered = False
    lists_refer = False

    @property
    def on_gpu(self) -> bool:
        """Whether it is XLA:GPU: for a described GPU, or on a machine that has one."""
        return self.device["type"] == "GPU" or bool(tf.config.list_physical_devices("GPU"))

    @property
    def keeps_running_sums(self) -> bool:
        return self.on_gpu  # barriers hold what is added before one

    def kernels(
        self,
        operations: Sequence[tf.Operation],
        results: Collection[tf.Tensor],
        bytes_of: Mapping[str, int],
    ) -> fusion.Kernels:
        return fusion.kernels(operations, results, bytes_of, self.on_gpu)

    def order(
        self,
        graph: nx.DiGraph,
        operations: Sequence[tf.Operation],
        seconds: Mapping[str, float],
        early_last: bool,
        threads: int,
    ) -> list[Event] | None:
        return None  # XLA itself looks for an order of low memory

    def scratch(self, op: tf.Operation, shape: ShapeOf) -> int:
        if not self.on_gpu:
            return cpu_workspace(op, shape)
        return gpu_workspace(op, shape) + partial_sums(op, shape, self.device)

    def reuses(self, op: tf.Operation) -> bool:
        return normalisation.keeps_statistics(op)  # the variance itself, on any device

    def may_copy(self, op: tf.Operation) -> bool:
        return not any(t.dtype == tf.variant for t in (*op.inputs, *op.outputs))


#: The index of the filter among the inputs of convolutions and gradients; None if it is the output.
_FILTERS = {"Conv2D": 1, "Conv3D": 1, "Conv2DBackpropInput": 1, "Conv3DBackpropInputV2": 1} | {
    "Conv2DBackpropFilter": None,
    "Conv3DBackpropFilterV2": None,
}


def gpu_workspace(op: tf.Operation, shape: ShapeOf) -> int:
    """Bytes of scratch space that XLA's program for a GPU needs for `op`.

    cuDNN expects filters with the output channels first, so they are transposed. The gradient of
    max pooling finds the place of each maximum, as an index for each dimension. The scratch space
    of autotuned kernels is not known.

    Args:
        op: the op.
        shape: gives the shape of a tensor.

    Returns:
        Bytes; 0 for other ops.
    """
    if op.type in GRADIENTS_OF_MAX_POOLING:
        pooled = shape(op.inputs[1])
        return len(pooled) * tf.int32.size * math.prod(pooled)
    if op.type not in _FILTERS:
        return 0
    place = _FILTERS[op.type]
    filters = op.outputs[0] if place is None else op.inputs[place]
    return filters.dtype.size * math.prod(size or 0 for size in shape(filters))


def cpu_workspace(op: tf.Operation, shape: ShapeOf) -> int:
    """Bytes of scratch space that XLA's program for a CPU needs for `op`.

    It transposes the operands of a convolution's gradient. It computes the gradient of a depthwise
    filter as that of a dense one and takes the diagonal; both are alive at once. A grouped
    convolution is computed in another layout first. The probabilities that a cross entropy makes of
    logits are alive beside these and their gradient. The gradient of max pooling has tables of all
    indices, for each dimension.

    Args:
        op: the op.
        shape: gives the shape of a tensor.

    Returns:
        Bytes; 0 for other ops.
    """
    if op.type in kinds.CROSS_ENTROPIES:
        return op.inputs[0].dtype.size * math.prod(shape(op.inputs[0]))
    if op.type in GRADIENTS_OF_MAX_POOLING:
        image, pooled = shape(op.inputs[0]), shape(op.inputs[1])
        indices = len(image) * (math.prod(image) + math.prod(pooled)) * tf.int32.size
        return indices + op.outputs[0].dtype.size * math.prod(pooled)
    if op.type == "Conv2D" and shape(op.inputs[0])[-1] != shape(op.inputs[1])[-2]:
        return op.outputs[0].dtype.size * math.prod(shape(op.outputs[0]))
    if op.type not in TRANSPOSES:
        return 0
    size = op.outputs[0].dtype.size
    if op.type == "DepthwiseConv2dNativeBackpropFilter":
        height, width, channels, multiplier = shape(op.outputs[0])
        return 2 * height * width * channels * channels * multiplier * size
    if op.type == "Conv2DBackpropFilter":
        height, width, channels_of_group, out_channels = shape(op.outputs[0])
        channels = shape(op.inputs[0])[-1]
        if channels_of_group == 1 < channels:
            return 2 * height * width * channels * out_channels * size
    return size * sum(math.prod(shape(t)) for t in op.inputs if t.dtype == op.outputs[0].dtype)
