"""Which tensors are read in fact.

TensorFlow runs a loop without the loop variables that nothing reads: the gradient of a sequence
that nobody asks for, a list that only such a gradient pops. They stay in the graph, as inputs and
outputs of the loop, and as ops around it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Iterator, Sequence

import networkx as nx
import tensorflow as tf

from memory_saving_gradients.graph import calls, order, tf_private


@dataclasses.dataclass(frozen=True)
class Live:
    """What is needed of a graph.

    Attributes:
        tensors: the names of the tensors that are read, results among them.
        operations: the ops that compute something that is needed.
    """

    tensors: frozenset[str]
    operations: frozenset[tf.Operation]


def live(
    graph: nx.DiGraph,
    operations: Sequence[tf.Operation],
    results: Iterable[tf.Tensor],
    for_data: Container[tf.Operation] = (),
) -> Live:
    """What is needed of a graph for some results.

    Args:
        graph: which ops wait for which.
        operations: its ops, each after those that it waits for.
        results: tensors of it.
        for_data: ops that need not compute anything if others only wait for them.
    """
    read = {t.name for t in results}
    runs = set[tf.Operation]()
    for op in reversed(operations):
        if (
            any(t.name in read for t in op.outputs)
            or not op.outputs
            or op.op_def.is_stateful
            or tf_private.in_control_flow(op)
            or (op not in for_data and _is_awaited(op, graph, runs))
        ):
            runs.add(op)
            read.update(t.name for t in _read_by(op, read))
    return Live(frozenset(read), frozenset(runs))


def _is_awaited(op: tf.Operation, graph: nx.DiGraph, runs: Container[tf.Operation]) -> bool:
    """Whether an op that runs has a control edge from `op`."""
    return any(later in runs and op in later.control_inputs for later in graph.successors(op))


def _read_by(op: tf.Operation, read: Container[str]) -> Iterator[tf.Tensor]:
    """The inputs that an op needs for those of its outputs that are read."""
    needed = loop_variables(op, read)
    return (t for i, t in enumerate(op.inputs) if needed is None or i in needed)


def loop_variables(op: tf.Operation, read: Container[str]) -> set[int] | None:
    """The loop variables of a loop that its rounds need; None if `op` is no loop.

    Args:
        op: any op.
        read: the names of the tensors that are read, of its outputs at least.
    """
    bodies = calls.bodies(op) if op.type in calls.LOOPS else []
    if not bodies:
        return None
    condition = tf_private.function_graph(op.graph, op.get_attr("cond").name)
    if condition is None:
        return None
    (body,) = bodies
    tested = order.needed(t.op for t in condition.outputs)
    needed = {i for i, t in enumerate(condition.inputs) if t.op in tested}
    needed |= {i for i, t in enumerate(op.outputs) if t.name in read}
    while True:
        results = [body.outputs[i] for i in needed]
        ends = [*(t.op for t in results), *body.control_outputs]
        graph = order.dependencies(ends)
        runs = live(graph, [*nx.topological_sort(graph)], results).operations
        more = needed | {i for i, t in enumerate(body.inputs) if t.op in runs}
        if more == needed:
            return needed
        needed = more
