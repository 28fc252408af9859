"""What the rewriter leaves behind must suit TensorFlow's own graph passes."""

import collections
import dataclasses
import functools
import itertools

import networkx as nx
import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import get_plans, gradients
from memory_saving_gradients.graph.traced import traced
from memory_saving_gradients.rewriting.run import COPY
from test_models import Chain, build_v1
from tests.cases import MODELS

v1 = tf.compat.v1


def dependencies(graph):
    edges = [(t.op.name, op.name) for op in graph.get_operations() for t in op.inputs]
    edges += [(b.name, op.name) for op in graph.get_operations() for b in op.control_inputs]
    return nx.DiGraph(edges)


#: Layers whose gradients multiply by constants that wait for a gradient: what Grappler moves.
PRODUCTS = {
    "squares": lambda x, h: tf.square(h * tf.cos(x)),
    "halves": lambda x, h: tf.square(0.5 * (h * tf.cos(x))) + tf.tanh(h),
    "products of squares": lambda x, h: tf.square(h * tf.cos(x)) * tf.tanh(h),
    "cubes": lambda x, h: tf.pow(h * tf.cos(x), 3.0) + tf.sqrt(1.0 + tf.square(h * x)),
}


def chain_loss():
    model = Chain(8, 64)
    step = build_v1(model, 256)
    return step.loss, step.variables, step.feed(model.example(256))


def products_loss(kind):
    x = y = tf.constant(np.linspace(-1, 1, 10_000, dtype=np.float32)) + 0.0
    for _ in range(8):
        y = PRODUCTS[kind](y, tf.sin(y))
    return tf.reduce_mean(y), [x], {}


@pytest.mark.parametrize("how", ["memory", "speed"])
@pytest.mark.parametrize("kind", ["chain", *PRODUCTS])
@pytest.mark.sweep(3)
def test_no_pass_of_grappler_makes_a_cycle(graph, kind, how, capfd):
    loss, xs, feed = chain_loss() if kind == "chain" else products_loss(kind)
    ours = gradients(loss, xs, checkpoints=how)
    plain = tf.gradients(loss, xs)
    assert get_plans()
    assert nx.is_directed_acyclic_graph(dependencies(graph))
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        a, b = session.run([ours, plain], feed)
    for one, other in zip(a, b, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * np.abs(other).max())
    assert "sorted in topological order" not in capfd.readouterr().err


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sweep(4)
def test_copies_wait_for_the_backward_pass(graph, name):
    make, batch = MODELS[name]
    step = build_v1(make(), batch)
    gradients(step.loss, step.variables, checkpoints="memory")
    (plan,) = get_plans()
    assert nx.is_directed_acyclic_graph(dependencies(graph))
    descends = functools.partial(nx.has_path, dependencies(graph))
    copies = {f"{name}{COPY}" for name in plan.recomputed}
    ops = [plan.problem.ops[index] for index in plan.schedule]
    forward = [op.name for op in itertools.takewhile(lambda op: not op.backward, ops)]
    last_forward = [name for name in forward if not name.startswith("gradients/")][-1]
    for copy in copies:
        assert descends(last_forward, copy), f"{copy} would run with the forward pass"


def test_ops_run_as_often_as_planned_where_the_loss_is_fetched_too():
    """Gradients that need no result of the forward pass may run before it."""

    def step(**options):
        with tf.Graph().as_default() as graph, v1.Session() as session:
            h = x = tf.Variable(np.linspace(-0.1, 0.1, 10_000, dtype=np.float32).reshape(100, 100))
            for _ in range(8):
                h = tf.tanh(h @ x)
            loss = tf.reduce_sum(h)
            fetches = [loss, *gradients(loss, [x], **options)]
            (plan,) = get_plans(graph)
            session.run(v1.global_variables_initializer())
            names = [node.node_name.split(COPY)[0] for node in traced(session, fetches).nodes]
            return plan, collections.Counter(names)

    plan, _ = step(checkpoints="memory")
    first = next(i for i in plan.schedule if plan.problem.ops[i].backward)
    early = (first, *(i for i in plan.schedule if i != first))
    _, ran = step(plan=dataclasses.replace(plan, schedule=early))
    planned = collections.Counter(plan.problem.ops[index].name for index in early)
    layers = [name for name in planned if name.startswith(("MatMul", "Tanh"))]
    assert {name: ran[name] for name in layers} == {name: planned[name] for name in layers}
