"""Kinds of op, as to memory: views, sources, buffers written in place, what computes much.

Nothing in TensorFlow's API tells this, so the facts are tables. Each was read off the allocation
records of a traced run on CPU; tests/graph/test_kinds.py traces them again.
"""

from __future__ import annotations

import tensorflow as tf

VIEWS = frozenset(
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


#: The attribute of loops that run no round and hand on their inputs: see `runtimes.gate`.
GATE = "_memory_saving_gate"


def is_gate(op: tf.Operation) -> bool:
    return op.type == "StatelessWhile" and GATE in op.node_def.attr


def shown_input(op: tf.Operation, output: int) -> int | None:
    """The input whose buffer an output of `op` shows, or None where it has one of its own."""
    if op.type == "IdentityN" or is_gate(op):
        return output
    if op.type in VIEWS or (op.type == "Unpack" and op.get_attr("axis") == 0):
        return 0
    return None


def is_of_the_step(op: tf.Operation) -> bool:
    """Whether the outputs of `op` are made in a step, and no one else's.

    A variable that is gathered from, or scattered to, is copied wherever it is read as a whole
    (`EnsureSparseVariableAccess`): the tied embedding of a language model.
    """
    if op.type == "ReadVariableOp":
        kinds = {reader.type for reader in op.inputs[0].consumers()}
        return any(kind.startswith(("ResourceGather", "ResourceScatter")) for kind in kinds)
    return op.type not in SOURCES


def owner(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor whose buffer `tensor` shows, itself if it has one of its own."""
    while (shown := shown_input(tensor.op, tensor.value_index)) is not None:
        tensor = tensor.op.inputs[shown]
    return tensor
