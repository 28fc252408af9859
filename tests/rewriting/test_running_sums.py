"""Running sums: the gradients of plain sums, in less memory."""

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import get_plans, gradients, measure

v1 = tf.compat.v1

WIDTH, TIMES = 256, 24


def unrolled(scope):
    """A weight that is read many times; its gradients by `tf.gradients` and by ours."""
    x = tf.constant(np.random.default_rng(0).standard_normal((16, WIDTH)), tf.float32)
    weight = tf.Variable(tf.random.stateless_normal((WIDTH, WIDTH), (0, 1), stddev=WIDTH**-0.5))
    h = x
    for i in range(TIMES):
        with tf.name_scope(scope(i)):
            h = tf.tanh(tf.matmul(h, weight))
    return tf.reduce_mean(tf.square(h)), weight


def run(differentiate, scope):
    with tf.Graph().as_default() as graph:
        loss, weight = unrolled(scope)
        grads = differentiate(loss, [weight])
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            return session.run(grads)[0], measure.session_peak(session, grads), get_plans(graph)


def last_comes_first(i):
    """Sorted by name, the gradients are in the order of their making."""
    return f"step{chr(ord('z') - i)}"


def as_people_name_them(i):
    return f"step{i}"


ONE = WIDTH * WIDTH * 4


@pytest.mark.usefixtures("deterministic")
def test_in_the_order_of_the_plain_step_a_sum_is_equal_bit_for_bit():
    plain, most, _ = run(tf.gradients, last_comes_first)
    ours, least, (plan,) = run(gradients_memory, last_comes_first)
    np.testing.assert_array_equal(ours, plain)
    assert plan.labels.reordered == ()
    assert most >= TIMES * ONE
    assert least < 6 * ONE


@pytest.mark.usefixtures("deterministic")
def test_in_another_order_it_is_equal_to_rounding():
    plain, _, _ = run(tf.gradients, as_people_name_them)
    ours, least, (plan,) = run(gradients_memory, as_people_name_them)
    np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-6 * np.abs(plain).max())
    assert plan.labels.reordered
    assert least < 6 * ONE


@pytest.mark.usefixtures("deterministic")
def test_a_sum_that_is_kept_whole_is_equal_bit_for_bit():
    def whole(ys, xs):
        return gradients(ys, xs, checkpoints="memory", running_sums=False)

    plain, _, _ = run(tf.gradients, as_people_name_them)
    ours, peak, plans = run(whole, as_people_name_them)
    np.testing.assert_array_equal(ours, plain)
    assert peak > (TIMES - 1) * ONE
    assert not any(plan.labels.reordered for plan in plans)


def test_a_second_derivative_goes_through_running_sums():
    def twice(differentiate):
        def call(loss, xs):
            (first,) = differentiate(loss, xs)
            return differentiate(tf.reduce_sum(tf.square(first)), xs)

        return call

    plain, _, _ = run(twice(tf.gradients), as_people_name_them)
    ours, _, _ = run(twice(gradients_memory), as_people_name_them)
    np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-5 * np.abs(plain).max())


def test_what_saves_nothing_leaves_sums_whole(graph):
    x = tf.constant(np.ones((4, 4)), tf.float32)
    loss = tf.reduce_sum(tf.add_n([tf.square(x + i) for i in range(3)]))
    with pytest.warns(UserWarning, match="saves nothing"):
        (grad,) = gradients(loss, [x], checkpoints="memory")
    assert "running" not in grad.name


def gradients_memory(ys, xs):
    return gradients(ys, xs, checkpoints="memory")
