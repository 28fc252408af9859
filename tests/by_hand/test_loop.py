"""A loop in segments by hand: the values of `tf.while_loop`, in less memory."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import checkpoint_loop
from memory_saving_gradients.measure import function_peak

WIDTH = 16


def weight(width=WIDTH):
    return np.random.default_rng(0).normal(scale=0.3, size=(width, width)).astype(np.float32)


def gradient(loop, rounds, w, x, **options):
    """The state after so many rounds, and its gradients by the weight and the first state."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        count, h = loop(
            lambda i, h: i < rounds,
            lambda i, h: (i + 1, tf.tanh(h @ w + tf.cast(i, tf.float32) * 0.1)),
            (0, x),
            **options,
        )
        loss = tf.reduce_sum(h**2)
    return [count, h, *tape.gradient(loss, [w, x], unconnected_gradients="zero")]


def compare(rounds, plain_options=None, **options):
    w, x = tf.Variable(weight()), tf.ones((4, WIDTH))
    ours = gradient(checkpoint_loop, rounds, w, x, **options)
    plain = gradient(tf.while_loop, rounds, w, x, **(plain_options or {}))
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rounds", [0, 1, 4, 5, 6, 23])
def test_values_are_those_of_a_while_loop(rounds):
    compare(rounds, every=5)


@pytest.mark.parametrize("most", [None, 0, 9, 100])
def test_how_many_rounds(most):
    compare(40, {"maximum_iterations": most}, maximum_iterations=most)


def test_nests_growing_shapes_and_one_variable():
    x = tf.ones((2, WIDTH))
    with tf.GradientTape() as tape:
        tape.watch(x)
        _, state = checkpoint_loop(
            lambda i, state: i < 7,
            lambda i, state: (i + 1, {"h": tf.concat([state["h"], 2 * state["h"][:1]], 0)}),
            (0, {"h": x}),
            every=3,
            shape_invariants=(tf.TensorShape([]), {"h": tf.TensorShape([None, WIDTH])}),
        )
        loss = tf.reduce_sum(state["h"] ** 2)
    assert state["h"].shape == (9, WIDTH)
    np.testing.assert_allclose(tape.gradient(loss, x)[0], 2 * (1 + 7 * 4) * np.ones(WIDTH))
    (alone,) = checkpoint_loop(lambda x: x < 100.0, lambda x: 2 * x, [1.0], every=2)
    assert alone == 128


def test_the_mask_of_dropout_is_that_of_the_forward_pass():
    x = tf.ones((64, WIDTH))
    with tf.GradientTape() as tape:
        tape.watch(x)
        _, h = checkpoint_loop(
            lambda i, h: i < 6, lambda i, h: (i + 1, tf.nn.dropout(h, 0.2)), [0, x], every=2
        )
    np.testing.assert_allclose(tape.gradient(h, x), h)


def make_step(loop, **options):
    w, x = tf.Variable(weight(128)), tf.ones((256, 128))
    return lambda: gradient(loop, 256, w, x, **options)


@pytest.mark.measured
def test_a_long_loop_takes_a_fraction_of_the_memory():
    ours = functools.partial(make_step, checkpoint_loop, every=16)
    assert function_peak(ours) < 0.4 * function_peak(make_step, tf.while_loop)


def test_in_a_graph_it_says_what_to_use():
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match=r"use tf\.while_loop under"):
        checkpoint_loop(lambda x: x < 1.0, lambda x: 2 * x, [1.0])


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((None, lambda h: h, [1.0]), TypeError, "cond must be a function"),
        ((lambda h: True, 3, [1.0]), TypeError, "body must be a function"),
        ((lambda h: True, lambda h: h, tf.ones(3)), TypeError, "list or tuple"),
        ((lambda h: True, lambda h: h, []), ValueError, "loop_vars is empty"),
        ((lambda h: True, lambda h: h, [1.0], 0), ValueError, "every must be 1 or more"),
        ((lambda h: True, lambda h: h, [1.0], 2.5), TypeError, "every must be an int"),
        (
            (lambda h: True, lambda h: h, [tf.TensorArray(tf.float32, 3)]),
            TypeError,
            "TensorArray",
        ),
    ],
)
def test_wrong_calls(arguments, error, says):
    with pytest.raises(error, match=says):
        checkpoint_loop(*arguments)
