"""What TensorFlow's kernels do with memory: views, buffers written in place, scratch space.

Nothing in TensorFlow's API tells this, so the facts are tables. Each was read off the allocation
records of a traced run on CPU; `tests/graph/test_kernels.py` traces them again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import tensorflow as tf

from memory_saving_gradients.graph.tf_private import onednn_enabled

_VIEWS = frozenset(
    """Identity IdentityN Reshape Squeeze ExpandDims StopGradient PreventGradient EnsureShape
    Bitcast Snapshot RefIdentity CheckNumerics""".split()
)

#: Their outputs are the caller's or a variable's, not the step's.
SOURCES = frozenset(
    "Placeholder PlaceholderV2 PlaceholderWithDefault Const VariableV2 Variable VarHandleOp "
    "ReadVariableOp".split()
)

#: Types of tensors whose bytes nobody knows, and which nobody makes twice.
HANDLES = frozenset({tf.resource, tf.string})

#: Ops that read only the shape of their inputs.
SHAPE_ONLY = frozenset({"Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs"})

#: Ops whose kernel may write its output over an input of the same size that dies with them.
IN_PLACE = frozenset(
    """Abs Add AddN AddV2 BiasAdd Ceil ClipByValue Cos Div DivNoNan Elu EluGrad Erf Erfc Exp Expm1
    Floor InvGrad Inv LeakyRelu LeakyReluGrad Log Log1p LogSoftmax MatrixBandPart Maximum Minimum
    Mul MulNoNan Neg Pow RealDiv Reciprocal Relu Relu6 Relu6Grad ReluGrad Round Rsqrt RsqrtGrad
    Select SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Softmax
    SoftmaxCrossEntropyWithLogits Softplus SoftplusGrad Softsign
    SparseSoftmaxCrossEntropyWithLogits Sqrt SqrtGrad Square SquaredDifference Sub Tan Tanh
    TanhGrad Xdivy Xlogy""".split()
)

#: Ops that compute: matrix products, convolutions, decompositions, transforms, calls of functions.
#: The `speed` strategy keeps their outputs whatever the cost estimate says.
EXPENSIVE = frozenset(
    """MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 SparseTensorDenseMatMul SparseMatMul Einsum
    XlaEinsum Conv Conv1D Conv2D Conv3D Conv2DBackpropInput Conv3DBackpropInputV2
    Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNative
    DepthwiseConv2dNativeBackpropInput DepthwiseConv2dNativeBackpropFilter CudnnRNN CudnnRNNV2
    CudnnRNNV3 LSTMBlockCell BlockLSTM BlockLSTMV2 GRUBlockCell FFT FFT2D FFT3D IFFT IFFT2D
    IFFT3D RFFT RFFT2D RFFT3D IRFFT IRFFT2D IRFFT3D Cholesky MatrixInverse MatrixDeterminant
    MatrixSolve MatrixTriangularSolve Qr Svd SelfAdjointEigV2 If StatelessIf While StatelessWhile
    Case StatelessCase PartitionedCall""".split()
)

#: Gradients of convolutions. XLA transposes their operands before it multiplies.
TRANSPOSES = frozenset(
    """Conv2DBackpropInput Conv3DBackpropInputV2 Conv2DBackpropFilter Conv3DBackpropFilterV2
    DepthwiseConv2dNativeBackpropInput DepthwiseConv2dNativeBackpropFilter""".split()
)

# The sizes that the convolution kernels split their work by, in bytes. They are what Eigen takes
# the caches to be inside TensorFlow's own wheels, not what the processor reports.
_L2_BYTES = 256 * 2**10
_L3_BYTES = 30 * 2**20


def threads() -> int:
    """How many ops a session or function runs at a time, unless its own options say otherwise."""
    return tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count() or 1


def shown_input(op: tf.Operation, output: int) -> int | None:
    """The input whose buffer an output of `op` shows, or None where it has one of its own."""
    if op.type == "IdentityN":
        return output
    if op.type in _VIEWS or (op.type == "Unpack" and op.get_attr("axis") == 0):
        return 0
    return None


def reserve_bytes(
    op: tf.Operation, output: int, shape: Callable[[tf.Tensor], Sequence[int]]
) -> int:
    """Bytes of what a batch normalisation keeps for its gradient and gives no shape for.

    oneDNN's kernel takes in the ReLU behind it (`remapper.cc`) and keeps a mask of it: a bit for an
    element where the channels fill its registers, else a byte, in TensorFlow's buffer of floats
    (`mkl_fused_batch_norm_op.cc`) four times that. tests/test_onednn.py measures it.

    Args:
        op: the op.
        output: which of its outputs.
        shape: gives the shape of a tensor.

    Returns:
        Bytes; 0 for an output of another op or of one that keeps nothing.
    """
    if op.type != "FusedBatchNormV3" or output != _RESERVE or not onednn_enabled():
        return 0
    readers = {reader for reader in op.outputs[0].consumers() if reader.type not in SHAPE_ONLY}
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


def workspace(
    op: tf.Operation, shape: Callable[[tf.Tensor], Sequence[int]], on_gpu: bool = False
) -> int:
    """Bytes of scratch space that `op`'s CPU kernel takes beside its inputs and outputs.

    The convolution formulas are those of TensorFlow's `conv_grad_filter_ops` and
    `conv_grad_input_ops` (Eigen kernels): as many images are unrolled at a time as fill the
    last-level cache. oneDNN's kernels take far less and count as none. `Einsum` transposes.

    Args:
        op: the op.
        shape: gives the shape of a tensor.
        on_gpu: True if ops without a device of their own run on a GPU.

    Returns:
        Bytes; 0 for ops without a formula and for ops on a GPU.
    """
    if "GPU" in op.device.upper() or (on_gpu and "CPU" not in op.device.upper()):
        return 0
    size = op.outputs[0].dtype.size if op.outputs else 0
    if op.type == "MaxPoolGrad":
        # The maxima of each window again, and their positions as int64.
        return math.prod(shape(op.inputs[1])) * (size + 8)
    if op.type in ("Conv2DBackpropFilter", "Conv2DBackpropInput") and not onednn_enabled():
        is_filter = op.type == "Conv2DBackpropFilter"
        kernel = op.outputs[0].shape.as_list() if is_filter else list(shape(op.inputs[1]))
        batch, height, width, filters = shape(op.inputs[2])
        if None in kernel:
            return 0
        unrolled = height * width * math.prod(kernel[:3])
        work = unrolled + height * width * filters + math.prod(kernel)
        threads = tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count() or 1
        one_image = not is_filter and (batch == 1 or work / threads >= _L2_BYTES / size)
        images = 1 if one_image else math.ceil(_L3_BYTES / size / work)
        return images * unrolled * size
    if op.type == "Pow" and tf.get_static_value(op.inputs[1]) == 3:
        # Grappler makes x * x**2 of it.
        return math.prod(shape(op.outputs[0])) * size
    if op.type == "Einsum" and len(op.inputs) == 2:
        equation = op.get_attr("equation").decode()
        operands = [math.prod(shape(tensor)) for tensor in op.inputs]
        return size * _transposed(equation, operands, math.prod(shape(op.outputs[0])))
    return 0


def compiled_workspace(op: tf.Operation, shape: Callable[[tf.Tensor], Sequence[int]]) -> int:
    """Bytes of scratch space that XLA's program for a CPU takes for `op`.

    It transposes the operands of a convolution's gradient. The gradient of a depthwise filter it
    takes from that of a dense one, of which it keeps the diagonal, and both are there at once. A
    convolution in groups is made in another layout first.

    Args:
        op: the op.
        shape: gives the shape of a tensor.

    Returns:
        Bytes; 0 for ops that are neither gradients of convolutions nor convolutions in groups.
    """
    if op.type == "Conv2D" and shape(op.inputs[0])[-1] != shape(op.inputs[1])[-2]:
        return op.outputs[0].dtype.size * math.prod(shape(op.outputs[0]))
    if op.type not in TRANSPOSES:
        return 0
    size = op.outputs[0].dtype.size
    if op.type == "DepthwiseConv2dNativeBackpropFilter":
        height, width, channels, multiplier = shape(op.outputs[0])
        return 2 * height * width * channels * channels * multiplier * size
    if op.type == "Conv2DBackpropFilter":
        height, width, channels_of_group, made = shape(op.outputs[0])
        channels = shape(op.inputs[0])[-1]
        if channels_of_group == 1 < channels:
            return 2 * height * width * channels * made * size
    return size * sum(math.prod(shape(t)) for t in op.inputs if t.dtype == op.outputs[0].dtype)


def _transposed(equation: str, operands: Sequence[int], output: int) -> int:
    """How many elements an einsum of two operands transposes.

    Its kernel multiplies matrices in batches: operands as (batch, free, contracted) or (batch,
    contracted, free), the product as (batch, free, free); within each, labels are in the order in
    which the equation names them. What does not lie so is copied (`einsum_op_impl.h`).
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
