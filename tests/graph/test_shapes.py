"""Shapes, as TensorFlow itself says of known graphs."""

import tensorflow as tf

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


def test_sizes_that_depend_on_data(graph):
    """The parts of a partition are equal, a mask leaves all in; what is made of them follows."""
    rows = v1.placeholder(tf.float32, (64, 8))
    kind = v1.placeholder(tf.int32, (64,))
    parts = tf.dynamic_partition(rows, kind, 4)
    again = tf.dynamic_partition(parts[1], tf.cast(parts[1][:, 0], tf.int32), 2)
    kept = tf.tanh(tf.boolean_mask(rows, kind > 0))
    shapes = Shapes(graph.get_operations())
    assert [shapes(part) for part in parts] == [[16, 8]] * 4
    assert [shapes(part) for part in again] == [[8, 8]] * 2
    assert shapes(kept) == [64, 8]


def test_sizes_that_depend_on_data_and_an_unknown_batch(graph):
    rows = v1.placeholder(tf.float32, (None, 8))
    part = tf.tanh(tf.dynamic_partition(rows, v1.placeholder(tf.int32, (None,)), 4)[3])
    assert Shapes(graph.get_operations())(part) == [32, 8]
