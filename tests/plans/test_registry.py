"""`get_plans` takes what the user has at hand, and never answers with an empty list instead."""

import subprocess
import sys

import keras
import pytest
import tensorflow as tf

import memory_saving_gradients as msg
from test_models import Chain

WIDTH = 64
X = tf.ones((512, WIDTH))


def function_of_a_chain():
    model = Chain(layers=8, width=WIDTH)
    model.loss(X)  # makes the variables, for which TensorFlow would trace twice

    @tf.function
    def step(x):
        return msg.gradients(model.loss(x), model.variables, checkpoints="memory")

    return step


def test_of_a_function_all_traces():
    step = function_of_a_chain()
    assert msg.get_plans(step) == []
    step(X)
    step(X[:256])
    assert len(msg.get_plans(step)) == 2
    (plan,) = msg.get_plans(step.get_concrete_function(X))
    assert plan in msg.get_plans(step)
    assert msg.get_plans(step.get_concrete_function(X).graph) == [plan]
    assert msg.get_plans()[-1] == msg.get_plans(step)[-1]  # eagerly, those of the process


def test_of_a_model():
    model = keras.Sequential(
        [keras.Input((WIDTH,)), *[keras.layers.Dense(WIDTH, "tanh") for _ in range(8)]]
    )
    with pytest.raises(ValueError, match="was not given to"):
        msg.get_plans(model)
    msg.keras.save_memory(model)
    model.compile("sgd", "mse")
    model.train_on_batch(X, X)
    assert msg.get_plans(model) == msg.keras.get_plans(model) != []


def test_inside_a_trace_it_says_when_to_ask():
    model = Chain(layers=8, width=WIDTH)

    @tf.function
    def step(x):
        grads = msg.gradients(model.loss(x), model.variables, checkpoints="memory")
        msg.get_plans()
        return grads

    with pytest.raises(RuntimeError, match=r"when its trace ends.*get_plans\(step\)"):
        step(X)


def test_what_has_no_plans_is_refused():
    with pytest.raises(TypeError, match=r"takes a tf\.function, a concrete function"):
        msg.get_plans(tf.ones(3))


TWO_PLANS = """
import tensorflow as tf
import memory_saving_gradients as msg

x = tf.ones((512, 64))

@tf.function
def step(x):
    y = x
    for _ in range(16):
        y = tf.tanh(y)
    return msg.gradients(y, x, checkpoints="memory")

step(x), step(x[:256])
print(*msg.get_plans(step), sep="\\n")
"""


@pytest.mark.measured
def test_the_first_plan_of_a_process_is_said():
    ran = subprocess.run([sys.executable, "-c", TWO_PLANS], capture_output=True, text=True)
    first, second = ran.stdout.splitlines()
    assert first != second
    lines = [line for line in ran.stderr.splitlines() if line.startswith("memory_saving")]
    hint = 'memory_budget="device" recomputes only what does not fit'
    assert lines == [f"memory_saving_gradients: {first}; {hint}"]
