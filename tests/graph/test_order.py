"""Backward ops that make more than they free come late; all others stay."""

import itertools

import numpy as np
import tensorflow as tf

from memory_saving_gradients import get_plans, gradients
from memory_saving_gradients.graph.backward import BackwardPass
from memory_saving_gradients.graph.read import read

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


def test_a_large_weights_gradient_comes_after_the_rest(graph):
    problem, (first, second, third) = read_network((200, 200, 200, 200), batch=10)
    last = [op.name for op in problem.ops[-3:]]
    assert {first, second, third} == set(last)
    assert {op.name for op in problem.ops if op.postponed} >= {second, third}


def test_a_small_weights_gradient_frees_its_activation_at_once(graph):
    problem, grads = read_network((20, 20, 20, 20), batch=1000)
    assert not any(op.postponed for op in problem.ops)
    assert problem.ops[-1].name == grads[0]


def test_what_adds_up_postponed_gradients_is_postponed(graph):
    x = v1.placeholder(tf.float32, (10, 200))
    weight = tf.Variable(tf.ones((200, 200)))
    y = tf.tanh(tf.matmul(tf.tanh(tf.matmul(x, weight)), weight))
    first_new = len(graph.get_operations())
    loss = tf.reduce_sum(y) + tf.nn.l2_loss(weight)
    grads = tf.gradients(loss, weight)
    ops = read(BackwardPass.since(first_new, loss, grads)).problem.ops
    assert ops[-1].name == grads[0].op.name  # a sum of three
    assert [op.postponed for op in ops[-3:-1]] == [True, True]


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
