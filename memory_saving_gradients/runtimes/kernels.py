"""The scratch space of the executor's CPU kernels, Eigen's and oneDNN's.

Each formula was read off the allocation records of traced runs;
tests/runtimes/test_kernels.py and tests/test_onednn.py trace them again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Sequence

import llvmlite.binding
import numpy as np
import tensorflow as tf

from memory_saving_gradients.graph import kinds
from memory_saving_gradients.graph.tf_private import onednn_enabled
from memory_saving_gradients.graph.traced import traced
from memory_saving_gradients.runtimes.runtime import ShapeOf

# The cache sizes by which the convolution kernels split their work, in bytes. They are those that
# Eigen assumes in TensorFlow's own wheels, not those that the processor reports.
_L2_BYTES = 256 * 2**10
_L3_BYTES = 30 * 2**20


def workspace(op: tf.Operation, shape: ShapeOf) -> int:
    """Bytes of scratch space that `op`'s kernel needs besides its inputs and outputs.

    Memory that it allocates and never writes to does not count (see `untouched`), as it never
    becomes resident. oneDNN's kernels for gradients of convolutions, for float32 and bfloat16, need
    far less than Eigen's and count as 0, except for filter gradients of volumes without AVX-512.
    `Einsum` transposes its operands.

    Args:
        op: the op.
        shape: gives the shape of a tensor.

    Returns:
        Bytes; 0 for ops without a formula.
    """
    size = op.outputs[0].dtype.size if op.outputs else 0
    if op.type == "MaxPoolGrad":
        # The maxima of all windows once more, and their positions as int64. oneDNN keeps them.
        onednns = onednn_enabled() and op.outputs[0].dtype in _REGISTERS
        return 0 if onednns else math.prod(shape(op.inputs[1])) * (size + 8)
    images = _unrolled(op, shape)
    if images is not None:
        return min(images.at_once, images.batch) * images.bytes
    if op.type == "Conv3DBackpropFilterV2":
        return _unrolled_volume(op, shape)
    if op.type == "Pow" and np.all(tf.get_static_value(op.inputs[1]) == 3):
        # Grappler turns it into x * x**2.
        return math.prod(shape(op.outputs[0])) * size
    if op.type == "Einsum" and len(op.inputs) == 2:
        equation = op.get_attr("equation").decode()
        operands = [math.prod(shape(tensor)) for tensor in op.inputs]
        return size * _transposed(equation, operands, math.prod(shape(op.outputs[0])))
    return 0


def untouched(op: tf.Operation, shape: ShapeOf) -> int:
    """Bytes that `op`'s kernel allocates as scratch space and never writes to.

    Eigen's gradients of convolutions allocate space for as many images as fill the last-level
    cache, even if the batch has fewer. Allocation records show all of it, resident memory only the
    part that is written to.
    """
    images = _unrolled(op, shape)
    return max(0, images.at_once - images.batch) * images.bytes if images else 0


@dataclasses.dataclass(frozen=True)
class _Unrolled:
    """The images or volumes that a kernel unrolls.

    Attributes:
        at_once: how many fit into its scratch space.
        batch: how many there are.
        bytes: the bytes of one, unrolled.
    """

    at_once: int
    batch: int
    bytes: int


def _unrolled(op: tf.Operation, shape: ShapeOf) -> _Unrolled | None:
    """The unrolled inputs of Eigen's gradient of a convolution; None for other ops or kernels."""
    if op.type in ("Conv2DBackpropFilter", "Conv2DBackpropInput"):
        onednns = onednn_enabled() and op.outputs[0].dtype in _REGISTERS
        return None if onednns else _unrolled_images(op, shape)
    if op.type in ("Conv3DBackpropFilterV2", "Conv3DBackpropInputV2") and not onednn_enabled():
        return _unrolled_volumes(op, shape)
    return None


def _unrolled_images(op: tf.Operation, shape: ShapeOf) -> _Unrolled | None:
    """For a 2-D convolution: `conv_grad_filter_ops` and `conv_grad_input_ops` of TensorFlow."""
    size = op.outputs[0].dtype.size
    is_filter = op.type == "Conv2DBackpropFilter"
    kernel = op.outputs[0].shape.as_list() if is_filter else list(shape(op.inputs[1]))
    batch, height, width, filters = shape(op.inputs[2])
    if None in kernel:
        return None
    unrolled = height * width * math.prod(kernel[:3])
    work = unrolled + height * width * filters + math.prod(kernel)
    threads = tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count() or 1
    one_image = not is_filter and (batch == 1 or work / threads >= _L2_BYTES / size)
    at_once = 1 if one_image else math.ceil(_L3_BYTES / size / work)
    return _Unrolled(at_once, batch, unrolled * size)


def _unrolled_volume(op: tf.Operation, shape: ShapeOf) -> int:
    """Bytes of scratch space of oneDNN's filter gradient of a 3-D convolution, without AVX-512.

    They hold a volume with its channels first, and a layer of it unrolled
    (`gemm_convolution_utils.cpp`). Each thread that has run one keeps them; we count one thread.
    """
    kernel = op.outputs[0].shape.as_list()
    if None in kernel or not onednn_enabled() or _has_avx512():
        return 0
    layer = math.prod(shape(op.inputs[2])[2:4]) * math.prod(kernel[:4])
    return (math.prod(shape(op.inputs[0])[1:]) + layer) * op.outputs[0].dtype.size


def _has_avx512() -> bool:
    """Whether oneDNN uses AVX-512: the processor has it, and `ONEDNN_MAX_CPU_ISA` allows it."""
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    return bool(
        allowed.startswith(("ALL", "DEFAULT", "AVX512", "AVX10"))
        and llvmlite.binding.get_host_cpu_features().get("avx512f")
    )


def _unrolled_volumes(op: tf.Operation, shape: ShapeOf) -> _Unrolled | None:
    """For a 3-D convolution: `conv_grad_ops_3d` of TensorFlow."""
    is_filter = op.type == "Conv3DBackpropFilterV2"
    kernel = op.outputs[0].shape.as_list() if is_filter else list(shape(op.inputs[1]))
    volumes = shape(op.inputs[0] if is_filter else op.outputs[0])
    gradient = shape(op.inputs[2])
    dtype = op.outputs[0].dtype
    if None in kernel or dtype not in (tf.float32, tf.float64):
        return None
    positions = math.prod(gradient[1:4])
    unrolled = positions * math.prod(kernel[:4])
    work = unrolled + positions * kernel[4] + math.prod(kernel)
    one_volume = gradient[0] == 1 and not is_filter
    at_once = 1 if one_volume else math.ceil(_cache_for_volumes() // dtype.size / work)
    inputs = math.prod(volumes) + math.prod(kernel) + math.prod(gradient)
    if at_once * unrolled // inputs > _MOST_UNROLLED:
        return None
    return _Unrolled(at_once, gradient[0], unrolled * dtype.size)


_MOST_UNROLLED = 25  # times the inputs; the kernel does not unroll what would be larger


@functools.cache
def _cache_for_volumes() -> int:
    """Bytes of the last-level cache as Eigen reads it, derived from a gradient's scratch space.

    On some processors it is not the size that Linux reports.
    """
    side, filters = 11, 63
    work = side**3 * (1 + filters) + filters
    with tf.Graph().as_default() as graph:
        volumes, gradient = tf.zeros((8, *[side] * 3, 1)), tf.zeros((8, *[side] * 3, filters))
        tf.raw_ops.Conv3DBackpropFilterV2(
            input=volumes,
            filter_sizes=(1, 1, 1, 1, filters),
            out_backprop=gradient,
            strides=[1] * 5,
            padding="SAME",
            name="probe",
        )
    config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.compat.v1.Session(graph=graph, config=config) as session:
        nodes = traced(session, "probe").nodes
    at_once = max(
        record.alloc_bytes // (side**3 * 4)
        for node in nodes
        for memory in node.memory
        for record in memory.allocation_records
        if node.node_name == "probe"
    )
    # The number of volumes is rounded up; cache sizes are multiples of half a megabyte.
    return at_once * work * 4 // 2**19 * 2**19


# oneDNN runs them and their gradients by kernels that share a workspace, where the gradient reads
# the op itself (`mkl_layout_pass.cc`).
_WITH_GRADIENT = frozenset({"MaxPool", "MaxPool3D", "LRN"})


def apart_from_gradient(tensor: tf.Tensor) -> tf.Tensor:
    """A recomputed tensor, for a gradient that would otherwise have read a list or a branch.

    Its kernel, which decides the last bits, then stays the same.
    """
    if tensor.op.type not in _WITH_GRADIENT:
        return tensor
    return tf.ensure_shape(tensor, tensor.shape, name=f"{tensor.op.name}/apart")


def untold_bytes(op: tf.Operation, output: int, shape: ShapeOf) -> int:
    """Bytes of an output that holds more than its static shape tells; else 0."""
    return _pooled_bytes(op, shape) or _reserve_bytes(op, output, shape)


def _pooled_bytes(op: tf.Operation, shape: ShapeOf) -> int:
    """Bytes of what oneDNN's maximum pooling makes; 0 for other ops.

    Its kernel keeps the place of each maximum for the gradient, a byte per element, as another
    output (`mkl_maxpooling_op.cc`).
    """
    if op.type not in ("MaxPool", "MaxPool3D") or not onednn_enabled():
        return 0
    pooled = op.outputs[0]
    for_gradient = any(reader.type == f"{op.type}Grad" for reader in pooled.consumers())
    if pooled.dtype not in _REGISTERS or not for_gradient:
        return 0
    return math.prod(shape(pooled)) * (pooled.dtype.size + 1)


def _reserve_bytes(op: tf.Operation, output: int, shape: ShapeOf) -> int:
    """Bytes of the output of a batch normalisation that has no static shape, kept for its gradient.

    oneDNN's kernel fuses the ReLU behind it (`remapper.cc`) and keeps a mask of it: a bit per
    element if the channels fill its registers, else a byte; TensorFlow's buffer of floats is four
    times as large (`mkl_fused_batch_norm_op.cc`). tests/test_onednn.py measures it.

    Args:
        op: the op.
        output: which of its outputs.
        shape: gives the shape of a tensor.

    Returns:
        Bytes; 0 for an output of another op or of one that keeps nothing.
    """
    if op.type != "FusedBatchNormV3" or output != _RESERVE or not onednn_enabled():
        return 0
    readers = {
        reader for reader in op.outputs[0].consumers() if reader.type not in kinds.SHAPE_ONLY
    }
    channels = shape(op.inputs[0])[-1]
    fused = (
        {reader.type for reader in readers} == {"Relu"}
        and len(readers) == 1
        and op.get_attr("is_training")
        and op.get_attr("data_format") == b"NHWC"
        and op.inputs[0].dtype in _REGISTERS
        and channels % 4 == 0
    )
    if not fused:
        return 0
    elements = math.prod(shape(op.inputs[0]))
    return elements // 2 if channels % _REGISTERS[op.inputs[0].dtype] == 0 else elements * 4


_RESERVE = 5
_REGISTERS = {tf.float32: 8, tf.bfloat16: 16}  # channels that fill one


def _transposed(equation: str, operands: Sequence[int], output: int) -> int:
    """How many elements an einsum of two operands transposes.

    Its kernel is a batched matrix product: operands are (batch, free, contracted) or (batch,
    contracted, free), the product is (batch, free, free); within each group, labels are in the
    order of the equation. Tensors with another layout are copied (`einsum_op_impl.h`).
    """
    left, right, out = equation.replace("->", ",").split(",")
    first = {label: i for i, label in reversed([*enumerate(left + right)])}

    def kind(label: str) -> int:  # batch, free, contracted
        return 0 if label in left and label in right and label in out else 1 + (label not in out)

    elements = 0
    for labels, size in zip((left, right), operands, strict=True):
        as_is = sorted(labels, key=lambda label: (kind(label), first[label]))
        swapped = sorted(labels, key=lambda label: (-kind(label) % 3, first[label]))
        if list(labels) not in (as_is, swapped):
            elements += size
    product = sorted(out, key=lambda label: (kind(label), label not in left, first[label]))
    return elements + (output if list(out) != product else 0)
