"""Shapes and cost estimates, against what TensorFlow itself says of known graphs."""

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients.graph.costs import estimate_seconds
from memory_saving_gradients.graph.devices import DEVICES
from memory_saving_gradients.graph.shapes import NOMINAL_SIZES, Shapes

v1 = tf.compat.v1


def test_known_shapes_are_the_graphs_own(graph):
    x = tf.zeros((3, 5), tf.float64)
    shapes = Shapes(graph.get_operations())
    assert shapes(x) == [3, 5]
    assert shapes.bytes(x) == 3 * 5 * 8


def test_an_unknown_batch_is_nominal_and_what_derives_from_it_is_inferred(graph):
    x = v1.placeholder(tf.float32, (None, 6))
    steps = tf.reshape(x, (-1, 3))
    bias = tf.reduce_sum(steps + tf.zeros((1, 3)), 0)
    gradient = tf.gradients(tf.reduce_sum(steps * tf.tile(steps[:1], (1, 1))), steps)[0]
    shapes = Shapes(graph.get_operations())
    assert shapes(x) == [128, 6]
    assert shapes(steps) == [256, 3]
    assert shapes(bias) == [3]
    # Broadcast gradients reduce over axes that are known only by computing with the shapes.
    assert shapes(gradient) == [256, 3]


def test_a_batch_that_a_reshape_cannot_divide_takes_the_next_nominal_size(graph):
    x = v1.placeholder(tf.float32, (None, 2))
    y = tf.reshape(x, (-1, 7))
    shapes = Shapes(graph.get_operations())
    assert shapes(x) == [NOMINAL_SIZES[1], 2]
    assert shapes(y) == [NOMINAL_SIZES[1] * 2 // 7, 7]


def test_shapes_that_no_nominal_size_suits_count_each_unknown_dimension(graph):
    x = v1.placeholder(tf.float32, (None, 1))
    y = tf.reshape(x, (-1, 11))
    shapes = Shapes(graph.get_operations())
    assert shapes(x) == [128, 1]
    assert shapes(y) == [128, 11]


def test_an_unknown_rank_counts_as_a_scalar(graph):
    x = v1.placeholder(tf.float32)
    assert Shapes(graph.get_operations()).bytes(x) == 4


def test_costs_grow_with_the_work_and_equal_ops_cost_the_same(graph):
    x = tf.random.uniform((64, 64))
    small = [tf.matmul(x, x) for _ in range(3)]
    big = tf.matmul(tf.random.uniform((64, 640)), tf.random.uniform((640, 64)))
    operations = graph.get_operations()
    seconds = estimate_seconds(operations, Shapes(operations), DEVICES["cpu"])
    assert len({seconds[y.op.name] for y in small}) == 1
    assert seconds[big.op.name] == pytest.approx(10 * seconds[small[0].op.name], rel=0.2)
    assert set(seconds) == {op.name for op in operations}


def test_convolution_gradients_are_estimated_from_their_sizes(graph):
    x = tf.random.uniform((4, 16, 16, 8))
    kernel = tf.Variable(np.zeros((3, 3, 8, 8), np.float32))
    y = tf.nn.conv2d(x, kernel, 1, "SAME")
    tf.gradients(y, [x, kernel])
    operations = graph.get_operations()
    seconds = estimate_seconds(operations, Shapes(operations), DEVICES["cpu"])
    forward = seconds[y.op.name]
    for op in operations:
        if op.type.startswith("Conv2DBackprop"):
            assert seconds[op.name] == pytest.approx(forward, rel=0.5)


def test_calls_of_functions_cost_as_much_as_the_dearest_op(graph):
    x = tf.random.uniform((64, 64))
    y = tf.matmul(x, x)
    called = tf.function(tf.tanh)(x)
    operations = graph.get_operations()
    seconds = estimate_seconds(operations, Shapes(operations), DEVICES["cpu"])
    call = next(
        op for op in operations if op.type in ("PartitionedCall", "StatefulPartitionedCall")
    )
    assert called is not None
    assert seconds[call.name] == seconds[y.op.name]
