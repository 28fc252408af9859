"""Layers inside a branch are planned, too."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import (
    BudgetError,
    GradientTape,
    get_plans,
    gradients,
    gradients_memory,
)
from memory_saving_gradients.measure import compiled_temporaries, session_peak
from tests.cases import assert_same

v1 = tf.compat.v1
ROWS, WIDTH = 2048, 32


def weights(count):
    return [
        v1.get_variable(f"w{i}", (WIDTH, WIDTH), initializer=v1.orthogonal_initializer(seed=i))
        for i in range(count)
    ]


def deep(x, ws, dropout=0.0):
    for w in ws:
        x = tf.tanh(tf.sin(tf.matmul(x, w)))
        x = tf.nn.dropout(x, dropout) if dropout else x
    return x


def one_branch(dropout=0.0):
    """A network that lies in a branch as a whole."""
    x = v1.get_variable("x", (ROWS, WIDTH), initializer=v1.random_normal_initializer(seed=1))
    ws = weights(16)
    reads = [tf.convert_to_tensor(w) for w in ws]
    h = tf.cond(tf.reduce_sum(x) < 1e9, lambda: deep(tf.sin(x), reads, dropout), lambda: tf.cos(x))
    return tf.reduce_mean(h**2), [x, *ws]


def with_variables():
    """The branches read variables themselves."""
    x = v1.get_variable("x", (ROWS, WIDTH), initializer=v1.random_normal_initializer(seed=1))
    ws = weights(16)
    h = x
    for half in (ws[:8], ws[8:]):
        h = tf.cond(
            tf.reduce_sum(h) < 1e9, lambda h=h, half=half: deep(h, half), lambda h=h: tf.sin(h)
        )
    return tf.reduce_mean(h**2), [x, *ws]


def both_sides():
    x = v1.get_variable("x", (ROWS, WIDTH), initializer=v1.random_normal_initializer(seed=1))
    reads = [tf.convert_to_tensor(w) for w in weights(16)]
    h = tf.sin(x)
    for _ in range(2):
        h = tf.cond(
            tf.reduce_sum(h) < 0,
            lambda h=h: deep(h, reads[:8]),
            lambda h=h: deep(tf.cos(h), reads[8:]) + h,
        )
    return tf.reduce_mean(h**2), v1.trainable_variables()


def one_side_does_nothing():
    x = v1.get_variable("x", (ROWS, WIDTH), initializer=v1.random_normal_initializer(seed=1))
    reads = [tf.convert_to_tensor(w) for w in weights(12)]
    h = tf.cond(tf.reduce_sum(x) < 1e9, lambda: deep(x * 1.0, reads), lambda: x * 1.0)
    return tf.reduce_mean(h**2), v1.trainable_variables()


def complex_numbers():
    x = v1.get_variable("x", (ROWS, WIDTH), initializer=v1.random_normal_initializer(seed=1))

    def transformed(h):
        for _ in range(12):
            h = tf.signal.fft(tf.sin(h) + h)
        return h

    h = tf.complex(x, x) * 1e-9
    h = tf.cond(tf.reduce_sum(x) < 1e9, lambda: transformed(h), lambda: h)
    return tf.reduce_mean(tf.abs(h)), [x]


def run(differentiate, build):
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(5)
        loss, xs = build()
        grads = differentiate(loss, xs)
        with v1.Session(config=v1.ConfigProto(inter_op_parallelism_threads=1)) as session:
            session.run(v1.global_variables_initializer())
            values = session.run(grads)
            return values, session_peak(session, grads), get_plans(graph)


BUILDS = {
    "one branch": one_branch,
    "dropout": lambda: one_branch(0.5),
    "variables": with_variables,
    "both sides": both_sides,
    "one side does nothing": one_side_does_nothing,
    "complex numbers": complex_numbers,
}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.sweep(2)
def test_layers_inside_a_branch_are_recomputed(name):
    plain, plain_peak, _ = run(tf.gradients, BUILDS[name])
    ours, peak, (plan,) = run(gradients_memory, BUILDS[name])
    assert_same(ours, plain)
    assert peak < 0.6 * plain_peak
    assert plan.peak_bytes < plan.baseline_peak_bytes


@pytest.mark.usefixtures("deterministic")
def test_in_a_function_under_a_tape():
    initial = tf.random.stateless_normal((8, WIDTH, WIDTH), (1, 2), stddev=0.3)
    ws = [tf.Variable(w) for w in tf.unstack(initial)]

    def traced(make_tape):
        @tf.function(autograph=False)
        def step(x):
            with make_tape() as tape:
                h = tf.cond(tf.reduce_sum(x) < 1e9, lambda: deep(x, ws), lambda: tf.cos(x))
                loss = tf.reduce_mean(h)
            return tape.gradient(loss, ws)

        x = tf.random.stateless_normal((ROWS, WIDTH), (3, 4))
        return step(x), get_plans(step.get_concrete_function(x).graph)

    plain, _ = traced(tf.GradientTape)
    ours, (plan,) = traced(lambda: GradientTape(checkpoints="memory"))
    for a, b in zip(ours, plain, strict=True):
        assert (a.numpy() == b.numpy()).all()
    assert plan.peak_bytes < 0.6 * plan.baseline_peak_bytes


@pytest.mark.usefixtures("deterministic")
def test_a_budget_that_needs_what_is_inside_branches():
    plain, plain_peak, _ = run(tf.gradients, one_branch)
    ours, peak, (plan,) = run(functools.partial(gradients, memory_budget=0.6), one_branch)
    assert_same(ours, plain)
    assert peak < 0.65 * plain_peak
    assert plan.peak_bytes <= plan.budget_bytes == pytest.approx(0.6 * plan.baseline_peak_bytes)
    with pytest.raises(BudgetError):
        run(functools.partial(gradients, memory_budget=0.01), one_branch)


def compiled(differentiate, build):
    """The compiled step of a network in branches, with its inputs; made without variables of v1."""
    ws = tf.unstack(tf.random.stateless_normal((16, WIDTH, WIDTH), (1, 2), stddev=0.3))
    x = tf.random.stateless_normal((ROWS, WIDTH), (3, 4))
    variables = [tf.Variable(w) for w in ws]

    @tf.function(jit_compile=True, autograph=False)
    def step(x):
        loss = tf.reduce_mean(build(x, variables) ** 2)
        return differentiate(loss, [x, *variables])

    return step, x


def reads_inside(x, ws):
    return tf.cond(tf.reduce_sum(x) < 1e9, lambda: deep(x, ws), lambda: tf.cos(x))


def two_branches(x, ws):
    """The second begins with what the first made, and has its condition."""
    reads = [tf.convert_to_tensor(w) for w in ws]
    condition = tf.reduce_sum(x) < 1e9
    h = tf.cond(condition, lambda: deep(x, reads[:8]), lambda: deep(x, reads[8:]) + x)
    return tf.cond(condition, lambda: deep(tf.cos(h), reads[8:]), lambda: h)


def not_taken(x, ws):
    return tf.cond(tf.reduce_sum(x) > 1e9, lambda: deep(x, ws), lambda: deep(tf.cos(x), ws[8:]))


@pytest.mark.parametrize("build", [reads_inside, two_branches, not_taken])
@pytest.mark.parametrize("options", [{"checkpoints": "memory"}, {"memory_budget": 0.5}], ids=str)
@pytest.mark.sweep(3)
def test_layers_inside_a_compiled_branch_are_recomputed(build, options):
    plain, x = compiled(tf.gradients, build)
    ours, _ = compiled(functools.partial(gradients, **options), build)
    for a, b in zip(ours(x), plain(x), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())
    (plan,) = get_plans(ours.get_concrete_function(x).graph)
    assert plan.peak_bytes < 0.6 * plan.baseline_peak_bytes
    assert compiled_temporaries(ours, x) < 0.7 * compiled_temporaries(plain, x)


def test_a_saved_plan_recomputes_inside_branches_again(tmp_path):
    _, peak, (plan,) = run(gradients_memory, both_sides)
    plan.save(tmp_path / "plan.json")
    again = functools.partial(gradients, plan=tmp_path / "plan.json")
    _, peak_again, (applied,) = run(again, both_sides)
    assert applied.peak_bytes == plan.peak_bytes
    assert peak_again == pytest.approx(peak, rel=0.15)
    with pytest.raises(ValueError, match="another graph"):
        run(again, one_branch)


@pytest.mark.usefixtures("deterministic")
def test_gradients_of_gradients_through_a_branch():
    def second(differentiate):
        def build():
            loss, xs = both_sides()
            first = differentiate(loss, xs)
            return tf.add_n([tf.reduce_sum(g**2) for g in first]), xs

        return run(differentiate, build)[0]

    assert_same(second(gradients_memory), second(tf.gradients))
