"""The simulated executor keeps the rules of a real one."""

import networkx as nx
import pytest
import tensorflow as tf

from memory_saving_gradients.graph import order
from memory_saving_gradients.runtimes import execution_order

v1 = tf.compat.v1


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_begin_ops_when_what_they_wait_for_has_ended(graph, threads):
    x = v1.placeholder(tf.float32, (100, 50))
    h, weights = x, []
    for _ in range(6):
        weights.append(tf.Variable(tf.ones((50, 50))))
        h = tf.tanh(h @ weights[-1])
    grads = tf.gradients(tf.reduce_sum(h), weights)
    needed = order.dependencies(g.op for g in grads)
    operations = list(nx.topological_sort(needed))
    seconds = {op.name: 1.0 for op in operations if op.type in ("MatMul", "Tanh", "TanhGrad")}
    for early_last in (False, True):
        running, done, most = set(), set(), 0
        for op, begins in execution_order.executed(
            needed, operations, seconds, threads, early_last
        ):
            if begins:
                assert done.issuperset(needed.predecessors(op))
                running.add(op)
                most = max(most, len(running))
            else:
                running.remove(op)
                done.add(op)
        assert done == set(operations)
        assert most == threads  # gradients of weights beside the next ones
