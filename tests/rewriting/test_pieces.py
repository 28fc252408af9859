"""Regions in pieces: the values of the plain step, in as many pieces as there are, or more."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_saving_gradients.graph.shapes import InputSizes
from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.reading.growing import regions_of
from memory_saving_gradients.reading.read import read
from memory_saving_gradients.rewriting.pieces import in_pieces

v1 = tf.compat.v1

BATCH, TIME, WIDTH, WORDS, HEADS = 3, 20, 8, 40, 2
ROWS = BATCH * TIME


def sparse(labels, logits):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def flat(h, labels, weight):
    logits = tf.reshape(h, [-1, WIDTH]) @ weight("w", WIDTH, WORDS)
    return tf.reduce_mean(sparse(tf.reshape(labels, [-1]), logits))


def with_bias(h, labels, weight):
    logits = tf.tensordot(h, weight("w", WIDTH, WORDS), 1)
    return tf.reduce_mean(sparse(labels, tf.nn.bias_add(logits, weight("b", WORDS))))


def tied(h, labels, weight):
    table = weight("w", WORDS, WIDTH)
    h += tf.gather(table, labels)
    logits = tf.matmul(tf.reshape(h, [-1, WIDTH]), table, transpose_b=True)
    return tf.reduce_mean(sparse(tf.reshape(labels, [-1]), logits))


def smoothed(h, labels, weight):
    targets = 0.9 * tf.one_hot(labels, WORDS) + 0.1 / WORDS
    logits = tf.tensordot(h, weight("w", WIDTH, WORDS), 1)
    return tf.reduce_sum(tf.nn.softmax_cross_entropy_with_logits(targets, logits)) / ROWS


def weighted(h, labels, weight):
    used = tf.cast(labels > 3, tf.float32)
    lost = sparse(labels, tf.tensordot(h, weight("w", WIDTH, WORDS), 1)) * used
    return tf.reduce_sum(lost) / tf.reduce_sum(used)


def by_hand(h, labels, weight):
    logits = 5.0 * tf.tanh(tf.tensordot(h, weight("w", WIDTH, WORDS), 1) / 5.0)
    logits -= tf.stop_gradient(tf.reduce_max(logits, -1, keepdims=True))
    right = tf.gather(logits, labels, batch_dims=2)
    return tf.reduce_mean(tf.math.log(tf.reduce_sum(tf.exp(logits), -1)) - right)


def after_softmax(h, labels, weight):
    probabilities = tf.nn.softmax(tf.tensordot(h, weight("w", WIDTH, WORDS), 1))
    picked = tf.one_hot(labels, WORDS) * tf.math.log(tf.clip_by_value(probabilities, 1e-7, 1.0))
    return -tf.reduce_mean(tf.reduce_sum(picked, -1))


def by_batch_product(h, labels, weight):
    logits = tf.matmul(h, weight("w", 1, WIDTH, WORDS))
    return tf.reduce_mean(sparse(labels, logits))


def by_einsum(h, labels, weight):
    logits = tf.einsum("btw,wv->btv", h, weight("w", WIDTH, WORDS)) + weight("b", WORDS)
    return tf.reduce_mean(sparse(labels, logits))


def half(h, labels, weight):
    h, w = (tf.cast(t, tf.bfloat16) for t in (h, weight("w", WIDTH, WORDS)))
    logits = tf.cast(tf.tensordot(h, w, 1), tf.float32)
    return 128.0 * tf.reduce_mean(sparse(labels, logits))


def end(h):
    """A loss that needs all rows at once."""
    return tf.reduce_mean(tf.square(h - tf.reduce_mean(h, [0, 1])))


def mlp(h, labels, weight):
    wide = tf.nn.gelu(tf.tensordot(h, weight("w0", WIDTH, WORDS), 1) + weight("b", WORDS))
    return end(h + tf.tensordot(wide, weight("w1", WORDS, WIDTH), 1))


def two_mlps(h, labels, weight):
    """The second region reads what the first one makes."""
    for i in range(2):
        wide = tf.nn.relu(tf.tensordot(h, weight(f"in{i}", WIDTH, WORDS), 1))
        h = tf.tensordot(wide, weight(f"out{i}", WORDS, WIDTH), 1)
    return end(h)


def attention(h, labels, weight, mask=None, dropout=0.0):
    mixed = tf.tensordot(h, weight("qkv", WIDTH, 3 * WIDTH * HEADS), 1)
    mixed = tf.reshape(mixed, [-1, TIME, 3, HEADS, WIDTH])
    q, k, v = tf.unstack(tf.transpose(mixed, [2, 0, 3, 1, 4]))
    scores = tf.matmul(q, k, transpose_b=True) * WIDTH**-0.5
    if mask is not None:
        scores = tf.where(mask, scores, -1e9)
    scores = tf.nn.softmax(scores)
    if dropout:
        kept = tf.random.stateless_uniform(tf.shape(scores), (1, 2)) >= dropout
        scores = tf.where(kept, scores / (1 - dropout), 0.0)
    return end(h + tf.reduce_mean(tf.matmul(scores, v), 1))


def causal(h, labels, weight):
    return attention(h, labels, weight, tf.linalg.band_part(tf.ones((TIME, TIME)), -1, 0) > 0)


def masked(h, labels, weight):
    return attention(h, labels, weight, (labels > 9)[:, None, None, :])


def dropped(h, labels, weight):
    return attention(h, labels, weight, dropout=0.3)


HEADS_OF_LOSSES = [
    flat, with_bias, tied, smoothed, weighted, by_hand, after_softmax, by_batch_product, by_einsum,
    half,
]  # fmt: skip
ATTENTION = [attention, causal, masked, dropped]
IN_THE_MIDDLE = [mlp, two_mlps, *ATTENTION]


class Network:
    """A network with one form in it, its gradients, and the regions that were found."""

    def __init__(self, form, known, dtype=np.float32):
        random = np.random.default_rng(0)
        batch = BATCH if known == "all" else None
        time = None if known == "none" else TIME
        self.weights = []

        def weight(name, *shape):
            value = (random.standard_normal(shape) * 0.5).astype(dtype)
            self.weights.append(v1.get_variable(name, initializer=value, use_resource=True))
            return self.weights[-1] + 0.0

        self.graph = tf.Graph()
        with self.graph.as_default():
            x = v1.placeholder(dtype, (batch, time, WIDTH))
            labels = v1.placeholder(tf.int32, (batch, time))
            h = tf.tanh(tf.tensordot(x, weight("first", WIDTH, WIDTH), 1))
            self.loss = form(h, labels, weight)
            first_new = len(self.graph.get_operations())
            grads = tf.gradients(self.loss, [x, *self.weights])
            step = BackwardPass.since(first_new, self.loss, [*map(tf.convert_to_tensor, grads)])
        sizes = InputSizes(None if known == "all" else BATCH)
        reading = read(step, sizes=sizes)
        self.step, (self.regions, self.whole) = step, regions_of(reading, 4 * ROWS * WIDTH)
        self.inputs = x, labels
        self.session = v1.Session(graph=self.graph)
        with self.graph.as_default():
            self.session.run(v1.global_variables_initializer())

    def run(self, batch=BATCH):
        random = np.random.default_rng(1)
        fed = (
            random.standard_normal((batch, TIME, WIDTH)),
            random.integers(0, WORDS, (batch, TIME)),
        )
        feed = dict(zip(self.inputs, fed, strict=True))
        return self.session.run([self.loss, *self.step.results], feed)

    def split(self, count):
        """Makes the regions of the largest tensors run in pieces; returns the first."""
        largest = [one for one in self.regions if one.bytes == self.regions[0].bytes]
        with self.graph.as_default():
            self.step = in_pieces(self.step, dict.fromkeys(largest, count))
        return largest[0]


def check(form, known, count, batch=BATCH, dtype=np.float32):
    network = Network(form, known, dtype)
    plain = network.run(batch)
    region = network.split(count)
    ours = network.run(batch)
    if form in HEADS_OF_LOSSES and form is not half:
        np.testing.assert_array_equal(ours[0], plain[0], err_msg="the loss")
    exact = 1e-6 if form is not half else 0.02
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=exact * np.abs(b).max())
    return network, region


@pytest.mark.parametrize("known", ["all", "time", "none"])
@pytest.mark.parametrize("form", HEADS_OF_LOSSES + IN_THE_MIDDLE, ids=lambda form: form.__name__)
@pytest.mark.sweep(2)
def test_the_values_are_those_of_the_plain_step(form, known):
    if known == "none" and form in ATTENTION:
        return  # these write the number of tokens into the graph
    if known == "none" and form in (with_bias, weighted, half, mlp, two_mlps):
        whole = Network(form, known).whole["Tensordot_1/MatMul:0"]
        assert "reads the shape of" in whole
        return
    network, region = check(form, known, 2)
    assert region.at_once == (form in HEADS_OF_LOSSES)
    assert region.largest.op not in network.step.needed, "it is still computed at once"


@pytest.mark.parametrize("count", [3, ROWS + 5])
@pytest.mark.parametrize("form", [with_bias, attention, mlp], ids=lambda form: form.__name__)
def test_in_any_number_of_pieces(form, count):
    check(form, "time", count)


@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("form", [flat, by_hand, mlp], ids=lambda form: form.__name__)
def test_for_any_batch(form, batch):
    check(form, "time" if form is mlp else "none", 4, batch)


def test_an_op_that_needs_all_rows_is_named():
    def normalised(h, labels, weight):
        logits = tf.tensordot(h, weight("w", WIDTH, WORDS), 1)
        mean, variance = tf.nn.moments(logits, [0, 1])
        return tf.reduce_mean(sparse(labels, (logits - mean) * tf.math.rsqrt(variance + 1e-3)))

    network = Network(normalised, "all")
    assert not any("Tensordot/MatMul" in region.name for region in network.regions)
    assert any("reads all rows" in why for why in network.whole.values())


def test_what_the_step_returns_stays_whole():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, (ROWS, WIDTH))
        logits = tf.tanh(x @ tf.ones((WIDTH, WORDS)))
        first_new = len(graph.get_operations())
        (grad,) = tf.gradients(tf.reduce_mean(tf.square(logits)), [logits])
        reading = read(BackwardPass.since(first_new, logits, [grad]))
        regions, whole = regions_of(reading, 4 * ROWS)
    assert not regions
    assert "the step returns" in whole[grad.name]


#: What a random network does to its rows.
ROW_WISE = {
    "tanh": lambda h, weight: tf.tanh(h),
    "dense": lambda h, weight: tf.tensordot(h, weight("dense", h.shape[-1], 24), 1),
    "bias": lambda h, weight: tf.nn.bias_add(h, weight("bias", h.shape[-1])),
    "scaled": lambda h, weight: h * weight("scale", 1, 1, h.shape[-1]),
    "norm": lambda h, weight: h - tf.reduce_mean(h, -1, keepdims=True),
    "softmax": lambda h, weight: tf.nn.softmax(h),
    "largest": lambda h, weight: h / (1 + tf.reduce_max(tf.abs(h), -1, keepdims=True)),
    "flat": lambda h, weight: tf.reshape(tf.reshape(h, [-1, h.shape[-1]]) * 2, tf.shape(h)),
    "clipped": lambda h, weight: tf.where(h > 0, h, 0.1 * h),
    "twice": lambda h, weight: tf.concat([h, tf.square(h)], -1),
    "steps": lambda h, weight: h + tf.reduce_mean(h, 1, keepdims=True),
}


@given(
    st.lists(st.sampled_from(sorted(ROW_WISE)), min_size=1, max_size=6),
    st.sampled_from([1, 2, 3, ROWS, ROWS + 5]),
    st.sampled_from(["all", "time"]),
    st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_random_networks(names, count, known, in_the_middle):
    def form(h, labels, weight):
        for i, name in enumerate(["dense", *names]):
            h = ROW_WISE[name](h, lambda name, *shape, i=i: weight(f"{name}{i}", *shape))
        return end(h) if in_the_middle else tf.reduce_mean(tf.reduce_logsumexp(h, -1))

    # In double precision, as gradients may be small differences of large terms.
    if Network(form, known, np.float64).regions:
        check(form, known, count, dtype=np.float64)
