"""XLA: what its programs take, and how an op is made to wait in a graph that it compiles.

It drops control edges and orders the rest as it likes: only data holds an op back. See `gate`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import networkx as nx
import tensorflow as tf

from memory_saving_gradients.graph import kinds
from memory_saving_gradients.graph.runtimes import fusion, gate
from memory_saving_gradients.graph.runtimes.course import Event
from memory_saving_gradients.graph.runtimes.gate import Gate
from memory_saving_gradients.graph.runtimes.runtime import Holding, Run, Runtime, ShapeOf, apart
from memory_saving_gradients.planning.problem import Schedule, copied

if TYPE_CHECKING:
    from memory_saving_gradients.graph.read import Reading

# Gradients of convolutions. XLA transposes their operands before it multiplies.
_TRANSPOSES = frozenset(
    """Conv2DBackpropInput Conv3DBackpropInputV2 Conv2DBackpropFilter Conv3DBackpropFilterV2
    DepthwiseConv2dNativeBackpropInput DepthwiseConv2dNativeBackpropFilter""".split()
)


class Xla(Runtime):
    """XLA, which compiles a graph as a whole."""

    obeys_control_edges = False
    runs_in_sessions = False
    keeps_running_sums = False
    results_apart = True

    @property
    def on_gpu(self) -> bool:
        """Whether it is XLA:GPU: for a described GPU, or on a machine that has one."""
        return self.device["type"] == "GPU" or bool(tf.config.list_physical_devices("GPU"))

    def unbuffered(
        self,
        operations: Sequence[tf.Operation],
        results: Collection[tf.Tensor],
        bytes_of: Mapping[str, int],
    ) -> dict[str, tuple[tf.Tensor, ...]]:
        return fusion.unbuffered(operations, results, bytes_of, self.on_gpu)

    def order(
        self,
        graph: nx.DiGraph,
        operations: Sequence[tf.Operation],
        seconds: Mapping[str, float],
        early_last: bool,
        threads: int,
    ) -> list[Event] | None:
        return None  # XLA looks for the order with the least memory itself

    def scratch(self, op: tf.Operation, shape: ShapeOf) -> int:
        return gpu_workspace(op, shape) if self.on_gpu else cpu_workspace(op, shape)

    def may_copy(self, op: tf.Operation) -> bool:
        return not any(t.dtype == tf.variant for t in (*op.inputs, *op.outputs))

    def holding(self, reading: Reading, schedule: Schedule) -> Holding:
        return _Gates(reading, schedule, self.on_gpu)


#: Where convolutions and their gradients have the filter: among the inputs, or as what they make.
_FILTERS = {"Conv2D": 1, "Conv3D": 1, "Conv2DBackpropInput": 1, "Conv3DBackpropInputV2": 1} | {
    "Conv2DBackpropFilter": None,
    "Conv3DBackpropFilterV2": None,
}


def gpu_workspace(op: tf.Operation, shape: ShapeOf) -> int:
    """Bytes of scratch space that XLA's program for a GPU takes for `op`.

    cuDNN has filters with the channels of the output first, so they are transposed. Scratch space
    of kernels that are tuned is not known.

    Args:
        op: the op.
        shape: gives the shape of a tensor.

    Returns:
        Bytes; 0 for ops that are neither convolutions nor gradients of convolutions.
    """
    if op.type not in _FILTERS:
        return 0
    place = _FILTERS[op.type]
    filters = op.outputs[0] if place is None else op.inputs[place]
    return filters.dtype.size * math.prod(size or 0 for size in shape(filters))


def cpu_workspace(op: tf.Operation, shape: ShapeOf) -> int:
    """Bytes of scratch space that XLA's program for a CPU takes for `op`.

    It transposes the operands of a convolution's gradient. The gradient of a depthwise filter it
    takes from that of a dense one, of which it keeps the diagonal, and both are there at once. A
    convolution in groups is made in another layout first.

    Args:
        op: the op.
        shape: gives the shape of a tensor.

    Returns:
        Bytes; 0 for ops that are neither gradients of convolutions nor convolutions in groups.
    """
    if op.type == "Conv2D" and shape(op.inputs[0])[-1] != shape(op.inputs[1])[-2]:
        return op.outputs[0].dtype.size * math.prod(shape(op.outputs[0]))
    if op.type not in _TRANSPOSES:
        return 0
    size = op.outputs[0].dtype.size
    if op.type == "DepthwiseConv2dNativeBackpropFilter":
        height, width, channels, multiplier = shape(op.outputs[0])
        return 2 * height * width * channels * channels * multiplier * size
    if op.type == "Conv2DBackpropFilter":
        height, width, channels_of_group, made = shape(op.outputs[0])
        channels = shape(op.inputs[0])[-1]
        if channels_of_group == 1 < channels:
            return 2 * height * width * channels * made * size
    return size * sum(math.prod(shape(t)) for t in op.inputs if t.dtype == op.outputs[0].dtype)


class _Gates(Holding):
    def __init__(self, reading: Reading, schedule: Schedule, on_gpu: bool) -> None:
        self.gates = _gates(reading, schedule)
        self.backward = reading.new
        self.on_gpu = on_gpu

    def hold(self, runs: Sequence[Run], copies: Mapping[str, tf.Operation]) -> None:
        """Holds back what does not read through a gate.

        A copy that reads weights alone waits for the run before it. And of a convolution's
        gradient, the operands that are no gradients wait for that which is: XLA transposes them,
        and would do so in the forward pass and keep both. On a GPU it transposes filters, all
        before anything else, so a filter waits for the image. The slices of a concatenation's
        gradient are written out: they are less than what they are computed from.
        """
        graph = runs[0].op.graph
        backward = self.backward
        gated = {*backward, *(op.name for op in copies.values())}
        previous: Sequence[tf.Tensor] = ()
        known: dict[tuple[str, ...], tf.Tensor] = {}

        def until(after: Sequence[tf.Tensor]) -> tf.Tensor:
            """The `never` of these; one for all that wait for the same."""
            names = tuple(t.name for t in after)
            if names not in known:
                known[names] = gate.never(after)
            return known[names]

        with apart(graph, "gate"):
            for run in runs:
                op = copies[run.copy] if run.copy else run.op
                if run.copy and not any(t.op.name in gated for t in op.inputs):
                    gate.hold_back(op, functools.partial(until, previous), gated)
                elif not run.copy and op.type in _TRANSPOSES:
                    grads = [t for t in op.inputs if t.op.name in backward]
                    gate.hold_back(op, functools.partial(until, grads), gated)
                elif self.on_gpu and op.type in ("Conv2D", "Conv3D"):
                    image = op.inputs[0]
                    waiting = {*gated, kinds.owner(image).op.name}
                    gate.hold_back(op, functools.partial(until, [image]), waiting)
                elif op.type == "Slice" and op.name in backward:
                    gate.write_out(op)
                previous = op.outputs


def _gates(reading: Reading, schedule: Schedule) -> dict[int, Gate]:
    """The gates of a schedule, by the place in it that each comes before.

    There is one before each stretch of recomputed ops. It waits for what the backward ops since
    the last gate made and did not use, so for all of them; and all that its stretch, and the
    backward ops up to the next one, read of the forward pass goes through it.
    """
    problem, graph = reading.problem, reading.operations[0].graph
    returned = {t.name for t in reading.step.results}
    _, again = copied(problem, schedule)
    starts = [place for place in range(1, len(again)) if again[place] and not again[place - 1]]
    found = {}
    for before, start, end in zip([0, *starts], starts, [*starts[1:], len(schedule)], strict=False):
        made: set[int] = set()
        passes: dict[int, None] = {}
        for index in schedule[start:end]:
            op = problem.ops[index]
            passes.update(
                (t, None)
                for t in op.inputs
                if t not in made
                and problem.made_by[t] >= 0
                and not problem.ops[problem.made_by[t]].backward
                and gate.may_wait(graph.get_tensor_by_name(problem.tensors[t].name))
            )
            made.update(op.outputs)
        ops = [reading.operations[i] for i in schedule[before:start]]
        ops = [op for op in ops if op.name in reading.new] or ops[-1:]
        read = {t.name for op in ops for t in op.inputs}
        made_here = (t for op in ops for t in op.outputs if t.name not in read)
        after = [t for t in made_here if t.consumers() or t.name in returned]
        found[start] = Gate(after, list(passes))
    return found
