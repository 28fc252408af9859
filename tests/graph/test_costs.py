"""Cost estimates, against what TensorFlow itself says of known graphs."""

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients.graph.costs import estimate_seconds
from memory_saving_gradients.graph.devices import DEVICES
from memory_saving_gradients.graph.shapes import InputSizes, Shapes

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


def test_convolutions_of_volumes_cost_what_as_many_multiplications_do(graph):
    x, flat = tf.random.uniform((2, 8, 16, 16, 32)), tf.random.uniform((16, 16, 16, 32))
    kernel, plane = tf.Variable(tf.ones((3, 3, 3, 32, 32))), tf.ones((9, 3, 32, 32))
    y, other = tf.nn.conv3d(x, kernel, [1] * 5, "SAME"), tf.nn.conv2d(flat, plane, 1, "SAME")
    tf.gradients(y, [x, kernel])
    operations = graph.get_operations()
    for device in ("cpu", "h100"):
        seconds = estimate_seconds(operations, Shapes(operations), DEVICES[device])
        volumes = [seconds[op.name] for op in operations if op.type.startswith("Conv3D")]
        assert len(volumes) == 3
        assert volumes == pytest.approx(3 * [seconds[other.op.name]], rel=0.5)


def test_slow_kernels_of_a_cpu_cost_more_than_their_bytes(graph):
    x = tf.random.uniform((4, 16, 16, 8))
    slow, fast = tf.cumsum(x, 1), tf.nn.leaky_relu(x)
    operations = graph.get_operations()
    for device, ratio in (("cpu", 25), ("h100", 1)):
        seconds = estimate_seconds(operations, Shapes(operations), DEVICES[device])
        assert seconds[slow.op.name] == pytest.approx(ratio * seconds[fast.op.name], rel=0.2)


def test_sizes_that_are_computed_from_the_batch_count(graph):
    x = v1.placeholder(tf.float32, (None, 16, 16, 8))
    kernel = tf.Variable(np.zeros((3, 3, 8, 8), np.float32))
    up = tf.nn.conv2d_transpose(x, kernel, tf.stack([tf.shape(x)[0], 32, 32, 8]), 2)
    down = tf.nn.conv2d(x, kernel, 1, "SAME")
    operations = graph.get_operations()
    known = InputSizes(batch=4)
    seconds = estimate_seconds(operations, Shapes(operations, known), DEVICES["cpu"])
    assert seconds[up.op.name] == pytest.approx(seconds[down.op.name], rel=0.5)


def test_statistics_take_longer_than_normalising(graph):
    x = tf.random.uniform((4, 16, 16, 8))
    ones = tf.ones(8)
    both = [
        v1.nn.fused_batch_norm(x, ones, ones, *given, is_training=training)[0].op.name
        for given, training in [((), True), ((ones, ones), False)]
    ]
    operations = graph.get_operations()
    for device, ratio in (("cpu", 2.5), ("h100", 1)):
        seconds = estimate_seconds(operations, Shapes(operations), DEVICES[device])
        assert seconds[both[0]] == pytest.approx(ratio * seconds[both[1]], rel=0.2)


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
