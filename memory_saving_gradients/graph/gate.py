"""What makes a copy wait for the backward pass where control edges do not: in a graph for XLA.

XLA drops control edges, merges ops that compute the same, and orders the rest as it likes. Only
data holds a copy back. So one of its inputs is gated: `select(never, 0, input)`, where `never` is
computed from an element of each tensor that has to be there first. It is false for every value of
those elements, NaN too, but XLA cannot know. A select serves every type alike and changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from memory_saving_gradients.graph import tf_private

# What XLA computes with, and so what can carry a dependency. The rest are handles.
_CARRIERS = frozenset(
    {tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128, tf.bool}
    | {tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64}
)


def may_carry(tensor: tf.Tensor) -> bool:
    """Whether an op can be made to wait by this input of it.

    Integers that ops take for shapes, axes or sizes must be known when XLA compiles; so small ones
    are left alone.
    """
    if tensor.dtype.is_integer:
        return tensor.dtype in _CARRIERS and (tensor.shape.rank or 0) > 1
    return tensor.dtype in _CARRIERS and tensor.op.type != "Const"


def never(after: Iterable[tf.Tensor]) -> tf.Tensor | None:
    """A scalar that is false, and known to be when all of `after` are there.

    Args:
        after: tensors of one graph, the default graph.

    Returns:
        A bool tensor; None if no tensor of `after` can be waited for.
    """
    elements = [_element(t) for t in after if t.dtype in _CARRIERS]
    if not elements:
        return None
    bits = tf.bitcast(tf.concat(elements, 0), tf.int32)
    # No square is 2 modulo 4.
    return tf.reduce_any(tf.equal(tf.bitwise.bitwise_and(bits * bits, 3), 2))


def gated(tensor: tf.Tensor, never: tf.Tensor) -> tf.Tensor:
    """`tensor`, but not before `never` is known."""
    gate = tf.where(never, tf.zeros((), tensor.dtype), tensor)
    gate.set_shape(tensor.shape)
    return gate


def _element(tensor: tf.Tensor) -> tf.Tensor:
    """The first element of `tensor` as a float vector; an empty one if it has none.

    The barrier keeps XLA from computing that element alone.
    """
    first = tf.reshape(tf_private.optimization_barrier(tensor), [-1])[:1]
    if first.dtype.is_complex:
        first = tf.math.real(first)
    return tf.cast(first, tf.float32)
