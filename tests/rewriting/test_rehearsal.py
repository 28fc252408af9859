"""What Grappler makes of a rewritten step: it can run, copies still wait, and are still there."""

import collections
import functools
import itertools

import networkx as nx
import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import get_plans, gradients
from memory_saving_gradients.graph import tf_private
from memory_saving_gradients.pipeline import prove
from memory_saving_gradients.rewriting.run import COPY
from test_models import Model, build_v1
from tests.cases import MODELS

v1 = tf.compat.v1


class Attention(Model):
    """Layers whose gradients Grappler would take apart: a scaled softmax, GELU, powers."""

    def __init__(self, erf=False):
        super().__init__()
        self.erf = erf

    def loss(self, *inputs):
        (h,) = inputs
        for i in range(6):
            q, k, v = (self.dense(h, 64, f"{i}/{part}", bias=False) for part in "qkv")
            weights = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / 8.0)
            h = h + tf.matmul(weights, v)
            y = self.dense(h, 256, f"{i}/up")
            if self.erf:  # behind a view, as in BERT
                y = tf.reshape(tf.nn.gelu(tf.reshape(y, (-1, 256))), tf.shape(y))
            else:
                y = 0.5 * y * (1.0 + tf.tanh(0.79788 * (y + 0.044715 * tf.pow(y, 3.0))))
            h = self.layer_norm(h + self.dense(y, 64, f"{i}/down"), f"{i}/norm")
        return tf.reduce_mean(h**2)

    def example(self, batch):
        return [np.random.default_rng(0).standard_normal((batch, 64, 64), dtype=np.float32)]


def optimized(graph, results):
    """The nodes that a session would run, by name, and who waits for whom."""
    made = tf_private.optimized(graph.as_graph_def(), [t.name for t in results])
    nodes = {n.name: n for n in made.node}
    edges = nx.DiGraph()
    edges.add_nodes_from(nodes)
    for node in nodes.values():
        edges.add_edges_from((name.lstrip("^").split(":")[0], node.name) for name in node.input)
    return nodes, edges


@pytest.mark.parametrize("how", ["memory", pytest.param("speed", marks=pytest.mark.slow), 0.6])
@pytest.mark.parametrize("name", [*MODELS, "attention"])
@pytest.mark.sweep(7)
def test_copies_are_there_and_wait(graph, name, how):
    make, batch = MODELS.get(name, (Attention, 16))
    step = build_v1(make(), batch)
    chosen = {"memory_budget": how} if isinstance(how, float) else {"checkpoints": how}
    try:
        grads = gradients(step.loss, step.variables, **chosen)
    except ValueError:
        pytest.skip("scratch space makes most of this peak")
    plans = get_plans()
    if not plans or not plans[0].recomputed:
        pytest.skip("nothing is recomputed")
    (plan,) = plans
    nodes, edges = optimized(graph, tf.nest.flatten(grads, expand_composites=True))
    assert nx.is_directed_acyclic_graph(edges)
    copies = collections.Counter(f"{op}{COPY}" for op in plan.recomputed)
    missing = [copy for copy in copies if copy not in nodes]
    assert len(missing) <= 0.1 * len(copies), missing  # folded into a neighbour
    ops = [plan.problem.ops[index] for index in plan.schedule]
    # The very last forward ops may be what Grappler merges, so that nothing waits for them.
    last = [op.name for op in itertools.takewhile(lambda op: not op.backward, ops)][-3:]
    begins = {op.name for op in plan.problem.ops if op.backward} | {*last}
    later = functools.reduce(
        set.union, (nx.descendants(edges, one) for one in begins if one in edges), set()
    )
    size = {t.name.rpartition(":")[0]: t.bytes for t in plan.problem.tensors}
    early = [copy for copy in set(copies) & set(nodes) - later if size.get(copy[: -len(COPY)])]
    assert not early


@pytest.mark.parametrize("name", [*MODELS, "attention", "attention with erf"])
@pytest.mark.sweep(5)
def test_a_rehearsed_step_holds_no_more(graph, monkeypatch, name):
    added = []
    real = prove.added_bytes
    monkeypatch.setattr(prove, "added_bytes", lambda *args: added.append(real(*args)) or added[-1])
    make, batch = MODELS.get(name, (functools.partial(Attention, "erf" in name), 16))
    step = build_v1(make(), batch)
    try:
        gradients(step.loss, step.variables, memory_budget=0.4)
    except ValueError:
        pytest.skip("scratch space makes most of this peak")
    (plan,) = get_plans()
    assert added[0] <= 0.06 * plan.peak_bytes


@pytest.mark.parametrize("erf", [False, True])
def test_nothing_of_a_product_is_computed_early(graph, erf):
    """Of (g - s) * a / c Grappler makes (g - s) * (a / c), which each layer would keep."""
    step = build_v1(Attention(erf), 16)
    grads = gradients(step.loss, step.variables, checkpoints="memory")
    (plan,) = get_plans()
    nodes, edges = optimized(graph, grads)
    forward = {op.name for op in plan.problem.ops if not op.backward}
    backward = {op.name for op in plan.problem.ops if op.backward} & set(nodes)
    late = set(backward).union(*(nx.descendants(edges, name) for name in backward))
    made = [
        n for n in nodes.values() if n.name not in forward | late and n.op in ("Mul", "RealDiv")
    ]
    read = {name for n in made for name in edges.predecessors(n.name)}
    large = {t.name.rpartition(":")[0] for t in plan.problem.tensors if t.bytes > 10**5}
    assert not read & large & forward, [n.name for n in made]
