"""Cost estimates, against what TensorFlow itself says of known graphs."""

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients.graph.costs import estimate_seconds
from memory_saving_gradients.graph.devices import DEVICES
from memory_saving_gradients.graph.shapes import Shapes

v1 = tf.compat.v1


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
