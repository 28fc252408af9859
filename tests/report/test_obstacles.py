"""The warnings that say what stands in the way, and what to try."""

import re

import pytest
import tensorflow as tf

from memory_saving_gradients import gradients

v1 = tf.compat.v1


def table():
    """An embedding matrix that is read whole."""
    weights = tf.Variable(tf.zeros((20_000, 64)))
    with tf.name_scope("embedding"):
        h = v1.placeholder(tf.float32, (8, 20_000)) @ weights
    for _ in range(4):
        h = tf.tanh(h)
    return tf.reduce_sum(h), [weights]


def noise():
    """Noise of the size of all activations, which cannot be drawn twice."""
    x = v1.placeholder(tf.float32, (500, 1000))
    h = x
    for i in range(8):
        with tf.name_scope(f"noisy_{i}"):
            h = h * tf.random.normal(h.shape)
    return tf.reduce_sum(h), [x]


def layers():
    x = h = v1.placeholder(tf.float32, (500, 1000))
    for i in range(12):
        h = tf.tanh(h, name=f"layer_{i}")
    return tf.reduce_sum(h), [x]


CASES = {
    "gradient of weights": (table, "memory", r"\d\d% of the peak is gradient of weights \(embedd"),
    "what cannot run twice": (noise, "memory", r"twice \(RandomStandardNormal\).*stateless"),
    "checkpoints at the start": (layers, ["layer_0"], "spread over the network"),
    "all is given": (layers, [r"layer_\d+"], "you gave most of these.*fewer"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_named(graph, name):
    build, checkpoints, said = CASES[name]
    loss, xs = build()
    with pytest.warns(UserWarning, match="saves (nothing|little) here") as warned:
        gradients(loss, xs, checkpoints=checkpoints)
    assert re.search(said, str(warned[0].message)), warned[0].message


def test_nobody_is_bothered_where_much_is_saved(graph, recwarn):
    loss, xs = layers()
    gradients(loss, xs, checkpoints="memory")
    gradients(loss, xs, memory_budget=0.9)
    assert not recwarn.list
