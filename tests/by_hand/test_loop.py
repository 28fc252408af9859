"""A loop in segments by hand: the values of `tf.while_loop`, in less memory."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import checkpoint_loop
from memory_saving_gradients.measure import function_peak

WIDTH = 16


def plain_loop(cond, body, loop_vars, every=None, **options):
    return tf.while_loop(cond, body, loop_vars, **options)


def weight(width=WIDTH):
    return np.random.default_rng(0).normal(scale=0.3, size=(width, width)).astype(np.float32)


def gradient(loop, rounds, w, x, **options):
    """The state after so many rounds, and its gradients by the weight and the first state."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        results = loop(
            lambda i, h: i < rounds,
            lambda i, h: (i + 1, tf.tanh(h @ w + tf.cast(i, tf.float32) * 0.1)),
            [0, x],
            **options,
        )
        loss = tf.reduce_sum(results[1] ** 2)
    return [results[0], results[1], *tape.gradient(loss, [w, x])]


def in_a_session(make):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        w, x = tf.compat.v1.get_variable("w", initializer=weight()), tf.ones((4, WIDTH))
        tensors = make(w, x)
        session.run(tf.compat.v1.global_variables_initializer())
        return session.run(tensors)


HOW = {
    "eager": lambda make: make(tf.Variable(weight()), tf.ones((4, WIDTH))),
    "function": lambda make: tf.function(functools.partial(make, tf.Variable(weight())))(
        tf.ones((4, WIDTH))
    ),
    "session": in_a_session,
}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("rounds", [0, 1, 4, 5, 6, 23])
@pytest.mark.parametrize("how", HOW)
def test_values_are_those_of_a_while_loop(how, rounds):
    ours = HOW[how](lambda w, x: gradient(checkpoint_loop, rounds, w, x, every=5))
    plain = HOW[how](lambda w, x: gradient(plain_loop, rounds, w, x))
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{}, {"maximum_iterations": 9}, {"every": tf.constant(3)}, {"maximum_iterations": 0}],
)
def test_how_many_rounds(options):
    w, x = tf.Variable(weight()), tf.ones((4, WIDTH))
    ours = gradient(checkpoint_loop, 40, w, x, **options)
    options.pop("every", None)
    for a, b in zip(ours, gradient(plain_loop, 40, w, x, **options), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_nests_growing_shapes_and_one_variable():
    @tf.function
    def grown(x):
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
        return state["h"], tape.gradient(loss, x)

    h, by_x = grown(tf.ones((2, WIDTH)))
    assert h.shape == (9, WIDTH)
    np.testing.assert_allclose(by_x[0], 2 * (1 + 7 * 4) * np.ones(WIDTH))
    (alone,) = checkpoint_loop(lambda x: x < 100.0, lambda x: 2 * x, [1.0], every=2)
    assert alone == 128


def test_the_mask_of_dropout_is_that_of_the_forward_pass():
    x = tf.ones((64, WIDTH))
    with tf.GradientTape() as tape:
        tape.watch(x)
        _, h = checkpoint_loop(
            lambda i, h: i < 6, lambda i, h: (i + 1, tf.nn.dropout(h, 0.2)), [0, x], every=2
        )
    np.testing.assert_allclose(tape.gradient(h, x) * x, h)


def make_step(loop, eager):
    w, x = tf.Variable(weight(128)), tf.ones((256, 128))

    def step():
        return gradient(loop, 256, w, x, **({"every": 16} if loop is checkpoint_loop else {}))

    return step if eager else tf.function(step)


@pytest.mark.measured
@pytest.mark.parametrize("eager", [False, True])
def test_a_long_loop_takes_a_fraction_of_the_memory(eager):
    assert function_peak(make_step, checkpoint_loop, eager) < 0.4 * function_peak(
        make_step, plain_loop, eager
    )


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
