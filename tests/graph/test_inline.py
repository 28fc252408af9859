"""Functions under the tape become part of the graph, whatever they are called."""

import functools

import pytest
import tensorflow as tf

from memory_saving_gradients import GradientTape, get_plans
from tests.cases import assert_same

WIDTH = 32


def _block(h, w):
    return tf.tanh(tf.tanh(h @ w))


class Called:
    def __call__(self, h, w):
        return _block(h, w)

    def method(self, h, w):
        return _block(h, w)


def scaled(h, w, scale):
    return _block(h, w * scale)


FUNCTIONS = {
    "an underscore": _block,
    "a lambda": lambda h, w: _block(h, w),
    "a partial": functools.partial(scaled, scale=1.5),
    "a partial of a partial": functools.partial(functools.partial(scaled), scale=1.5),
    "a callable object": Called(),
    "a method": Called().method,
    "a partial of an object": functools.partial(Called()),
}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_any_name_are_planned(name):
    block = tf.function(FUNCTIONS[name])
    weights = [tf.Variable(tf.eye(WIDTH)) for _ in range(6)]

    def run(tape):
        @tf.function
        def step(h):
            with tape as t:
                for w in weights:
                    h = block(h, w)
                loss = tf.reduce_mean(h**2)
            return t.gradient(loss, weights)

        x = tf.random.stateless_normal((256, WIDTH), (1, 2))
        return step(x), get_plans(step.get_concrete_function(x).graph)

    (plain, _), (ours, plans) = run(tf.GradientTape()), run(GradientTape())
    assert_same(ours, plain)
    assert plans[0].recomputed
