"""What the functions need that an op calls."""

import tensorflow as tf

from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.reading.read import read

ROWS, WIDTH, TIMES = 64, 32, 9


def wide(i, h):
    """A round that needs many times the bytes of its result."""
    return i + 1, tf.reduce_sum(tf.sin(tf.tile(h[None], [TIMES, 1, 1])), axis=0)


def twice(body, h):
    return tf.while_loop(lambda i, _: i < 2, body, (0, h))


def test_what_a_loop_in_a_loop_needs_is_counted():
    with tf.Graph().as_default() as graph:
        x = tf.ones((ROWS, WIDTH))
        h = twice(lambda i, h: (i + 1, twice(wide, h)[1]), tf.stop_gradient(x))[1]
        loss = tf.reduce_sum(h * x)
        first_new = len(graph.get_operations())
        reading = read(BackwardPass.since(first_new, loss, tf.gradients(loss, [x])))
    (loop,) = (op for op in reading.problem.ops if op.name.startswith("while"))
    assert loop.workspace >= TIMES * ROWS * WIDTH * tf.float32.size
