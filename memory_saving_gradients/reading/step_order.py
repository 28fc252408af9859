"""The order of a step: additional dependencies, and the topological order for schedules."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

import networkx as nx
import tensorflow as tf

from memory_saving_gradients.graph import calls
from memory_saving_gradients.graph.order import readers_through_views
from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.reading.buffers import Buffers


def add_order_of_effects(
    graph: nx.DiGraph, created: dict[tf.Operation, int], new: Collection[tf.Operation]
) -> None:
    """Makes each new op with effects wait for the one created before it.

    When a `tf.function` is built, TensorFlow orders them like that; another order would close a
    cycle.

    Args:
        graph: which ops wait for which; edges are added.
        created: the place of each op in the graph.
        new: the ops that differentiation made.
    """
    ours = [op for op in graph if op in new and op.type != "ReadVariableOp"]
    effects = sorted((op for op in ours if op.op_def.is_stateful), key=created.__getitem__)
    if effects and hasattr(effects[0].graph, "outer_graph"):
        graph.add_edges_from(itertools.pairwise(effects))


def add_order_of_updates(graph: nx.DiGraph, step: BackwardPass) -> None:
    """Makes updates of variables wait for ops that must not, or should not, come after them.

    An op that writes to a variable waits for the readers of its old value: as long as that is
    alive, TensorFlow copies the variable. It also waits for the gradients of calls and loops that
    read the variable themselves: they could run again until then. (Decoupled weight decay needs no
    gradient, so it could come before.) oneDNN merges the gradient of a bias with a filter
    gradient, so readers of the former wait for the latter; an update waits for all other readers of
    the gradient that both are computed from.

    Args:
        graph: which ops wait for which; edges are added.
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
    of_calls = _readers_of_calls(step)
    for op in step.graph.get_operations()[step.end :] if of_calls else ():
        if op in graph and not calls.only_reads(op):
            waited_for = {reader for t in op.inputs for reader in of_calls.get(t.name, ())}
            graph.add_edges_from((other, op) for other in waited_for if other in graph)


def readers_before(op: tf.Operation, step: BackwardPass) -> set[tf.Operation]:
    """The ops that read the old value of a variable that `op` may write to.

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


def _readers_of_calls(step: BackwardPass) -> dict[str, set[tf.Operation]]:
    """By name of a variable's handle, the backward ops that read what calls compute from it."""
    found: dict[str, set[tf.Operation]] = {}
    backward = step.new - step.after
    for call in filter(calls.bodies, step.needed):
        readers = backward.intersection(reader for t in call.outputs for reader in t.consumers())
        for handle in (t for t in call.inputs if t.dtype == tf.resource):
            found.setdefault(handle.name, set()).update(readers)
    return found


def planned(
    graph: nx.DiGraph,
    operations: Sequence[tf.Operation],
    created: dict[tf.Operation, int],
    step: BackwardPass,
    backward: set[tf.Operation],
    buffers: Buffers,
    early: Mapping[tf.Operation, tf.Operation],
) -> list[tf.Operation]:
    """The topological order for schedules: forward ops as created, then the backward pass.

    Of the backward ops that could run next, the one that reads the latest activation comes first,
    so that activations die in the reverse of the order in which they were made. An op that reads
    none goes with the readers of its output. The reader of a product that runs `early` multiplies
    with the product's first operand, and comes right after the product. New ops that do not wait
    for a gradient run as soon as they can.
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
        # An op without an activation leads to no other op that matters: it runs as soon as it can.
        return 2, -latest.get(op, len(created)), op not in reads, created[op]

    return list(nx.lexicographical_topological_sort(graph, key=key))
