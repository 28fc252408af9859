"""Special values and sizes: NaN and infinity, empty tensors, scalars, more than 2³¹ elements."""

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import get_plans, gradients
from memory_saving_gradients.planning.problem import baseline
from memory_saving_gradients.planning.simulate import simulate
from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.reading.read import read
from tests.cases import assert_same

v1 = tf.compat.v1


def deep(x, w, layers=12):
    for _ in range(layers):
        x = tf.tanh(tf.matmul(x, w)) * tf.exp(-x)
    return x


def both(y, xs, feed):
    ours, plain = gradients(y, xs, checkpoints="memory"), tf.gradients(y, xs)
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        return session.run([ours, plain], feed)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf, -0.0, 1e-42, 3e38])
def test_special_values_pass_equally(graph, special):
    x = v1.placeholder(tf.float32, (40, 20))
    w = v1.get_variable("w", (20, 20), initializer=v1.orthogonal_initializer(seed=1))
    fed = np.linspace(-1, 1, 800, dtype=np.float32).reshape(40, 20)
    fed[3, 4] = fed[17, 2] = special
    ours, plain = both(tf.reduce_sum(deep(x, w)), [x, w], {x: fed})
    assert get_plans()[-1].recomputed
    assert_same(ours, plain)
    if not np.isfinite(special):
        assert not np.isfinite(plain[0]).all()


@pytest.mark.filterwarnings("ignore:memory_saving_gradients")
@pytest.mark.parametrize("rows", [0, 1])
def test_an_empty_batch_is_planned_for_others_and_runs(graph, rows):
    x = v1.placeholder(tf.float32, (None, 20))
    w = v1.get_variable("w", (20, 20), initializer=v1.orthogonal_initializer(seed=1))
    ours, plain = both(tf.reduce_sum(deep(x, w)), [x, w], {x: np.ones((rows, 20))})
    assert get_plans()[-1].recomputed
    assert_same(ours, plain)
    assert ours[0].shape == (rows, 20)


@pytest.mark.filterwarnings("ignore:memory_saving_gradients")
@pytest.mark.parametrize("shape", [(0, 20), (), (1,)])
def test_a_step_of_no_bytes_to_speak_of(graph, shape):
    x = v1.placeholder(tf.float32, shape)
    y = x
    for _ in range(8):
        y = tf.tanh(y) + tf.sin(y)
    ours, plain = both(tf.reduce_sum(y), [x], {x: np.ones(shape)})
    assert_same(ours, plain)


@pytest.mark.filterwarnings("ignore:memory_saving_gradients")
@pytest.mark.parametrize("how", [{"checkpoints": "memory"}, {"checkpoints": "speed"}])
def test_a_step_that_makes_no_tensor(graph, how):
    x = v1.placeholder(tf.float32, (40, 20))
    start = v1.placeholder(tf.float32, (800,))
    (grad,) = gradients(tf.reshape(x, [800]), x, grad_ys=start, **how)
    with v1.Session() as session:
        fed = np.arange(800, dtype=np.float32)
        np.testing.assert_array_equal(session.run(grad, {start: fed}), fed.reshape(40, 20))


def test_empty_tensors_beside_full_ones(graph):
    x = v1.placeholder(tf.float32, (40, 20))
    w = v1.get_variable("w", (20, 20), initializer=v1.orthogonal_initializer(seed=1))
    h = tf.concat([deep(x[:0], w), deep(x, w)], 0)
    ours, plain = both(tf.reduce_sum(h), [x, w], {x: np.ones((40, 20))})
    assert get_plans()[-1].recomputed
    assert_same(ours, plain)


@pytest.mark.slow
def test_sizes_of_more_than_32_bits_do_not_overflow(graph):
    """On paper: the graph is read, planned and rewritten, and never run."""
    x = v1.placeholder(tf.float32, (2**17, 2**15))  # 2³² elements, 16 GiB
    y = x
    for i in range(12):
        y = tf.tanh(y, name=f"layer{i}")
    first_new = len(graph.get_operations())
    problem = read(BackwardPass.since(first_new, y, tf.gradients(tf.reduce_sum(y), x))).problem
    peak = simulate(problem, baseline(problem)).peak
    assert peak >= 12 * 2**34
    assert all(tensor.bytes > 0 for tensor in problem.tensors)
    gradients(tf.reduce_sum(y), x, memory_budget="120GiB")
    plan = get_plans()[-1]
    assert 2**34 < plan.peak_bytes <= 120 * 2**30 < plan.baseline_peak_bytes
    assert 0 < plan.overhead < 1
