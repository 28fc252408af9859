"""`GradientTape` as a user calls it: every behaviour of `tf.GradientTape`, in less memory."""

import functools
import warnings

import numpy as np
import pytest
import tensorflow as tf

import memory_saving_gradients as msg
from memory_saving_gradients.doors import tape as tape_module

WIDTH, LAYERS = 64, 12


@pytest.fixture
def weights():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((LAYERS, WIDTH, WIDTH)).astype(np.float32) / 8
    return [tf.Variable(v, name=f"w{i}") for i, v in enumerate(values)]


def network(x, weights):
    for w in weights:
        x = tf.tanh(tf.sin(x @ w))
    return x


X = np.random.default_rng(1).standard_normal((512, WIDTH)).astype(np.float32)


def as_written(make_tape, weights, x):
    with make_tape() as tape:
        loss = tf.reduce_sum(network(x, weights))
    return tape.gradient(loss, weights)


def watched_input(make_tape, weights, x):
    with make_tape(watch_accessed_variables=False) as tape:
        tape.watch(x)
        loss = tf.reduce_sum(network(x, weights))
    return tape.gradient(loss, [x, weights[0]])


def output_gradients(make_tape, weights, x):
    with make_tape() as tape:
        y = network(x, weights)
    return tape.gradient(y, weights, output_gradients=2.0 * x)


def nested_structures(make_tape, weights, x):
    with make_tape() as tape:
        tape.watch(x)
        y = network(x, weights)
        targets = {"a": tf.reduce_sum(y), "b": [y * 2.0, tf.reduce_mean(y**2)]}
    return tape.gradient(targets, {"x": x, "w": (weights[0], [weights[1]])})


def output_gradients_of_a_structure(make_tape, weights, x):
    with make_tape() as tape:
        y = network(x, weights)
        z = tf.sin(y)
    return tape.gradient([y, z], weights, output_gradients=[x, 2.0 * x])


def persistent(make_tape, weights, x):
    with make_tape(persistent=True) as tape:
        y = network(x, weights)
        loss, other = tf.reduce_sum(y), tf.reduce_sum(y**2)
    first, second = tape.gradient(loss, weights), tape.gradient(other, weights)
    del tape
    return first, second


def second_order(make_tape, weights, x):
    with make_tape() as outer:
        with make_tape() as inner:
            loss = tf.reduce_sum(network(x, weights) ** 2)
        grads = inner.gradient(loss, weights)
        norm = tf.add_n([tf.reduce_sum(g**2) for g in grads])
    return outer.gradient(norm, weights)


def stop_recording(make_tape, weights, x):
    with make_tape() as tape:
        y = network(x, weights)
        with tape.stop_recording():
            scale = tf.reduce_max(y)
        loss = tf.reduce_sum(y * scale)
    return tape.gradient(loss, weights)


def unconnected(make_tape, weights, x):
    with make_tape() as tape:
        loss = tf.reduce_sum(network(x, weights[:-1]))
    return tape.gradient(loss, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO)


def reset(make_tape, weights, x):
    with make_tape() as tape:
        network(x, weights)
        tape.reset()
        loss = tf.reduce_sum(network(x, weights))
    return tape.gradient(loss, weights)


def jacobian(make_tape, weights, x):
    with make_tape() as tape:
        y = tf.reduce_sum(network(x, weights), axis=0)[:5]
    return tape.jacobian(y, weights[0])


def batch_jacobian(make_tape, weights, x):
    x = x[:8]
    with make_tape() as tape:
        tape.watch(x)
        y = network(x, weights)
    return tape.batch_jacobian(y, x)


def nested_functions(make_tape, weights, x):
    @tf.function
    def layers(h, weights):
        for w in weights:  # AutoGraph must leave this loop alone, and convert the branch
            h = tf.tanh(h @ w)
        if tf.reduce_sum(h) > 1e9:
            h = h + 1.0
        return h

    @tf.function(autograph=False)
    def both(h):
        return layers(layers(h, weights[:6]), weights[6:])

    with make_tape() as tape:
        loss = tf.reduce_sum(both(x))
    return tape.gradient(loss, weights)


def calls_with_effects_in_the_backward_pass(make_tape, weights, x):
    """Each keeps its place, though the gradients of wide layers would better come late."""
    noted = weights[-1]
    noted.assign(tf.zeros_like(noted))

    @tf.custom_gradient
    def note(h, w):
        def backward(g):
            noted.assign(0.5 * noted + tf.reduce_sum(g))
            return g @ tf.transpose(w), tf.transpose(h) @ g

        return h @ w, backward

    with make_tape() as tape:
        h = x
        for w in weights[:-1]:
            h = tf.tanh(note(h, tf.identity(w)))
        loss = tf.reduce_sum(h)
    return tape.gradient(loss, weights[:-1]), noted.read_value()


def custom_gradient(make_tape, weights, x):
    @tf.custom_gradient
    def clipped(h):
        return tf.sin(h), lambda g: tf.clip_by_value(g * tf.cos(h), -1.0, 1.0)

    with make_tape() as tape:
        loss = tf.reduce_sum(clipped(network(clipped(network(x, weights[:6])), weights[6:])))
    return tape.gradient(loss, weights)


def recompute_grad(make_tape, weights, x):
    inner = tf.recompute_grad(lambda h: network(h, weights[3:6]))
    with make_tape() as tape:
        loss = tf.reduce_sum(network(inner(network(x, weights[:3])), weights[6:]))
    return tape.gradient(loss, weights)


def a_loop(make_tape, weights, x):
    with make_tape() as tape:
        h = network(x, weights[:6])
        _, h = tf.while_loop(
            lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h @ weights[6])), (0, h)
        )
        loss = tf.reduce_sum(network(h, weights[7:]))
    return tape.gradient(loss, weights)


def sparse(make_tape, weights, x):
    rows = tf.constant([1, 5, 5, 9])
    with make_tape() as tape:
        h = tf.tile(tf.gather(weights[0], rows), (128, 1))
        loss = tf.reduce_sum(network(h, weights[1:]))
    return tape.gradient(loss, weights)


def in_a_name_scope(make_tape, weights, x):
    with tf.name_scope("training"):
        return as_written(make_tape, weights, x)


#: name: (what to run, whether it saves memory)
USES = {
    use.__name__: (use, saves)
    for use, saves in [
        (as_written, True),
        (watched_input, True),
        (output_gradients, True),
        (output_gradients_of_a_structure, True),
        (nested_structures, True),
        (persistent, True),
        (second_order, True),
        (stop_recording, True),
        (unconnected, True),
        (reset, True),
        (jacobian, False),
        (batch_jacobian, False),
        (nested_functions, True),
        (calls_with_effects_in_the_backward_pass, True),
        (custom_gradient, True),
        (recompute_grad, True),
        (a_loop, True),
        (sparse, True),
        (in_a_name_scope, True),
    ]
}


def traced(use, make_tape, weights, compiled=False):
    step = tf.function(lambda x: use(make_tape, weights, x), jit_compile=compiled, autograph=False)
    function = step.get_concrete_function(tf.TensorSpec(X.shape, tf.float32))
    return function(tf.constant(X)), msg.get_plans(function.graph)


def assert_same(ours, plain):
    tf.nest.assert_same_structure(ours, plain, expand_composites=True)
    pairs = (tf.nest.flatten(tree, expand_composites=True) for tree in (ours, plain))
    for a, b in zip(*pairs, strict=True):
        if b is None:
            assert a is None
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", USES)
def test_gradients_are_those_of_the_plain_tape(weights, name):
    use, saves = USES[name]
    plain, _ = traced(use, tf.GradientTape, weights)
    ours, plans = traced(use, msg.GradientTape, weights)
    assert_same(ours, plain)
    assert bool(plans) == saves
    assert all(plan.peak_bytes < plan.baseline_peak_bytes for plan in plans)


@pytest.mark.usefixtures("deterministic")
def test_a_budget_is_met(weights):
    make = functools.partial(msg.GradientTape, memory_budget=0.6)
    ours, (plan,) = traced(as_written, make, weights)
    plain, _ = traced(as_written, tf.GradientTape, weights)
    assert_same(ours, plain)
    assert plan.peak_bytes <= 0.6 * plan.baseline_peak_bytes


def test_checkpoints_may_be_named(weights):
    make = functools.partial(msg.GradientTape, checkpoints=[r"^Tanh_[37]:0"])
    _, (plan,) = traced(as_written, make, weights)
    assert {"Tanh_3:0", "Tanh_7:0"} <= set(plan.checkpoints)


def test_eager_mode_gives_plain_gradients_and_says_so_once(weights, monkeypatch):
    monkeypatch.setattr(tape_module, "_warned", False)
    x = tf.constant(X)
    with pytest.warns(UserWarning, match=r"tf\.function") as warned:
        ours = as_written(msg.GradientTape, weights, x)
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_written(msg.GradientTape, weights, x)
    assert_same(ours, as_written(tf.GradientTape, weights, x))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"checkpoints": "fast"}, ValueError, "unknown strategy"),
        ({"checkpoints": 3}, TypeError, "checkpoints must be"),
        ({"memory_budget": -1}, ValueError, "memory_budget"),
        ({"memory_budget": [1]}, TypeError, "memory_budget"),
    ],
)
def test_wrong_options_raise_at_once(options, error, says):
    with pytest.raises(error, match=says):
        msg.GradientTape(**options)


def test_a_used_tape_says_so_as_the_plain_one_does(weights):
    @tf.function
    def step(x):
        with msg.GradientTape() as tape:
            loss = tf.reduce_sum(network(x, weights))
        tape.gradient(loss, weights)
        return tape.gradient(loss, weights)

    with pytest.raises(RuntimeError, match="non-persistent"):
        step(X)


def test_autograph_leaves_it_alone(weights):
    @tf.function
    def step(x):
        with msg.GradientTape() as tape:
            h = x
            for w in weights:
                h = tf.tanh(h @ w)
            loss = tf.reduce_sum(h)
        if tf.reduce_sum(x) > 0:
            loss += 1.0
        return tape.gradient(loss, weights)

    assert len(step(tf.constant(X))) == LAYERS


def test_nested_functions_are_planned(weights):
    _, (nested,) = traced(nested_functions, msg.GradientTape, weights)
    _, (flat,) = traced(as_written, msg.GradientTape, weights)
    assert nested.peak_bytes < 1.2 * flat.peak_bytes
    assert any("both/layers/" in name for name in nested.recomputed)


def test_nested_functions_are_called_as_ever_outside_of_the_tape(weights):
    call = type(tf.function(len)).__call__
    traced(nested_functions, msg.GradientTape, weights)
    assert type(tf.function(len)).__call__ is call
    compiled = tf.function(lambda h: tf.tanh(h), jit_compile=True)

    @tf.function
    def step(x):
        with msg.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(network(compiled(x), weights))
        return tape.gradient(loss, x)

    ops = step.get_concrete_function(tf.constant(X)).graph.get_operations()
    assert [op.type for op in ops].count("StatefulPartitionedCall") + [op.type for op in ops].count(
        "PartitionedCall"
    ) >= 2  # forward and backward of `compiled`


def test_a_strategy_in_the_place_of_persistent_is_pointed_out():
    with pytest.raises(TypeError, match=r"did you mean\s+GradientTape\(checkpoints=.speed.\)"):
        msg.GradientTape("speed")
