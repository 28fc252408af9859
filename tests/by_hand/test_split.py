"""What is kept of a part, and what runs again."""

import collections

import pytest
import tensorflow as tf

from memory_saving_gradients.by_hand.split import Traced, split
from memory_saving_gradients.graph import calls

ROWS, WIDTH = 32, 16


def traced(part, keep=lambda op: False, again=False):
    """A part of an input and a weight, split."""
    w = tf.Variable(tf.eye(WIDTH))

    concrete = tf.function(lambda x: part(x, w), autograph=False).get_concrete_function(
        tf.TensorSpec((ROWS, WIDTH))
    )
    inputs = [tf.ones((ROWS, WIDTH)), *concrete.captured_inputs]
    return split(
        Traced.of(concrete.graph),
        inputs,
        range(len(inputs)),
        keep,
        again,
    )


def kept(parts):
    """The types and the elements of what is kept beside variables, of a part with one result."""
    outputs = parts.forward.structured_outputs[1:]
    return sorted(
        (t.dtype.name, t.shape.num_elements()) for t in outputs if t.shape != (WIDTH, WIDTH)
    )


def ran(function):
    return collections.Counter(op.type for op in function.graph.get_operations())


PARTS = {
    "nothing but variables": (lambda x, w: tf.tanh(tf.tanh(x @ w) @ w), []),
    "of dropout the mask": (
        lambda x, w: tf.nn.dropout(tf.tanh(x @ w), 0.5) @ w,
        [("bool", ROWS * WIDTH)],
    ),
    "of noise the noise": (
        lambda x, w: tf.tanh(x @ w) * tf.random.normal((ROWS, WIDTH)),
        [("float32", ROWS * WIDTH)],
    ),
    "of a row of noise the row": (
        lambda x, w: tf.tanh(x @ w) * tf.exp(tf.tile(tf.random.normal((1, WIDTH)), (ROWS, 1))),
        [("float32", WIDTH)],
    ),
    "not what no gradient needs": (
        lambda x, w: tf.tanh(x @ w) + tf.random.normal((ROWS, WIDTH)),
        [],
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_the_smallest_tensors_that_decide_are_kept(name):
    part, expected = PARTS[name]
    assert kept(traced(part)) == expected


def test_what_runs_again():
    part, _ = PARTS["nothing but variables"]
    parts = traced(part)
    assert ran(parts.forward)["MatMul"] == 2
    # The second product's result is not needed but for its tanh, which the gradient starts from.
    assert ran(parts.backward)["Tanh"] == 2
    assert ran(parts.backward)["MatMul"] == 2 + 4
    assert not ran(parts.backward)["ReadVariableOp"]
    kept_products = traced(part, keep=lambda op: op.type == "MatMul")
    assert ran(kept_products.backward)["MatMul"] == 4
    assert kept(kept_products) == [("float32", ROWS * WIDTH)] * 2


def loop_of(function):
    return next(op for op in function.graph.get_operations() if op.type == "StatelessWhile")


def test_a_loop_collects_only_where_its_gradient_is_near():
    """What a loop hands on to its gradient is not collected in the forward pass as well."""

    def part(x, w):
        return tf.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, tf.tanh(a @ w)), [0, x])[1]

    concrete = tf.function(part).get_concrete_function(tf.ones((ROWS, WIDTH)), tf.eye(WIDTH))
    plain = len(loop_of(concrete).outputs)
    parts = traced(lambda x, w: part(x, tf.convert_to_tensor(w)))
    assert len(loop_of(parts.forward).outputs) == plain
    assert len(loop_of(parts.backward).outputs) > plain
    (body,) = calls.bodies(loop_of(parts.forward))
    assert [len(body.inputs), len(body.outputs)] == [plain, plain]


def test_nothing_random_and_no_update_runs_again():
    count = tf.Variable(0.0)

    def part(x, w):
        count.assign_add(1.0)
        return tf.nn.dropout(tf.tanh(x @ w), 0.5) @ w

    parts = traced(part)
    assert ran(parts.forward)["RandomUniform"] == 1
    assert ran(parts.forward)["AssignAddVariableOp"] == 1
    assert not ran(parts.backward)["RandomUniform"]
    assert not ran(parts.backward)["AssignAddVariableOp"]


def test_what_may_be_differentiated_again_shows_what_it_kept():
    part, _ = PARTS["nothing but variables"]
    assert len(traced(part, again=True).seen) == 2  # the weight, as it was read twice
    assert traced(part).seen == ()
