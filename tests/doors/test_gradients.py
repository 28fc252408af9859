"""`gradients()` as a user calls it: arguments, results, messages."""

import importlib
import logging
import re

import numpy as np
import pytest
import tensorflow as tf

import memory_saving_gradients as msg
from memory_saving_gradients import get_plans, gradients
from memory_saving_gradients.planning.strategies import STRATEGIES
from memory_saving_gradients.rewriting.run import COPY

v1 = tf.compat.v1
EAGER = tf.constant([1.0, 2.0])


def deep(x, layers=12):
    """A network with plenty of activations; tensors are named layer0 to layer11."""
    for i in range(layers):
        x = tf.tanh(x, name=f"layer{i}")
    return x


def evaluate(fetches, feed=None):
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        return session.run(fetches, feed)


@pytest.fixture
def x(graph):
    return tf.constant(np.linspace(-1, 1, 400, dtype=np.float32).reshape(20, 20), name="x") + 0.0


CHOICES = {
    "memory": lambda: "memory",
    "speed": lambda: "speed",
    "one tensor": lambda: tf.compat.v1.get_default_graph().get_tensor_by_name("layer5:0"),
    "tensors": lambda: [
        tf.compat.v1.get_default_graph().get_tensor_by_name(f"layer{i}:0") for i in (3, 7)
    ],
    "op": lambda: [tf.compat.v1.get_default_graph().get_operation_by_name("layer5")],
    "tensor name": lambda: ["layer5:0"],
    "op name": lambda: ["layer5"],
    "regular expression": lambda: [r"layer[37]:"],
    "compiled expression": lambda: re.compile("layer[37]:"),
    "policy": lambda: lambda op: op.name in ("layer3", "layer7"),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.sweep(3)
def test_every_way_to_choose_checkpoints(x, graph, choice):
    y = deep(x)
    plain = tf.gradients(y, x)
    ours = gradients(y, x, checkpoints=CHOICES[choice]())
    plan = get_plans(graph)[-1]
    assert plan.peak_bytes < plan.baseline_peak_bytes
    assert plan.recomputed
    np.testing.assert_array_equal(*evaluate([ours[0], plain[0]]))


def test_collection_is_the_default(x, graph):
    y = deep(x)
    for i in (3, 7):
        v1.add_to_collection("checkpoints", graph.get_tensor_by_name(f"layer{i}:0"))
    gradients(y, x)
    plan = get_plans()[-1]
    assert plan.strategy == "collection"
    assert {"layer3:0", "layer7:0"} <= set(plan.checkpoints)
    assert not {"layer3", "layer7"} & set(plan.recomputed)
    assert {"layer1", "layer2", "layer5"} <= set(plan.recomputed)


def test_plan_says_what_was_done(x, graph):
    gradients(deep(x), x, checkpoints="memory")
    (plan,) = get_plans(graph)
    assert plan.baseline_peak_bytes > plan.peak_bytes > 0
    assert plan.overhead > 0
    assert plan.seconds
    assert all(graph.get_tensor_by_name(name) is not None for name in plan.checkpoints)
    copies = {op.name for op in graph.get_operations() if COPY in op.name}
    assert {f"{name}{COPY}" for name in plan.recomputed} <= copies


def test_plans_are_kept_by_graph(x, graph):
    y = deep(x)
    gradients(y, x, checkpoints="memory")
    gradients(y, x, checkpoints=["layer5"])
    assert [plan.strategy for plan in get_plans()] == ["memory", "list"]
    with tf.Graph().as_default():
        assert get_plans() == []
    assert len(get_plans(graph)) == 2


def test_one_line_is_logged(x, caplog):
    with caplog.at_level(logging.INFO, logger="memory_saving_gradients"):
        gradients(deep(x), x, checkpoints="memory")
    (record,) = [r for r in caplog.records if r.name == "memory_saving_gradients"]
    assert record.levelno == logging.INFO
    for part in ("B ->", "x)", "overhead", "ops recomputed", " s"):
        assert part in record.getMessage()


# Arguments of tf.gradients.


def test_single_values_and_lists(x):
    y = deep(x)
    assert isinstance(gradients(y, x, checkpoints="memory"), list)
    assert len(gradients([y, 2.0 * y], [x, y], checkpoints="memory")) == 2


def test_grad_ys_and_stop_gradients(x, graph):
    y = deep(x)
    middle = graph.get_tensor_by_name("layer6:0")
    weight = tf.fill(y.shape, 3.0)
    arguments = {"grad_ys": [weight], "stop_gradients": [middle]}
    ours = gradients(y, [x, middle], checkpoints="memory", **arguments)
    plain = tf.gradients(y, [x, middle], **arguments)
    assert ours[0] is plain[0] is None
    np.testing.assert_array_equal(*evaluate([ours[1], plain[1]]))


def test_unconnected(x):
    y = deep(x)
    other = tf.ones((3,))
    assert gradients(y, [x, other], checkpoints="memory")[1] is None
    zero = gradients(
        y, [x, other], checkpoints="memory", unconnected_gradients=tf.UnconnectedGradients.ZERO
    )[1]
    np.testing.assert_array_equal(evaluate(zero), np.zeros(3))


def test_nothing_connected_gives_none(x, caplog):
    with caplog.at_level(logging.INFO, logger="memory_saving_gradients"):
        assert gradients(deep(x), tf.ones((3,)), checkpoints="memory") == [None]
    assert "no y depends on any x" in caplog.text


def test_name_gate_colocation_and_aggregation(x, graph):
    y = deep(x)
    (grad,) = gradients(
        y,
        x,
        checkpoints="memory",
        name="mine",
        gate_gradients=True,
        colocate_gradients_with_ops=False,
        aggregation_method=tf.AggregationMethod.EXPERIMENTAL_TREE,
    )
    assert grad.name.startswith("mine/")
    np.testing.assert_array_equal(*evaluate([grad, tf.gradients(y, x)[0]]))


@pytest.mark.parametrize("use_resource", [True, False])
def test_variables(graph, use_resource):
    w = v1.get_variable("w", (20, 20), use_resource=use_resource)
    y = deep(tf.matmul(tf.ones((30, 20)), w))
    ours = gradients(y, [w], checkpoints="memory")
    assert get_plans()
    np.testing.assert_array_equal(*evaluate([ours[0], tf.gradients(y, [w])[0]]))


def test_keras_variables():
    layer = tf.keras.layers.Dense(20)
    layer.build((None, 20))

    @tf.function
    def step(x):
        y = tf.reduce_sum(deep(layer(x)))
        kernel = layer.trainable_variables[0]
        return gradients(y, [kernel], checkpoints="memory"), tf.gradients(y, [kernel.value])

    ours, plain = step(tf.ones((30, 20)))
    np.testing.assert_array_equal(ours[0], plain[0])


def test_indexed_slices_stay_sparse(graph):
    table = v1.get_variable("table", (50, 20))
    y = deep(tf.gather(table, tf.constant([1, 2, 1] * 20)))
    (grad,) = gradients(y, [table], checkpoints="memory")
    assert isinstance(grad, tf.IndexedSlices)
    assert get_plans()


# In the place of tf.gradients.


@pytest.mark.parametrize("name", ["gradients_memory", "gradients_speed", "gradients_collection"])
def test_fixed_strategies_take_positional_arguments(x, graph, name):
    y = deep(x)
    v1.add_to_collection("checkpoints", graph.get_tensor_by_name("layer5:0"))
    (grad,) = getattr(msg, name)(y, [x], None, "positional")
    assert grad.name.startswith("positional/")
    assert get_plans()[-1].strategy == name.removeprefix("gradients_")


@pytest.mark.parametrize("spelling", ["tensorflow", "tensorflow.compat.v1", "tensorflow.compat.v2"])
def test_monkey_patched_tf_gradients_and_optimizer(monkeypatch, graph, spelling):
    from tensorflow.python.ops import gradients as gradients_module

    tf = importlib.import_module(spelling)
    monkeypatch.setattr(tf, "gradients", msg.gradients_memory)
    monkeypatch.setattr(gradients_module, "gradients", msg.gradients_memory)
    w = v1.get_variable("w", (20, 20), initializer=v1.constant_initializer(0.01))
    loss = tf.reduce_mean(deep(tf.matmul(tf.ones((30, 20)), w)))
    assert tf.gradients(loss, [w])[0].shape == (20, 20)
    train = v1.train.GradientDescentOptimizer(1.0).minimize(loss)
    assert len(get_plans()) == 2
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        before = session.run(loss)
        session.run(train)
        assert session.run(loss) < before


def test_entries_of_a_list_that_match_nothing_are_named_and_the_others_count(x, graph):
    """Google's EfficientDet has such a list: TensorFlow 2 has no ops of those names."""
    y = deep(x)
    with pytest.warns(UserWarning, match='"Add_", "AddN": neither the name .* are kept') as caught:
        gradients(y, x, checkpoints=["Add_", "layer5", "AddN"])
    assert caught[0].filename == __file__
    assert "layer5:0" in get_plans()[-1].checkpoints


# Ops that must not run twice.


def test_dropout_masks_are_those_of_the_forward_pass(graph):
    x = tf.ones((40, 40)) * v1.get_variable("x", (), initializer=v1.ones_initializer())
    h = x
    for _ in range(6):
        h = tf.tanh(tf.nn.dropout(tf.tanh(h), 0.5)) + h
    plain = tf.gradients(h, x)
    ours = gradients(h, x, checkpoints="memory")
    assert get_plans()[-1].recomputed
    # Both in one run, so that both see the same unseeded masks.
    for a, b in [evaluate([ours[0], plain[0]]) for _ in range(2)]:
        np.testing.assert_array_equal(a, b)
    copies = {op.type for op in graph.get_operations() if COPY in op.name}
    assert not copies & {"RandomUniform", "GreaterEqual"}  # the small bool mask is kept


def test_stateful_ops_run_once(graph):
    calls = []

    def count(value):
        calls.append(1)
        return value

    counter = v1.get_variable("counter", (), tf.int32, v1.zeros_initializer())
    x = tf.ones((40, 40)) * v1.get_variable("x", (), initializer=v1.ones_initializer())
    h = deep(x, 4)
    h = h * tf.ensure_shape(tf.numpy_function(count, [tf.stop_gradient(h)], tf.float32), h.shape)
    with tf.control_dependencies([counter.assign_add(1)]):
        h = tf.tanh(h)
    h = deep(h, 6)
    ours = gradients(h, x, checkpoints="memory")
    assert get_plans()[-1].recomputed
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        session.run(ours)
        assert session.run(counter) == 1
    assert len(calls) == 1


def test_variable_that_changes_in_the_step_is_read_once(graph):
    w = v1.get_variable("w", (), initializer=v1.ones_initializer())
    x = tf.ones((40, 40)) + 0.0
    h = deep(x * w.read_value(), 10)
    ours = gradients(h, x, checkpoints="memory")[0]
    plain = tf.gradients(h, x)[0]
    with tf.control_dependencies([tf.reduce_sum(h)]), tf.control_dependencies([w.assign(5.0)]):
        after = w.read_value()
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        expected = session.run(plain)
        session.run(v1.global_variables_initializer())
        got, changed = session.run([ours, after])
    assert changed == 5.0
    np.testing.assert_array_equal(got, expected)
    copies = {op.type for op in graph.get_operations() if COPY in op.name}
    assert not copies & {"ReadVariableOp", "VarHandleOp", "Placeholder"}


def test_copies_keep_device_and_attributes(graph):
    with tf.device("/CPU:0"):
        x = tf.ones((40, 40)) + 0.0
        h = x
        for _ in range(12):
            h = tf.nn.leaky_relu(h, alpha=0.3)
    gradients(h, x, checkpoints="memory", max_recompute=1)
    copies = [op for op in graph.get_operations() if COPY in op.name]
    assert copies
    for copy in copies:
        original = graph.get_operation_by_name(copy.name.removesuffix(COPY))
        assert copy.device == original.device == "/device:CPU:0"
        attributes = dict(copy.node_def.attr)
        attributes.pop("_gradient_op_type")
        assert attributes == dict(original.node_def.attr)


def test_gradients_of_gradients(x):
    def second(differentiate):
        y = tf.reduce_sum(tf.sin(deep(x)))
        (first,) = differentiate(y, x)
        return differentiate(tf.reduce_sum(first**2), x)[0]

    plain = second(tf.gradients)
    ours = second(lambda ys, xs: gradients(ys, xs, checkpoints="memory"))
    assert len(get_plans()) == 2
    np.testing.assert_array_equal(*evaluate([ours, plain]))


def test_plain_gradients_of_ours_are_refused_where_they_would_be_wrong(x):
    (first,) = gradients(tf.reduce_sum(tf.sin(deep(x))), x, checkpoints="memory")
    with pytest.raises(NotImplementedError, match="the second time, too"):
        tf.gradients(first, x)


@pytest.mark.parametrize("v2", [True, False])
def test_loops_and_branches(graph, v2):
    (v1.enable_control_flow_v2 if v2 else v1.disable_control_flow_v2)()
    try:
        x = tf.ones((40, 40)) * v1.get_variable("x", (), initializer=v1.ones_initializer())
        h = deep(x, 8)
        h = tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.sin(h)), [0, h])[1]
        h = tf.cond(tf.reduce_sum(h) > 0, lambda: tf.cos(h), lambda: tf.sin(h))
        h = deep(h, 8)
        ours = gradients(h, x, checkpoints="memory")
        plain = tf.gradients(h, x)
    finally:
        v1.enable_control_flow_v2()
    assert get_plans()[-1].recomputed
    np.testing.assert_array_equal(*evaluate([ours[0], plain[0]]))


# When nothing can be saved, and errors.


def serialized(graph):
    return graph.as_graph_def().SerializeToString(deterministic=True)


def test_nothing_saved_leaves_the_plain_graph_and_warns():
    def build(differentiate):
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, (10, 10))
            differentiate(tf.reduce_sum(3.0 * x), x)
            return graph

    with pytest.warns(UserWarning, match="saves nothing here"):
        ours = build(lambda y, x: gradients(y, x, checkpoints="memory"))
    assert serialized(ours) == serialized(build(tf.gradients))
    assert get_plans(ours) == []


def other_graph_tensor():
    with tf.Graph().as_default():
        return tf.ones((2,), name="elsewhere")


WRONG = {
    "unknown strategy": ("fast", ValueError, '"collection", "memory", "speed"'),
    "empty collection": ("collection", ValueError, r"add_to_collection.*memory"),
    "empty list": ([], ValueError, "empty list"),
    "other graph": (lambda: [other_graph_tensor()], ValueError, "another graph"),
    "not in the forward graph": (lambda: [tf.ones(2)], ValueError, "not in the forward graph"),
    "eager tensor": (lambda: [EAGER], ValueError, "tf.function"),
    "name of nothing": (["no_such_layer"], ValueError, "neither the name"),
    "bad expression": (["layer(["], ValueError, "no regular expression"),
    "number": (3, TypeError, "got 3"),
    "list of numbers": ([3], TypeError, "got 3"),
    "None": (None, TypeError, "got None"),
    "dictionary": ({"layer5": True}, TypeError, "got {"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_checkpoints_raise_before_any_edit(case):
    value, error, message = WRONG[case]

    def attempt():
        y = deep(tf.ones((10, 10)) + 0.0)
        chosen = value() if callable(value) else value
        graph = tf.compat.v1.get_default_graph()
        before = serialized(graph)
        with pytest.raises(error, match=message):
            gradients(y, graph.get_tensor_by_name("add:0"), checkpoints=chosen)
        assert serialized(graph) == before

    if case == "eager tensor":
        tf.function(attempt).get_concrete_function()
    else:
        with tf.Graph().as_default():
            attempt()


def test_eager_execution_is_refused():
    with pytest.raises(RuntimeError, match=r"tf\.function"):
        gradients(tf.ones(2), tf.ones(2), checkpoints="memory")


def test_eager_xs_are_refused(graph):
    with pytest.raises(ValueError, match="xs has an eager tensor"):
        gradients(deep(tf.ones((2, 2))), EAGER, checkpoints="memory")


def test_errors_of_tf_gradients_are_kept(x):
    with pytest.raises(ValueError, match="grad_ys"):
        gradients(deep(x), x, grad_ys=[x, x], checkpoints="memory")


def test_replicas_are_planned_once(graph, monkeypatch):
    asked = []
    memory = STRATEGIES["memory"]
    monkeypatch.setitem(STRATEGIES, "memory", lambda *args: asked.append(1) or memory(*args))
    for replica in range(3):
        with tf.name_scope(f"replica_{replica}"):
            x = tf.zeros((96, 33)) + 1.0
            gradients(deep(x), x, checkpoints="memory")
    first, *others = get_plans()
    assert len(asked) == 1
    assert len(others) == 2
    for other in others:
        assert other.schedule == first.schedule
        assert other.recomputed != first.recomputed
