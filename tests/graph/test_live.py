"""Loop variables that nothing reads."""

import tensorflow as tf

from memory_saving_gradients.graph import order
from memory_saving_gradients.graph.live import live, loop_variables

v1 = tf.compat.v1


def what_is_read(graph, tensors):
    """The names of the tensors that these depend on."""
    waits = order.dependencies(t.op for t in tensors)
    return live(waits, [op for op in graph.get_operations() if op in waits], tensors).tensors


def test_a_loop_needs_what_its_condition_and_its_outputs_depend_on(graph):
    def body(i, most, read, unread, added):
        return i + 1, most, read + added, unread + tf.sin(read), added

    start = [v1.placeholder(tf.float32, (4,), name) for name in ("read", "unread", "added")]
    *_, wanted, _, _ = tf.while_loop(lambda i, most, *_: i < most, body, (0, 7, *start))
    loop = wanted.op.inputs[0].op
    names = [t.op.name for t in loop.inputs]
    needed = loop_variables(loop, what_is_read(graph, [wanted]))
    assert {names[i] for i in needed if names[i] in ("read", "unread", "added")} == {
        "read",
        "added",
    }


def test_the_gradient_of_a_sequence_is_not_needed_unless_it_is_asked_for(graph):
    x = v1.placeholder(tf.float32, (8, 4), "x")
    w = v1.placeholder(tf.float32, (4,), "w")
    h = tf.foldl(lambda h, step: tf.tanh(h * w + step), x, tf.zeros((4,)))
    of_weight, of_sequence = tf.gradients(h, [w, x])
    zeros = [op for op in graph.get_operations() if op.type == "ZerosLike"]
    lists = {t.name for op in zeros for t in op.outputs if t.dtype == tf.variant}
    assert lists
    assert not lists & what_is_read(graph, [of_weight])
    assert lists & what_is_read(graph, [of_weight, of_sequence])


def test_what_a_needed_op_of_a_round_waits_for_is_needed(graph):
    def body(i, read, awaited):
        with tf.control_dependencies([awaited]):
            return i + 1, tf.sin(read), awaited + 1.0

    read, awaited = (v1.placeholder(tf.float32, (4,), name) for name in ("read", "awaited"))
    _, wanted, _ = tf.while_loop(lambda i, *_: i < 7, body, (0, read, awaited))
    loop = wanted.op.inputs[0].op
    needed = loop_variables(loop, {wanted.op.inputs[0].name})
    assert {read.op.name, awaited.op.name} <= {loop.inputs[i].op.name for i in needed}


def test_what_others_only_wait_for_runs_unless_only_its_data_counts(graph):
    waited, read = tf.sin(tf.ones(4)), tf.ones(4)
    with tf.control_dependencies([waited]):
        end = tf.exp(read)
    waits = order.dependencies([end.op])
    operations = [op for op in graph.get_operations() if op in waits]
    assert waited.op in live(waits, operations, [end]).operations
    assert waited.op not in live(waits, operations, [end], for_data=operations).operations
