"""Kinds of ops with respect to memory: views, sources, in-place kernels, expensive ops.

TensorFlow's API does not tell them, so they are tables. Each entry was read off the allocation
records of a traced run on CPU; tests/graph/test_kinds.py traces them again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from memory_saving_gradients.graph import tf_private

VIEWS = frozenset(
    """Identity IdentityN Reshape Squeeze ExpandDims StopGradient PreventGradient EnsureShape
    Bitcast Snapshot RefIdentity CheckNumerics""".split()
)

#: Ops whose outputs belong to the caller or to a variable, not to the step.
SOURCES = frozenset(
    "Placeholder PlaceholderV2 PlaceholderWithDefault Const VariableV2 Variable VarHandleOp "
    "ReadVariableOp".split()
)

#: Dtypes of tensors of unknown size that are never recomputed.
HANDLES = frozenset({tf.resource, tf.string})

#: Ops that read only the shape of their inputs.
SHAPE_ONLY = frozenset({"Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs"})

#: Ops whose kernel may write the output over an input of equal size that nothing else reads later.
IN_PLACE = frozenset(
    """Abs Add AddN AddV2 BiasAdd Ceil ClipByValue Cos Div DivNoNan Elu EluGrad Erf Erfc Exp Expm1
    Floor InvGrad Inv LeakyRelu LeakyReluGrad Log Log1p LogSoftmax MatrixBandPart Maximum Minimum
    Mul MulNoNan Neg Pow RealDiv Reciprocal Relu Relu6 Relu6Grad ReluGrad Round Rsqrt RsqrtGrad
    Select SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Softmax
    SoftmaxCrossEntropyWithLogits Softplus SoftplusGrad Softsign
    SparseSoftmaxCrossEntropyWithLogits Sqrt SqrtGrad Square SquaredDifference Sub Tan Tanh
    TanhGrad Xdivy Xlogy""".split()
)

#: Ops that make the loss of each example, and its gradient by the logits, at once.
CROSS_ENTROPIES = frozenset(
    {"SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"}
)

#: Ops that return an operand unchanged if all elements of the other are this value; which operands.
_NEUTRAL: dict[str, tuple[int, tuple[int, ...]]] = {
    **dict.fromkeys(["Mul", "MulNoNan"], (1, (0, 1))),
    **dict.fromkeys(["Div", "RealDiv"], (1, (0,))),
    **dict.fromkeys(["Add", "AddV2"], (0, (0, 1))),
    "Sub": (0, (0,)),
}

#: Expensive ops: matrix products, convolutions, decompositions, transforms, calls of functions.
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


#: The attribute that marks gates: see `graph.gate`.
GATE = "_memory_saving_gate"


def is_gate(op: tf.Operation) -> bool:
    return op.type in _GATES and GATE in op.node_def.attr


_GATES = frozenset({"StatelessWhile", "XlaOptimizationBarrier"})


def shown_input(op: tf.Operation, output: int) -> int | None:
    """The input whose buffer an output of `op` shares as a view; None if it has its own."""
    if op.type == "IdentityN" or is_gate(op):
        return output
    if op.type in VIEWS or (op.type == "Unpack" and op.get_attr("axis") == 0):
        return 0
    return _handed_on(op) if op.type in _NEUTRAL else None


def showing(op: tf.Operation, tensor: tf.Tensor) -> Iterator[tf.Tensor]:
    """The outputs of `op` that are views of `tensor`."""
    for i, output in enumerate(op.outputs):
        shown = shown_input(op, i)
        if shown is not None and op.inputs[shown] is tensor:
            yield output


def _handed_on(op: tf.Operation) -> int | None:
    """The operand that a sum or product returns unchanged, as the other one is neutral.

    Grappler's constant folding (and XLA) removes such an op: x * 1, x / 1, x + 0, x - 0. In a graph
    with reference variables it may copy x instead, so there we assume nothing.
    """
    try:
        known = _handed_on_in[op.graph]
    except KeyError:
        known = None if tf_private.has_references(op.graph) else {}
        _handed_on_in[op.graph] = known
    if known is None:
        return None
    if op.name not in known:
        value, places = _NEUTRAL[op.type]
        handed_on = (
            place
            for place in places
            if _fits_into(op.inputs[1 - place].shape, op.inputs[place].shape)
            and _is_all(op.inputs[1 - place].op, value)
        )
        known[op.name] = next(handed_on, None)
    return known[op.name]


#: By graph: the results of `_handed_on`, by op; None for graphs with reference variables.
_handed_on_in: weakref.WeakKeyDictionary[tf.Graph, dict[str, int | None] | None]
_handed_on_in = weakref.WeakKeyDictionary()


def _fits_into(shape: tf.TensorShape, other: tf.TensorShape) -> bool:
    """Whether broadcasting `shape` to `other` gives `other`."""
    if shape.rank is None or other.rank is None or shape.rank > other.rank:
        return False
    pairs = zip(shape[::-1], other[::-1], strict=False)
    return all(size == 1 or (size is not None and size == there) for size, there in pairs)


def _is_all(op: tf.Operation, value: int) -> bool:
    source = op.inputs[1].op if op.type == "Fill" else op
    return source.type == "Const" and bool(np.all(tf.get_static_value(source.outputs[0]) == value))


def is_gathered(handle: tf.Tensor) -> bool:
    """Whether the variable of a handle is gathered from or scattered to.

    TensorFlow's kernel then makes a copy where the whole variable is read
    (`EnsureSparseVariableAccess`): of the tied embedding of a language model, for example.
    """
    kinds = {reader.type for reader in handle.consumers()}
    return any(kind.startswith(("ResourceGather", "ResourceScatter")) for kind in kinds)


def owner(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor of which `tensor` is a view; `tensor` itself if it has its own buffer."""
    while (shown := shown_input(tensor.op, tensor.value_index)) is not None:
        tensor = tensor.op.inputs[shown]
    return tensor
