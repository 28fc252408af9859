"""How long CPU kernels take, compared with TensorFlow's estimates of them.

For `graph/cpu_kernels.py`: each of its kernels is timed beside convolutions and products, in a
session that runs one op at a time, on tensors of 8 MB. On 2 cores it takes about 8 minutes.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable

import tensorflow as tf

from memory_saving_gradients.graph import cpu_kernels
from memory_saving_gradients.graph.costs import estimate_seconds
from memory_saving_gradients.graph.devices import DEVICES
from memory_saving_gradients.graph.shapes import Shapes
from memory_saving_gradients.graph.traced import traced
from scripts.benchmarks.common import Section

v1 = tf.compat.v1
raw = tf.raw_ops

_RUNS = 5
_BATCH = 32


class Inputs:
    """Tensors to compute with: values of variables, which no optimiser folds."""

    def __init__(self) -> None:
        self.images = self.of(_BATCH, 32, 32, 64)
        self.others = self.of(_BATCH, 32, 32, 64)
        self.rows = self.of(1024, 2048)
        self.sequences = self.of(_BATCH, 1024, 64)
        self.kernel = self.of(3, 3, 64, 64)
        self.channels = self.of(64)
        self.matrices = self.of(256, 64, 64)
        self.indices = self.of(1024, most=1024, dtype=tf.int32)

    def of(self, *shape: int, most: float = 0.9, dtype: tf.DType = tf.float32) -> tf.Tensor:
        """A tensor of random numbers between 0.1, or 0, and some other."""
        least = 0.1 if dtype.is_floating else 0
        initializer = v1.random_uniform_initializer(least, most, dtype=dtype)
        name = f"input{len(v1.global_variables())}"
        return v1.get_variable(name, shape, dtype, initializer, use_resource=True).read_value()

    @property
    def definite(self) -> tf.Tensor:
        """Positive definite matrices."""
        return tf.matmul(self.matrices, self.matrices, transpose_b=True) + 64 * tf.eye(64)


_TO_HALF = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
_BORDERS = [[0, 0], [1, 1], [1, 1], [0, 0]]

#: What all are compared with.
PRODUCTS: dict[str, Callable[[Inputs], tf.Tensor]] = {
    "Conv2D": lambda i: tf.nn.conv2d(i.images, i.kernel, 1, "SAME"),
    "Conv2D of one pixel": lambda i: tf.nn.conv2d(i.images, i.kernel[:1, :1], 1, "SAME"),
    "MatMul": lambda i: i.rows @ i.of(2048, 1024),
}

KERNELS: dict[str, Callable[[Inputs], tf.Tensor]] = (
    {
        "All": lambda i: tf.reduce_all(i.images > i.others, -1),
        "Any": lambda i: tf.reduce_any(i.images > i.others, -1),
        "ArgMax": lambda i: tf.argmax(i.rows, -1),
        "AvgPoolGrad": lambda i: raw.AvgPoolGrad(
            orig_input_shape=[_BATCH, 32, 32, 64], grad=i.of(_BATCH, 16, 16, 64), **_TO_HALF
        ),
        "BatchToSpaceND": lambda i: raw.BatchToSpaceND(
            input=i.images, block_shape=[2, 2], crops=[[0, 0], [0, 0]]
        ),
        "Betainc": lambda i: tf.math.betainc(i.images, i.others, i.images),
        "BiasAddGrad": lambda i: raw.BiasAddGrad(out_backprop=i.images),
        "BlockLSTMV2": lambda i: raw.BlockLSTMV2(
            seq_len_max=tf.constant(64, tf.int64),
            x=i.of(64, _BATCH, 128),
            cs_prev=i.of(_BATCH, 64),
            h_prev=i.of(_BATCH, 64),
            w=i.of(192, 256),
            wci=i.channels,
            wcf=i.channels,
            wco=i.channels,
            b=i.of(256),
        )[1],
        "Bucketize": lambda i: raw.Bucketize(input=i.images, boundaries=[0.2, 0.4]),
        "Cholesky": lambda i: tf.linalg.cholesky(i.definite),
        "ComplexAbs": lambda i: tf.abs(tf.complex(i.images, i.others)),
        "Cumprod": lambda i: tf.math.cumprod(i.rows, 1),
        "Cumsum": lambda i: tf.cumsum(i.sequences, 1),
        "DepthToSpace": lambda i: tf.nn.depth_to_space(i.images, 2),
        "Dilation2D": lambda i: tf.nn.dilation2d(
            i.images, i.of(3, 3, 64), [1] * 4, "SAME", "NHWC", [1] * 4
        ),
        "DynamicStitch": lambda i: tf.dynamic_stitch([tf.range(1024)], [i.rows]),
        "Elu": lambda i: tf.nn.elu(i.images),
        "Erfinv": lambda i: tf.math.erfinv(i.images),
        "ExtractImagePatches": lambda i: tf.image.extract_patches(
            i.images, [1, 3, 3, 1], [1] * 4, [1] * 4, "SAME"
        ),
        "FloorMod": lambda i: i.images % i.others,
        "GatherNd": lambda i: tf.gather_nd(
            tf.reshape(i.images, [-1]), i.of(2**21, 1, most=2**21 - 1, dtype=tf.int32)
        ),
        "Igamma": lambda i: tf.math.igamma(i.images, i.others),
        "LRN": lambda i: tf.nn.lrn(i.images),
        "LogMatrixDeterminant": lambda i: raw.LogMatrixDeterminant(input=i.definite)[1],
        "LogSoftmax": lambda i: tf.nn.log_softmax(i.rows),
        "MatrixBandPart": lambda i: tf.linalg.band_part(i.of(1024, 32, 64), 0, -1),
        "MatrixDeterminant": lambda i: tf.linalg.det(i.definite),
        "MatrixInverse": lambda i: tf.linalg.inv(i.definite),
        "MatrixSolve": lambda i: tf.linalg.solve(i.definite, i.matrices),
        "MatrixTriangularSolve": lambda i: tf.linalg.triangular_solve(i.definite, i.matrices),
        "Max": lambda i: tf.reduce_max(i.images, [1, 2]),
        "MaxPool": lambda i: tf.nn.max_pool2d(i.images, 3, 2, "SAME"),
        "MaxPoolWithArgmax": lambda i: raw.MaxPoolWithArgmax(input=i.images, **_TO_HALF)[0],
        "Mean": lambda i: tf.reduce_mean(i.images, [1, 2]),
        "Min": lambda i: tf.reduce_min(i.images, [1, 2]),
        "MirrorPad": lambda i: tf.pad(i.images, _BORDERS, "REFLECT"),
        "Mod": lambda i: raw.Mod(x=i.images, y=i.others),
        "NextAfter": lambda i: tf.math.nextafter(i.images, i.others),
        "Pad": lambda i: tf.pad(i.images, _BORDERS),
        "PadV2": lambda i: tf.pad(i.images, _BORDERS, constant_values=1.0),
        "Pow": lambda i: i.images**i.others,
        "Prod": lambda i: tf.reduce_prod(i.images, [0, 1, 2]),
        "Qr": lambda i: tf.linalg.qr(i.matrices)[0],
        "RFFT": lambda i: tf.signal.rfft(i.rows),
        "RFFT2D": lambda i: tf.signal.rfft2d(i.of(1024, 64, 32)),
        "ResizeBicubic": lambda i: raw.ResizeBicubic(images=i.images, size=[64, 64]),
        "ResizeBilinear": lambda i: raw.ResizeBilinear(images=i.images, size=[64, 64]),
        "ResizeBilinearGrad": lambda i: raw.ResizeBilinearGrad(
            grads=i.of(_BATCH, 64, 64, 64), original_image=i.images
        ),
        "ResizeNearestNeighborGrad": lambda i: raw.ResizeNearestNeighborGrad(
            grads=i.of(_BATCH, 64, 64, 64), size=[32, 32]
        ),
        "ScatterNd": lambda i: tf.scatter_nd(
            i.of(2**19, 1, most=2**21, dtype=tf.int32), i.of(2**19), [2**21]
        ),
        "SegmentMean": lambda i: tf.math.segment_mean(i.rows, tf.range(1024)),
        "SegmentSum": lambda i: tf.math.segment_sum(i.rows, tf.range(1024)),
        "SelfAdjointEigV2": lambda i: tf.linalg.eigh(i.definite[:8])[0],
        "Slice": lambda i: tf.slice(i.images, [0] * 4, [_BATCH, 32, 32, 32]),
        "SoftmaxCrossEntropyWithLogits": lambda i: raw.SoftmaxCrossEntropyWithLogits(
            features=i.rows, labels=i.rows
        )[0],
        "Softplus": lambda i: tf.nn.softplus(i.images),
        "SpaceToBatchND": lambda i: tf.space_to_batch(i.images, [2, 2], [[0, 0], [0, 0]]),
        "SparseSoftmaxCrossEntropyWithLogits": lambda i: raw.SparseSoftmaxCrossEntropyWithLogits(
            features=i.rows, labels=i.indices
        )[0],
        "SparseTensorDenseMatMul": lambda i: raw.SparseTensorDenseMatMul(
            a_indices=i.of(2**15, 2, most=1024, dtype=tf.int64),
            a_values=i.of(2**15),
            a_shape=[1024, 1024],
            b=i.rows,
        ),
        "Split": lambda i: tf.split(i.images, 2, -1)[0],
        "SplitV": lambda i: tf.split(i.images, [16, 48], -1)[0],
        "StridedSlice": lambda i: i.images[:, ::2, ::2],
        "StridedSliceGrad": lambda i: raw.StridedSliceGrad(
            shape=[_BATCH, 64, 64, 64],
            begin=[0] * 4,
            end=[_BATCH, 64, 64, 64],
            strides=[1, 2, 2, 1],
            dy=i.images,
        ),
        "Sum": lambda i: tf.reduce_sum(i.images, [0, 1, 2]),
        "Svd": lambda i: tf.linalg.svd(i.matrices[:8])[0],
        "Tile": lambda i: tf.tile(i.of(_BATCH, 32, 32, 1), [1, 1, 1, 64]),
        "TopKV2": lambda i: tf.math.top_k(i.rows, 5)[0],
        "Transpose": lambda i: tf.transpose(i.images, [0, 3, 1, 2]),
        "TruncateMod": lambda i: raw.TruncateMod(x=i.images, y=i.others),
        "UnsortedSegmentSum": lambda i: tf.math.unsorted_segment_sum(i.rows, i.indices, 1024),
        "Where": lambda i: tf.where(i.images > 0.8),
    }
    | {
        kind: functools.partial(lambda function, i: function(x=i.images), getattr(raw, kind))
        for kind in "Asinh Atanh BesselI0e Cos Cosh Digamma Expm1 Lgamma Sin Sinh Tan".split()
    }
    | {
        "Acosh": lambda i: tf.acosh(1 + i.images),
        "Selu": lambda i: tf.nn.selu(i.images),
    }
)


def measured(kind: str) -> dict[str, float]:
    """Seconds of a kernel, as estimated and as measured, and its factor beside the products."""
    with tf.Graph().as_default() as graph:
        inputs = Inputs()
        ops = {name: make(inputs).op for name, make in PRODUCTS.items()}
        ops[kind] = KERNELS[kind](inputs).op
        estimated = estimate_seconds(
            [*ops.values()], Shapes(graph.get_operations()), DEVICES["cpu"]
        )
        seconds = _seconds(ops.values())
    known = cpu_kernels.times_estimate(ops[kind])
    ratios = {name: seconds[op.name] / estimated[op.name] for name, op in ops.items()}
    factor = known * ratios.pop(kind) / statistics.median(ratios.values())
    name = ops[kind].name
    return {"estimated": estimated[name] / known, "seconds": seconds[name], "factor": factor}


def _seconds(ops: Iterable[tf.Operation]) -> dict[str, float]:
    """The median seconds of ops, by name."""
    config = v1.ConfigProto(inter_op_parallelism_threads=1)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = v1.OptimizerOptions.L0
    taken: dict[str, list[float]] = {op.name: [] for op in ops}
    with v1.Session(config=config) as session:
        session.run(v1.global_variables_initializer())
        for op in ops:
            session.run(op)
            for _ in range(_RUNS):
                for node in traced(session, op).nodes:
                    if node.node_name == op.name:
                        nanoseconds = node.op_end_rel_nanos - node.op_start_rel_nanos
                        taken[op.name].append(1e-9 * nanoseconds)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


SECTIONS = {"kernels": Section(list(KERNELS), measured)}
