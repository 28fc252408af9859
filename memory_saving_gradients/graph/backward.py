"""A backward pass as TensorFlow made it: what is read, planned and rewritten at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import networkx as nx
import tensorflow as tf

from memory_saving_gradients.graph import kinds, order, tf_private
from memory_saving_gradients.graph.devices import described
from memory_saving_gradients.graph.runtimes.executor import Executor
from memory_saving_gradients.graph.runtimes.runtime import Runtime
from memory_saving_gradients.graph.runtimes.xla import Xla
from memory_saving_gradients.graph.shapes import Shapes


@dataclasses.dataclass(frozen=True)
class BackwardPass:
    """One call that differentiated, or several whose backward passes hang off one forward pass.

    Attributes:
        target: what was differentiated, or the first of several.
        results: the gradients, tensors of one graph, at least one.
        new: the ops that differentiation made, needed or not.
        needed: the ops that the results need.
        end: how many ops the graph had when it was differentiated.
        runtime: what will run it.
        traced: whether a `tf.function` is traced: what writes to a variable later waits then.
        beside: ops that read what the forward pass makes and that the results do not need, such as
            metrics; known at the end of the trace.
    """

    target: tf.Tensor
    results: tuple[tf.Tensor, ...]
    new: frozenset[tf.Operation]
    needed: frozenset[tf.Operation]
    end: int
    runtime: Runtime
    traced: bool = False
    beside: frozenset[tf.Operation] = frozenset()

    @property
    def graph(self) -> tf.Graph:
        return self.results[0].graph

    @property
    def forward(self) -> frozenset[tf.Operation]:
        """The ops of the forward pass."""
        return self.needed - self.new

    @classmethod
    def since(
        cls,
        first_new: int,
        target: tf.Tensor,
        results: Sequence[tf.Tensor],
        device: str = "cpu",
    ) -> BackwardPass:
        """The one that has just been made.

        Args:
            first_new: how many ops the graph had before.
            target: what was differentiated.
            results: the gradients.
            device: the device to estimate costs for, of `devices.DEVICES` or "local".
        """
        graph = results[0].graph
        operations = graph.get_operations()
        needed = frozenset(order.dependencies(t.op for t in results))
        new = frozenset(operations[first_new:])
        kind = Xla if tf_private.in_xla(graph) else Executor  # one can tell while it is traced
        runtime = kind(described(device))
        return cls(target, tuple(results), new, needed, len(operations), runtime)

    def joined(self, other: BackwardPass) -> BackwardPass:
        """Both as one."""
        return BackwardPass(
            self.target,
            (*self.results, *other.results),
            self.new | other.new,
            self.needed | other.needed,
            max(self.end, other.end),
            self.runtime,
            self.traced,
        )

    def hangs_off(self, other: BackwardPass) -> bool:
        """Whether this one needs what differentiation made for the other."""
        return not self.needed.isdisjoint(other.new)


def share_activations(one: BackwardPass, other: BackwardPass) -> bool:
    """Whether two backward passes hang off one forward pass.

    Weights, and what is made of them alone, may take a few of the bytes of independent ones.
    """
    shapes = Shapes([*(one.forward | other.forward)])

    def size(operations: Iterable[tf.Operation]) -> int:
        owners = (op for op in operations if op.type not in kinds.SOURCES)
        return sum(shapes.bytes(t) for op in owners for t in op.outputs)

    least = min(size(one.forward), size(other.forward))
    return size(one.forward & other.forward) > _SHARED * least


# The share of the bytes of a forward pass.
_SHARED = 0.1


def with_beside(passes: Sequence[BackwardPass]) -> list[BackwardPass]:
    """The backward passes of a whole step, each with the ops beside it.

    Such an op depends on a forward pass by data; on no backward pass, and none depends on it. Of
    several forward passes that it reads it belongs to the last.
    """
    new = frozenset().union(*(one.new for one in passes))
    needed = frozenset().union(*(one.needed for one in passes))
    others = nx.DiGraph()
    for op in passes[0].graph.get_operations():
        if op not in needed and op not in new:
            others.add_edges_from((other, op) for other in order.waits_for(op))
    updates = (other for op in needed for other in op.control_inputs if other not in needed)
    others.add_edges_from(("gradients", op) for op in new)
    others.add_edges_from((op, "read again") for op in updates)
    elsewhere = nx.descendants(others, "gradients")
    if "read again" in others:
        elsewhere |= nx.ancestors(others, "read again")
    belongs = {op: n for n, one in reversed([*enumerate(passes)]) for op in one.forward}
    beside: list[set[tf.Operation]] = [set() for _ in passes]
    for op in passes[0].graph.get_operations():
        reads = max((belongs.get(t.op, -1) for t in op.inputs), default=-1)
        if reads >= 0 and op in others and op not in needed and op not in elsewhere:
            belongs[op] = reads
            beside[reads].add(op)
    return [
        dataclasses.replace(one, beside=frozenset(ops))
        for one, ops in zip(passes, beside, strict=True)
    ]
