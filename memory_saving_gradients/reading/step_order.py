"""The order of a step: what must come after what, and the order that schedules are made of."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

import networkx as nx
import tensorflow as tf

from memory_saving_gradients.graph.order import readers_through_views
from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.reading.buffers import Buffers


def add_order_of_effects(
    graph: nx.DiGraph, created: dict[tf.Operation, int], new: Collection[tf.Operation]
) -> None:
    """Has ops with effects wait for those that differentiation made before them.

    When a `tf.function` is built, TensorFlow orders them so; any other order would close a cycle.

    Args:
        graph: who waits for whom; edges are added.
        created: the place of each op in the graph.
        new: the ops that differentiation made.
    """
    ours = [op for op in graph if op in new and op.type != "ReadVariableOp"]
    effects = sorted((op for op in ours if op.op_def.is_stateful), key=created.__getitem__)
    if effects and hasattr(effects[0].graph, "outer_graph"):
        graph.add_edges_from(itertools.pairwise(effects))


def add_order_of_updates(graph: nx.DiGraph, step: BackwardPass) -> None:
    """Has updates of variables wait for what must not, or had better not, come after them.

    What writes to a variable waits for those that read what was read of it before: as long as that
    is alive, TensorFlow writes to a copy. What reads the gradient of a bias waits for the filter
    gradient that oneDNN merges that with; an update waits for all readers of what both are made of.

    Args:
        graph: who waits for whom; edges are added.
        step: the backward pass, with the ops after it.
    """
    biases = [op for op in graph if op.type == "BiasAddGrad" and op in step.new]
    for bias in biases:
        of_bias = {op for op in readers_through_views(bias.outputs[0]) if op in graph}
        readers = [op for op in bias.inputs[0].consumers() if op in graph and op in step.new]
        for op in (op for op in readers if op is not bias):
            graph.add_edges_from((op, update) for update in of_bias & step.after)
            if op.type == "Conv2DBackpropFilter":
                others = [o for o in of_bias - step.after if not nx.has_path(graph, o, op)]
                graph.add_edges_from((op, other) for other in others)
    for op in step.after:
        graph.add_edges_from((reader, op) for reader in readers_before(op, step) if reader in graph)


def readers_before(op: tf.Operation, step: BackwardPass) -> set[tf.Operation]:
    """The ops that read a variable's value as it was read before `op`, which may write to it.

    Args:
        op: an op after the backward pass.
        step: the backward pass, with the ops after it.
    """
    if op.type == "ReadVariableOp":
        return set()
    handles = [t for t in op.inputs if t.dtype == tf.resource]
    read_ops = [read for t in handles for read in t.consumers() if read.type == "ReadVariableOp"]
    readers = (
        reader
        for read in read_ops
        if read not in step.after
        for reader in readers_through_views(read.outputs[0])
    )
    return {reader for reader in readers if reader not in step.after}


def planned(
    graph: nx.DiGraph,
    operations: Sequence[tf.Operation],
    created: dict[tf.Operation, int],
    step: BackwardPass,
    backward: set[tf.Operation],
    buffers: Buffers,
    early: Mapping[tf.Operation, tf.Operation],
) -> list[tf.Operation]:
    """The order that schedules are made of: the user's ops as created, then the backward pass.

    Of the backward ops that could run next, the one that reads the latest activation comes
    first, so that activations die in the reverse of the order in which they were made; an op that
    reads none goes with those that read its output; the reader of a product that runs `early`, and
    so takes its first operand, comes right after that. What `tf.gradients` made but does not wait
    for a gradient runs as soon as it can.
    """
    latest: dict[tf.Operation, int] = {}  # the activation that an op goes with
    reads: set[tf.Operation] = set()
    product_of = {reader: op for op, reader in early.items()}
    for op in reversed(operations):
        if op in backward:
            read = product_of.get(op, op).inputs
            shown = [buffers.shown_by(t) for t in read if buffers.matters(t)]
            goes_with = [created[t.op] for t in shown if t.op not in backward]
            if goes_with:
                reads.add(op)
            else:
                goes_with = [latest[after] for after in graph.successors(op) if after in latest]
            if goes_with:
                latest[op] = max(goes_with)

    def key(op: tf.Operation) -> tuple[int, int, bool, int]:
        if op not in backward:
            return -int(op in step.new), 0, False, created[op]
        if op in step.beside:  # before there are gradients
            return 1, 0, False, created[op]
        # What goes with no activation leads to no other op that matters: the sooner the better.
        return 2, -latest.get(op, len(created)), op not in reads, created[op]

    return list(nx.lexicographical_topological_sort(graph, key=key))
