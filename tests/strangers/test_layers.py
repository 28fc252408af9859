"""Every public layer of Keras, in a small network: the same gradients and state as plain."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import checkpoint
from tests.strangers.layers import ALIASES, LAYERS, SKIPPED, inputs
from tests.strangers.steps import WAYS, compare, gradients_of, todays


def around(name):
    """A small network around a layer, its inputs and its variables."""
    entry = LAYERS[name]
    keras.utils.set_random_seed(3)
    layer = entry.make()
    arrays = inputs(entry)
    entry.apply(layer, *map(tf.convert_to_tensor, arrays))  # builds it
    scale = tf.Variable(1.0)

    def forward(*xs):
        if entry.dtype == "float32":
            xs = [x + tf.tanh(tf.sin(tf.tanh(x * scale))) * 0.1 for x in xs]
        outputs = entry.apply(layer, *xs)
        if not entry.flows:
            outputs = [tf.sin(tf.cast(y, tf.float32) * scale) for y in tf.nest.flatten(outputs)]
        return [tf.sin(tf.tanh(tf.cast(y, tf.float32))) for y in tf.nest.flatten(outputs)]

    states = tf.nest.flatten(getattr(layer, "states", None) or [])
    variables = [v.value if isinstance(v, keras.Variable) else v for v in layer.variables]
    variables += [v.value for v in states if isinstance(v, keras.Variable)]
    variables = list({id(v): v for v in [scale, *variables]}.values())
    return forward, arrays, variables


def check(name, way, monkeypatch):
    compare(*around(name), way, monkeypatch)


def check_inside_checkpoint(name, eager):
    forward, arrays, variables = around(name)
    try:
        plain = gradients_of(forward, arrays, variables, eager=eager)
    except ValueError as error:  # the gradient of float8 needs a graph
        pytest.skip(f"fails by itself: {error}")
    inside = functools.partial(checkpoint, forward)
    ours = gradients_of(inside, arrays, variables, eager=eager)
    for a, b in zip(ours, plain, strict=True):
        largest = np.abs(np.asarray(b, np.float64)).max(initial=1e-6)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * largest)


def test_every_public_layer_is_listed():
    public = {
        name
        for name, value in vars(keras.layers).items()
        if isinstance(value, type) and issubclass(value, keras.layers.Layer)
    }
    assert public == {name.split()[0] for name in LAYERS} | SKIPPED.keys() | ALIASES.keys()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("way", ["memory", "all again"])
@pytest.mark.parametrize("name", todays(LAYERS, 8))
def test_layers_of_the_day(name, way, monkeypatch):
    check(name, way, monkeypatch)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "function"])
@pytest.mark.parametrize("name", todays(LAYERS, 4))
def test_layers_of_the_day_inside_checkpoint(name, eager):
    check_inside_checkpoint(name, eager)


@pytest.mark.slow
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "function"])
@pytest.mark.parametrize("name", LAYERS)
def test_all_layers_inside_checkpoint(name, eager):
    check_inside_checkpoint(name, eager)


@pytest.mark.slow
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LAYERS)
def test_all_layers(name, way, monkeypatch):
    check(name, way, monkeypatch)
