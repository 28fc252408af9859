"""`checkpoint()` of parts with loops and branches that may be differentiated again."""

import pytest
import tensorflow as tf

from memory_saving_gradients import checkpoint
from tests.parts import assert_close, plainly, weights, x_of


def loop(x, w):
    return tf.while_loop(lambda i, _: i < 2, lambda i, a: (i + 1, tf.tanh(a @ w)), [0, x])[1]


def loop_in_a_loop(x, w):
    return tf.while_loop(lambda i, _: i < 2, lambda i, a: (i + 1, loop(a, w)), [0, x])[1]


def branch(x, w):
    return tf.cond(x[0, 0] < 9.0, lambda: tf.sin(tf.tanh(x @ w)), lambda: tf.tanh(x))


def mapped(x, w):
    return tf.map_fn(lambda row: tf.tanh(tf.linalg.matvec(w, row)), x)


def second_gradients(part, w, call):
    """The gradient of a chain of two parts by `w`, and that of its square."""
    with tf.GradientTape() as outer, tf.GradientTape() as tape:
        outer.watch(w)
        tape.watch(w)
        y = call(part, call(part, x_of(), w), w)
        with tape.stop_recording():
            first = tape.gradient(y, w)
        square = tf.reduce_sum(first**2)
    return first, outer.gradient(square, w)


@pytest.mark.parametrize("part", [loop, loop_in_a_loop, branch, mapped])
def test_copies_of_one_loop_are_told_apart(part):
    """What TensorFlow makes of a loop or branch to differentiate it is named after its functions.

    In eager mode both calls are of one part, traced once and split twice.
    """
    w = tf.convert_to_tensor(weights()[0])
    assert_close(second_gradients(part, w, checkpoint), second_gradients(part, w, plainly))


@pytest.mark.parametrize("how", ["eager", "function"])
@pytest.mark.parametrize("part", [loop, branch, mapped])
def test_a_copied_call_is_differentiated_as_the_call_is(part, how):
    """Under two tapes TensorFlow wraps a loop or branch that reads a variable in a call."""
    w = weights()[0]

    def run(call):
        step = lambda: second_gradients(part, w, call)  # noqa: E731
        return (step if how == "eager" else tf.function(step))()

    assert_close(run(checkpoint), run(plainly))


def test_a_loop_of_a_graph_that_is_imported():
    """Its functions are of another kind, which is not copied."""
    with tf.Graph().as_default() as graph:
        given = tf.compat.v1.placeholder(tf.float32, x_of().shape, "x")
        result = loop(given, tf.eye(given.shape[1])).name
    graph_def = graph.as_graph_def()

    def part(x, w):
        (scale,) = tf.graph_util.import_graph_def(graph_def, {"x": x}, [result])
        return tf.sin(tf.tanh(x @ w) * tf.stop_gradient(scale))

    w = weights()[0]

    @tf.function
    def run(call):
        with tf.GradientTape() as tape:
            y = call(part, call(part, x_of(), w), w)
        return tape.gradient(y, w)

    assert_close(run(checkpoint), run(plainly))
