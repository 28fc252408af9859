"""How Grappler's optimisations change the peak of a rewritten step, before a session runs it.

We replay the step twice, as written and as optimised: an op runs at its place in the schedule, or
as soon as it can, if it no longer waits for the ops before. The difference between the peaks is not
known to the plan.
"""

from __future__ import annotations

import graphlib
import types
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from memory_saving_gradients.graph import calls, kinds, order, tf_private
from memory_saving_gradients.graph.names import node_of, tensor_of
from memory_saving_gradients.planning.problem import Schedule
from memory_saving_gradients.reading.read import Reading
from memory_saving_gradients.runtimes import grappler

# How many places of the schedule an op may be early without being moved: those of a few waves.
_SLACK = 64


def added_bytes(reading: Reading, schedule: Schedule, names: Sequence[str]) -> int:
    """The bytes by which Grappler raises the peak of a rewritten step.

    It is 0 if Grappler fails: a session then runs the graph as written.

    Args:
        reading: the step.
        schedule: the schedule by which it was rewritten.
        names: the names of its runs, ops and copies, in the order of the schedule.
    """
    step = reading.step
    whole = step.graph.as_graph_def()
    needed = {op.name: op for op in order.needed(t.op for t in step.results)}
    nodes = [node for node in whole.node if node.name in needed]
    written = tf.compat.v1.GraphDef(node=nodes, versions=whole.versions)
    if any(map(calls.calls, needed.values())):
        written.library.CopyFrom(whole.library)
    fetches = [t.name for t in step.results]
    try:
        optimized = tf_private.optimized(written, fetches, whole=False)
    except tf.errors.OpError:
        return 0
    sizes: dict[str, int] = {}
    place: dict[str, int] = {}
    count = 0
    for name, index in zip(names, schedule, strict=True):
        place[name] = count
        count += reading.operations[index] not in step.after  # updates run right after their data
        for t in reading.problem.ops[index].outputs:
            tensor = reading.problem.tensors[t]
            sizes[f"{name}:{tensor.name.rpartition(':')[2]}"] = tensor.bytes
    planned = _peak(nodes, fetches, place, sizes, needed)
    return max(0, _peak(optimized.node, fetches, place, sizes) - planned)


def _peak(
    nodes: Sequence[tf.compat.v1.NodeDef],
    fetches: Sequence[str],
    place: Mapping[str, int],
    sizes: Mapping[str, int],
    operations: Mapping[str, tf.Operation] = types.MappingProxyType({}),
) -> int:
    """The most bytes that nodes hold at once, when each runs at its place in the schedule.

    Args:
        nodes: the nodes.
        fetches: the tensors that live to the end.
        place: the place of nodes in the schedule, by name.
        sizes: the bytes of tensors, by name.
        operations: the ops of the nodes, by name, if Grappler has not optimised them: sums and
            products with a neutral operand are then still there, as views of the other operand.
    """
    by_name = {node.name: node for node in nodes}
    end_of_step = max(place.values()) + 1
    before = {
        node.name: () if node.op in order.BACK_EDGES else [*map(node_of, node.input)]
        for node in nodes
    }
    at: dict[str, int] = {}
    size = dict(sizes)
    owner: dict[str, str] = {}
    read_last: dict[str, tuple[int, bool]] = {}  # when, and whether the reader writes over it
    for name in graphlib.TopologicalSorter(before).static_order():
        node = by_name[name]
        ready = max(map(at.__getitem__, before[name]), default=0)
        planned = place.get(name, ready)
        at[name] = planned if planned - ready <= _SLACK else ready
        read = [tensor_of(one) for one in node.input if not one.startswith("^")]
        read = [owner.get(tensor, tensor) for tensor in read]
        output = f"{name}:0"
        shown = 0 if node.op in kinds.VIEWS and read else None
        if node.op in grappler.ASSOCIATIVE and name in operations:
            shown = kinds.shown_input(operations[name], 0)
        if shown is not None:
            owner[output] = read[shown]
        elif node.op == "Const":
            size[output] = 0  # constants are not counted
        elif node.op in grappler.ASSOCIATIVE:  # its operands may differ from the plan's
            size[output] = min(size.get(output, 0), max(size.get(tensor, 0) for tensor in read))
        for tensor in read:
            over = node.op in kinds.IN_PLACE and size.get(output) == size.get(tensor)
            read_last[tensor] = max(read_last.get(tensor, (0, False)), (at[name], over))
    for name in fetches:
        read_last[owner.get(name, name)] = end_of_step, False
    live = np.zeros(end_of_step + 2, dtype=np.int64)
    for tensor, (end, over) in read_last.items():
        live[at[node_of(tensor)]] += size.get(tensor, 0)
        live[end + (not over)] -= size.get(tensor, 0)
    return int(live.cumsum().max())
