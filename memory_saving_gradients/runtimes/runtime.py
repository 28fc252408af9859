"""The runtime of a step, which determines how much memory the step takes.

The graph is not executed as written. TensorFlow's executor runs the graph that Grappler has
optimised, with kernels that need scratch space; XLA fuses and schedules it anew. We ask the runtime
how it will execute the step: which bytes it needs that the graph does not show, in which order it
runs ops that nothing orders, and which ops it can run twice. How the copies of a rewritten step are
delayed is in `rewriting.waves` and `rewriting.gates`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import TypeAlias

import networkx as nx
import tensorflow as tf

from memory_saving_gradients.graph import kinds
from memory_saving_gradients.graph.devices import Device
from memory_saving_gradients.runtimes import execution_order
from memory_saving_gradients.runtimes.fusion import Kernels

#: Gives the shape of a tensor.
ShapeOf: TypeAlias = Callable[[tf.Tensor], Sequence[int]]


class Runtime(abc.ABC):
    """The runtime of a step.

    Args:
        device: the device to estimate costs for.

    Attributes:
        device: the same.
        threads: how many ops run in parallel, unless the options of a session say otherwise.
        obeys_control_edges: whether ops wait for control inputs.
        runs_in_sessions: whether a `tf.compat.v1.Session` can run the step.
        results_apart: whether the results of a step are in memory that belongs to its caller.
        has_gates: whether a rewritten step reads kept and recomputed tensors through gates.
        copies_gathered: whether reading a variable that is also gathered from makes a copy of it.
        lists_refer: whether a list refers to its elements; else it has copies of them.
        call_seconds: what it takes to call a kernel, in seconds. It counts in functions, as loops
            call small kernels over and over.
    """

    threads = 1
    obeys_control_edges = True
    runs_in_sessions = True
    results_apart = False
    has_gates = False
    copies_gathered = True
    lists_refer = True
    call_seconds = 0.0

    def __init__(self, device: Device) -> None:
        self.device = device

    @property
    def keeps_running_sums(self) -> bool:
        """Whether running sums stay, and are not merged into one sum."""
        return True

    @abc.abstractmethod
    def scratch(self, op: tf.Operation, shape: ShapeOf) -> int:
        """Bytes of scratch space that `op` uses while it runs, besides inputs and outputs."""

    def untouched(self, op: tf.Operation, shape: ShapeOf) -> int:
        """Bytes of scratch space that `op` allocates in addition, and never writes to."""
        return 0

    def untold_bytes(self, op: tf.Operation, output: int, shape: ShapeOf) -> int:
        """Bytes of an output whose size is not that of its static shape; else 0."""
        return 0

    def kernels(
        self,
        operations: Sequence[tf.Operation],
        results: Collection[tf.Tensor],
        bytes_of: Mapping[str, int],
    ) -> Kernels:
        """What the kernels of a step read and write.

        Args:
            operations: the ops of the step, each after those that it waits for.
            results: the tensors that live to the end of the step.
            bytes_of: the bytes of the tensors of the step, by name.
        """
        return Kernels({}, {op for op in operations if op.type in kinds.IN_PLACE}, set())

    def within(self, op: tf.Operation) -> Runtime:
        """The runtime that executes the functions that `op` calls."""
        return self

    def may_copy(self, op: tf.Operation) -> bool:
        """Whether the runtime can run a copy of `op`."""
        return True

    def reuses(self, op: tf.Operation) -> bool:
        """Whether a second run of `op` can take the statistics of the first as inputs."""
        return False

    def runs_early(
        self, graph: nx.DiGraph, late: Container[tf.Operation]
    ) -> dict[tf.Operation, tf.Operation]:
        """The products that run before their first operand, which their reader multiplies with.

        Args:
            graph: which ops wait for which.
            late: the ops of the backward pass.

        Returns:
            Product to reader.
        """
        return {}

    def order(
        self,
        graph: nx.DiGraph,
        operations: Sequence[tf.Operation],
        seconds: Mapping[str, float],
        early_last: bool,
        threads: int,
    ) -> list[execution_order.Event] | None:
        """The order in which ops begin and end; see `execution_order.executed`.

        None if the runtime itself chooses an order of low memory: that of the problem is then used.
        """
        return execution_order.executed(graph, operations, seconds, threads, early_last)

    def merged(
        self, fetches: Iterable[Collection[tf.Operation]]
    ) -> list[Mapping[tf.Operation, tf.Operation]]:
        """The ops that the runtime merges, even if control edges lead from them.

        Args:
            fetches: sets of ops that a session may run.

        Returns:
            For each set, or once if it makes no difference, each of these ops to the representative
            of its group.
        """
        return [{}]
