"""Where ops come from, as the user knows it."""

import keras
import pytest
import tensorflow as tf

from memory_saving_gradients import BudgetError, GradientTape, gradients
from memory_saving_gradients.graph.origin import origin


def sine(x):
    return tf.sin(x)  # the line


def test_an_op_without_a_scope_has_the_users_line(graph):
    y = sine(tf.ones(4))
    assert origin(y.op) == "test_origin.py:12: return tf.sin(x)  # the line"


def test_a_scope_is_the_origin(graph):
    with tf.name_scope("block"), tf.name_scope("inner"):
        y = sine(tf.ones(4))
    assert origin(y.op) == "block/inner"


def test_a_gradient_comes_from_what_is_differentiated(graph):
    x = tf.ones(4)
    with tf.name_scope("block"):
        y = sine(x)
    (grad,) = tf.gradients(y + sine(x), x)
    assert grad.op.type == "AddN"
    places = {origin(grad.op), *(origin(term.op) for term in grad.op.inputs)}
    assert places == {"block", "test_origin.py:12: return tf.sin(x)  # the line"}


def test_with_the_tape_too():
    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = sine(tf.tanh(x))
        return tape.gradient(y, x)

    graph = step.get_concrete_function(tf.TensorSpec((4,))).graph
    (cosine,) = [op for op in graph.get_operations() if op.type == "Cos"]
    assert origin(cosine).endswith("y = sine(tf.tanh(x))")


def test_a_budget_error_names_layers_and_lines():
    model = keras.Sequential([keras.layers.Dense(64, "tanh", name=f"d{i}") for i in range(6)])
    model(tf.ones((1, 64)))

    @tf.function
    def step(x):
        with GradientTape(memory_budget="10kB") as tape:
            loss = tf.reduce_mean(model(sine(x)))
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    with pytest.raises(BudgetError) as caught:
        step(tf.ones((4096, 64)))
    text = str(caught.value)
    assert 'gradients of "Mean:0" (test_origin.py:' in text
    assert "/d" in text
    assert "make the batch smaller" in text


def test_gradients_of_weights_need_no_smaller_batch(graph):
    weights = [tf.Variable(tf.ones((512, 512))) for _ in range(6)]
    h = tf.ones((4, 512))
    for w in weights:
        h = tf.tanh(tf.matmul(h, w))
    with pytest.raises(BudgetError, match=r"\d+% of it are gradients of weights") as caught:
        gradients(tf.reduce_mean(h), weights, memory_budget=0.3)
    assert "batch smaller" not in str(caught.value)
    assert "max_recompute" not in str(caught.value)
    with pytest.raises(BudgetError, match="or raise max_recompute"):
        gradients(tf.reduce_mean(h), weights, memory_budget=0.3, max_recompute=1)
