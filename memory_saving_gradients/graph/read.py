"""From a graph that `tf.gradients` has just extended to a `Problem`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container, Iterable, Mapping, Sequence

import networkx as nx
import numpy as np
import tensorflow as tf

from memory_saving_gradients.graph import calls, functions, kinds, order, tf_private
from memory_saving_gradients.graph.backward import BackwardPass
from memory_saving_gradients.graph.buffers import Buffers
from memory_saving_gradients.graph.costs import estimate_seconds
from memory_saving_gradients.graph.origin import origin
from memory_saving_gradients.graph.roles import Roles, roles_of
from memory_saving_gradients.graph.runtimes.runtime import Runtime
from memory_saving_gradients.graph.shapes import NOTHING_GIVEN, InputSizes, Shapes
from memory_saving_gradients.graph.trace import measure_ops
from memory_saving_gradients.planning.labels import Labels
from memory_saving_gradients.planning.order import backward_order
from memory_saving_gradients.planning.problem import Op, Problem, Tensor
from memory_saving_gradients.planning.simulate import plain_peak, simulate

# What opens and closes a v1 loop or branch.
_SWITCHES = frozenset({"Switch", "RefSwitch"})
_BEGINS = _SWITCHES | {"Enter", "RefEnter"}
_ENDS = frozenset({"Merge", "RefMerge", "Exit", "RefExit"})
_COMPARISONS = frozenset({"Greater", "GreaterEqual", "Less", "LessEqual"})
_SIDE_EFFECTS = frozenset({"PyFuncStateless", "EagerPyFunc", "PyFunc"})


@dataclasses.dataclass(frozen=True)
class Reading:
    """A problem, and what its indices mean in the graph.

    Attributes:
        step: what was read.
        problem: the step as data.
        operations: the operation of every op of the problem.
        tensor_of: tensor name to the index of its buffer in the problem; a view maps to the
            tensor that it shows. Tensors left out of the problem are not here.
        roles: what the labels say of tensors of the backward pass, by index.
        perhaps: the peak of another course that the plain step may take, sometimes the real one.
        new: names of the ops that differentiation made and the step needs.
        unused: names of the ops that differentiation made in vain.
        unordered: names of the ops that neither wait for others nor are waited for: those of v1
            loops and branches, those that Grappler may fold into constants, and those that
            `tf.function` lifts out of the trace.
        sizes: what was known of the inputs.
        batch_size: the first dimension of the inputs, where the graph leaves it unknown.
        growth: the bytes that each tensor, and then the scratch space of each op, gains with every
            example of the batch.
    """

    step: BackwardPass
    problem: Problem
    operations: list[tf.Operation]
    tensor_of: dict[str, int]
    roles: Roles
    perhaps: int
    new: frozenset[str]
    unused: frozenset[str]
    unordered: frozenset[str]
    sizes: InputSizes = NOTHING_GIVEN
    batch_size: int | None = None
    growth: tuple[float, ...] = ()

    @functools.cached_property
    def labels(self) -> Labels:
        """What the user calls the ops and tensors of the problem."""
        named = (self.step.graph.get_tensor_by_name(t.name) for t in self.problem.tensors)
        tensors = [(t.shape, t.dtype.base_dtype.name) for t in named]
        return Labels(
            types=tuple(op.type for op in self.operations),
            origins=tuple(map(origin, self.operations)),
            shapes=tuple(None if s.rank is None else tuple(s.as_list()) for s, _ in tensors),
            dtypes=tuple(dtype for _, dtype in tensors),
            of_weights=self.roles.of_weights,
            sums=self.roles.sums,
            updates=self.roles.updates,
            waited_for=self.roles.waited_for,
            reordered=self.step.reordered,
        )

    def in_order_of(self, problem: Problem) -> Reading:
        """The same reading with its ops in the order that they have in another problem of them."""
        index_of = {op.name: i for i, op in enumerate(self.problem.ops)}
        sequence = [index_of[op.name] for op in problem.ops]
        return dataclasses.replace(
            self,
            problem=self.problem.reordered(sequence),
            operations=[self.operations[i] for i in sequence],
            growth=_reordered(self.growth, len(problem.tensors), sequence),
        )


def read(
    step: BackwardPass,
    cost_model: str = "analytical",
    sizes: InputSizes = NOTHING_GIVEN,
) -> Reading:
    """Reads a step: the ops that its results need, and those beside.

    Args:
        step: a backward pass, with the forward pass that it needs.
        cost_model: "analytical" (TensorFlow's estimate) or "measured" (a traced run).
        sizes: what is known of the inputs.

    Returns:
        The step as a problem, with the way back to the graph.
    """
    created = {op: i for i, op in enumerate(step.graph.get_operations())}
    ours = step.needed | step.beside | step.after
    # What rewriting adds comes last; of another backward pass it can be part of the forward pass.
    written = max(step.end, step.end_of_trace)
    graph = order.dependencies(step.ends, lambda op: op in ours or created[op] >= written)
    order.add_order_of_effects(graph, created, step.new)
    operations = list(nx.lexicographical_topological_sort(graph, key=created.__getitem__))
    backward = _backward(graph, operations, step)
    shapes = Shapes(operations, sizes)
    runtime = step.runtime
    buffers = Buffers(operations, shapes, runtime)
    early = runtime.runs_early(graph, backward)
    executed, others = _as_run(graph, early, step)
    order.add_order_of_updates(graph, step)
    ordered = order.planned(graph, operations, created, step, backward, buffers, early)

    tensor_of, tensors = _numbered(ordered, buffers)
    kept_ops = [op for op in ordered if not buffers.is_view(op) and _touches(op, tensor_of)]
    seconds = estimate_seconds(kept_ops, shapes, runtime.device)
    workspaces = {op.name: runtime.scratch(op, shapes) for op in kept_ops}
    growth = _growth(operations, tensors, kept_ops, workspaces, shapes, runtime)
    for op in kept_ops:
        if calls.bodies(op):
            seconds[op.name], workspaces[op.name] = _called(op, runtime, graph, sizes)
    if cost_model == "measured":
        measured = measure_ops(step, operations, shapes)
        seconds |= {name: found.seconds for name, found in measured.items()}
        workspaces |= {name: found.workspace for name, found in measured.items()}
    moved = {op: sum(buffers.bytes(t) for t in (*op.inputs, *op.outputs)) for op in kept_ops}
    a_byte = float(np.median([seconds[op.name] / max(moved[op], 1) for op in kept_ops] or [0.0]))
    problem_ops = []
    conditional = _conditional(ordered)
    forward = [op for op in ordered if op not in backward]
    pinned = _pinned(forward, conditional, buffers, step)
    for op in kept_ops:
        problem_ops.append(
            Op(
                name=op.name,
                inputs=_numbers(others[op], tensor_of) if op in others else _reads(op, tensor_of),
                outputs=_makes(op, tensor_of, buffers, graph),
                cost=seconds[op.name],
                workspace=workspaces[op.name],
                backward=op in backward,
                pinned=op in pinned,
                in_place=op.type in kinds.IN_PLACE,
                expensive=op.type in kinds.EXPENSIVE
                or seconds[op.name] > max(_DEAR * moved[op] * a_byte, _NOTHING),
            )
        )
    kept = frozenset(tensor_of[t.name] for t in step.to_end if t.name in tensor_of)
    problem = Problem(tuple(problem_ops), tuple(tensors), kept)
    waits = _waits(graph, operations, kept_ops)
    first = problem.forward_count
    sequence, late = backward_order(
        problem, [{i for i in before if i >= first} for before in waits]
    )
    if runtime.obeys_control_edges:
        problem = dataclasses.replace(problem, waits=tuple(tuple(sorted(w)) for w in waits))
    sequence = [*range(first), *sequence]
    problem = problem.reordered(sequence, late)
    kept_ops = [kept_ops[i] for i in sequence]
    growth = _reordered(growth, len(tensors), sequence)
    index_of = {op: i for i, op in enumerate(kept_ops)}

    place = {op: i for i, op in enumerate(ordered)}
    plain = list(nx.lexicographical_topological_sort(executed, key=lambda op: place.get(op, 0)))

    def course(early_last: bool) -> tuple[int, ...]:
        events = runtime.order(executed, plain, seconds, early_last)
        numbered = ((index_of[op], begins) for op, begins in events if op in index_of)
        return tuple(index if begins else ~index for index, begins in numbered)

    other = problem = dataclasses.replace(problem, as_executed=course(early_last=False))
    if sum(tf_private.is_seed(op) for op in backward if op in step.new) != 1:
        # A single loss has a single order; several may be taken one by one.
        other = dataclasses.replace(problem, as_executed=course(early_last=True))
    new = frozenset(op.name for op in operations if op in step.new)
    apart = {*conditional, *_foldable(ordered, backward), *order.of_new_variables(step.graph)}
    return Reading(
        step=step,
        problem=problem,
        operations=kept_ops,
        tensor_of=tensor_of,
        roles=roles_of(step, operations, backward, tensor_of, shapes),
        perhaps=plain_peak(other),
        new=new,
        unused=frozenset(op.name for op in step.new) - new,
        unordered=frozenset(op.name for op in apart),
        sizes=sizes,
        batch_size=shapes.batch_size,
        growth=growth,
    )


def _as_run(
    graph: nx.DiGraph, early: Mapping[tf.Operation, tf.Operation], step: BackwardPass
) -> tuple[nx.DiGraph, dict[tf.Operation, list[tf.Tensor]]]:
    """Who waits for whom, and what ops read, in the plain step.

    There sums wait for all their terms, and products run without their first operand.
    """
    executed = graph.copy()
    for whole, running in step.sums:
        executed.add_edges_from((t.op, whole) for t in whole.inputs)
        executed.add_edges_from((whole, op) for op in running)
    inputs: dict[tf.Operation, list[tf.Tensor]] = {}
    for op, reader in early.items():
        late, other = op.inputs
        inputs[op], inputs[reader] = [other], [late, op.outputs[0]]
        executed.remove_edge(late.op, op)
        executed.add_edge(late.op, reader)
    return executed, inputs


def _waits(
    graph: nx.DiGraph, operations: Iterable[tf.Operation], kept_ops: Sequence[tf.Operation]
) -> list[set[int]]:
    """For each of `kept_ops` those that it waits for, by index, if only through other ops.

    Whoever reads what a sum of many reads does so before or after it, as now: see
    `order.depends_on_time`.
    """
    index_of = {op: i for i, op in enumerate(kept_ops)}
    waits: dict[tf.Operation, set[int]] = {}
    for op in operations:
        waits[op] = set()
        for before in graph.predecessors(op):
            waits[op] |= {index_of[before]} if before in index_of else waits[before]
    found = [waits[op] for op in kept_ops]
    for i, op in enumerate(kept_ops):
        if order.depends_on_time(op):
            readers = {index_of.get(reader, i) for t in op.inputs for reader in t.consumers()}
            for reader in readers - {i}:
                found[max(i, reader)].add(min(i, reader))
    return found


def _growth(
    operations: Sequence[tf.Operation],
    tensors: Sequence[Tensor],
    kept_ops: Sequence[tf.Operation],
    workspaces: dict[str, int],
    shapes: Shapes,
    runtime: Runtime,
) -> tuple[float, ...]:
    """The bytes by which each tensor, and then the scratch space of each op, grow with the batch.

    Peaks are close to linear in it, so two sizes tell.
    """
    if shapes.batch_size is None:
        return ()
    larger = Shapes(operations, shapes.given.times(_GROWN, shapes.batch_size))
    buffers = Buffers(operations, larger, runtime)
    graph = operations[0].graph
    then = [buffers.bytes(graph.get_tensor_by_name(tensor.name)) for tensor in tensors]
    then += [runtime.scratch(op, larger) for op in kept_ops]
    now = [*(tensor.bytes for tensor in tensors), *(workspaces[op.name] for op in kept_ops)]
    more = (_GROWN - 1) * shapes.batch_size
    return tuple((b - a) / more for a, b in zip(now, then, strict=True))


_GROWN = 2


def _reordered(
    growth: tuple[float, ...], tensors: int, sequence: Iterable[int]
) -> tuple[float, ...]:
    return growth and growth[:tensors] + tuple(growth[tensors + i] for i in sequence)


# An op whose estimate is this many times that of the median op, byte for byte, does more than
# read and write.
_DEAR = 100
_NOTHING = 1e-5  # seconds; below it no op is dear


def _numbered(
    ordered: Sequence[tf.Operation], buffers: Buffers
) -> tuple[dict[str, int], list[Tensor]]:
    """The number of each tensor that matters, by name, and the tensors."""
    tensor_of: dict[str, int] = {}
    tensors: list[Tensor] = []
    for op in ordered:
        for tensor in op.outputs:
            if not buffers.matters(tensor):
                continue
            shown = buffers.shown_by(tensor)
            if shown.name not in tensor_of:
                tensor_of[shown.name] = len(tensors)
                tensors.append(Tensor(shown.name, buffers.bytes(shown)))
            tensor_of[tensor.name] = tensor_of[shown.name]
    return tensor_of, tensors


def _called(
    op: tf.Operation, runtime: Runtime, step: Container[tf.Operation], sizes: InputSizes
) -> tuple[float, int]:
    """Seconds, and bytes beside inputs and outputs, that an op takes for the functions it calls."""
    dearest, most = 0.0, 0
    runtime = runtime.within(op)
    for body in calls.bodies(op):
        created = {one: i for i, one in enumerate(body.get_operations())}
        made = {t.value_index for t in _made_at_all(op, step)}
        loop = op.type not in calls.BRANCHES
        outputs = [t for i, t in enumerate(body.outputs) if loop or i in made]
        needed = nx.lexicographical_topological_sort(
            order.dependencies(t.op for t in outputs), key=created.__getitem__
        )
        inside = [one for one in needed if one.type != "Placeholder"]
        shapes = Shapes(inside, sizes)
        buffers = Buffers(inside, shapes, runtime)
        tensor_of, tensors = _numbered(inside, buffers)
        seconds = estimate_seconds(inside, shapes, runtime.device)
        steps = []
        for one in inside:
            cost, workspace = seconds[one.name], runtime.scratch(one, shapes)
            if calls.bodies(one):
                cost, workspace = _called(one, runtime, created, sizes)
            reads, makes = _reads(one, tensor_of), _makes(one, tensor_of, buffers, created)
            steps.append(Op(one.name, reads, makes, cost, workspace))
        results = frozenset(tensor_of[t.name] for t in outputs if t.name in tensor_of)
        if not tensors:
            continue
        simulation = simulate(Problem(tuple(steps), tuple(tensors), results), range(len(steps)))
        handed_on = sum(tensors[t].bytes for t in results)
        dearest = max(dearest, simulation.cost * functions.rounds(op))
        most = max(most, simulation.peak - handed_on)
    return dearest, most


def _backward(
    graph: nx.DiGraph,
    operations: Sequence[tf.Operation],
    step: BackwardPass,
) -> set[tf.Operation]:
    """The ops that wait for a gradient, make zeros for a list of them, or are beside or after.

    Other ops that `tf.gradients` made (shapes, masks) run with the forward pass.
    """
    backward: set[tf.Operation] = set(step.beside | step.after)
    for op in operations:
        if op in step.new and (
            tf_private.is_seed(op)
            or (op.type == "ZerosLike" and op.outputs[0].dtype == tf.variant)
            or any(before in backward for before in graph.predecessors(op))
        ):
            backward.add(op)
    if backward.isdisjoint(step.new):  # the gradients to begin with were given: there is no seed
        backward.update(op for op in operations if op in step.new)
    return backward


def _touches(op: tf.Operation, tensor_of: dict[str, int]) -> bool:
    return any(t.name in tensor_of for t in op.outputs) or bool(_reads(op, tensor_of))


def _reads(op: tf.Operation, tensor_of: dict[str, int]) -> tuple[int, ...]:
    """The tensors that `op` reads, each once."""
    if op.type in kinds.SHAPE_ONLY:
        return ()
    return _numbers((t for t in op.inputs if t.op.type not in order.BACK_EDGES), tensor_of)


def _numbers(tensors: Iterable[tf.Tensor], tensor_of: dict[str, int]) -> tuple[int, ...]:
    """The numbers of tensors that matter, each once."""
    return tuple(dict.fromkeys(tensor_of[t.name] for t in tensors if t.name in tensor_of))


def _makes(
    op: tf.Operation,
    tensor_of: dict[str, int],
    buffers: Buffers,
    step: Container[tf.Operation],
) -> tuple[int, ...]:
    """The tensors that `op` makes; what it only shows is not among them."""
    owned = (t for t in _made_at_all(op, step) if buffers.shown_by(t) is t)
    return tuple(tensor_of[t.name] for t in owned if t.name in tensor_of)


def _made_at_all(op: tf.Operation, step: Container[tf.Operation]) -> list[tf.Tensor]:
    """The outputs of `op`; of a branch, where TensorFlow prunes others, what the step reads."""
    if op.type not in calls.BRANCHES:
        return op.outputs
    return [t for t in op.outputs if any(reader in step for reader in t.consumers())]


def _conditional(operations: Sequence[tf.Operation]) -> set[tf.Operation]:
    """The ops of v1 loops and branches: they run in a frame of their own, or not at all.

    Such an op can neither run twice nor wait for, or be waited for by, an op outside.
    """
    depth: dict[tf.Operation, int] = {}  # of loops and branches around what the op hands on
    found: set[tf.Operation] = set()
    for op in operations:
        before = (*(t.op for t in op.inputs), *op.control_inputs)
        depth[op] = max((depth.get(other, 0) for other in before), default=0)
        if op.type in _BEGINS and not (op.type in _SWITCHES and _is_loop_merge(op.inputs[0].op)):
            depth[op] += 1
        elif op.type in _ENDS and not _is_loop_merge(op):
            depth[op] -= 1
        if depth[op] > 0 or op.type in _BEGINS | _ENDS or tf_private.in_control_flow(op):
            found.add(op)
    return found


def _is_loop_merge(op: tf.Operation) -> bool:
    return any(t.op.type in order.BACK_EDGES for t in op.inputs)


def _foldable(operations: Sequence[tf.Operation], backward: set[tf.Operation]) -> set[tf.Operation]:
    """The backward ops that read no activation: Grappler may fold them into constants.

    What such an op is made to wait for, Grappler hands on to the ops that take in the constant.
    That could close a cycle.
    """
    found: set[tf.Operation] = set()
    for op in operations:
        if op.type in kinds.SHAPE_ONLY:
            known = all(t.shape.is_fully_defined() or t.op in found for t in op.inputs)
        elif op in backward and op.inputs and not op.op_def.is_stateful:
            known = all(t.op in found for t in op.inputs)
        else:
            known = op.type == "Const"
        if known:
            found.add(op)
    return found


def _pinned(
    operations: Sequence[tf.Operation],
    conditional: set[tf.Operation],
    buffers: Buffers,
    step: BackwardPass,
) -> set[tf.Operation]:
    """The forward ops whose second run could differ, have an effect, or cannot be had.

    Of the element-wise ops that make a dropout mask from random numbers, those that make it
    smaller are pinned as well: it takes fewer bytes to keep the mask than the numbers.
    """
    pinned = set()
    later = frozenset(step.graph.get_operations()[step.end :]) if step.traced else None
    drawn: dict[tf.Operation, int] = {}  # the bytes of the random numbers that an op depends on
    for op in operations:
        inputs = [t for t in op.inputs if buffers.bytes(t)]
        out_bytes = sum(buffers.bytes(t) for t in op.outputs)
        if "Random" in op.type and not any(buffers.matters(t) for t in inputs):
            drawn[op] = out_bytes
        elif inputs and (op.type in kinds.IN_PLACE or op.type in _COMPARISONS):
            sources = {buffers.shown_by(t).op for t in inputs if buffers.matters(t)}
            if sources and sources <= drawn.keys():
                drawn[op] = max(drawn[source] for source in sources)
        touched = (*op.inputs, *op.outputs)
        handles = {tf.string} if calls.calls(op) else kinds.HANDLES
        if (
            not calls.may_repeat(op, later)
            or op.type in kinds.SOURCES
            or op.type in _SIDE_EFFECTS
            or op in conditional
            or any(t.dtype in handles or tf_private.is_reference(t) for t in touched)
            or not step.runtime.may_copy(op)
            or out_bytes < drawn.get(op, 0)
        ):
            pinned.add(op)
        elif op.type == "AddN" and len(op.inputs) > 2 and not op.outputs[0].dtype.is_integer:
            # Its kernel begins with the first term that nobody else will read. A second run would
            # be such a reader.
            pinned.add(op)
    return pinned
