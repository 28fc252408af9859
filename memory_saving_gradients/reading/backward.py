"""A backward pass as TensorFlow made it: the unit that is read, planned and rewritten."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

import networkx as nx
import tensorflow as tf

from memory_saving_gradients.graph import calls, kinds, order, tf_private
from memory_saving_gradients.graph.devices import described
from memory_saving_gradients.graph.shapes import Shapes
from memory_saving_gradients.runtimes.executor import Executor
from memory_saving_gradients.runtimes.runtime import Runtime
from memory_saving_gradients.runtimes.xla import Xla


@dataclasses.dataclass(frozen=True)
class BackwardPass:
    """One differentiation, or several whose backward passes share a forward pass.

    Attributes:
        target: the tensor that was differentiated, or the first of several.
        results: the gradients, tensors of one graph, at least one.
        new: the ops that differentiation made, needed or not.
        needed: the ops that the results need.
        end: the number of ops in the graph right after differentiation.
        runtime: the runtime that will execute it.
        traced: whether it is in a `tf.function`, where later writes to variables wait for reads.
        sums: the sums that were replaced, each with its running sums in order.
        reordered: names of those sums whose terms are now added in another order.
        pieces: ops that run in the backward pass, piece by piece, though they need no gradient.
        beside: ops beside the backward pass, such as metrics: they read forward tensors, but the
            results do not need them; known at the end of the trace.
        after: ops after the backward pass, such as updates of variables: they need a gradient, or
            such ops need them; known at the end of the trace.
        live_out: the tensors that live to the end of the step; None if unknown.
        end_of_trace: the number of ops in the graph at the end of the trace, before any rewriting.
        original: the graph that its graph is a copy of; None if it is no copy.
    """

    target: tf.Tensor
    results: tuple[tf.Tensor, ...]
    new: frozenset[tf.Operation]
    needed: frozenset[tf.Operation]
    end: int
    runtime: Runtime
    traced: bool = False
    sums: tuple[tuple[tf.Operation, tuple[tf.Operation, ...]], ...] = ()
    reordered: tuple[str, ...] = ()
    pieces: frozenset[tf.Operation] = frozenset()
    beside: frozenset[tf.Operation] = frozenset()
    after: frozenset[tf.Operation] = frozenset()
    live_out: tuple[tf.Tensor, ...] | None = None
    end_of_trace: int = 0
    original: tf.Graph | None = None

    @property
    def ends(self) -> dict[tf.Operation, None]:
        """The last ops of the step, to which all others lead, in a deterministic order."""
        made = self.graph.get_operations() if self.beside or self.after else ()
        others = (op for op in made if op in self.beside or op in self.after)
        return dict.fromkeys([*(t.op for t in self.results), *others])

    @property
    def to_end(self) -> tuple[tf.Tensor, ...]:
        """The tensors that live to the end of the step."""
        return self.results if self.live_out is None else self.live_out

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
        """The backward pass that has just been made.

        Args:
            first_new: the number of ops in the graph before differentiation.
            target: the tensor that was differentiated.
            results: the gradients.
            device: the device to estimate costs for, of `devices.DEVICES` or "local".
        """
        graph = results[0].graph
        operations = graph.get_operations()
        needed = frozenset(order.needed(t.op for t in results))
        new = frozenset(operations[first_new:])
        kind = Xla if tf_private.in_xla(graph) else Executor  # known only during the trace
        runtime = kind(described(device))
        return cls(target, tuple(results), new, needed, len(operations), runtime)

    def joined(self, other: BackwardPass) -> BackwardPass:
        """Both backward passes as one."""
        return BackwardPass(
            self.target,
            (*self.results, *other.results),
            self.new | other.new,
            self.needed | other.needed,
            max(self.end, other.end),
            self.runtime,
            self.traced,
        )

    def depends_on(self, other: BackwardPass) -> bool:
        """Whether this one needs ops that differentiation made for the other."""
        return not self.needed.isdisjoint(other.new)


def share_activations(one: BackwardPass, other: BackwardPass) -> bool:
    """Whether two backward passes share a forward pass.

    Independent forward passes may share a few bytes: tensors that are computed from weights alone.
    """
    shapes = Shapes([*(one.forward | other.forward)])

    def size(operations: Iterable[tf.Operation]) -> int:
        owners = (op for op in operations if op.type not in kinds.SOURCES)
        return sum(shapes.bytes(t) for op in owners for t in op.outputs)

    least = min(size(one.forward), size(other.forward))
    return size(one.forward & other.forward) > _SHARED * least


# The share of the bytes of the smaller forward pass that both must have in common.
_SHARED = 0.1


def whole_step(passes: Sequence[BackwardPass]) -> list[BackwardPass]:
    """The backward passes of a traced step, each with the ops beside and after it.

    An op beside a backward pass reads the forward pass; it does not depend on the backward pass,
    nor does that depend on it. If it reads several forward passes, it belongs to the last one. An
    op after a backward pass depends on it, or is needed by such an op; with several backward passes
    we assign none. Forward-mode tangents of activations, from which the tangents of gradients are
    computed, count as forward pass. Ops that TensorFlow does not run are in none: Keras computes a
    step of the cell of a recurrent layer that nothing reads.
    """
    operations = passes[0].graph.get_operations()
    needed = frozenset().union(*(step.needed for step in passes))
    created = frozenset().union(*(step.new for step in passes))
    tangents = _made_for_others(created, needed, tf_private.returned(passes[0].graph))
    new = created - tangents
    passes = [dataclasses.replace(step, new=step.new & new) for step in passes]
    runs = _run(passes[0].graph, needed)
    others = nx.DiGraph()
    for op in operations:
        if op not in needed and op not in new:
            others.add_edges_from((other, op) for other in order.waits_for(op))
    updates = {other for op in needed for other in op.control_inputs if other not in needed}
    others.add_nodes_from(updates | new)
    elsewhere = {*order.leading_to(new, others.successors)}
    read_again = {*order.leading_to(updates, others.predecessors)}
    belongs = {op: n for n, step in reversed([*enumerate(passes)]) for op in step.forward}
    beside: list[set[tf.Operation]] = [set() for _ in passes]
    for op in operations:
        # A constant may wait for an update beside the pass, and what reads it comes after both.
        waits = (other for other in op.control_inputs if other not in needed)
        before = [*order.made_of(op), *waits]
        reads = max((belongs.get(other, -1) for other in before), default=-1)
        apart = op in needed or op in elsewhere or op in read_again
        if reads >= 0 and op in others and op in runs and not apart:
            belongs[op] = reads
            beside[reads].add(op)
    if len(passes) > 1:  # an op after one pass may come before another
        pairs = zip(passes, beside, strict=True)
        return [dataclasses.replace(step, beside=frozenset(ops)) for step, ops in pairs]
    leads = {*order.leading_to(elsewhere, others.predecessors)}
    return [_with(passes[0], beside[0], leads - read_again, read_again, tangents)]


def _run(graph: tf.Graph, needed: Collection[tf.Operation]) -> dict[tf.Operation, None]:
    """The ops of a traced function that TensorFlow runs: those with effects, and what they need."""
    returned = tf_private.returned(graph)
    ends = (
        op
        for op in graph.get_operations()
        if op in needed or not calls.only_reads(op) or any(t.name in returned for t in op.outputs)
    )
    return order.needed(ends)


def _made_for_others(
    created: frozenset[tf.Operation], needed: Collection[tf.Operation], returned: Collection[str]
) -> set[tf.Operation]:
    """The ops created during differentiation that other ops need, but not the gradients.

    A `tf.autodiff.ForwardAccumulator` creates such ops: the tangents of gradients.

    Args:
        created: the ops created during differentiation.
        needed: ops, among them those that the gradients need.
        returned: the names of what the step returns.
    """
    left = {op for op in created if op not in needed}
    read = {
        op
        for op in left
        for t in op.outputs
        if t.name in returned or not created.issuperset(t.consumers())
    }
    return {*order.leading_to(read, lambda op: order.waits_for(op) & left)}


def with_updates(step: BackwardPass, updates: tf.Operation) -> BackwardPass:
    """A backward pass of a v1 graph with the ops after it; no tensor lives to the end of the step.

    Args:
        step: the backward pass.
        updates: the op of an optimizer that updates the variables by its gradients.
    """
    after = frozenset(order.needed([updates])) - step.needed - step.new
    touched = (t for op in after for t in (*op.inputs, *op.outputs))
    if any(map(tf_private.is_reference, touched)):
        return step  # reads of such a variable could overlap with its update
    return dataclasses.replace(step, after=after, live_out=())


def _with(
    step: BackwardPass,
    beside: Collection[tf.Operation],
    leads: Collection[tf.Operation],
    read_again: Collection[tf.Operation],
    tangents: Collection[tf.Operation],
) -> BackwardPass:
    """A backward pass of a traced step with the ops beside and after it.

    Args:
        step: the backward pass.
        beside: the ops beside it.
        leads: the ops that depend on its gradients, and all ops that these need.
        read_again: the ops that a forward pass waits for by control edges.
        tangents: the ops that compute tangents of gradients.
    """
    known = {*step.needed, *step.new, *beside, *read_again, *order.of_new_variables(step.graph)}
    after: set[tf.Operation] = set()
    left = [op for op in step.graph.get_operations() if op in leads and op not in known]
    left = [op for op in left if not _is_read_in_calls(op, step)]
    before = -1
    while before < len(after):  # few ops wait for ops that were created later
        before = len(after)
        for op in left:
            if op not in after and order.waits_for(op) <= known:
                after.add(op)
                known.add(op)
    names = tf_private.returned(step.graph)
    # The tangents of activations belong to the forward pass.
    others = {*beside, *after}
    read = {t.op for op in tangents for t in op.inputs if t.op in beside}
    forward = {*order.leading_to(read, lambda op: order.waits_for(op) & others)}
    return dataclasses.replace(
        step,
        needed=step.needed | forward,
        beside=frozenset(beside) - forward,
        after=frozenset(after) - forward,
        end_of_trace=len(step.graph.get_operations()),
        live_out=tuple(t for op in known - {*read_again} for t in op.outputs if t.name in names),
    )


def _is_read_in_calls(op: tf.Operation, step: BackwardPass) -> bool:
    """Whether `op` may write to a variable that a function in the backward pass reads."""
    return any(
        calls.calls(reader) and reader in step.needed
        for handle in op.inputs
        if handle.dtype == tf.resource
        for reader in handle.consumers()
    )
