"""Which ops of a graph wait for which others."""

from __future__ import annotations

import graphlib
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping

import networkx as nx
import tensorflow as tf

from memory_saving_gradients.graph import kinds

BACK_EDGES = frozenset({"NextIteration", "RefNextIteration"})
_ENTERS = frozenset({"Enter", "RefEnter"})
_EXITS = frozenset({"Exit", "RefExit"})


def waits_for(op: tf.Operation) -> set[tf.Operation]:
    """The ops that `op` waits for, by data or by a control edge."""
    return {*(tensor.op for tensor in op.inputs), *op.control_inputs}


def made_of(op: tf.Operation) -> list[tf.Operation]:
    """The ops whose outputs `op` reads."""
    return [tensor.op for tensor in op.inputs]


def leading_to(
    wanted: Iterable[tf.Operation],
    before: Callable[[tf.Operation], Iterable[tf.Operation]] = made_of,
    reached: dict[tf.Operation, None] | None = None,
) -> dict[tf.Operation, None]:
    """These ops and all that a walk from them reaches, in its order; backwards by default.

    Args:
        wanted: the ops to begin with.
        before: from an op to the next ones of the walk; by default those whose outputs it reads.
        reached: what earlier walks have reached, to which this one adds.
    """
    reached = {} if reached is None else reached
    waiting = [*wanted]
    while waiting:
        op = waiting.pop()
        if op not in reached:
            reached[op] = None
            waiting.extend(before(op))
    return reached


def needed(wanted: Iterable[tf.Operation]) -> dict[tf.Operation, None]:
    """These ops and all that they wait for, by data or by control edges."""
    return leading_to(wanted, waits_for)


def dependencies(
    wanted: Iterable[tf.Operation], within: Callable[[tf.Operation], bool] = lambda op: True
) -> nx.DiGraph:
    """The ops and all that they wait for, with an edge from each op to those that wait for it.

    The back edges of a v1 loop would close a cycle; instead the exits of the loop wait for them.

    Args:
        wanted: the ops to begin with.
        within: whether an op belongs to the step; others are left out.
    """
    reached = dict.fromkeys(wanted)
    waiting = [*reached]
    edges: list[tuple[tf.Operation, tf.Operation]] = []
    going_back: dict[bytes, set[tf.Operation]] = {}  # by frame
    exits: dict[bytes, list[tf.Operation]] = {}
    while waiting:
        op = waiting.pop()
        if op.type in _EXITS:
            exits.setdefault(_frame(op), []).append(op)
        for other in filter(within, waits_for(op)):
            if other not in reached:
                reached[other] = None
                waiting.append(other)
            if other.type in BACK_EDGES:
                going_back.setdefault(_frame(op), set()).add(other)
            else:
                edges.append((other, op))
    graph = nx.DiGraph()
    graph.add_nodes_from(reached)
    graph.add_edges_from(edges)
    for frame, ops in exits.items():
        graph.add_edges_from(itertools.product(going_back.get(frame, ()), ops))
    return graph


def depends_on_time(op: tf.Operation) -> bool:
    """Whether the rounding of `op` depends on which other readers of its inputs have run.

    The kernel of an `AddN` starts from the first term that no other op will still read.
    """
    return op.type == "AddN" and len(op.inputs) > 2


class CycleError(Exception):
    """Ops of a graph wait for one another."""


def check_acyclic(
    graph: tf.Graph, merged: Mapping[tf.Operation, tf.Operation] = types.MappingProxyType({})
) -> None:
    """Raises a `CycleError` if ops of the graph wait for one another, by data or control edges.

    Args:
        graph: the graph.
        merged: ops that the runtime merges into one, each with the representative of its group.
    """
    before: dict[tf.Operation, set[tf.Operation]] = {}
    for op in graph.get_operations():
        whole = merged.get(op, op)
        waits = {merged.get(o, o) for o in waits_for(op) if o.type not in BACK_EDGES}
        before.setdefault(whole, set()).update(waits - {whole})
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError as error:
        cycle = error.args[1]
        shown = " -> ".join(f"{op.name} ({op.type})" for op in cycle[:_SHOWN])
        raise CycleError(f"{len(cycle) - 1} ops in a cycle: {shown} ...") from None


_SHOWN = 8  # ops of a cycle in the message


def _frame(op: tf.Operation) -> bytes:
    """The name of the v1 loop that an `Exit`, or the `Merge` at the loop's start, belongs to."""
    while op.type not in _ENTERS:
        op = op.inputs[0].op
    return op.get_attr("frame_name")


def readers(tensor: tf.Tensor) -> Iterator[tf.Operation]:
    """The ops that read a tensor or a view of it; the views themselves are left out."""
    for reader in tensor.consumers():
        views = [*kinds.showing(reader, tensor)]
        if not views:
            yield reader
        for view in views:
            yield from readers(view)


def readers_through_views(tensor: tf.Tensor) -> Iterator[tf.Operation]:
    """The ops that read a tensor or a view of it."""
    for reader in tensor.consumers():
        yield reader
        for output in kinds.showing(reader, tensor):
            yield from readers_through_views(output)


def of_new_variables(graph: tf.Graph) -> set[tf.Operation]:
    """The ops that compute and assign the initial values of variables that a trace creates.

    `tf.function` lifts these ops out of the trace, with all that they wait for.
    """
    is_new = [op for op in graph.get_operations() if op.type == "VarIsInitializedOp"]
    assigns = [op for new in is_new for op in new.outputs[0].consumers() if op.type == "If"]
    return {
        *needed(assigns),
        *(op for assign in assigns for op in readers_through_views(assign.outputs[0])),
    }
