"""Forward mode over our tape, for products of a Hessian and a vector: its tangents are counted."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import memory_saving_gradients as msg
from memory_saving_gradients.measure import function_peak

LAYERS, WIDTH, ROWS = 8, 64, 4096


def traced(ours):
    """The loss of a network, its gradients, and the product of the Hessian and a vector."""
    make_tape = functools.partial(msg.GradientTape, checkpoints="memory")
    initial = tf.random.stateless_normal((LAYERS, WIDTH, WIDTH), (0, 1), stddev=0.1)
    ws = [tf.Variable(w) for w in tf.unstack(initial)]

    @tf.function
    def step(x):
        with tf.autodiff.ForwardAccumulator(ws, [0.1 * w for w in ws]) as forward:
            with make_tape() if ours else tf.GradientTape() as tape:
                for w in ws:
                    x = tf.tanh(tf.sin(x @ w))
                loss = tf.reduce_mean(x**2)
            grads = tape.gradient(loss, ws)
        return loss, grads, [forward.jvp(grad) for grad in grads]

    x = tf.random.stateless_normal((ROWS, WIDTH), (2, 3))
    return functools.partial(step.get_concrete_function(x), x)


@pytest.mark.usefixtures("deterministic")
def test_values_are_those_of_the_plain_tape():
    for a, b in zip(*(tf.nest.flatten(traced(ours)()) for ours in (True, False)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.measured
def test_tangents_are_counted_and_recomputed():
    """Both those of activations, and those of gradients, that are made while it differentiates."""
    (plan,) = msg.get_plans(traced(True).func.graph)
    ours = function_peak(traced, True)
    plain = min(function_peak(traced, False) for _ in range(4))  # threads may race ahead
    assert plan.baseline_peak_bytes == pytest.approx(plain, rel=0.3)
    assert ours < 0.55 * plain
