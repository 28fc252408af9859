"""Backward ops that make more than they free come late; all others stay."""

import itertools

import numpy as np
import tensorflow as tf

from memory_saving_gradients import get_plans, gradients
from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.reading.read import read

v1 = tf.compat.v1


def read_network(sizes, batch):
    """A dense network of the given widths; its problem, and the names of the weights' gradients."""
    h = v1.placeholder(tf.float32, (batch, sizes[0]))
    weights = []
    for a, b in itertools.pairwise(sizes):
        weights.append(tf.Variable(tf.ones((a, b))))
        h = tf.tanh(tf.matmul(h, weights[-1]))
    first_new = len(h.graph.get_operations())
    grads = tf.gradients(tf.reduce_sum(h), weights)
    return read(BackwardPass.since(first_new, grads[0], grads)).problem, [g.op.name for g in grads]


def test_a_large_weights_gradient_comes_after_large_activations(graph):
    x = v1.placeholder(tf.float32, (1000, 1000))
    scale, weight = tf.Variable(tf.ones(1000)), tf.Variable(tf.ones((1000, 2000)))
    h = tf.reduce_sum(tf.tanh(tf.tanh(tf.tanh(x * scale))), axis=0, keepdims=True)
    first_new = len(graph.get_operations())
    grads = tf.gradients(tf.reduce_sum(tf.matmul(h, weight)), [scale, weight])
    ops = read(BackwardPass.since(first_new, grads[0], grads)).problem.ops
    assert [op.name for op in ops if op.postponed] == [grads[1].op.name]
    assert ops[-1].name == grads[1].op.name


def test_no_gradient_is_postponed_where_that_lowers_no_peak(graph):
    """All gradients are there at the end, and what they are made of would be, too."""
    problem, _ = read_network((200, 200, 200, 200), batch=10)
    assert not any(op.postponed for op in problem.ops)


def test_a_small_weights_gradient_frees_its_activation_at_once(graph):
    problem, grads = read_network((20, 20, 20, 20), batch=1000)
    assert not any(op.postponed for op in problem.ops)
    assert problem.ops[-1].name == grads[0]


def test_gated_gradients_are_still_right(graph):
    """`gate_gradients` makes all gradients of one op wait for one another."""
    x = np.full((400, 200), 0.1, np.float32)
    weights = [tf.Variable(tf.ones((200, 200)) * 0.01) for _ in range(12)]
    h = tf.constant(x)
    for weight in weights:
        for _ in range(20):
            h = tf.tanh(h)
        h = tf.matmul(h, weight)
    loss = tf.reduce_sum(h)
    plain = tf.gradients(loss, weights)
    gated = gradients(loss, weights, checkpoints="memory", gate_gradients=True)
    assert get_plans()[-1].recomputed
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        for ours, theirs in zip(*session.run([gated, plain]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_what_reads_the_gradient_of_a_bias_comes_after_the_filter_gradient(graph):
    """Both gradients become one op under oneDNN; this bias is computed from what is made last."""
    shape = (2, 16, 16, 8)
    x, kernel, weight = (tf.Variable(tf.ones(s)) for s in (shape, (3, 3, 8, 8), shape))
    y = tf.nn.conv2d(tf.tanh(x), kernel, 1, "SAME")
    bias = tf.reduce_mean(tf.sin(x) * weight, [0, 1, 2])
    first_new = len(graph.get_operations())
    loss = tf.reduce_sum(tf.nn.relu(tf.nn.bias_add(y, bias)))
    grads = tf.gradients(loss, [x, kernel, weight])
    ops = read(BackwardPass.since(first_new, grads[0], grads)).operations
    (of_kernel,) = (i for i, op in enumerate(ops) if op.type == "Conv2DBackpropFilter")
    assert of_kernel < next(i for i, op in enumerate(ops) if op is grads[2].op)
