"""Random numbers and variables: the recomputed pass sees what the forward pass saw."""

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import get_plans, gradients
from memory_saving_gradients.rewriting.run import COPY
from tests.cases import assert_same

WIDTH = 32


def stateful(_):
    return lambda x: x * tf.cast(tf.random.uniform(tf.shape(x)) > 0.3, x.dtype)


def normal(_):
    return lambda x: x + tf.random.normal(tf.shape(x), stddev=0.1)


def seeded(_):
    return lambda x: tf.nn.dropout(x, 0.3, seed=4)


def unseeded(_):
    return lambda x: tf.nn.dropout(x, 0.3)


def stateless(_):
    return lambda x: tf.nn.experimental.stateless_dropout(x, 0.3, seed=(1, 2))


def generator(made):
    made.append(tf.random.Generator.from_seed(5))
    return lambda x: x * tf.cast(made[0].uniform((256, WIDTH)) > 0.3, x.dtype)


def seed_generator(made):
    made.append(tf.keras.random.SeedGenerator(6))
    return lambda x: tf.keras.random.dropout(x, 0.3, seed=made[0])


def keras_layer(made):
    made.append(tf.keras.layers.Dropout(0.3, seed=7))
    return lambda x: made[0](x, training=True)


def gaussian_noise(made):
    made.append(tf.keras.layers.GaussianNoise(0.1, seed=8))
    return lambda x: made[0](x, training=True)


def categorical(_):
    return lambda x: x * tf.cast(tf.random.categorical(x, WIDTH) + 1, x.dtype) / WIDTH


SOURCES = [
    stateful,
    normal,
    seeded,
    unseeded,
    stateless,
    generator,
    seed_generator,
    keras_layer,
    gaussian_noise,
    categorical,
]


@pytest.mark.parametrize("how", [{"checkpoints": "memory"}, {"memory_budget": 0.5}])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.sweep(3)
def test_the_mask_is_the_forward_passs(source, how):
    """Both gradients are taken in one step, so that unseeded masks are the same for both."""
    draw = source([])
    initial = tf.random.stateless_normal((6, WIDTH, WIDTH), (1, 2), stddev=0.3)
    weights = [tf.Variable(one) for one in tf.unstack(initial)]

    @tf.function(autograph=False)
    def step(x):
        h = x
        for w in weights:
            h = tf.tanh(draw(tf.sin(tf.tanh(tf.matmul(h, w)))))
        loss = tf.reduce_mean(h)
        plain = tf.gradients(loss, [x, *weights])
        return gradients(loss, [x, *weights], **how), plain

    x = tf.random.stateless_normal((256, WIDTH), (3, 4))
    assert_same(*step(x))
    assert_same(*step(x))
    graph = step.get_concrete_function(x).graph
    assert get_plans(graph)[-1].recomputed
    again = {op.type for op in graph.get_operations() if COPY in op.name and op.op_def.is_stateful}
    assert not again


@pytest.mark.parametrize("source", [stateful, seeded, unseeded])
def test_the_small_mask_is_kept_not_the_numbers(source):
    @tf.function(autograph=False)
    def step(x):
        h = x
        for _ in range(6):
            h = tf.tanh(source([])(tf.sin(tf.tanh(h))))
        return gradients(h, x, checkpoints="memory")

    graph = step.get_concrete_function(tf.TensorSpec((256, WIDTH))).graph
    (plan,) = get_plans(graph)
    kept = [graph.get_tensor_by_name(name) for name in plan.checkpoints]
    masks = [tensor for tensor in kept if tensor.dtype == tf.bool]
    assert masks
    assert not any("Random" in tensor.op.type for tensor in kept)
    # Of the last layer nothing runs again, as its gradient comes first.
    floats = [tensor for tensor in kept if tensor.op.type in ("Cast", "SelectV2")]
    assert len(floats) <= 1


# Variables.


class Spectral:
    """A matrix divided by its largest singular value, whose vector each step improves."""

    def __init__(self):
        self.w = tf.Variable(tf.random.stateless_normal((WIDTH, WIDTH), (5, 6)))
        self.u = tf.Variable(tf.ones((1, WIDTH)), trainable=False)

    def __call__(self, x):
        v = tf.math.l2_normalize(tf.matmul(self.u, self.w, transpose_b=True))
        u = tf.stop_gradient(tf.math.l2_normalize(tf.matmul(v, self.w)))
        self.u.assign(u)
        sigma = tf.matmul(tf.matmul(tf.stop_gradient(v), self.w), u, transpose_b=True)
        return tf.matmul(x, self.w / sigma)


class Moving:
    """Normalisation by moving averages that the forward pass updates and reads again."""

    def __init__(self):
        self.w = tf.Variable(tf.ones((WIDTH,)))
        self.mean = tf.Variable(tf.zeros((WIDTH,)), trainable=False)

    def __call__(self, x):
        before = self.mean.read_value()
        self.mean.assign(0.9 * before + 0.1 * tf.reduce_mean(x, 0))
        return (x - self.mean.read_value()) * self.w + before


class Scaled:
    """A weight that is doubled between two reads."""

    def __init__(self):
        self.w = tf.Variable(tf.ones((WIDTH,)) * 0.5)

    def __call__(self, x):
        x = x * self.w.read_value()
        self.w.assign(self.w * 1.5)
        return tf.sin(x) * self.w.read_value()


class Looked:
    """Rows of a table, by a lookup of what the activations say."""

    def __init__(self):
        self.w = tf.Variable(tf.random.stateless_normal((4, WIDTH), (7, 8)))
        pairs = tf.lookup.KeyValueTensorInitializer(tf.range(4), tf.constant([3, 1, 0, 2]))
        self.table = tf.lookup.StaticHashTable(pairs, default_value=0)

    def __call__(self, x):
        key = tf.cast(tf.reduce_sum(x, 1) > 0, tf.int32) + 2
        return x + tf.nn.embedding_lookup(self.w, self.table.lookup(key))


class InLoop:
    """A variable that a loop reads, and one that it counts in."""

    def __init__(self):
        self.w = tf.Variable(tf.random.stateless_normal((WIDTH, WIDTH), (1, 2), stddev=0.3))
        self.rounds = tf.Variable(0, trainable=False)

    def __call__(self, x):
        def body(i, h):
            self.rounds.assign_add(1)
            return i + 1, tf.tanh(tf.matmul(h, self.w))

        return tf.while_loop(lambda i, _: i < 3, body, [0, x])[1]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("layer", [Spectral, Moving, Scaled, Looked, InLoop])
def test_variables_are_read_when_they_were_and_written_once(layer):
    def run(differentiate):
        layers = [layer() for _ in range(4)]
        weights = [one.w for one in layers]

        @tf.function(autograph=False)
        def step(x):
            h = x
            for one in layers:
                h = tf.tanh(one(tf.sin(tf.tanh(h))))
            loss = tf.reduce_mean(h**2)
            grads = differentiate(loss, weights)
            for weight, grad in zip(weights, grads, strict=True):
                if isinstance(grad, tf.IndexedSlices):
                    grad = tf.convert_to_tensor(grad)
                weight.assign_sub(0.1 * grad)
            return loss, grads

        x = tf.random.stateless_normal((256, WIDTH), (3, 4))
        values = [step(x) for _ in range(2)]
        state = [v.numpy() for one in layers for v in vars(one).values() if hasattr(v, "assign")]
        plans = get_plans(step.get_concrete_function(x).graph)
        return [*tf.nest.flatten(values, expand_composites=True), *state], plans

    plain, _ = run(tf.gradients)
    ours, plans = run(lambda ys, xs: gradients(ys, xs, checkpoints="memory"))
    assert plans[-1].recomputed
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_array_equal(a, b)
