"""`checkpoint_sequential()`: segments of equal cost."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from memory_saving_gradients import checkpoint_sequential
from memory_saving_gradients.by_hand import sequential
from memory_saving_gradients.measure import function_peak
from tests.cases import assert_same


def gradients_of(call, layers, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = call(layers, x)
        loss = tf.reduce_sum(y**2)
    weights = [v.value for layer in layers for v in getattr(layer, "trainable_variables", ())]
    return [y, *tape.gradient(loss, [x, *weights])]


def one_by_one(layers, x):
    for layer in layers:
        x = layer(x)
    return x


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("segments", [1, 2, 3, 7, 50])
def test_the_gradients_are_those_of_the_layers(segments):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.layers.Dense(16, "tanh") for _ in range(5)]
        + [keras.layers.BatchNormalization(), keras.layers.Reshape((4, 4)), keras.layers.Flatten()]
    )
    x = tf.random.stateless_normal((8, 16), (1, 2))
    model(x)
    plain = gradients_of(one_by_one, model.layers, x)
    for layers in (model, model.layers, tuple(model.layers)):
        ours = gradients_of(
            lambda _, x, layers=layers: checkpoint_sequential(layers, segments, x), model.layers, x
        )
        assert_same(ours, plain)


def test_anything_goes_from_function_to_function():
    functions = [
        lambda x: {"x": tf.tanh(x), "n": 2},
        lambda made: (tf.sin(made["x"]), made["n"]),
        lambda made: made[0] * made[1],
    ]
    x = tf.random.stateless_normal((8, 16), (1, 2))
    ours = gradients_of(lambda f, x: checkpoint_sequential(f, 2, x), functions, x)
    for a, b in zip(ours, gradients_of(one_by_one, functions, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 9))
def test_no_segments_are_more_equal(costs, count):
    count = min(count, len(costs))
    found = sequential._segments([*range(len(costs))], costs, count)
    assert [one for part in found for one in part] == [*range(len(costs))]
    assert len(found) == count
    assert all(found)

    def squares(parts):
        return sum(sum(costs[i] for i in part) ** 2 for part in parts)

    for cuts in itertools.combinations(range(1, len(costs)), count - 1):
        ends = [0, *cuts, len(costs)]
        other = [range(a, b) for a, b in itertools.pairwise(ends)]
        assert squares(found) <= squares(other)


def test_dear_layers_get_segments_of_their_own():
    layers = [keras.layers.Dense(width) for width in (512, 512, 4, 4, 4, 4)]
    x = tf.ones((64, 512))
    costs = sequential._estimated(sequential.Called.of(sequential._run, (layers, x), {}), None)
    assert [len(part) for part in sequential._segments(layers, costs, 3)] == [1, 1, 4]


LAYERS, ROWS, WIDTH = 32, 4096, 128


def make_step(segments):
    layers = [keras.layers.Dense(WIDTH, "tanh") for _ in range(LAYERS)]
    x = tf.ones((ROWS, WIDTH))

    def step():
        call = one_by_one if segments is None else _in_segments(segments)
        return gradients_of(call, layers, x)[1:2]

    return step


def _in_segments(segments):
    return lambda layers, x: checkpoint_sequential(layers, segments, x)


@pytest.mark.measured
def test_segments_take_less_memory():
    plain, ours = (function_peak(make_step, segments) for segments in (None, 6))
    assert ours < 0.45 * plain


def test_wrong_calls():
    x = tf.ones((2, 2))
    with pytest.raises(TypeError, match="must be a list of functions"):
        checkpoint_sequential(3, 2, x)
    with pytest.raises(TypeError, match="cannot be called"):
        checkpoint_sequential([tf.tanh, 3], 2, x)
    with pytest.raises(ValueError, match="functions is empty"):
        checkpoint_sequential([], 2, x)
    with pytest.raises(ValueError, match="segments must be 1 or more, got 0"):
        checkpoint_sequential([tf.tanh], 0, x)
    with pytest.raises(TypeError, match="segments must be an int"):
        checkpoint_sequential([tf.tanh], 2.0, x)
