"""How many rounds a loop runs."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients.graph import calls
from memory_saving_gradients.graph.rounds import expected_rounds
from memory_saving_gradients.graph.shapes import Shapes


def counting(condition, step, first, of=tf.sin):
    def form(h):
        return tf.while_loop(lambda i, _: condition(i), lambda i, h: (step(i), of(h)), [first, h])

    return form


@pytest.mark.parametrize(
    ("form", "rounds"),
    [
        (lambda h: tf.while_loop(lambda i, _: i < 5, lambda i, h: (i + 1, tf.sin(h)), [2, h]), 3),
        (
            lambda h: tf.while_loop(
                lambda _: tf.reduce_sum(h) > 0, lambda h: [tf.sin(h)], [h], maximum_iterations=7
            ),
            7,
        ),
        (lambda h: tf.while_loop(lambda h: tf.reduce_sum(h) > 0, lambda h: [tf.sin(h)], [h]), 16),
        (counting(lambda i: i < 1.0, lambda i: i + 0.1, 0.0), 10),
        (counting(lambda i: i <= 12, lambda i: 3 + i, 0), 5),
        (counting(lambda i: i > 4, lambda i: i + -2, 9), 3),
        (counting(lambda i: i >= 1, lambda i: i - 1, 6), 6),
        (counting(lambda i: i < 100, lambda i: i * 2, 1), 16),
        (counting(lambda i: i > 4, lambda i: i + 1, 0), 0),
        (counting(lambda i: i < np.inf, lambda i: i + 1, 0.0), 16),
        (
            lambda h: tf.while_loop(
                lambda i, *_: i < 100, lambda i, j, h: (i + j, j + i, tf.sin(h)), [1, 1, h]
            ),
            16,
        ),
        (lambda h: counting(lambda i: i < tf.shape(h)[1], lambda i: i + 1, 0)(h), 8),
    ],
)
def test_rounds_of_a_loop(graph, form, rounds):
    form(tf.ones((8, 8)))
    (op,) = [op for op in graph.get_operations() if op.type == "StatelessWhile"]
    assert expected_rounds(op, Shapes(graph.get_operations())) == rounds


def test_rounds_of_the_gradients_of_loops_in_loops(graph):
    def nested(counts, h):
        if not counts:
            return tf.sin(h)
        first, *others = counts
        of = functools.partial(nested, others)
        return counting(lambda i: i < first, lambda i: i + 1, 0, of)(h)[1]

    x = tf.ones((8, 8))
    tf.gradients(nested([5, 3, 2], x), x)
    counts, shapes, operations = [], Shapes(graph.get_operations()), graph.get_operations()
    while loops := [op for op in operations if op.type == "StatelessWhile"]:
        gradient = loops[-1]
        counts.append(expected_rounds(gradient, shapes))
        (body,) = calls.bodies(gradient)
        operations = body.get_operations()
        shapes = shapes.within(gradient, body, operations)
    assert counts == [5, 3, 2]
