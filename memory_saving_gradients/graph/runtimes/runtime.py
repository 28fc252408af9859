"""What runs a step, and so decides how much memory it takes.

What runs is not the graph as written. TensorFlow's executor runs what Grappler makes of it, with
kernels that take scratch space of their own; XLA fuses and orders it anew. All that depends on this
is asked of the step's runtime: which bytes the graph does not tell, in which order ops run that
nothing orders, which may run twice, how one is made to wait, and what would become of a rewritten
step.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import networkx as nx
import tensorflow as tf

from memory_saving_gradients.graph.devices import Device
from memory_saving_gradients.graph.runtimes import course
from memory_saving_gradients.graph.runtimes.gate import Gate
from memory_saving_gradients.planning.problem import Schedule

if TYPE_CHECKING:
    from memory_saving_gradients.graph.read import Reading

#: Gives the shape of a tensor.
ShapeOf: TypeAlias = Callable[[tf.Tensor], Sequence[int]]

#: What the names of copies end in, before a number.
COPY = "/recomputed"


@dataclasses.dataclass(frozen=True)
class Run:
    """One entry of a schedule: an op, or a copy of it."""

    op: tf.Operation
    copy: str | None
    in_backward: bool


class Holding(abc.ABC):
    """How the ops of one schedule are made to wait; made of the plain step, before any edit.

    Attributes:
        gates: the gates that what comes later reads through, by the place in the schedule that
            each comes before.
    """

    gates: Mapping[int, Gate]

    @abc.abstractmethod
    def hold(self, runs: Sequence[Run], copies: Mapping[str, tf.Operation]) -> None:
        """Makes the runs of the backward pass follow the schedule.

        Args:
            runs: the entries of the schedule.
            copies: the copies that they name.
        """


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
    ) -> list[course.Event] | None:
        """The order in which ops begin and end; see `course.executed`.

        None where that is one that keeps little alive: the order of the problem stands for it.
        """
        return course.executed(graph, operations, seconds, threads, early_last)

    @abc.abstractmethod
    def holding(self, reading: Reading, schedule: Schedule) -> Holding:
        """How the ops of a schedule will be made to wait."""

    def merged(self, graph: tf.Graph) -> Mapping[tf.Operation, tf.Operation]:
        """The ops that become one whatever control edges lead from them.

        Returns:
            Each of them to one that stands for all that it becomes one with.
        """
        return {}

    def reorders(self, reading: Reading) -> bool:
        """Whether it may compute parts of the backward pass of a step in another order."""
        return False

    def rehearse(self, reading: Reading, schedule: Schedule, nodes: Sequence[str]) -> int:
        """The bytes by which the peak of a rewritten step rises when the runtime optimises it.

        Args:
            reading: the step.
            schedule: what it was rewritten by.
            nodes: the names of what runs, in the order of the schedule.
        """
        return 0


@contextlib.contextmanager
def apart(graph: tf.Graph, scope: str | None = None) -> Iterator[None]:
    """Within it, new ops of `graph` are out of the user's scopes and wait for nothing."""
    with (
        graph.as_default(),
        graph.name_scope(scope),
        graph.device(None),
        graph.control_dependencies(None),
    ):
        yield
