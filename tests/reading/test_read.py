"""What the reader makes of a graph: order, views, pinned ops, bytes."""

import tensorflow as tf

from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.reading.read import read

v1 = tf.compat.v1


def read_gradients(y, xs):
    first_new = len(y.graph.get_operations())
    grads = tf.gradients(y, xs)
    return read(BackwardPass.since(first_new, y, [g for g in grads if g is not None]))


def ops_by_name(reading):
    return {op.name: op for op in reading.problem.ops}


def test_a_chain_is_read_forward_then_backward(graph):
    x = v1.placeholder(tf.float32, (100, 50))
    y = tf.tanh(tf.exp(tf.tanh(x, name="a"), name="b"), name="c")
    reading = read_gradients(y, x)
    problem = reading.problem
    assert [op.name for op in problem.ops[: problem.forward_count]] == ["a", "b", "c"]
    assert all(op.backward for op in problem.ops[problem.forward_count :])
    assert problem.tensors[reading.tensor_of["b:0"]].bytes == 100 * 50 * 4
    assert "Placeholder:0" not in reading.tensor_of  # the caller's memory, not the step's
    begins = [i for i in problem.as_executed if i >= 0]
    assert sorted(begins) == list(range(len(problem.ops)))
    assert sorted(~i for i in problem.as_executed if i < 0) == sorted(begins)


def test_views_share_the_tensor_that_they_show(graph):
    x = v1.placeholder(tf.float32, (100, 50))
    a = tf.tanh(x, name="a")
    view = tf.reshape(tf.identity(a), (50, 100))
    reading = read_gradients(tf.tanh(view, name="b"), x)
    assert reading.tensor_of[view.name] == reading.tensor_of[a.name]
    assert view.op.name not in ops_by_name(reading)


def test_ops_that_read_only_shapes_keep_nothing_alive(graph):
    x = v1.placeholder(tf.float32, (None, 50))
    a = tf.tanh(x, name="a")
    reading = read_gradients(tf.reduce_sum(a, name="sum"), x)
    a_tensor = reading.tensor_of["a:0"]
    readers = [op.name for op in reading.problem.ops if a_tensor in op.inputs]
    shape_ops = {op.name for op in graph.get_operations() if op.type in ("Shape", "Size")}
    assert shape_ops
    assert not shape_ops & set(readers)


def test_random_ops_and_variable_reads_are_pinned_and_arithmetic_is_not(graph):
    v = tf.Variable(tf.ones((100, 50)))
    noise = tf.random.uniform((100, 50))
    y = tf.tanh(tf.tanh(v.read_value() * noise, name="a"))
    reading = read_gradients(y, v)
    ops = ops_by_name(reading)
    assert ops[next(n for n in ops if n.endswith("RandomUniform"))].pinned
    assert not ops["a"].pinned
    assert all(not op.pinned for op in ops.values() if op.name.startswith("Tanh"))


def test_of_a_dropout_mask_the_smallest_tensor_is_pinned(graph):
    x = v1.placeholder(tf.float32, (100, 50))
    reading = read_gradients(tf.tanh(tf.nn.dropout(tf.tanh(x), 0.5)), x)
    pinned = {op.name for op in reading.problem.ops if op.pinned and not op.backward}
    masks = [graph.get_operation_by_name(name) for name in pinned]
    assert any(op.type == "GreaterEqual" for op in masks)
    assert not any(op.type in ("Cast", "SelectV2", "Mul") for op in masks)


def test_gradients_live_to_the_end(graph):
    w = tf.Variable(tf.ones((50, 40)))
    x = v1.placeholder(tf.float32, (100, 50))
    reading = read_gradients(tf.tanh(tf.matmul(x, w)), w)
    (result,) = reading.problem.results
    assert reading.problem.tensors[result].bytes == 50 * 40 * 4


def test_matrix_products_are_expensive_and_elementwise_ops_are_not(graph):
    x = v1.placeholder(tf.float32, (100, 50))
    reading = read_gradients(
        tf.tanh(tf.matmul(tf.exp(x, name="b"), tf.ones((50, 50)), name="a")), x
    )
    ops = ops_by_name(reading)
    assert ops["a"].expensive
    assert not ops["b"].expensive


def test_ops_wait_for_what_they_read_if_through_a_view_and_for_control_edges(graph):
    x = v1.placeholder(tf.float32, (100, 50))
    a = tf.tanh(x, name="a")
    with tf.control_dependencies([tf.exp(x, name="effect").op]):
        b = tf.sin(tf.reshape(a, (50, 100)), name="b")
    reading = read_gradients(tf.reduce_sum(tf.exp(x) + tf.reshape(tf.cos(b), (100, 50))), x)
    index = {op.name: i for i, op in enumerate(reading.problem.ops)}
    waits = reading.problem.waits
    assert index["a"] in waits[index["b"]]
    assert all(before < i for i in range(len(waits)) for before in waits[i])


def test_who_reads_the_terms_of_a_sum_stays_before_or_after_it(graph):
    """The kernel of a sum of many begins with the first term that nobody else will read."""
    x = v1.placeholder(tf.float32, (100, 50))
    terms = [tf.tanh(x * i) for i in (1.0, 2.0, 3.0)]
    other = tf.exp(terms[1], name="other")
    total = tf.add_n(terms, name="total")
    reading = read_gradients(tf.reduce_sum(tf.sin(total) * other), x)
    index = {op.name: i for i, op in enumerate(reading.problem.ops)}
    first, second = sorted((index["other"], index["total"]))
    assert first in reading.problem.waits[second]


def test_a_reading_in_the_order_of_a_plan_is_the_same_step(graph):
    x = v1.placeholder(tf.float32, (None, 50))
    reading = read_gradients(tf.reduce_sum(tf.exp(x) * tf.tanh(x)), x)
    problem = reading.problem
    turned = [1, 0, *range(2, len(problem.ops))]
    other = reading.in_order_of(problem.reordered(turned))
    assert [op.name for op in other.operations] == [op.name for op in other.problem.ops]
    assert other.operations[:2] == reading.operations[1::-1]
    assert other.problem.fingerprint == problem.fingerprint


def test_no_size_of_ours_contradicts_a_graph(graph):
    """What grows with the batch is looked for at sizes that nobody gave."""
    x, labels = (v1.placeholder(tf.float32, (None, size)) for size in (10, None))
    w = tf.ones((10, 10))
    logits = tf.tanh(tf.tanh(x @ w, name="hidden") @ w)
    reading = read_gradients(tf.nn.softmax_cross_entropy_with_logits(labels, logits), w)
    assert reading.batch_size == 128
    hidden = reading.tensor_of["hidden:0"]
    assert reading.problem.tensors[hidden].bytes == 128 * 10 * 4
    assert reading.growing()["hidden:0"] == 10 * 4
