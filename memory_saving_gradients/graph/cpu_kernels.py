"""CPU kernels that take much longer than TensorFlow estimates.

Its estimator counts the bytes that an op reads and writes, and the work of the ops that it knows:
convolutions, matrix products, element-wise functions. But some kernels run on one thread, go over
their input element by element, or compute more than the estimator knows.
`scripts/benchmarks/kernels.py` measures them.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from memory_saving_gradients.graph import normalisation

#: How many times as long as estimated they take, in comparison with products and convolutions.
SLOW: dict[str, float] = {
    kind: times
    for times, kinds in {
        100: "Betainc Igamma Qr ScatterNd SelfAdjointEigV2 Svd",
        50: "Acosh Asinh Bucketize Dilation2D Where",
        25: """BlockLSTMV2 Cosh Cumprod Cumsum Digamma Erfinv FloorMod Lgamma LogMatrixDeterminant
        MatrixDeterminant MatrixInverse MatrixSolve Mod Pow Sinh StridedSlice Tan TopKV2
        TruncateMod""",
        12: """Cholesky ExtractImagePatches GatherNd LRN MaxPoolWithArgmax MirrorPad ResizeBicubic
        ResizeBilinearGrad Softplus SparseSoftmaxCrossEntropyWithLogits SparseTensorDenseMatMul
        StridedSliceGrad""",
        5: """All Any ArgMax Atanh BatchToSpaceND BesselI0e ComplexAbs DynamicStitch Expm1
        LogSoftmax MatrixBandPart MatrixTriangularSolve NextAfter RFFT RFFT2D
        SoftmaxCrossEntropyWithLogits SpaceToBatchND UnsortedSegmentSum""",
        3: """AvgPoolGrad Cos DepthToSpace Elu Pad PadV2 Prod ResizeBilinear
        ResizeNearestNeighborGrad SegmentMean SegmentSum Selu Sin Sum Transpose""",
        2: "BiasAddGrad Max MaxPool Mean Min Slice Split SplitV Tile",
    }.items()
    for kind in kinds.split()
}

# Grappler replaces powers with these exponents by products and roots.
_REPLACED = (-1, -0.5, 0, 0.5, 1, 2, 3)


def times_estimate(op: tf.Operation) -> float:
    """How many times as long as TensorFlow estimates `op` takes on a CPU."""
    if op.type == "Pow" and np.all(np.isin(_value(op, 1), _REPLACED)):
        return 1.0
    if op.type == "StridedSlice" and np.all(_value(op, 3) == 1):  # copies rows
        return 1.0
    return SLOW.get(op.type) or normalisation.times_estimate(op)


def _value(op: tf.Operation, place: int) -> np.ndarray:
    """The value of an input; NaN if the graph does not tell it."""
    value = tf.get_static_value(op.inputs[place])
    return np.asarray(np.nan if value is None else value)
