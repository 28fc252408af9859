"""Reads a graph that `tf.gradients` has just extended, as a `Problem`."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import networkx as nx
import numpy as np
import tensorflow as tf

from memory_saving_gradients.graph import calls, kinds, normalisation, order, tf_private
from memory_saving_gradients.graph.costs import estimate_seconds
from memory_saving_gradients.graph.live import Live, live
from memory_saving_gradients.graph.origin import origins
from memory_saving_gradients.graph.rounds import AGAIN
from memory_saving_gradients.graph.shapes import NOTHING_GIVEN, InputSizes, Shapes
from memory_saving_gradients.planning.backward_order import backward_order
from memory_saving_gradients.planning.labels import Labels
from memory_saving_gradients.planning.problem import Op, Problem, Tensor
from memory_saving_gradients.planning.simulate import plain_peak
from memory_saving_gradients.reading import restrictions, step_order
from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.reading.bodies import of_calls
from memory_saving_gradients.reading.buffers import Buffers
from memory_saving_gradients.reading.execution import Execution
from memory_saving_gradients.reading.growth import Growth
from memory_saving_gradients.reading.measured_costs import measure_ops
from memory_saving_gradients.reading.roles import Roles, roles_of
from memory_saving_gradients.reading.tensors import makes, numbered, numbers, reads, touches
from memory_saving_gradients.runtimes.runtime import Runtime


@dataclasses.dataclass(frozen=True)
class Reading:
    """A problem, and the mapping from its indices to the graph.

    Attributes:
        step: the backward pass that was read.
        problem: the step as data.
        operations: the operation of every op of the problem.
        tensor_of: tensor name to the index of its buffer in the problem; a view maps to the
            buffer that it shares. Tensors left out of the problem are not in it.
        made_of: by name of a tensor without a buffer, the indices of the tensors that its readers
            read instead.
        roles: the roles of tensors of the backward pass, by index, for the labels.
        alternative_peak: the plain peak in another possible order of execution.
        one_thread: the plain peak in a session of one inter-op thread, if the number of threads of
            the session is unknown; else None.
        new: names of the ops that differentiation made and the step needs.
        unused: names of the ops that differentiation made and nothing needs.
        unordered: names of the ops that must have no control edges: those of v1 loops and branches,
            those that Grappler may fold into constants, and those that `tf.function` lifts out of
            the trace.
        sizes: what is known of the shapes of the inputs.
        batch_size: the first dimension of the inputs, if the graph leaves it unknown.
        growing: returns the `Growth` of tensors and scratch space with the batch.
    """

    step: BackwardPass
    problem: Problem
    operations: list[tf.Operation]
    tensor_of: dict[str, int]
    made_of: dict[str, tuple[int, ...]]
    roles: Roles
    alternative_peak: int
    one_thread: int | None
    new: frozenset[str]
    unused: frozenset[str]
    unordered: frozenset[str]
    sizes: InputSizes = NOTHING_GIVEN
    batch_size: int | None = None
    growing: Callable[[], Mapping[str, float]] = dict

    @functools.cached_property
    def labels(self) -> Labels:
        """Names and shapes of the ops and tensors of the problem, for reports."""
        named = (self.step.graph.get_tensor_by_name(t.name) for t in self.problem.tensors)
        tensors = [(t.shape, t.dtype.base_dtype.name) for t in named]
        return Labels(
            types=tuple(op.type for op in self.operations),
            origins=origins(self.operations),
            shapes=tuple(None if s.rank is None else tuple(s.as_list()) for s, _ in tensors),
            dtypes=tuple(dtype for _, dtype in tensors),
            of_weights=self.roles.of_weights,
            sums=self.roles.sums,
            updates=self.roles.updates,
            waited_for=self.roles.waited_for,
            reordered=self.step.reordered,
        )

    def numbers_of(self, tensor: str) -> tuple[int, ...]:
        """The tensors of the problem that readers of a tensor, by name, read; none if small."""
        if tensor in self.tensor_of:
            return (self.tensor_of[tensor],)
        return self.made_of.get(tensor, ())

    def in_order_of(self, problem: Problem) -> Reading:
        """The same reading, with its ops in the order of another problem of the same ops."""
        index_of = {op.name: i for i, op in enumerate(self.problem.ops)}
        sequence = [index_of[op.name] for op in problem.ops]
        return dataclasses.replace(
            self,
            problem=self.problem.reordered(sequence),
            operations=[self.operations[i] for i in sequence],
        )


def read(
    step: BackwardPass,
    cost_model: str = "analytical",
    sizes: InputSizes = NOTHING_GIVEN,
) -> Reading:
    """Reads a step: the ops that its results need, and those beside and after the backward pass.

    Args:
        step: a backward pass, with the forward pass that it needs.
        cost_model: "analytical" (TensorFlow's estimate) or "measured" (a traced run).
        sizes: what is known of the shapes of the inputs.

    Returns:
        The step as a problem, with the mapping back to the graph.
    """
    walk = _walk(step, sizes)
    executed, inputs_of = _as_run(walk)
    step_order.add_order_of_updates(walk.graph, step)
    ordered = step_order.planned(
        walk.graph, walk.operations, walk.created, step, walk.backward, walk.buffers, walk.early
    )
    tensor_of, tensors = numbered(ordered, walk.buffers)
    ops = [
        op
        for op in ordered
        if op not in walk.idle
        and not walk.buffers.is_view(op)
        and touches(op, tensor_of, walk.buffers)
    ]
    costs = _costs(walk, ops, cost_model)
    conditional = restrictions.conditional(ordered)
    forward = [op for op in ordered if op not in walk.backward]
    pinned = restrictions.pinned(forward, conditional, walk.buffers, step) | walk.from_the_start
    problem = _problem(walk, ops, pinned, inputs_of, tensor_of, tensors, costs)
    problem, ops = _in_backward_order(walk, problem, ops)
    execution = Execution(step.runtime, executed, ordered, problem, ops, costs.seconds)
    problem = execution.problem()
    # The backward passes of several losses may also run one after another.
    alternative = execution.problem(early_last=True) if _has_several_losses(walk) else problem
    one_thread = None
    if not step.traced and step.runtime.threads > 1:
        one_thread = min(plain_peak(execution.problem(last, threads=1)) for last in (False, True))
    new = frozenset(op.name for op in walk.operations if op in step.new)
    apart = {
        *conditional,
        *walk.foldable,
        *order.of_new_variables(step.graph),
    }
    return Reading(
        step=step,
        problem=problem,
        operations=ops,
        tensor_of=tensor_of,
        made_of={
            name: numbers(map(walk.buffers.shown_by, read), tensor_of)
            for name, read in walk.buffers.made_of.items()
        },
        roles=roles_of(step, walk.operations, walk.backward, tensor_of, walk.shapes),
        alternative_peak=plain_peak(alternative),
        one_thread=one_thread,
        new=new,
        unused=frozenset(op.name for op in step.new) - new,
        unordered=frozenset(op.name for op in apart),
        sizes=sizes,
        batch_size=walk.shapes.batch_size,
        growing=functools.cache(_growth(walk, tensors, costs)),
    )


@dataclasses.dataclass(frozen=True)
class _Walk:
    """The ops of a step, with all that is known of them before they are numbered.

    Attributes:
        step: the step.
        created: the place of each op in TensorFlow's graph.
        graph: which ops wait for which.
        operations: the ops, each after those that it waits for.
        backward: the ops of the backward pass.
        idle: the ops that compute nothing that is needed.
        read: the names of the tensors that are read.
        shapes: the shapes of their tensors.
        buffers: which tensors own memory.
        early: the products that run before their first operand, each with its reader.
        foldable: the ops that Grappler may fold into constants.
        from_the_start: the ops that differentiation made and that run when the step begins.
    """

    step: BackwardPass
    created: dict[tf.Operation, int]
    graph: nx.DiGraph
    operations: list[tf.Operation]
    backward: set[tf.Operation]
    idle: set[tf.Operation]
    read: frozenset[str]
    shapes: Shapes
    buffers: Buffers
    early: dict[tf.Operation, tf.Operation]
    foldable: set[tf.Operation]
    from_the_start: set[tf.Operation]


def _walk(step: BackwardPass, sizes: InputSizes) -> _Walk:
    ours = step.needed | step.beside | step.after
    created = {op: i for i, op in enumerate(step.graph.get_operations())}
    # Ops that rewriting added come last; those of another backward pass can be forward ops here.
    written = max(step.end, step.end_of_trace)
    graph = order.dependencies(step.ends, lambda op: op in ours or created[op] >= written)
    step_order.add_order_of_effects(graph, created, step.new)
    operations = list(nx.lexicographical_topological_sort(graph, key=created.__getitem__))
    backward = _backward(graph, operations, step)
    shapes = Shapes(operations, sizes)
    foldable = restrictions.foldable(operations, backward)
    executed = step.runtime.obeys_control_edges
    first = restrictions.from_the_start(foldable, backward, shapes) if executed else set()
    backward -= first
    needed = _needed(graph, operations, step)
    idle = {op for op in operations if op in step.new and op not in needed.operations}
    counted = [op for op in operations if op not in idle]
    buffers = Buffers(counted, shapes, step.runtime, step.to_end, needed.tensors)
    early = step.runtime.runs_early(graph, backward)
    return _Walk(
        step,
        created,
        graph,
        operations,
        backward,
        idle,
        needed.tensors,
        shapes,
        buffers,
        early,
        foldable,
        first,
    )


@dataclasses.dataclass(frozen=True)
class _Costs:
    """Seconds and bytes of scratch space of ops, by name.

    Attributes:
        seconds: the seconds.
        scratch: the bytes of the ops' own scratch space, as the runtime tells it, and of masks.
        workspaces: the bytes with those of the functions that ops call, or as measured.
    """

    seconds: dict[str, float]
    scratch: dict[str, int]
    workspaces: dict[str, int]


def _costs(walk: _Walk, ops: Sequence[tf.Operation], cost_model: str) -> _Costs:
    runtime, shapes = walk.step.runtime, walk.shapes
    seconds = estimate_seconds(ops, shapes, runtime.device)
    scratch = {op.name: runtime.scratch(op, shapes) + walk.buffers.mask_bytes(op) for op in ops}
    workspaces = {**scratch}
    for op in ops:
        if calls.bodies(op):
            seconds[op.name], workspaces[op.name] = of_calls(op, runtime, walk.read, shapes)
    if cost_model == "measured":
        measured = measure_ops(walk.step, walk.operations, shapes)
        seconds |= {name: measurement.seconds for name, measurement in measured.items()}
        for op in ops:
            if op.name in measured:
                allocated = measured[op.name].workspace
                workspaces[op.name] = max(0, allocated - runtime.untouched(op, shapes))
    return _Costs(seconds, scratch, workspaces)


def _problem(
    walk: _Walk,
    ops: Sequence[tf.Operation],
    pinned: Container[tf.Operation],
    inputs_of: Mapping[tf.Operation, list[tf.Tensor]],
    tensor_of: dict[str, int],
    tensors: Sequence[Tensor],
    costs: _Costs,
) -> Problem:
    """The problem, in the order of `ops`."""
    buffers, step = walk.buffers, walk.step
    moved = {op: sum(buffers.bytes(t) for t in (*op.inputs, *op.outputs)) for op in ops}
    seconds, kernels = costs.seconds, buffers.kernels
    a_byte = float(np.median([seconds[op.name] / max(moved[op], 1) for op in ops] or [0.0]))
    made = [
        Op(
            name=op.name,
            inputs=numbers(inputs_of[op], tensor_of)
            if op in inputs_of
            else reads(op, tensor_of, buffers),
            outputs=makes(op, tensor_of, buffers),
            cost=seconds[op.name],
            reused=normalisation.REUSED if reuses_statistics(op, step.runtime, tensor_of) else 0.0,
            workspace=costs.workspaces[op.name],
            backward=op in walk.backward,
            pinned=op in pinned,
            in_place=op in kernels.in_place,
            in_place_rewritten=op in kernels.in_place_rewritten,
            overwritable=op not in kernels.calls,
            freed_first=numbers(kernels.masked.get(op, ()), tensor_of),
            expensive=op.type in kinds.EXPENSIVE
            or seconds[op.name] > max(_DEAR * moved[op] * a_byte, _NOTHING),
            again=op.type in calls.LOOPS and AGAIN in op.node_def.attr,
        )
        for op in ops
    ]
    live_out = frozenset(tensor_of[t.name] for t in step.to_end if t.name in tensor_of)
    runtime = step.runtime
    if runtime.results_apart:
        tensors = _apart(tensors, live_out, tensor_of, buffers)
    return Problem(
        tuple(made),
        tuple(tensors),
        live_out,
        barriers=runtime.has_gates,
        packed=runtime.results_apart,
    )


def _apart(
    tensors: Sequence[Tensor],
    live_out: frozenset[int],
    tensor_of: Mapping[str, int],
    buffers: Buffers,
) -> list[Tensor]:
    """The tensors; the bytes of results, and of what they accumulate in, are the caller's."""
    found = buffers.kernels.accumulated.items()
    sums = {tensor_of.get(name): tensor_of.get(total.name) for name, total in found}
    begun = {i for i, total in sums.items() if total in live_out}
    apart = live_out.difference(sums.values()) | begun
    return [
        Tensor(t.name, 0, t.bytes if i in apart else 0) if i in apart | live_out else t
        for i, t in enumerate(tensors)
    ]


def reuses_statistics(op: tf.Operation, runtime: Runtime, tensor_of: Container[str]) -> bool:
    """Whether a second run takes the statistics of the first: they must be too small to matter."""
    return runtime.reuses(op) and not any(
        op.outputs[place].name in tensor_of for place in normalisation.STATISTICS.values()
    )


def _in_backward_order(
    walk: _Walk, problem: Problem, ops: list[tf.Operation]
) -> tuple[Problem, list[tf.Operation]]:
    """Both, with the backward pass in an order that keeps few bytes alive."""
    waits = _waits(walk.graph, walk.operations, ops)
    first = problem.forward_count
    at_once = [i for i in range(first) if ops[i] in walk.from_the_start]
    for i in range(first):  # they must not come later in another order
        waits[i].update(before for before in at_once if before < i)
    sequence, late = backward_order(
        problem, [{i for i in before if i >= first} for before in waits]
    )
    if walk.step.runtime.obeys_control_edges:
        problem = dataclasses.replace(problem, waits=tuple(tuple(sorted(w)) for w in waits))
    sequence = [*range(first), *sequence]
    return problem.reordered(sequence, late), [ops[i] for i in sequence]


def _growth(walk: _Walk, tensors: Sequence[Tensor], costs: _Costs) -> Growth:
    return Growth(
        graph=weakref.ref(walk.step.graph),
        operations=tuple(op.name for op in walk.operations),
        results=tuple(t.name for t in walk.step.to_end),
        runtime=walk.step.runtime,
        given=walk.shapes.given,
        batch_size=walk.shapes.batch_size,
        bytes={t.name: t.bytes for t in tensors},
        scratch=costs.scratch,
    )


def _has_several_losses(walk: _Walk) -> bool:
    return sum(tf_private.is_seed(op) for op in walk.operations if op in walk.step.new) != 1


def _as_run(walk: _Walk) -> tuple[nx.DiGraph, dict[tf.Operation, list[tf.Tensor]]]:
    """Which ops wait for which, and what they read, as the runtime executes the plain step.

    There sums wait for all their terms, and products run before their first operand.
    """
    executed = walk.graph.copy()
    for whole, running in walk.step.sums:
        executed.add_edges_from((t.op, whole) for t in whole.inputs)
        executed.add_edges_from((whole, op) for op in running)
    inputs: dict[tf.Operation, list[tf.Tensor]] = {}
    for op, reader in walk.early.items():
        late, other = op.inputs
        inputs[op], inputs[reader] = [other], [late, op.outputs[0]]
        executed.remove_edge(late.op, op)
        executed.add_edge(late.op, reader)
    return executed, inputs


def _waits(
    graph: nx.DiGraph, operations: Iterable[tf.Operation], ops: Sequence[tf.Operation]
) -> list[set[int]]:
    """For each of `ops` those that it waits for, directly or through other ops, by index.

    An op that shares an input with a long sum stays before or after the sum, as it is now: see
    `order.depends_on_time`.
    """
    index_of = {op: i for i, op in enumerate(ops)}
    waits: dict[tf.Operation, set[int]] = {}
    for op in operations:
        waits[op] = set()
        for before in graph.predecessors(op):
            waits[op] |= {index_of[before]} if before in index_of else waits[before]
    by_index = [waits[op] for op in ops]
    for i, op in enumerate(ops):
        if order.depends_on_time(op):
            readers = {index_of.get(reader, i) for t in op.inputs for reader in t.consumers()}
            for reader in readers - {i}:
                by_index[max(i, reader)].add(min(i, reader))
    return by_index


# An op whose estimated time per byte is this many times that of the median op is expensive: it does
# more than read and write.
_DEAR = 100
_NOTHING = 1e-5  # seconds; an op that takes less is never expensive


def _needed(graph: nx.DiGraph, operations: Sequence[tf.Operation], step: BackwardPass) -> Live:
    """What the step needs of its ops.

    A v1 optimizer makes all gradients of an op wait for one another, needed or not; Grappler makes
    those that others only wait for compute nothing.
    """
    others = (t for op in (*step.beside, *step.after) for t in op.outputs)
    return live(
        graph,
        operations,
        [*step.results, *step.to_end, *others],
        for_data=() if step.traced else step.new,
    )


def _backward(
    graph: nx.DiGraph,
    operations: Sequence[tf.Operation],
    step: BackwardPass,
) -> set[tf.Operation]:
    """The ops of the backward pass: those that wait for a gradient, beside and after it, in pieces.

    Zeros for lists of gradients belong to it, too. Other ops that `tf.gradients` made (shapes,
    masks) run with the forward pass.
    """
    backward: set[tf.Operation] = set(step.beside | step.after | step.pieces)
    for op in operations:
        if op in step.new and (
            tf_private.is_seed(op)
            or (op.type == "ZerosLike" and op.outputs[0].dtype == tf.variant)
            or any(before in backward for before in graph.predecessors(op))
        ):
            backward.add(op)
    if backward.isdisjoint(step.new):  # the initial gradients were given, so there is no seed
        forward: set[tf.Operation] = set()  # with the lists that a loop keeps for its gradient
        for op in reversed(operations):
            is_ours = op in step.new or op in backward
            if not is_ours or not forward.isdisjoint(graph.successors(op)):
                forward.add(op)
        backward.update(step.new.intersection(operations).difference(forward))
    return backward
