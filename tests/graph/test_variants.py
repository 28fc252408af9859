"""The bytes that lists and optional values hold."""

import tensorflow as tf

from memory_saving_gradients.graph.shapes import Shapes
from memory_saving_gradients.graph.variants import held_bytes

v1 = tf.compat.v1


def test_the_branch_that_a_constant_tells_is_the_one_that_counts(graph):
    def kept(condition):
        x = tf.sin(tf.zeros((64, 16)))
        y = tf.cond(condition, lambda: tf.exp(tf.sin(tf.exp(tf.sin(x)))), lambda: tf.exp(x))
        tf.gradients(y, x)
        shapes = Shapes(graph.get_operations())
        held = [t for t in y.op.inputs[0].op.outputs if t.dtype == tf.variant]
        return sum(held_bytes(t, shapes) for t in held) // (64 * 16 * 4)

    ones = tf.fill(tf.shape(tf.zeros((4,))), 1)
    open_to_both = kept(v1.placeholder(tf.bool, ()))
    assert kept(tf.reduce_any(ones > 0)) == open_to_both
    assert kept(tf.reduce_any(ones > 1)) < open_to_both
