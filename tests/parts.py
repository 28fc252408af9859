"""Small networks that call parts of theirs by `call`: plainly or as a `checkpoint`."""

import numpy as np
import tensorflow as tf

WIDTH = 16


def x_of(seed=5, rows=8):
    return tf.random.stateless_normal((rows, WIDTH), (seed, 2))


def weights():
    return [
        tf.Variable(tf.random.stateless_normal((WIDTH, WIDTH), (i, 1), stddev=0.3))
        for i in range(3)
    ]


def plainly(function, *args, policy=None, **kwargs):
    return function(*args, **kwargs)


def gradients_of(network, call, xs, persistent=False):
    """What a network makes, and its gradients by tensors; `call` calls its parts."""
    with tf.GradientTape(persistent=persistent) as tape:
        for x in xs:
            tape.watch(x)
        y = network(call, *xs)
    return y, tape.gradient(y, xs)


def one_part(call, w, x):
    return tf.reduce_sum(call(lambda x: tf.tanh(tf.tanh(x @ w) @ w), x) ** 2)


def several_inputs(call, w, x):
    """Some of which need no gradient."""
    table = tf.constant(np.arange(WIDTH, dtype=np.float32))
    index = tf.constant([3, 1, 2])

    def part(x, w, table, index):
        return tf.gather(tf.tanh(x @ w) * table, index)

    return tf.reduce_sum(call(part, x, w, table, index) ** 2)


def anything_in_nests(call, w, x):
    def part(inputs, scale, *, how, extra=None):
        assert how == "tanh"
        assert extra == {"name": [1, None, "a"]}
        h = getattr(tf, how)(inputs["x"] @ inputs["w"][0]) * scale
        return {"h": h, "count": 3, "parts": (h[0], [h[1] * 2.0, None])}

    made = call(part, {"x": x, "w": [w]}, 0.5, how="tanh", extra={"name": [1, None, "a"]})
    assert made["count"] == 3
    assert made["parts"][1][1] is None
    return tf.reduce_sum(made["h"]) + tf.reduce_sum(made["parts"][1][0] ** 2)


def unused_results(call, w, x):
    def part(x):
        h = tf.tanh(x @ w)
        return h, tf.exp(h), tf.argmax(h, 1)

    _, used, _ = call(part, x)
    return tf.reduce_sum(used)


def in_the_parts_of_a_part(call, w, x):
    def inner(x):
        return tf.sin(tf.tanh(x @ w))

    def outer(x):
        return call(inner, call(inner, x) + x) * 2.0

    return tf.reduce_sum(call(outer, x) ** 2)


def sparse_gradients(call, w, x):
    return tf.reduce_sum(call(lambda x: tf.gather(w, [1, 1, 3]) * tf.reduce_mean(x), x) ** 2)


def loops_and_branches(call, w, x):
    def part(x):
        _, x = tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, tf.tanh(x @ w)), (0, x))
        return tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.sin(x @ w), lambda: tf.cos(x))

    return tf.reduce_sum(call(part, x) ** 2)


def composite_tensors(call, w, x):
    def part(ragged, w):
        return tf.RaggedTensor.from_row_splits(tf.tanh(ragged.values @ w), ragged.row_splits)

    ragged = tf.RaggedTensor.from_row_splits(x, [0, 3, 8])
    return tf.reduce_sum(call(part, ragged, w).values ** 2)


def written_with_statements(call, w, x):
    """Python's `if` and `for` on tensors: AutoGraph's."""

    def part(x):
        h = tf.tanh(x @ w)
        for _ in tf.range(2):
            h = tf.sin(h)
        if tf.reduce_sum(h) > 1e9:
            h = h * 0.0
        return h

    return tf.reduce_sum(call(part, x) ** 2)


def complex_numbers(call, w, x):
    part = lambda x: tf.abs(tf.signal.fft(tf.complex(tf.sin(x @ w), x)))  # noqa: E731
    return tf.reduce_sum(call(part, x))


def with_its_own_gradient(call, w, x):
    @tf.custom_gradient
    def clipped(x):
        return x, lambda g: tf.clip_by_value(g, -0.1, 0.1)

    return tf.reduce_sum(call(lambda x: clipped(tf.tanh(x @ w)) * 3.0, x) ** 2)


def a_function_within(call, w, x):
    inner = tf.function(lambda x: tf.tanh(tf.sin(x @ w)))
    return tf.reduce_sum(call(lambda x: inner(inner(x)), x) ** 2)


NETWORKS = [
    one_part,
    several_inputs,
    anything_in_nests,
    unused_results,
    in_the_parts_of_a_part,
    sparse_gradients,
    loops_and_branches,
    composite_tensors,
    written_with_statements,
    complex_numbers,
    with_its_own_gradient,
    a_function_within,
]


def keep_products(op):
    return op.type == "MatMul"


POLICIES = {"none": None, "speed": "speed", "function": keep_products}


def assert_close(ours, plain):
    """Equal but for rounding: Grappler and XLA fuse the two programs differently."""
    for a, b in zip(tf.nest.flatten(ours, True), tf.nest.flatten(plain, True), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(np.abs(b).max(), 1e-30))
