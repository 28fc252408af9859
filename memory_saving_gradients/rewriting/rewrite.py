"""Edits the graph that `tf.gradients` has just extended so that it follows a schedule.

An op that a schedule runs a second time is copied. The copy reads the newest copies of its inputs,
and later backward ops read the copy. As an op runs as soon as its inputs are there, copies have to
be delayed: see `waves` and `gates`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

import tensorflow as tf

from memory_saving_gradients.graph import calls, gate, kinds, normalisation, order, tf_private
from memory_saving_gradients.graph.apart import apart
from memory_saving_gradients.planning.problem import Schedule, copied
from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.reading.read import Reading, reuses_statistics
from memory_saving_gradients.rewriting.gates import Gates
from memory_saving_gradients.rewriting.run import COPY, Holding, Run
from memory_saving_gradients.rewriting.waves import Waves
from memory_saving_gradients.runtimes.executor import Executor
from memory_saving_gradients.runtimes.runtime import Runtime
from memory_saving_gradients.runtimes.xla import Xla


@dataclasses.dataclass(frozen=True)
class _Reference:
    """An input of an op: the output of an op, or of a copy that is still to be made."""

    op: tf.Operation
    index: int
    copy: str | None = None  # the name of the copy's node; None for the op itself

    @property
    def name(self) -> str:
        return f"{self.copy or self.op.name}:{self.index}"


#: The name under which the gradient of every copy is registered.
NOT_DIFFERENTIABLE = "MemorySavingGradientsCopy"


@tf.RegisterGradient(NOT_DIFFERENTIABLE)
def _refuse(op: tf.Operation, *grads: tf.Tensor) -> None:
    raise NotImplementedError(
        f'"{op.name}" was recomputed by memory_saving_gradients, and TensorFlow\'s own gradients '
        "would miss the part that flows through the original. For a gradient of a gradient, call "
        "memory_saving_gradients.gradients() the second time, too."
    )


tf_private.save_without(NOT_DIFFERENTIABLE)


def rewrite(
    reading: Reading, schedule: Schedule, moved: Mapping[tuple[str, int], str] | None = None
) -> list[str]:
    """Makes the graph follow a schedule; an error leaves its ops unchanged.

    Args:
        reading: the step as it was read.
        schedule: the schedule.
        moved: by (op, input), for inputs that have been changed since differentiation, the name of
            the tensor that the op read then.

    Returns:
        The names of the runs, ops and copies, in the order of the schedule.
    """
    with tf_private.all_or_nothing():
        before, nodes = _edit(reading, schedule)
        graph = reading.step.graph
        for merged in reading.step.runtime.merged(_fetches(reading.step)):
            order.check_acyclic(graph, merged)
    rerouted = _rerouted.setdefault(graph, {})
    for place, tensor in {**before, **(moved or {})}.items():
        if place not in rerouted:
            rerouted[place] = tensor
            tf_private.can_be_undone(functools.partial(rerouted.pop, place))
    return nodes


def _fetches(step: BackwardPass) -> Iterator[dict[tf.Operation, None]]:
    """The sets of ops that a session may run: all of the graph, the step, its forward pass."""
    yield dict.fromkeys(step.graph.get_operations())
    yield order.needed(step.ends)
    yield order.needed([step.target.op])


#: How ops are delayed, by runtime.
_HOLDING: dict[type[Runtime], Callable[[Reading, Schedule], Holding]]
_HOLDING = {Executor: Waves, Xla: Gates}


def _edit(reading: Reading, schedule: Schedule) -> tuple[dict[tuple[str, int], str], list[str]]:
    """Edits the graph; returns what changed inputs read before, and the names of the runs."""
    edits = _Edits(reading)
    holding = _HOLDING[type(reading.step.runtime)](reading, schedule)
    first, again = copied(reading.problem, schedule)
    for place in _of_the_loss(reading, schedule, again):
        again[place] = False
    for place, index in enumerate(schedule):
        if place in holding.gates:
            edits.add_gate(holding.gates[place])
        edits.add_run(index, again[place], in_backward=place >= first)
    results = edits.results()
    copies = _make_copies(edits, reading.step.runtime.obeys_control_edges)
    for copy in copies.values():
        before_writes(copy)
    before = {}

    def read_instead(op: tf.Operation, index: int, reference: _Reference) -> None:
        before[op.name, index] = op.inputs[index].name
        tf_private.update_input(op, index, copies[str(reference.copy)].outputs[reference.index])

    for op, index, reference in edits.inputs:
        read_instead(op, index, reference)
    ours = {*reading.step.needed, *copies.values()}
    for tensor, reference in results:
        for op in (op for op in tensor.consumers() if op not in ours):
            for index in (i for i, read in enumerate(op.inputs) if read is tensor):
                read_instead(op, index, reference)
        note_behind(tensor, reference.name)
    holding.hold(edits.runs, copies)
    for name in edits.on_cpu:  # it holds ops by device: not before
        normalisation.stay_on_cpu(copies[name])
    return before, [run.copy or run.op.name for run in edits.runs]


def _of_the_loss(reading: Reading, schedule: Schedule, again: Sequence[bool]) -> list[int]:
    """The entries of the backward pass that run for the first time what the loss needs.

    A copy would be a second run: whoever asks for the loss runs the original as well. It is needed
    where an earlier op waits for the original through ops that are not in the problem.
    """
    first_runs = {index: place for place, index in reversed([*enumerate(schedule)])}
    late = {place for place in first_runs.values() if again[place]}
    if not late:
        return []
    needed = order.needed([reading.step.target.op])
    waited_for: dict[tf.Operation, None] = {}
    found = []
    for place, index in enumerate(schedule[: max(late) + 1]):
        op = reading.operations[index]
        if place in late and op in needed and op not in waited_for:
            found.append(place)
        order.leading_to([op], order.waits_for, waited_for)
    return found


#: By graph: the name of a result that passes gates -> that of the tensor behind the last gate.
_behind: weakref.WeakKeyDictionary[tf.Graph, dict[str, str]] = weakref.WeakKeyDictionary()


def note_behind(tensor: tf.Tensor, later: str) -> None:
    """Registers the tensor that readers outside the step read instead of a result."""
    known = _behind.setdefault(tensor.graph, {})
    known[tensor.name] = later
    tf_private.can_be_undone(functools.partial(known.pop, tensor.name, None))


def behind_gates(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that readers outside the step read instead of a result: behind all gates."""
    known, name = _behind.get(tensor.graph, {}), tensor.name
    while known.get(name, name) != name:
        name = known[name]
    return tensor.graph.get_tensor_by_name(name)


#: By graph: (op, input) -> the tensor that it read before it was changed to read a copy. These are
#: names, as an op would keep its graph alive.
_rerouted: weakref.WeakKeyDictionary[tf.Graph, dict[tuple[str, int], str]]
_rerouted = weakref.WeakKeyDictionary()


#: The attribute of a graph with the functions that undo the rewriting of its loops, newest last.
#: They refer to ops: stored anywhere else they would keep the graph alive.
_OF_LOOPS = "memory_saving_gradients_of_loops"


def plain_when_differentiated(graph: tf.Graph, edits: Sequence[Callable[[], object]]) -> None:
    """Registers edits of loops, which are undone for good if their graph is differentiated again.

    TensorFlow then adds to the loop what the gradient of its gradient needs.

    Args:
        graph: the graph.
        edits: the functions that undo them, newest last.
    """
    before = getattr(graph, _OF_LOOPS, [])
    tf_private.can_be_undone(functools.partial(setattr, graph, _OF_LOOPS, before))
    setattr(graph, _OF_LOOPS, [*before, *edits])


@contextlib.contextmanager
def as_differentiated(graph: tf.Graph, ops: Container[str]) -> Iterator[None]:
    """Within it, those of `ops` that were rewritten read what they read before.

    Differentiating a rewritten graph would miss the gradients that flow through the originals of
    recomputed tensors.

    Args:
        graph: the graph.
        ops: names of ops.
    """
    for take_back in reversed(getattr(graph, _OF_LOOPS, [])):
        take_back()
    setattr(graph, _OF_LOOPS, [])
    moved = []
    for (name, index), tensor in _rerouted.get(graph, {}).items():
        if name in ops:
            op = graph.get_operation_by_name(name)
            moved.append((op, index, op.inputs[index]))
            tf_private.update_input(op, index, graph.get_tensor_by_name(tensor))
    try:
        yield
    finally:
        for op, index, copy in moved:
            tf_private.update_input(op, index, copy)


class _Edits:
    """All edits, collected before any is made.

    Attributes:
        nodes: the copies to make, by name, each with the op that it copies.
        gates: the gates to make, in a graph for XLA, and the reshaping around them.
        outside: the existing tensors that these nodes read, by the name used in the nodes.
        inputs: (op, input, new reference), for ops that are to read a copy.
        runs: the entries of the schedule.
        on_cpu: the copies that only a CPU can run.
    """

    def __init__(self, reading: Reading) -> None:
        self.nodes: dict[str, tuple[tf.compat.v1.NodeDef, tf.Operation]] = {}
        self.gates: list[tf.compat.v1.NodeDef] = []
        self.outside: dict[str, tf.Tensor] = {}
        self.inputs: list[tuple[tf.Operation, int, _Reference]] = []
        self.runs: list[Run] = []
        self.on_cpu: list[str] = []
        self._reading = reading
        #: tensor, by the owner of its buffer -> the node and output of its newest copy
        self._newest: dict[str, tuple[str, int]] = {}
        self._views: dict[tuple[str, ...], str] = {}
        self._passed: set[str] = set()
        self._ran: set[int] = set()  # as they were, not as copies

    def add_run(self, index: int, again: bool, in_backward: bool) -> None:
        """Adds the next entry of the schedule: an op, or a copy of it that runs `again`."""
        reading, op = self._reading, self._reading.operations[index]
        references = [self._newest_of(tensor) for tensor in op.inputs]
        copy = None
        if again:
            copy = self._copy(op, references, has_run=index in self._ran)
            made = set(reading.problem.ops[index].outputs)
            self._newest.update(
                (self._buffer(t), (copy, t.value_index))
                for t in op.outputs
                # Else the original would run as well, for its small outputs.
                if index not in self._ran or reading.tensor_of.get(t.name) in made
            )
        else:
            self.inputs.extend((op, i, r) for i, r in enumerate(references) if r.copy)
            self._ran.add(index)
        self.runs.append(Run(op, copy, in_backward))

    def _newest_of(self, tensor: tf.Tensor) -> _Reference:
        """The newest copy of `tensor`; copies views of copied tensors as needed."""
        if tensor.name in self._reading.made_of:
            return self._computed_again(tensor)
        views = []
        while (shown := kinds.shown_input(tensor.op, tensor.value_index)) is not None:
            views.append(tensor)
            tensor = tensor.op.inputs[shown]
        copy, output = self._newest.get(self._buffer(tensor), (None, tensor.value_index))
        if copy in self.nodes and self.nodes[copy][1] is tensor.op:
            output = tensor.value_index  # lists of a loop can share a buffer
        reference = _Reference(tensor.op, output, copy)
        for view in reversed(views if copy else []):
            if not calls.may_repeat(view.op):
                continue  # a check that returns its input: the original has checked the same
            key = view.op.name, reference.name
            if key not in self._views:
                references = [_Reference(t.op, t.value_index) for t in view.op.inputs]
                references[kinds.shown_input(view.op, view.value_index) or 0] = reference
                self._views[key] = self._copy(view.op, references)
            reference = _Reference(view.op, view.value_index, self._views[key])
        return reference if copy or not views else _Reference(views[0].op, views[0].value_index)

    def _buffer(self, tensor: tf.Tensor) -> str:
        number = self._reading.tensor_of.get(tensor.name)
        return tensor.name if number is None else self._reading.problem.tensors[number].name

    def _computed_again(self, tensor: tf.Tensor) -> _Reference:
        """A tensor without a buffer, computed from the newest copies of its sources."""
        op = tensor.op
        references = [self._newest_of(t) for t in op.inputs]
        if not any(reference.copy for reference in references):
            return _Reference(op, tensor.value_index)
        key = op.name, *(reference.name for reference in references)
        if key not in self._views:
            self._views[key] = self._copy(op, references, has_run=True)
        return _Reference(op, tensor.value_index, self._views[key])

    def _copy(
        self, op: tf.Operation, references: Sequence[_Reference], has_run: bool = False
    ) -> str:
        """Adds a copy of `op`, for which the statistics are there if the op `has_run`."""
        node = op.node_def
        runtime, tensor_of = self._reading.step.runtime, self._reading.tensor_of
        reuses = has_run and reuses_statistics(op, runtime, tensor_of)
        if reuses:
            kept = {i: _Reference(op, output) for i, output in normalisation.STATISTICS.items()}
            references = [kept.get(i, reference) for i, reference in enumerate(references)]
            node.attr["is_training"].b = False
        # Grappler sorts the inputs of a sum or product by name: a copy must sort like its original.
        with op.graph.name_scope(None):
            node.name = op.graph.unique_name(op.name + COPY)
        node.attr.pop("_class", None)
        node.attr["_gradient_op_type"].s = NOT_DIFFERENTIABLE.encode()
        node.input[:] = [self._input(reference) for reference in references]
        self.nodes[node.name] = node, op
        if reuses and runtime.runs_in_sessions:
            self.on_cpu.append(node.name)
        return node.name

    def add_gate(self, opening: gate.Gate) -> None:
        """Makes later entries read the newest copies of some tensors through a gate."""
        tensors = opening.tensors
        inputs = [self._input(self._newest_of(tensor)) for tensor in tensors]
        with self._reading.step.graph.name_scope(None):
            name = self._reading.step.graph.unique_name("gate/gate")
        if opening.after is None:
            behind = self._add_barrier(name, inputs, tensors)
        else:
            behind = self._add_loop(name, inputs, tensors, opening.after)
        self._newest.update(zip(map(self._buffer, tensors), behind, strict=True))
        self._passed.update(tensor.name for tensor in tensors)

    def _add_loop(
        self,
        name: str,
        inputs: Sequence[str],
        tensors: Sequence[tf.Tensor],
        after: Sequence[tf.Tensor],
    ) -> list[tuple[str, int]]:
        with apart(self._reading.step.graph, "gate"):
            never = gate.never(after)
        inputs = [self._input(_Reference(never.op, 0)), *inputs]
        self.gates.append(gate.loop_node(name, inputs, [never, *tensors]))
        return [(name, 1 + i) for i in range(len(tensors))]

    def _add_barrier(
        self, name: str, inputs: list[str], tensors: Sequence[tf.Tensor]
    ) -> list[tuple[str, int]]:
        behind = [(name, i) for i in range(len(tensors))]
        if vectors := [i for i, t in enumerate(tensors) if gate.passes_as_vector(t)]:
            with apart(self._reading.step.graph, "gate"):
                flat, shapes = tf.constant([-1]), [tf.shape(tensors[i]) for i in vectors]
            for i, shape in zip(vectors, shapes, strict=True):
                dtype = tensors[i].dtype
                inputs[i] = f"{self._add_reshape(f'{name}/in_{i}', inputs[i], flat, dtype)}:0"
                behind[i] = self._add_reshape(f"{name}/out_{i}", f"{name}:{i}", shape, dtype), 0
        self.gates.append(gate.barrier_node(name, inputs, tensors))
        return behind

    def _add_reshape(self, name: str, read: str, shape: tf.Tensor, dtype: tf.DType) -> str:
        inputs = [read, self._input(_Reference(shape.op, 0))]
        self.gates.append(gate.reshape_node(name, inputs, dtype, shape.dtype))
        return name

    def results(self) -> list[tuple[tf.Tensor, _Reference]]:
        """The gradients that pass gates, each with the reference behind the last gate."""
        made = [t for t in self._reading.step.results if t.op.name in self._reading.new]
        passed = [t for t in made if kinds.owner(t).name in self._passed]
        return [(tensor, self._newest_of(tensor)) for tensor in passed]

    def _input(self, reference: _Reference) -> str:
        """The name by which a node reads a reference."""
        if reference.copy:
            return reference.name
        self.outside[f"outside/{reference.name}"] = reference.op.outputs[reference.index]
        return f"outside/{reference.name}"


def _make_copies(edits: _Edits, with_control_edges: bool) -> dict[str, tf.Operation]:
    """Adds all copies to the graph at once, with the devices and attributes of the ops.

    Where control edges are not obeyed we add none: they could lead to ops that nothing reads.
    """
    if not edits.nodes:
        return {}
    graph = edits.runs[0].op.graph
    nodes = [*(node for node, _ in edits.nodes.values()), *edits.gates]
    names = [node.name for node in nodes]
    graph_def = tf.compat.v1.GraphDef(node=nodes, versions=graph.graph_def_versions)
    with apart(graph):
        imported = tf.graph_util.import_graph_def(
            graph_def,
            input_map=edits.outside,
            return_elements=names,
            name="",
        )
    copies = dict(zip(names, imported, strict=True))
    for name, (_, op) in edits.nodes.items():
        if with_control_edges:
            tf_private.add_control_inputs(copies[name], op.control_inputs)
        if groups := tf_private.colocation(op):
            tf_private.set_colocation(copies[name], groups)
        for tensor, original in zip(copies[name].outputs, op.outputs, strict=True):
            if not tensor.shape.is_fully_defined():
                tensor.set_shape(original.shape)
    return copies


def before_writes(op: tf.Operation) -> None:
    """Makes ops that write to the variables that `op` reads wait for it; all of them come later."""
    for writer in calls.writers(op):
        tf_private.add_control_inputs(writer, [op])
