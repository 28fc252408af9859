"""Reference variables: what is read again is what the forward pass read, and updates come later."""

import time

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import get_plans, gradients_memory
from memory_saving_gradients.pipeline import plan_and_rewrite
from memory_saving_gradients.planning import strategies
from memory_saving_gradients.planning.keep import keeping

v1 = tf.compat.v1


@pytest.fixture
def all_again(monkeypatch):
    """Every op that may run twice does, whether that saves memory or not."""
    monkeypatch.setitem(strategies.STRATEGIES, "memory", lambda problem, _: keeping(problem, ()))
    monkeypatch.setattr(plan_and_rewrite, "is_worth_it", lambda *_: True)


def variable(*shape, seed=0):
    values = np.random.default_rng(seed).normal(scale=0.2, size=shape).astype(np.float32)
    return v1.Variable(values, use_resource=False)


def products(h):
    """The gradient of a weight is there before that of the layer's input, which reads it, too."""
    ws = [variable(64, 64, seed=i) for i in range(6)]
    for w in ws:
        h = tf.tanh(tf.matmul(w, h))
    return h, ws


def slow_reads(h):
    """What reads a weight takes its time, as copy and as original."""

    def slowly(w):
        def body(i, a):
            return i + 1, tf.tanh(w + a)

        return tf.while_loop(lambda i, _: i < 200, body, [0, tf.zeros_like(w)])[1]

    ws = [variable(64, 64, seed=i) for i in range(6)]
    for w in ws:
        h = tf.tanh(tf.matmul(w + tf.stop_gradient(slowly(w)), h))
    return h, ws


def loops(h):
    """Read within a v1 loop, which nothing outside can wait for but where it ends."""
    w = variable(64, 64)

    def body(i, a):
        return i + 1, tf.tanh(tf.matmul(w, a))

    h = tf.tanh(tf.matmul(w, tf.tanh(h)))
    return tf.tanh(tf.while_loop(lambda i, _: i < 3, body, [0, h])[1]), [w]


def rows(h):
    table, w = variable(32, 64), variable(64, 64)
    for _ in range(3):
        h = tf.tanh(tf.matmul(w, h))
    looked_up = tf.tanh(tf.gather(table, [1, 5, 1, 7] * 16))
    return h * tf.matmul(looked_up, table, transpose_b=True)[:, :1], [table, w]


def step(network, differentiate, threads):
    """The largest error of an update, as a share of its gradient."""
    rate = 1e-3
    with tf.Graph().as_default() as graph:
        x = np.random.default_rng(9).normal(size=(64, 128)).astype(np.float32)
        h, ws = network(tf.constant(x))
        grads = differentiate(tf.reduce_sum(h * h), ws)
        train = v1.train.GradientDescentOptimizer(rate).apply_gradients(zip(grads, ws, strict=True))
        config = v1.ConfigProto(inter_op_parallelism_threads=threads)
        with v1.Session(graph=graph, config=config) as session:
            session.run(v1.global_variables_initializer())
            dense = [tf.convert_to_tensor(grad) for grad in grads]
            before, expected = session.run([ws, dense])
            session.run(train)
            after = session.run(ws)
    changes = [(b - a) / rate for a, b in zip(after, before, strict=True)]
    errors = [abs(c - g).max() / abs(g).max() for c, g in zip(changes, expected, strict=True)]
    return max(errors), graph


@pytest.mark.usefixtures("all_again")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("network", [products, slow_reads, loops, rows])
def test_an_update_waits_for_the_last_read(network, threads):
    error, graph = step(network, gradients_memory, threads)
    assert get_plans(graph)
    assert error < 0.01


def test_plain_updates_do_not_wait():
    """So it is TensorFlow that does not order them, and the test above can fail."""
    assert step(products, tf.gradients, 1)[0] > 0.1


@pytest.mark.usefixtures("all_again")
@pytest.mark.parametrize("needed", [True, False], ids=["within", "beside"])
def test_what_the_forward_pass_writes_to_is_read_once(needed):
    """As spectral normalisation does: a vector is updated from what it was."""

    def run(differentiate):
        with tf.Graph().as_default():
            w, u = variable(64, 64), variable(64, 1, seed=1)
            x = tf.ones((64, 256))
            old = tf.stop_gradient(tf.tanh(tf.tanh(tf.matmul(w, u))))
            write = u.assign(old + 1.0)
            with tf.control_dependencies([write.op] if needed else []):
                h = tf.tanh(tf.matmul(w, x) * tf.sin(old))
            # So long the write beside it has time.
            pause = tf.numpy_function(lambda a: time.sleep(0.2) or a, [h[0, 0]], tf.float32)
            with tf.control_dependencies([pause]):
                h = tf.identity(h)
            loss = tf.reduce_sum(tf.tanh(h) * tf.tanh(tf.matmul(w, tf.tanh(h))))
            grads = differentiate(loss, [w])
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                return session.run([loss, *grads, write])

    for a, b in zip(run(gradients_memory), run(tf.gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
