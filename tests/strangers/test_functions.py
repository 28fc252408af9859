"""Every differentiable function of TensorFlow and keras.ops: the same gradients as plain."""

import pytest
import tensorflow as tf

from tests.strangers.functions import FUNCTIONS, NOT_DIFFERENTIABLE, PUBLIC, SKIPPED
from tests.strangers.steps import WAYS, compare, todays

X = tf.random.stateless_uniform((64, 16), (3, 4), -0.99, 0.99)


def check(name, way, monkeypatch):
    function = FUNCTIONS[name]
    w = tf.Variable(tf.eye(16) * 0.9)

    def forward(x):
        h = tf.sin(tf.tanh(tf.sin(tf.matmul(x, w)))) + x * 0.1
        return tf.nest.map_structure(
            lambda y: tf.sin(y * 0.5) if y.dtype.is_floating else y,
            [tf.convert_to_tensor(y) for y in tf.nest.flatten(function(h), True) if y is not None],
        )

    compare(forward, [X], [w], way, monkeypatch)


def test_every_public_function_is_listed():
    for name in PUBLIC:
        word = name.rpartition(".")[2]
        groups = [name in FUNCTIONS, name in SKIPPED, bool({name, word} & NOT_DIFFERENTIABLE)]
        assert sum(groups) == 1, name


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("way", ["all again"])
@pytest.mark.parametrize("name", todays(FUNCTIONS, 20))
def test_functions_of_the_day(name, way, monkeypatch):
    check(name, way, monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_functions(name, way, monkeypatch):
    check(name, way, monkeypatch)
