"""From a schedule to edits of the graph that `tf.gradients` has just extended.

An op that a schedule runs a second time is copied; its inputs are the newest copies of its
tensors, and the backward ops that come later read the copies. TensorFlow's executor runs an op as
soon as its inputs are there, so a copy must be told to wait: see `waves` and `gates`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

import tensorflow as tf

from memory_saving_gradients.graph import calls, gate, kinds, order, tf_private
from memory_saving_gradients.graph.apart import apart
from memory_saving_gradients.planning.problem import Schedule, copied
from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.reading.read import Reading
from memory_saving_gradients.rewriting.gates import Gates
from memory_saving_gradients.rewriting.run import COPY, Holding, Run
from memory_saving_gradients.rewriting.waves import Waves
from memory_saving_gradients.runtimes.executor import Executor
from memory_saving_gradients.runtimes.runtime import Runtime
from memory_saving_gradients.runtimes.xla import Xla


@dataclasses.dataclass(frozen=True)
class _Reference:
    """What an op reads: an output of an op, or of a copy that is yet to be made."""

    op: tf.Operation
    index: int
    copy: str | None = None  # the node of the copy, None for the op itself

    @property
    def name(self) -> str:
        return f"{self.copy or self.op.name}:{self.index}"


#: The name under which the gradient of every copy is registered.
NOT_DIFFERENTIABLE = "MemorySavingGradientsCopy"


@tf.RegisterGradient(NOT_DIFFERENTIABLE)
def _refuse(op: tf.Operation, *grads: tf.Tensor) -> None:
    raise NotImplementedError(
        f'"{op.name}" was recomputed by memory_saving_gradients, and TensorFlow\'s own gradients '
        "would miss what flows through the original. For a gradient of a gradient, call "
        "memory_saving_gradients.gradients() the second time, too."
    )


tf_private.save_without(NOT_DIFFERENTIABLE)


def rewrite(
    reading: Reading, schedule: Schedule, moved: Mapping[tuple[str, int], str] | None = None
) -> list[str]:
    """Makes the graph follow a schedule; an error leaves its ops as they are.

    Args:
        reading: the step as it was read.
        schedule: what to run, in which order.
        moved: (op, input) to the name of what it read when it was differentiated, for inputs that
            have been changed since.

    Returns:
        The names of what runs, ops and copies, in the order of the schedule.
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
    """What a session may run: all of the graph, the step, its forward pass."""
    yield dict.fromkeys(step.graph.get_operations())
    yield order.leading_to(step.ends, order.waits_for)
    yield order.leading_to([step.target.op], order.waits_for)


#: How ops are made to wait, by what runs them.
_HOLDING: dict[type[Runtime], Callable[[Reading, Schedule], Holding]]
_HOLDING = {Executor: Waves, Xla: Gates}


def _edit(reading: Reading, schedule: Schedule) -> tuple[dict[tuple[str, int], str], list[str]]:
    """Edits the graph; returns what the inputs read before that read copies now, and what runs."""
    edits = _Edits(reading)
    holding = _HOLDING[type(reading.step.runtime)](reading, schedule)
    first, again = copied(reading.problem, schedule)
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
        _note_behind(tensor, reference.name)
    holding.hold(edits.runs, copies)
    return before, [run.copy or run.op.name for run in edits.runs]


#: By graph: a result that passes gates -> what is behind the last one. Names.
_behind: weakref.WeakKeyDictionary[tf.Graph, dict[str, str]] = weakref.WeakKeyDictionary()


def _note_behind(tensor: tf.Tensor, later: str) -> None:
    known = _behind.setdefault(tensor.graph, {})
    known[tensor.name] = later
    tf_private.can_be_undone(functools.partial(known.pop, tensor.name, None))


def behind_gates(tensor: tf.Tensor) -> tf.Tensor:
    """What whoever the step is for reads instead of a result of it, which may have passed gates."""
    name = _behind.get(tensor.graph, {}).get(tensor.name, tensor.name)
    return tensor.graph.get_tensor_by_name(name)


#: By graph: (op, input) -> the tensor that it read before it was made to read a copy. Names, as
#: an op would keep its graph alive.
_rerouted: weakref.WeakKeyDictionary[tf.Graph, dict[tuple[str, int], str]]
_rerouted = weakref.WeakKeyDictionary()


#: The attribute of a graph with what takes back how its loops were rewritten, newest last. That
#: knows ops: anywhere else it would keep the graph alive.
_OF_LOOPS = "memory_saving_gradients_of_loops"


def plain_when_differentiated(graph: tf.Graph, edits: Sequence[Callable[[], object]]) -> None:
    """Has edits of loops taken back for good when their graph is differentiated again.

    TensorFlow adds to a loop what the gradient of its gradient needs.

    Args:
        graph: the graph.
        edits: what takes them back, newest last.
    """
    before = getattr(graph, _OF_LOOPS, [])
    tf_private.can_be_undone(functools.partial(setattr, graph, _OF_LOOPS, before))
    setattr(graph, _OF_LOOPS, [*before, *edits])


@contextlib.contextmanager
def as_differentiated(graph: tf.Graph, ops: Container[str]) -> Iterator[None]:
    """Within it, the rewritten ones of `ops` read what they did before any rewriting.

    To differentiate a rewritten graph again would miss what flows through the originals of
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
    """All that is to change, worked out before anything does.

    Attributes:
        nodes: the copies to make, by name, each with the op that it copies.
        gates: the gates to make, in a graph for XLA.
        outside: the existing tensors that those read, by the name they go by in them.
        inputs: (op, input, what it shall read), for ops that read a copy from now on.
        runs: the schedule.
    """

    def __init__(self, reading: Reading) -> None:
        self.nodes: dict[str, tuple[tf.compat.v1.NodeDef, tf.Operation]] = {}
        self.gates: list[tf.compat.v1.NodeDef] = []
        self.outside: dict[str, tf.Tensor] = {}
        self.inputs: list[tuple[tf.Operation, int, _Reference]] = []
        self.runs: list[Run] = []
        self._reading = reading
        #: tensor, by the owner of its buffer -> the node and output of its newest copy
        self._newest: dict[str, tuple[str, int]] = {}
        self._views: dict[tuple[str, ...], str] = {}
        self._passed: set[str] = set()

    def add_run(self, index: int, again: bool, in_backward: bool) -> None:
        """Adds the next entry of the schedule: an op, or a copy of it that runs `again`."""
        reading, op = self._reading, self._reading.operations[index]
        references = [self._newest_of(tensor) for tensor in op.inputs]
        copy = None
        if again:
            copy = self._copy(op, references)
            made = set(reading.problem.ops[index].outputs)
            self._newest.update(
                (self._buffer(t), (copy, t.value_index))
                for t in op.outputs
                if reading.tensor_of.get(t.name) in made
            )
        else:
            self.inputs.extend((op, i, r) for i, r in enumerate(references) if r.copy)
        self.runs.append(Run(op, copy, in_backward))

    def _newest_of(self, tensor: tf.Tensor) -> _Reference:
        """The newest copy of `tensor`; views of copied tensors are copied on the way."""
        if tensor.name in self._reading.made_of:
            return self._computed_again(tensor)
        views = []
        while (shown := kinds.shown_input(tensor.op, tensor.value_index)) is not None:
            views.append(tensor)
            tensor = tensor.op.inputs[shown]
        copy, output = self._newest.get(self._buffer(tensor), (None, tensor.value_index))
        reference = _Reference(tensor.op, output, copy)
        for view in reversed(views if copy else []):
            if not calls.may_repeat(view.op):
                continue  # a check that hands on its input: the original has checked the same
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
        """A tensor that is in no buffer, from the newest copies of what it is computed from."""
        op = tensor.op
        references = [self._newest_of(t) for t in op.inputs]
        if not any(reference.copy for reference in references):
            return _Reference(op, tensor.value_index)
        key = op.name, *(reference.name for reference in references)
        if key not in self._views:
            self._views[key] = self._copy(op, references)
        return _Reference(op, tensor.value_index, self._views[key])

    def _copy(self, op: tf.Operation, references: Sequence[_Reference]) -> str:
        node = op.node_def
        # Grappler sorts the inputs of a sum or product by name: a copy's must come where its
        # original's would.
        with op.graph.name_scope(None):
            node.name = op.graph.unique_name(op.name + COPY)
        node.attr.pop("_class", None)
        node.attr["_gradient_op_type"].s = NOT_DIFFERENTIABLE.encode()
        node.input[:] = [self._input(reference) for reference in references]
        self.nodes[node.name] = node, op
        return node.name

    def add_gate(self, opening: gate.Gate) -> None:
        """Has what comes next read the newest copies of some tensors through a gate."""
        graph, tensors = self._reading.step.graph, opening.tensors
        make = gate.barrier_node
        if opening.after is not None:
            make = gate.loop_node
            with apart(graph, "gate"):
                tensors = [gate.never(opening.after), *tensors]
        references = [self._newest_of(tensor) for tensor in tensors]
        with graph.name_scope(None):
            name = graph.unique_name("gate/gate")
        self.gates.append(make(name, [self._input(r) for r in references], tensors))
        self._newest.update((self._buffer(t), (name, i)) for i, t in enumerate(tensors))
        self._passed.update(tensor.name for tensor in tensors)

    def results(self) -> list[tuple[tf.Tensor, _Reference]]:
        """The gradients that pass a gate, each with what is behind the last one."""
        made = [t for t in self._reading.step.results if t.op.name in self._reading.new]
        passed = [t for t in made if kinds.owner(t).name in self._passed]
        return [(tensor, self._newest_of(tensor)) for tensor in passed]

    def _input(self, reference: _Reference) -> str:
        """By what name a node reads it."""
        if reference.copy:
            return reference.name
        self.outside[f"outside/{reference.name}"] = reference.op.outputs[reference.index]
        return f"outside/{reference.name}"


def _make_copies(edits: _Edits, with_control_edges: bool) -> dict[str, tf.Operation]:
    """Adds the copies to the graph, in one step, with the devices and attributes of the ops.

    Where control edges are not obeyed, one could only lead to an op that nothing reads any more.
    """
    if not edits.nodes:
        return {}
    graph = edits.runs[0].op.graph
    nodes = [*(node for node, _ in edits.nodes.values()), *edits.gates]
    names = [node.name for node in nodes]
    graph_def = tf.compat.v1.GraphDef(node=nodes, versions=graph.graph_def_versions)
    with apart(graph):
        made = tf.graph_util.import_graph_def(
            graph_def,
            input_map=edits.outside,
            return_elements=names,
            name="",
        )
    copies = dict(zip(names, made, strict=True))
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
    """Has what writes to the variables that `op` reads wait for it; it may only come later."""
    for writer in calls.writers(op):
        tf_private.add_control_inputs(writer, [op])
