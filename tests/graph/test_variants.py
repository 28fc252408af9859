"""The bytes that lists and optional values hold."""

import tensorflow as tf

from memory_saving_gradients.graph.shapes import Shapes
from memory_saving_gradients.graph.variants import held_bytes, same_lists

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


def test_lists_of_the_same_tensors(graph):
    """The result of a round is in the list that the user makes and in one for the gradient."""
    w = tf.ones((4, 4))

    def body(i, h, made):
        h = tf.tanh(h @ w)
        return i + 1, h, made.write(i, h)

    begin = 0, tf.ones((2, 4)), tf.TensorArray(tf.float32, 5)
    *_, made = tf.while_loop(lambda i, *_: i < 5, body, begin, maximum_iterations=5)
    result = made.stack()
    tf.gradients(result, w)
    loop = next(op for op in graph.get_operations() if op.type == "StatelessWhile")
    lists = [t for t in loop.outputs if t.dtype == tf.variant and t.consumers()]
    of_user = result.op.inputs[0].op.inputs[0]
    same = same_lists(loop, {t.name for t in lists})
    last = same[of_user.value_index]
    assert last != of_user.value_index
    assert same[last] == last
    assert same_lists(loop, {of_user.name}) == {of_user.value_index: of_user.value_index}
    shapes = Shapes(graph.get_operations())
    assert held_bytes(loop.outputs[last], shapes) == held_bytes(of_user, shapes) == 5 * 2 * 4 * 4
