"""The layers of which random networks are made: from tensors of one shape to such tensors.

A layer takes a builder and as many tensors of shape (ROWS, WIDTH) as it has further parameters, and
returns one such tensor or a list of them.
"""

import functools
import inspect

import numpy as np
import tensorflow as tf

ROWS, WIDTH = 256, 16


class Builder:
    """Makes the variables of a random network; when it is built again, it gets the same ones."""

    def __init__(self):
        self.trainable, self.others = [], []

    def begin(self):
        self._left = {id(kind): [*kind] for kind in (self.trainable, self.others)}

    def weights(self, *shape):
        seed = (1, len(self.trainable))
        normal = functools.partial(tf.random.stateless_normal, stddev=shape[0] ** -0.5)
        return self._next(self.trainable, lambda: normal(shape, seed))

    def state(self, *shape):
        return self._next(self.others, lambda: tf.ones(shape))

    def _next(self, kind, initial):
        left = self._left[id(kind)]
        if left:
            return left.pop(0)
        with tf.init_scope():
            kind.append(tf.Variable(initial(), trainable=kind is self.trainable))
        return kind[-1]


def image(x):
    return tf.reshape(x, [ROWS // 16, 4, 4, WIDTH])


def flat(x):
    return tf.reshape(x, [ROWS, WIDTH])


def table(x):
    return tf.reshape(x, [4, ROWS // 4, WIDTH])


# fmt: off
def elementwise(function):
    return lambda b, x: function(x)


OPS = {name: elementwise(getattr(tf.nn, name)) for name in (
    "relu", "relu6", "elu", "selu", "leaky_relu", "softplus", "softsign", "sigmoid", "swish",
    "gelu", "softmax", "log_softmax", "tanh",
)}
OPS |= {name: elementwise(getattr(tf, name)) for name in (
    "sin", "cos", "square", "abs", "negative", "identity", "floor", "sign",
)}
OPS |= {name: elementwise(getattr(tf.math, name)) for name in ("erf", "expm1", "atan", "cumsum")}
# fmt: on


def layer(function):
    OPS[function.__name__] = function
    return function


def arity(name):
    return len(inspect.signature(OPS[name]).parameters) - 1


# Element by element.


@layer
def add(b, x, y):
    return x + y


@layer
def subtract(b, x, y):
    return x - y


@layer
def multiply(b, x, y):
    return x * y


@layer
def divide(b, x, y):
    return x / (1.0 + tf.square(y))


@layer
def maximum(b, x, y):
    return tf.maximum(x, y)


@layer
def squared_difference(b, x, y):
    return tf.math.squared_difference(x, y)


@layer
def select(b, x, y):
    return tf.where(x > y, x, tf.sin(y))


@layer
def add_n(b, x, y, z):
    # Not x, y and z themselves: if others read them, the rounding is a matter of time (README).
    return tf.add_n([tf.sin(x), tf.cos(y), tf.tanh(z)])


@layer
def root(b, x):
    return tf.sqrt(1.0 + tf.abs(x)) + tf.math.rsqrt(2.0 + tf.abs(x))


@layer
def clip(b, x):
    return tf.clip_by_value(x, -0.5, 0.5)


@layer
def half_precision(b, x):
    return tf.cast(tf.tanh(tf.cast(x, tf.float16)), tf.float32)


@layer
def double_precision(b, x):
    return tf.cast(tf.sin(tf.cast(x, tf.float64)), tf.float32)


@layer
def stopped(b, x):
    return x * tf.stop_gradient(tf.cos(x))


# Sums and shapes.


@layer
def layer_norm(b, x):
    mean, variance = tf.nn.moments(x, [1], keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-3)


@layer
def reduce_and_broadcast(b, x):
    return tf.broadcast_to(tf.reduce_sum(x, 0, keepdims=True) / ROWS, (ROWS, WIDTH)) + tf.sin(x)


@layer
def reduce_max(b, x):
    return x - tf.reduce_max(x, axis=1, keepdims=True)


@layer
def transpose(b, x):
    return flat(tf.transpose(table(x), [1, 0, 2]))


@layer
def concat(b, x, y):
    return tf.concat([x[:, : WIDTH // 2], y[:, WIDTH // 2 :]], 1)


@layer
def pad(b, x):
    return tf.pad(x, [[0, 0], [1, 0]])[:, :WIDTH]


@layer
def tile(b, x):
    return tf.tile(x[:, :4], [1, WIDTH // 4])


@layer
def roll(b, x):
    return tf.roll(x, 3, 0)


@layer
def reverse(b, x):
    return tf.reverse(x, [1])


@layer
def gather(b, x):
    return tf.gather(x, np.arange(ROWS)[::-1] // 2)


@layer
def scatter(b, x):
    return tf.scatter_nd(np.arange(ROWS)[:, None] // 2, x, (ROWS, WIDTH))


@layer
def dynamic_partition(b, x):
    rows = np.arange(ROWS, dtype=np.int32)
    where = tf.cast(tf.reduce_sum(x, 1) > 0, tf.int32)
    parts = tf.dynamic_partition(x, where, 2)
    return tf.ensure_shape(
        tf.dynamic_stitch(tf.dynamic_partition(rows, where, 2), [tf.sin(parts[0]), parts[1]]),
        (ROWS, WIDTH),
    )


@layer
def top_k(b, x):
    return tf.math.top_k(x, WIDTH).values


@layer
def split(b, x):
    return [tf.concat([part, part], 1) for part in tf.split(x, 2, axis=1)]


@layer
def unstack(b, x):
    parts = tf.unstack(table(x))
    return [flat(tf.stack(parts[::-1])), flat(tf.stack([parts[0]] * 4))]


# Weights.


@layer
def dense(b, x):
    return tf.nn.bias_add(tf.matmul(x, b.weights(WIDTH, WIDTH)), b.weights(WIDTH))


@layer
def shared_dense(b, x, y):
    w = b.weights(WIDTH, WIDTH)
    return [tf.tanh(tf.matmul(x, w)), tf.tanh(tf.matmul(y, w))]


@layer
def outer_product(b, x, y):
    return tf.matmul(x, tf.matmul(x, y, transpose_a=True)) / ROWS


@layer
def attention(b, x):
    q = table(x)
    return flat(tf.matmul(tf.nn.softmax(tf.matmul(q, q, transpose_b=True)), q))


@layer
def einsum(b, x):
    return flat(tf.einsum("abc,cd->abd", table(x), b.weights(WIDTH, WIDTH)))


@layer
def convolution(b, x):
    return flat(tf.nn.conv2d(image(x), b.weights(3, 3, WIDTH, WIDTH), 1, "SAME"))


@layer
def depthwise(b, x):
    return flat(tf.nn.depthwise_conv2d(image(x), b.weights(3, 3, WIDTH, 1), [1] * 4, "SAME"))


@layer
def max_pool(b, x):
    return flat(tf.nn.max_pool2d(image(x), 3, 1, "SAME"))


@layer
def avg_pool(b, x):
    return flat(tf.nn.avg_pool2d(image(x), 2, 1, "SAME"))


@layer
def batch_norm(b, x):
    scale, offset = b.weights(WIDTH) + 1.0, b.weights(WIDTH)
    moving = b.state(WIDTH)
    y, mean, _ = tf.compat.v1.nn.fused_batch_norm(image(x), scale, offset)
    with tf.control_dependencies([moving.assign_add(mean, read_value=False)]):
        return tf.identity(flat(y))


@layer
def embedding(b, x):
    rows = tf.argmax(x, 1)
    return x + tf.nn.embedding_lookup(b.weights(WIDTH, WIDTH), rows)


@layer
def fourier(b, x):
    return tf.signal.irfft(tf.signal.rfft(x) * tf.complex(0.5, 0.5), [WIDTH])


# What must not run twice.


@layer
def dropout(b, x):
    return tf.nn.dropout(x, 0.5, seed=5)


@layer
def noise(b, x):
    return x * tf.random.normal((ROWS, WIDTH), 1.0, 0.1, seed=6)


@layer
def stateless_noise(b, x):
    return x + tf.random.stateless_uniform((ROWS, WIDTH), (1, 2))


@layer
def counter(b, x):
    count = b.state().assign_add(1.0, read_value=True)
    return x * tf.fill((ROWS, WIDTH), count)


@layer
def read_before_and_after(b, x):
    state = b.state(WIDTH)
    before = x * state.read_value()
    with (
        tf.control_dependencies([before]),
        tf.control_dependencies([state.assign_add([0.5] * WIDTH)]),
    ):
        return before + tf.sin(x) * state.read_value()


@layer
def python(b, x):
    y = tf.numpy_function(np.cos, [tf.stop_gradient(x)], tf.float32, stateful=True)
    return x * tf.ensure_shape(y, (ROWS, WIDTH))


# Functions.


@layer
def branch(b, x):
    w = b.weights(WIDTH, WIDTH)
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.tanh(tf.matmul(x, w)), lambda: tf.sin(x))


@layer
def branch_with_dropout(b, x):
    drop = lambda: tf.nn.dropout(tf.sin(x), 0.5, seed=7)  # noqa: E731
    return tf.cond(tf.reduce_sum(x) > 0, drop, lambda: tf.cos(x))


@layer
def loop(b, x):
    w = b.weights(WIDTH, WIDTH)

    def body(i, h):
        return i + 1, tf.tanh(tf.matmul(h, w))

    return tf.while_loop(lambda i, _: i < 3, body, [0, x])[1]


@layer
def map_fn(b, x):
    return flat(tf.map_fn(lambda row: tf.sin(row) * row, table(x)))


@layer
def called(b, x):
    return tf.function(lambda x: tf.tanh(tf.cos(x)), autograph=False)(x)


@layer
def custom_gradient(b, x):
    @tf.custom_gradient
    def clipped(x):
        y = tf.tanh(x)
        return y, lambda dy: tf.clip_by_value(dy, -0.1, 0.1) * (1.0 - y * y)

    return clipped(x)
