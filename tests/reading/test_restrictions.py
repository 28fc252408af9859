"""What may not wait for others, measured: it lives from the start of the step."""

import functools

import pytest
import tensorflow as tf

import memory_saving_gradients as msg
from memory_saving_gradients.measure import function_peak


def traced():
    """A mean over a large tensor, whose gradient is of constants, after a wide forward pass."""
    ws = [tf.Variable(tf.eye(64)) for _ in range(6)] + [tf.Variable(tf.ones((64, 4096)) / 64)]

    @tf.function
    def step(x):
        with msg.GradientTape(checkpoints="memory") as tape:
            for w in ws:
                x = tf.tanh(tf.sin(x @ w))
            wide = tf.sort(tf.concat([tf.sin(x), tf.cos(x)], 0))
            loss = tf.reduce_mean(x * tf.stop_gradient(tf.reduce_mean(wide)))
        return tape.gradient(loss, ws)

    x = tf.ones((1024, 64))
    return functools.partial(step.get_concrete_function(x), x)


@pytest.mark.measured
def test_large_constants_of_the_backward_pass_count_from_the_start():
    (plan,) = msg.get_plans(traced().func.graph)
    assert function_peak(traced) == pytest.approx(plan.peak_bytes, rel=0.05)
