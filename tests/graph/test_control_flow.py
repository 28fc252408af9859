"""Loops and branches, as ops that call functions and as v1 frames."""

import functools

import pytest
import tensorflow as tf

from memory_saving_gradients import get_plans, gradients, gradients_memory
from memory_saving_gradients.measure import session_peak
from memory_saving_gradients.rewriting.run import COPY
from tests.cases import assert_same

v1 = tf.compat.v1
WIDTH = 32


def loop(h, w):
    return tf.while_loop(lambda i, _: i < 5, lambda i, h: (i + 1, tf.tanh(h @ w)), [0, h])[1]


def branch(h, w):
    return tf.cond(tf.reduce_sum(h) > 0, lambda: tf.tanh(tf.sin(h) @ w), lambda: tf.cos(h))


def case(h, w):
    total = tf.reduce_sum(h)
    pairs = [(total > 100, lambda: tf.sin(h)), (total > -100, lambda: tf.tanh(tf.cos(h @ w)))]
    return tf.case(pairs, default=lambda: h)


def switch_case(h, w):
    index = tf.cast(tf.reduce_sum(h) > 0, tf.int32)
    return tf.switch_case(index, [lambda: tf.tanh(tf.sin(h) @ w), lambda: tf.tanh(tf.cos(h))])


def scan(h, w):
    rows = tf.reshape(h, [4, -1, WIDTH])
    return tf.reshape(tf.scan(lambda a, x: tf.tanh(a @ w + x), rows, rows[0] * 0.5), [-1, WIDTH])


def map_fn(h, w):
    return tf.reshape(
        tf.map_fn(lambda x: tf.tanh(x @ w), tf.reshape(h, [4, -1, WIDTH])), [-1, WIDTH]
    )


def tensor_array(h, w):
    parts = tf.TensorArray(tf.float32, 4).unstack(tf.split(h, 4))
    results = tf.TensorArray(tf.float32, 4)

    def body(i, results):
        return i + 1, results.write(i, tf.tanh(parts.read(i) @ w))

    results = tf.while_loop(lambda i, _: i < 4, body, [0, results])[1]
    return results.concat()


def nested(h, w):
    def body(i, h):
        inner = tf.while_loop(lambda j, _: j < 2, lambda j, h: (j + 1, tf.sin(h @ w)), [0, h])[1]
        return i + 1, tf.cond(i < 1, lambda: tf.tanh(inner), lambda: tf.cos(inner))

    return tf.while_loop(lambda i, _: i < 3, body, [0, h])[1]


def loop_with_dropout(h, w):
    def body(i, h):
        return i + 1, tf.nn.dropout(tf.tanh(h @ w), 0.5)

    return tf.while_loop(lambda i, _: i < 3, body, [0, h])[1]


def branch_with_dropout(h, w):
    drop = lambda: tf.tanh(tf.nn.dropout(h, 0.5))  # noqa: E731
    return tf.cond(tf.reduce_sum(h * h) > 0, drop, lambda: tf.sin(h))


FORMS = [
    loop,
    branch,
    case,
    switch_case,
    scan,
    map_fn,
    tensor_array,
    nested,
    loop_with_dropout,
    branch_with_dropout,
]


@pytest.fixture(params=["functional", "v1"])
def control_flow(request):
    if request.param == "v1":
        v1.disable_control_flow_v2()
    yield request.param
    v1.enable_control_flow_v2()


def network(form):
    """A network that goes through `form` three times, and what it is differentiated by."""
    w = v1.get_variable("w", (WIDTH, WIDTH), initializer=v1.orthogonal_initializer(seed=1))
    h0 = v1.get_variable("x", (256, WIDTH), initializer=v1.random_normal_initializer(seed=2))
    h = tf.matmul(h0, w)
    for _ in range(3):
        for _ in range(6):
            h = tf.tanh(tf.sin(h))
        h = tf.ensure_shape(form(h, w), (256, WIDTH))
    return tf.reduce_mean(h**2), v1.trainable_variables()


@pytest.mark.parametrize("how", [{"checkpoints": "memory"}, {"checkpoints": "speed"}])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sweep(3)
def test_every_form_in_a_graph(graph, control_flow, form, how):
    loss, xs = network(form)
    plain = tf.gradients(loss, xs)
    ours = gradients(loss, xs, **how)
    assert get_plans()[-1].recomputed
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        assert_same(*session.run([ours, plain]))  # in one run: unseeded masks are the same


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("form", FORMS)
def test_every_form_in_a_function(form):
    w = tf.Variable(tf.random.stateless_normal((WIDTH, WIDTH), (1, 2)) * 0.3)
    x = tf.Variable(tf.random.stateless_normal((256, WIDTH), (3, 4)))

    @tf.function
    def step():
        h = x * 1.0
        for _ in range(3):
            h = tf.ensure_shape(form(tf.tanh(tf.sin(tf.tanh(h))), w), (256, WIDTH))
        loss = tf.reduce_mean(h**2)
        plain = tf.gradients(loss, [x, w])
        return gradients(loss, [x, w], checkpoints="memory"), plain

    assert_same(*step())
    assert get_plans(step.get_concrete_function().graph)[-1].recomputed


def copied_types(graph):
    return {op.type for op in graph.get_operations() if COPY in op.name}


def measured(differentiate, build):
    """Gradients, measured peak, plans and types of the copied ops of one step."""
    with tf.Graph().as_default() as graph:
        loss, xs = build()
        grads = differentiate(loss, xs)
        with v1.Session(config=v1.ConfigProto(inter_op_parallelism_threads=1)) as session:
            session.run(v1.global_variables_initializer())
            values = session.run(grads)
            return values, session_peak(session, grads), get_plans(graph), copied_types(graph)


def repeated(form):
    """A chain of one form that reads no variable."""
    x = v1.get_variable("x", (2048, WIDTH), initializer=v1.random_normal_initializer(seed=1))
    w = v1.get_variable("w", (WIDTH, WIDTH), initializer=v1.orthogonal_initializer(seed=2))
    h, read = tf.sin(x), tf.convert_to_tensor(w)
    for _ in range(6):
        h = tf.ensure_shape(form(h, read), (2048, WIDTH))
    return tf.reduce_mean(h**2), [x, w]


@pytest.mark.parametrize("form", [loop, branch, scan, map_fn, nested])
def test_functional_forms_are_recomputed_as_one_op(form):
    build = functools.partial(repeated, form)
    plain, plain_peak, _, _ = measured(tf.gradients, build)
    ours, peak, (plan,), types = measured(gradients_memory, build)
    assert types & {"StatelessWhile", "StatelessIf"}
    assert_same(ours, plain)
    assert peak < 0.8 * plain_peak
    # The graph does not tell which branch is taken, nor all that a list shares with others.
    assert plan.baseline_peak_bytes == pytest.approx(plain_peak, rel=0.5)


@pytest.mark.parametrize("form", [loop_with_dropout, branch_with_dropout])
def test_what_draws_random_numbers_runs_once(graph, form):
    h = tf.ones((256, WIDTH)) * v1.get_variable("x", (), initializer=v1.ones_initializer())
    for _ in range(6):
        h = tf.ensure_shape(form(tf.tanh(tf.sin(h)), tf.eye(WIDTH)), (256, WIDTH))
    gradients(h, v1.trainable_variables(), checkpoints="memory")
    assert get_plans()[-1].recomputed
    assert not copied_types(graph) & {"StatelessWhile", "While", "StatelessIf", "If"}


def test_in_a_graph_of_v1_a_loop_that_reads_a_variable_runs_once(graph):
    loss, xs = network(loop)
    gradients(loss, xs, checkpoints="memory")
    assert "While" not in copied_types(graph)


def test_in_a_function_it_may_run_again_unless_it_writes():
    w, seen = tf.Variable(tf.eye(WIDTH)), tf.Variable(0.0)

    def counting(h):
        def body(i, h):
            seen.assign_add(1.0)
            return i + 1, tf.tanh(h @ w)

        return tf.while_loop(lambda i, _: i < 5, body, [0, h])[1]

    def copied(form):
        @tf.function(autograph=False)
        def step(h):
            start = h
            for _ in range(6):
                h = tf.ensure_shape(form(tf.sin(h)), (256, WIDTH))
            return gradients(tf.reduce_mean(h), [start, w], checkpoints="memory")

        concrete = step.get_concrete_function(tf.TensorSpec((256, WIDTH)))
        step(tf.ones((256, WIDTH)))
        return copied_types(concrete.graph)

    assert "While" in copied(lambda h: loop(h, w))
    assert "While" not in copied(counting)
    assert seen.numpy() == 30
