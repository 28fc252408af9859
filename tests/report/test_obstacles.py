"""The warnings that say what stands in the way, and what to try."""

import re

import pytest
import tensorflow as tf

from memory_saving_gradients import get_plans, gradients

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
            h = h * tf.random.normal(h.shape, stddev=0.5)
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


@pytest.mark.parametrize("given", [["layer_0"], [r"layer_\d+"], lambda op: op.name == "layer_11"])
def test_where_checkpoints_were_given_it_says_what_memory_would_give(graph, given):
    loss, xs = layers()
    with pytest.warns(UserWarning, match="saves (nothing|little) here") as warned:
        gradients(loss, xs, checkpoints=given)
    with tf.Graph().as_default():
        gradients(*layers(), checkpoints="memory")
        (memory,) = get_plans()
    assert str(warned[0].message).endswith(
        f'checkpoints="memory" would give {memory.peak_bytes / 1e6:.1f} MB at an overhead of '
        f"{memory.overhead:.1%}."
    )
    assert memory.peak_bytes < 0.8 * memory.baseline_peak_bytes


def test_it_does_not_say_so_where_memory_was_asked_for(graph):
    with pytest.warns(UserWarning, match="saves nothing here") as warned:
        gradients(*noise(), checkpoints="memory")
    assert "would give" not in str(warned[0].message)
