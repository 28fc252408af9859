"""Time and memory of the functions that an op calls: loops, branches, calls."""

from __future__ import annotations

from collections.abc import Container, Sequence

import networkx as nx
import tensorflow as tf

from memory_saving_gradients.graph import calls, order
from memory_saving_gradients.graph.costs import estimate_seconds
from memory_saving_gradients.graph.live import live, loop_variables
from memory_saving_gradients.graph.rounds import expected_rounds
from memory_saving_gradients.graph.shapes import Shapes
from memory_saving_gradients.planning.problem import Op, Problem
from memory_saving_gradients.planning.simulate import simulate
from memory_saving_gradients.reading.buffers import Buffers
from memory_saving_gradients.reading.tensors import makes, numbered, reads
from memory_saving_gradients.runtimes.runtime import Runtime


def seconds_inside(
    operations: Sequence[tf.Operation], runtime: Runtime, shapes: Shapes
) -> dict[str, float]:
    """Estimated seconds of one run of ops of a function that call no functions, by name."""
    seconds = estimate_seconds(operations, shapes, runtime.device)
    return {name: each + runtime.call_seconds for name, each in seconds.items()}


def of_calls(
    op: tf.Operation, runtime: Runtime, read_outside: Container[str], outside: Shapes
) -> tuple[float, int]:
    """Seconds, and bytes besides inputs and outputs, of the functions that an op calls.

    Args:
        op: the op.
        runtime: the runtime of the step.
        read_outside: the names of the tensors of the step that are read.
        outside: the shapes of the step.
    """
    dearest, most = 0.0, 0
    runtime = runtime.within(op)
    for body in outside.bodies(op):
        created = {inner: i for i, inner in enumerate(body.get_operations())}
        used = loop_variables(op, read_outside)
        if op.type in calls.BRANCHES:
            used = {i for i, t in enumerate(op.outputs) if t.name in read_outside}
        outputs = [t for i, t in enumerate(body.outputs) if used is None or i in used]
        needed = order.dependencies(t.op for t in outputs)
        ordered = [*nx.lexicographical_topological_sort(needed, key=created.__getitem__)]
        read_here = live(needed, ordered, outputs).tensors
        inside = [inner for inner in ordered if inner.type != "Placeholder"]
        shapes = outside.within(op, body, inside)
        buffers = Buffers(inside, shapes, runtime, outputs, read_here)
        tensor_of, tensors = numbered(inside, buffers)
        seconds = seconds_inside(inside, runtime, shapes)
        steps = []
        for inner in inside:
            cost, workspace = seconds[inner.name], runtime.scratch(inner, shapes)
            if calls.bodies(inner):
                cost, workspace = of_calls(inner, runtime, read_here, shapes)
            read = reads(inner, tensor_of, buffers)
            made_here = makes(inner, tensor_of, buffers)
            steps.append(Op(inner.name, read, made_here, cost, workspace=workspace))
        results = frozenset(tensor_of[t.name] for t in outputs if t.name in tensor_of)
        if not tensors:
            continue
        simulation = simulate(Problem(tuple(steps), tuple(tensors), results), range(len(steps)))
        handed_on = sum(tensors[t].bytes for t in results)
        dearest = max(dearest, simulation.cost * expected_rounds(op, outside))
        most = max(most, simulation.peak - handed_on)
    return dearest, most
