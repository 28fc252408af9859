"""Batch normalisation that runs again with the statistics of its first run.

The first run computes the mean and the variance of the batch, and keeps both for its gradient, a
few bytes a channel. A second run need not compute them: with the statistics as inputs the op only
normalises, in less than half the time (Eigen's and oneDNN's kernels; the same bits).
"""

from __future__ import annotations

import tensorflow as tf

from memory_saving_gradients.graph import tf_private

_NORMALISATIONS = frozenset({"FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"})
GRADIENTS = frozenset({"FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3"})

# How many times as long as TensorFlow estimates they take on a CPU. It counts their inputs and
# outputs once, but the kernels go over them again for the statistics, and for the sums that the
# gradient needs. Measured on eight networks; normalising alone takes as long as estimated.
_OF_FIRST_RUN, _OF_GRADIENT = 2.5, 2.0

#: The share of the time that a second run saves.
REUSED = 1 - 1 / _OF_FIRST_RUN

#: The inputs of a second run that take mean and variance, and the outputs of the first with those
#: that its gradient reads, too. (For moving averages there are others, with the sample variance.)
STATISTICS = {3: 3, 4: 4}


def keeps_statistics(op: tf.Operation) -> bool:
    """Whether `op` computes statistics that a second run on a CPU, or in XLA, can take over.

    TensorFlow's kernel for GPUs keeps the inverse of the standard deviation, not the variance.
    """
    if not _computes_statistics(op):  # of most ops, whose attributes take long to read
        return False
    return op.node_def.attr["exponential_avg_factor"].f in (0.0, 1.0)  # V3 alone has one


def _computes_statistics(op: tf.Operation) -> bool:
    return op.type in _NORMALISATIONS and op.get_attr("is_training")


def takes_statistics(op: tf.Operation) -> bool:
    """Whether `op` is a second run, with the statistics of the first."""
    return op.type in _NORMALISATIONS and op.inputs[3].op.type in _NORMALISATIONS


def computed_alike(op: tf.Operation) -> tf.Tensor:
    """What a second run makes in XLA, with the bits of the first: the formula of its training op.

    XLA multiplies and adds in another order where statistics are given
    (`xla/service/batchnorm_expander.cc`).

    Args:
        op: the second run, in the default graph.
    """
    x, scale, *others = op.inputs
    layout = op.get_attr("data_format")
    shape = [-1, *(1 for _ in layout[2:])] if layout.startswith(b"NC") else [-1]
    scale, offset, mean, variance = (tf.reshape(t, shape) for t in (scale, *others))
    over_deviation = tf.math.rsqrt(variance + op.get_attr("epsilon"))
    y = (tf.cast(x, scale.dtype) - mean) * over_deviation * scale + offset
    return tf.cast(y, x.dtype)


def times_estimate(op: tf.Operation) -> float:
    """How many times as long as TensorFlow estimates `op` takes on a CPU."""
    if op.type in GRADIENTS:
        return _OF_GRADIENT if op.get_attr("is_training") else 1.0
    return _OF_FIRST_RUN if _computes_statistics(op) else 1.0


def stay_on_cpu(op: tf.Operation) -> None:
    """Keeps a second run on a CPU, also where the graph is loaded on a machine with a GPU."""
    device = tf.DeviceSpec.from_string(op.device)
    if device.device_type is None:
        device = device.replace(device_type="CPU", device_index=0)
        tf_private.set_device(op, device.to_string())
