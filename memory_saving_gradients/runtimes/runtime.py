"""What runs a step, and so decides how much memory it takes.

What runs is not the graph as written. TensorFlow's executor runs what Grappler makes of it, with
kernels that take scratch space of their own; XLA fuses and orders it anew. We ask the runtime of a
step which bytes the graph does not tell, in which order ops run that nothing orders, and which ops
may run twice. How a rewritten step is held back is in `rewriting.holding`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import TypeAlias

import networkx as nx
import tensorflow as tf

from memory_saving_gradients.graph.devices import Device
from memory_saving_gradients.runtimes import execution_order

#: Gives the shape of a tensor.
ShapeOf: TypeAlias = Callable[[tf.Tensor], Sequence[int]]


class Runtime(abc.ABC):
    """What runs a step.

    Args:
        device: the device to estimate costs for.

    Attributes:
        device: the same.
        threads: how many ops run at a time, unless a session's own options say otherwise.
        obeys_control_edges: whether ops wait for more than data.
        runs_in_sessions: whether a `tf.compat.v1.Session` runs it.
        keeps_running_sums: whether a sum of a sum and a term is not made one sum of all terms.
        results_apart: whether what a step returns is in memory that belongs to its caller.
    """

    threads = 1
    obeys_control_edges = True
    runs_in_sessions = True
    keeps_running_sums = True
    results_apart = False

    def __init__(self, device: Device) -> None:
        self.device = device

    @abc.abstractmethod
    def scratch(self, op: tf.Operation, shape: ShapeOf) -> int:
        """Bytes that `op` takes beside its inputs and outputs while it runs."""

    def untouched(self, op: tf.Operation, shape: ShapeOf) -> int:
        """Bytes that `op` allocates beside those, and never writes to."""
        return 0

    def untold_bytes(self, op: tf.Operation, output: int, shape: ShapeOf) -> int:
        """Bytes of an output that has another size than its shape says; 0 if it has that size."""
        return 0

    def unbuffered(
        self,
        operations: Sequence[tf.Operation],
        results: Collection[tf.Tensor],
        bytes_of: Mapping[str, int],
    ) -> dict[str, tuple[tf.Tensor, ...]]:
        """The tensors that are in no buffer, by name, with those that they are computed from.

        Args:
            operations: the ops of the step, each after those that it waits for.
            results: the tensors that live to the end of the step.
            bytes_of: the bytes of the tensors of the step, by name.
        """
        return {}

    def within(self, op: tf.Operation) -> Runtime:
        """The runtime of the functions that `op` calls."""
        return self

    def may_copy(self, op: tf.Operation) -> bool:
        """Whether an op that computes the same again may be added."""
        return True

    def runs_early(
        self, graph: nx.DiGraph, late: Container[tf.Operation]
    ) -> dict[tf.Operation, tf.Operation]:
        """The products that are computed without their first operand, which their reader reads.

        Args:
            graph: who waits for whom.
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

        None where that is one that keeps little alive: the order of the problem stands for it.
        """
        return execution_order.executed(graph, operations, seconds, threads, early_last)

    def merged(
        self, fetches: Iterable[Collection[tf.Operation]]
    ) -> list[Mapping[tf.Operation, tf.Operation]]:
        """The ops that become one whatever control edges lead from them.

        Args:
            fetches: sets of ops that a session may run.

        Returns:
            For each set, or once if it makes no difference, each of these ops to one that stands
            for all that it becomes one with.
        """
        return [{}]
