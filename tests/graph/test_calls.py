"""Functions of every kind, and ops with state: read, or run once."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import function as v1_function

from memory_saving_gradients import GradientTape, get_plans, gradients
from memory_saving_gradients.graph import calls
from memory_saving_gradients.graph import tf_private as private
from memory_saving_gradients.graph.shapes import Shapes
from memory_saving_gradients.rewriting.run import COPY
from tests.cases import assert_same

v1 = tf.compat.v1
WIDTH = 32


def check(layer, expects_plan=True):
    """A step of six such layers under the tape; the graph of ours."""
    weights = [tf.Variable(tf.eye(WIDTH) * 0.9 + 0.01) for _ in range(6)]

    def run(tape):
        @tf.function
        def step(h):
            with tape as t:
                for w in weights:
                    h = tf.tanh(layer(tf.sin(tf.tanh(h @ w))))
                loss = tf.reduce_mean(h**2)
            return t.gradient(loss, weights)

        x = tf.random.stateless_normal((256, WIDTH), (1, 2))
        return step(x), step.get_concrete_function(x).graph

    (plain, _), (ours, graph) = run(tf.GradientTape()), run(GradientTape())
    assert_same(ours, plain)
    assert bool(get_plans(graph)) == expects_plan
    return graph


def copied(graph):
    return {op.type for op in graph.get_operations() if COPY in op.name}


def eigenvalues(h):
    square = tf.reshape(h, (-1, 8, 8))
    values, _ = tf.linalg.eigh(square + tf.linalg.matrix_transpose(square))
    return tf.reshape(square * values[:, None], (-1, WIDTH))


def singular_values(h):
    square = tf.reshape(h, (-1, 8, 8))
    values, left, _ = tf.linalg.svd(square)
    return tf.reshape(left * values[:, None], (-1, WIDTH))


def checked(h):
    return tf.debugging.check_numerics(tf.sin(h), "not finite") + 1.0


@v1_function.Defun(tf.float32, func_name="defined_sine")
def defined(h):
    return tf.sin(h) * 2.0


def with_ctc(h):
    labels, logits = tf.ones((8, 5), tf.int32), tf.reshape(h, (8, 32, WIDTH))
    lengths = tf.fill([8], 5), tf.fill([8], 32)
    loss = tf.nn.ctc_loss(labels, logits, *lengths, logits_time_major=False, blank_index=0)
    return h * tf.reduce_mean(loss) * 0.01


def scanned(h):
    rows = tf.reshape(h, (4, -1, WIDTH))
    return tf.reshape(tf.keras.ops.associative_scan(lambda a, b: a + b, rows), (-1, WIDTH))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("layer", [eigenvalues, singular_values, checked, with_ctc, scanned])
def test_it_is_planned_and_equal(layer):
    check(layer)


@pytest.mark.usefixtures("deterministic")
def test_what_has_state_is_never_copied():
    graph = check(checked)
    assert "Sin" in copied(graph)
    assert "CheckNumerics" not in copied(graph)
    stateful = [op for op in graph.get_operations() if COPY in op.name and op.op_def.is_stateful]
    assert not stateful


@pytest.mark.usefixtures("deterministic")
def test_a_check_still_fails():
    w = tf.Variable(tf.ones((WIDTH, WIDTH)))

    @tf.function
    def step(h):
        with GradientTape() as t:
            for _ in range(6):
                h = tf.tanh(tf.debugging.check_numerics(tf.sin(h @ w), "not finite"))
            loss = tf.reduce_mean(h)
        return t.gradient(loss, w)

    step(tf.ones((256, WIDTH)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
        step(tf.constant(np.full((256, WIDTH), np.nan, "f")))


class Saved(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec((256, WIDTH))])
    def __call__(self, h):
        return tf.sin(h) * 2.0


@pytest.mark.usefixtures("deterministic")
def test_a_saved_function_is_called_as_ever(tmp_path):
    tf.saved_model.save(Saved(), str(tmp_path))
    check(tf.saved_model.load(str(tmp_path)))


def with_defuns():
    """A step of a session whose layers are functions of the old kind; the types of its copies."""
    x = v1.get_variable("x", (256, WIDTH), initializer=v1.random_normal_initializer(seed=1))
    h = tf.sin(x)
    for _ in range(6):
        h = tf.tanh(tf.sin(tf.tanh(tf.ensure_shape(defined(h), h.shape))))
    loss = tf.reduce_mean(h**2)
    both = gradients(loss, x, checkpoints="memory"), tf.gradients(loss, x)
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        assert_same(*session.run(both))
    return copied(h.graph)


def test_a_function_of_the_old_kind_is_read(graph):
    assert "defined_sine" in with_defuns()


def test_an_opaque_function_runs_once(graph, monkeypatch):
    monkeypatch.setattr(private, "function_graph", lambda graph, name: None)
    assert "defined_sine" not in with_defuns()
    assert get_plans()


def test_a_function_that_draws_runs_once(graph):
    call = tf.function(lambda x: tf.random.uniform((4,)) + x).get_concrete_function(
        tf.TensorSpec((4,))
    )
    op = call(tf.zeros(4)).op
    assert calls.calls(op)
    assert not calls.may_repeat(op)


def test_of_a_call_the_shapes_are_those_of_its_function(graph):
    x = v1.placeholder(tf.float32, (None, 6))
    call = tf.function(lambda x: tf.concat([x, x], 1), jit_compile=True)
    made = call(x)
    again = call(made)
    shapes = Shapes(graph.get_operations())
    assert shapes(made) == [128, 12]
    assert shapes(again) == [128, 24]


@pytest.mark.usefixtures("deterministic")
def test_a_loop_that_reads_a_variable_reads_it_before_it_is_written():
    """Its second run comes after the first variables are updated, in the order of the program."""
    weights = [tf.Variable(tf.eye(WIDTH) * 0.5) for _ in range(5)]

    def run(tape):
        for w in weights:
            w.assign(tf.eye(WIDTH) * 0.5)

        @tf.function
        def step(h):
            with tape as t:
                for w in weights:
                    h = tf.while_loop(
                        lambda i, _: i < 3,
                        lambda i, h, w=w: (i + 1, tf.tanh(tf.sin(h) @ w)),
                        [0, tf.sin(tf.tanh(h))],
                    )[1]
                loss = tf.reduce_mean(h**2)
            for w, grad in zip(weights, t.gradient(loss, weights), strict=True):
                w.assign_sub(grad * 100.0)
            return loss

        x = tf.random.stateless_normal((256, WIDTH), (1, 2))
        losses = [step(x) for _ in range(3)]
        return [*losses, *(w.numpy() for w in weights)], step.get_concrete_function(x).graph

    (plain, _), (ours, graph) = run(tf.GradientTape()), run(GradientTape())
    assert_same(ours, plain)
    assert copied(graph) & {"While", "StatelessWhile"}


def test_gradients_in_a_graph_that_nothing_traces(graph):
    """A session has no order of reads and writes, so that nothing with a variable runs twice."""
    w = v1.get_variable("w", (WIDTH, WIDTH), use_resource=True)
    h = tf.ones((256, WIDTH))
    for _ in range(5):
        h = tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w)), [0, h])[1]
    gradients(tf.reduce_mean(h), w, checkpoints="memory")
    assert not copied(graph) & {"While", "StatelessWhile"}
