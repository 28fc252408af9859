"""`patch()` as a user calls it."""

import threading

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import gradients as ops_gradients

import memory_saving_gradients as msg
from memory_saving_gradients.graph import tf_private
from tests.doors.test_tape import (
    LAYERS,
    WIDTH,
    X,
    as_written,
    assert_same,
    network,
    traced,
    weights,
)

__all__ = ["weights"]  # a fixture

v1 = tf.compat.v1


def names():
    places = [*tf_private.gradient_functions(), (threading.Thread, "start")]
    return {(m.__name__, name): getattr(m, name) for m, name in places}


@pytest.fixture(autouse=True)
def nothing_stays_patched():
    import tf_keras  # noqa: F401  # makes tf.compat.v1 another module than `v1` here

    before = names()
    yield
    assert names() == before


def test_a_call_patches_until_it_is_undone(weights):
    before = names()
    patched = msg.patch()
    assert tf.gradients is not before["tensorflow", "gradients"]
    assert all(now is not before[key] for key, now in names().items())
    _, plans = traced(as_written, tf.GradientTape, weights)
    assert patched.plans == plans != []
    patched.undo()
    assert names() == before
    assert traced(as_written, tf.GradientTape, weights)[1] == []


@pytest.mark.usefixtures("deterministic")
def test_a_with_block_patches_what_is_traced_in_it(weights):
    plain, _ = traced(as_written, tf.GradientTape, weights)
    with msg.patch("speed") as patched:
        ours, _ = traced(as_written, lambda: tf.GradientTape(), weights)
    assert_same(ours, plain)
    assert [plan.strategy for plan in patched.plans] == ["speed"]


def test_the_innermost_block_counts(weights):
    outer = msg.patch("memory")
    with msg.patch("speed") as inner, msg.patch(memory_budget=0.7) as innermost:
        traced(as_written, lambda: tf.GradientTape(), weights)
    traced(as_written, lambda: tf.GradientTape(), weights)
    assert [len(p.plans) for p in (outer, inner, innermost)] == [1, 0, 1]
    assert innermost.plans[0].strategy == "budget"
    outer.undo()


def test_patching_twice_is_fine():
    before = names()
    first, second = msg.patch(), msg.patch("speed")
    first.undo()
    assert names() != before
    first.undo()
    second.undo()


def test_it_is_taken_back_after_an_error():
    with pytest.raises(KeyError), msg.patch():
        raise KeyError


def test_what_another_puts_over_it_stays(monkeypatch):
    found = tf.gradients
    patched = msg.patch()
    wrapped = tf.gradients

    def other(*args, **kwargs):
        return wrapped(*args, **kwargs)

    tf.gradients = other
    patched.undo()
    assert tf.gradients is other
    with tf.Graph().as_default() as graph:
        x = tf.zeros((64, 64)) + 1.0
        y = tf.reduce_sum(tf.tanh(tf.tanh(tf.tanh(x))))
        other(y, x)
    assert not msg.get_plans(graph)
    tf.gradients = found


def test_wrong_options_patch_nothing():
    with pytest.raises(ValueError, match="unknown strategy"):
        msg.patch("fast")


def test_an_undone_patch_cannot_be_entered():
    patched = msg.patch()
    patched.undo()
    with pytest.raises(RuntimeError, match="undone"), patched:
        pass


def test_a_block_covers_its_own_thread_and_those_it_starts(weights):
    def trace(into):
        into.extend(traced(as_written, lambda: tf.GradientTape(), weights)[1])

    entered, done = threading.Event(), threading.Event()
    elsewhere, within = [], []

    def other_thread():
        entered.wait()
        trace(elsewhere)
        done.set()

    other = threading.Thread(target=other_thread)
    other.start()
    with msg.patch():
        entered.set()
        done.wait()
        started_within = threading.Thread(target=trace, args=(within,))
        started_within.start()
        started_within.join()
    other.join()
    assert not elsewhere
    assert within


def test_a_thread_that_another_starts_meanwhile_is_not_covered(weights):
    """The one that starts it is in no block; those that are start one that starts another."""
    found = {}

    def trace(name):
        found[name] = traced(as_written, lambda: tf.GradientTape(), weights)[1]

    def starting(name):
        child = threading.Thread(target=trace, args=(name,))
        child.start()
        child.join()

    entered, done = threading.Event(), threading.Event()

    def patched():
        with msg.patch():
            entered.set()
            done.wait()
            grandparent = threading.Thread(target=starting, args=("inherited",))
            grandparent.start()
            grandparent.join()

    other = threading.Thread(target=patched)
    other.start()
    entered.wait()
    starting("unpatched")
    done.set()
    other.join()
    assert not found["unpatched"]
    assert found["inherited"]


def test_many_threads_each_get_their_own(weights):
    strategies = ["memory", "speed", None] * 4
    found = {}
    start = threading.Barrier(len(strategies))

    def run(index, strategy):
        start.wait()
        if strategy is None:
            found[index] = [p.strategy for p in traced(as_written, tf.GradientTape, weights)[1]]
            return
        with msg.patch(strategy):
            plans = traced(as_written, lambda: tf.GradientTape(), weights)[1]
            found[index] = [p.strategy for p in plans]

    threads = [threading.Thread(target=run, args=item) for item in enumerate(strategies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, strategy in enumerate(strategies):
        if strategy is not None:
            assert found[index] == [strategy]


def small_v1_step():
    x = v1.placeholder(tf.float32, (256, WIDTH))
    weights = [v1.get_variable(f"w{i}", (WIDTH, WIDTH), use_resource=True) for i in range(LAYERS)]
    return x, weights, tf.reduce_sum(network(x, weights))


@pytest.mark.parametrize("where", [tf, v1, tf.compat.v2, ops_gradients])
def test_tf_gradients_saves_memory(graph, where):
    _, weights, loss = small_v1_step()
    with msg.patch() as patched:
        where.gradients(loss, weights, None, "scope")
    assert patched.plans == msg.get_plans(graph) != []
    assert any(op.name.startswith("scope/") for op in graph.get_operations())


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "make",
    [
        lambda: v1.train.GradientDescentOptimizer(0.1),
        lambda: v1.train.AdamOptimizer(0.1),
        lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    ],
)
def test_v1_optimizers_save_memory(make):
    def train(patched):
        with tf.Graph().as_default() as graph:
            v1.set_random_seed(3)
            x, weights, loss = small_v1_step()
            if patched:
                with msg.patch():
                    train_op = make().minimize(loss)
            else:
                train_op = make().minimize(loss)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                for _ in range(3):
                    session.run(train_op, {x: X[:256]})
                return session.run(weights), msg.get_plans(graph)

    (plain, _), (ours, plans) = train(False), train(True)
    assert plans
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_v1_optimizer_in_a_function_saves_memory(weights):
    optimizer = v1.train.GradientDescentOptimizer(0.1)

    @tf.function
    def step(x):
        optimizer.minimize(lambda: tf.reduce_sum(network(x, weights)), var_list=weights)

    with msg.patch() as patched:
        step(tf.constant(X))
    assert patched.plans


def test_eagerly_tensorflow_says_what_is_wrong():
    x = tf.ones(3)
    with msg.patch(), pytest.raises(RuntimeError, match="eager"):
        tf.gradients(x, x)


def test_a_function_that_was_traced_before_is_told_of(weights):
    @tf.function
    def step(x):
        return tf.gradients(tf.reduce_sum(network(x, weights)), weights)

    step(tf.constant(X))
    with pytest.warns(UserWarning, match="traced before stays as it was"), msg.patch() as patched:
        step(tf.constant(X))
    assert not patched.plans


def test_an_error_within_a_block_is_no_reason_to_warn(recwarn):
    with pytest.raises(KeyError), msg.patch():
        raise KeyError
    assert not recwarn.list
