"""The layers inside a branch of `If` are recomputed, too.

TensorFlow differentiates an `If` by another one, which reads what the branches kept, as optional
values. Here the second `If` gets new branches: each runs the layers of its branch again, and what
is recomputed in what order inside is planned as for any other step. What must not run twice (random
numbers, reads of variables) is kept as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from memory_saving_gradients.graph import calls, tf_private
from memory_saving_gradients.graph.backward import BackwardPass
from memory_saving_gradients.graph.read import Reading

_IFS = frozenset({"If", "StatelessIf"})
_BRANCHES = ("then_branch", "else_branch")

#: Rewrites a step inside a branch.
Inside = Callable[[BackwardPass], object]


class _CannotRecompute(Exception):
    """The branch needs what must not run twice and was not kept."""


def has_branches(reading: Reading) -> bool:
    """Whether a step has an `If` whose gradient could recompute."""
    return bool(_pairs(reading))


def recompute_inside(reading: Reading, inside: Inside) -> dict[tuple[str, int], str]:
    """Has the gradients of `If`s recompute what the branches did.

    Args:
        reading: the step.
        inside: plans and rewrites the step inside a branch.

    Returns:
        (op, input) to the name of the tensor that it read before, for what now reads another `If`.
    """
    before: dict[tuple[str, int], str] = {}
    for forward, backward in _pairs(reading):
        try:
            new = _recomputing(forward, backward, inside)
        except _CannotRecompute:
            continue
        operations = backward.graph.get_operations()
        later = operations[operations.index(backward) :]
        for writer in calls.writers(new):
            if writer in later:
                tf_private.add_control_inputs(writer, [new])
        for old, tensor in zip(backward.outputs, new.outputs, strict=True):
            for reader in old.consumers():
                for i in (i for i, read in enumerate(reader.inputs) if read is old):
                    before[reader.name, i] = old.name
                    tf_private.update_input(reader, i, tensor)
    return before


def _pairs(reading: Reading) -> list[tuple[tf.Operation, tf.Operation]]:
    """The `If`s of a step that read what another one kept: that one, and they.

    One with state runs whether or not something reads it, so that nothing can take its place.
    """
    found = []
    for op, described in zip(reading.operations, reading.problem.ops, strict=True):
        stateless = op.type == "StatelessIf"
        if stateless and described.backward and reading.step.runtime.obeys_control_edges:
            kept_by = {t.op for t in op.inputs if t.dtype == tf.variant}
            if len(kept_by) == 1 and next(iter(kept_by)).type in _IFS:
                found.append((kept_by.pop(), op))
    return found


def _recomputing(forward: tf.Operation, backward: tf.Operation, inside: Inside) -> tf.Operation:
    """The gradient of an `If` with branches that recompute."""
    pairs = [_Pair(forward, backward, branch) for branch in _BRANCHES]
    kept = set().union(*(pair.kept for pair in pairs))
    if not any(pair.again for pair in pairs):
        raise _CannotRecompute
    inputs: dict[str, tf.Tensor] = {t.name: t for t in forward.inputs[1:]}
    for tensor in backward.inputs[1:]:
        if tensor.op is not forward or tensor.dtype != tf.variant or tensor.value_index in kept:
            inputs[tensor.name] = tensor
    node = backward.node_def
    for pair in pairs:
        body = pair.joined(inputs.values(), inside)
        node.attr[pair.branch].func.name = tf_private.function_of(body, backward.graph)
    del node.attr["Tin"].list.type[:]
    node.attr["Tin"].list.type.extend(t.dtype.as_datatype_enum for t in inputs.values())
    for name in ("_read_only_resource_inputs", "_class"):
        node.attr.pop(name, None)
    given = {f"given/{i}:0": t for i, t in enumerate([backward.inputs[0], *inputs.values()])}
    node.input[:] = given
    node.name = f"{backward.name}/recomputing"
    return _add(node, given, backward.graph)


def _add(node: tf.compat.v1.NodeDef, given: dict[str, tf.Tensor], graph: tf.Graph) -> tf.Operation:
    graph_def = tf.compat.v1.GraphDef(node=[node], versions=graph.graph_def_versions)
    with graph.as_default(), graph.name_scope(None), graph.control_dependencies(None):
        (made,) = tf.graph_util.import_graph_def(graph_def, given, [node.name], name="")
    return made


class _Pair:
    """One branch of an `If` and the same branch of its gradient.

    Attributes:
        branch: the name of the attribute that holds it.
        kept: which outputs of the `If` the gradient still reads.
        again: names of the ops of the branch that run again.
    """

    def __init__(self, forward: tf.Operation, backward: tf.Operation, branch: str) -> None:
        self.branch = branch
        self._first, self._second = (
            tf_private.function_graph(op.graph, op.get_attr(branch).name)
            for op in (forward, backward)
        )
        self._forward, self._backward = forward, backward
        self.kept: set[int] = set()
        self.again: set[str] = set()
        self._values: dict[str, tf.Tensor] = {}  # of the second branch: what the first computed
        self._outputs: dict[str, int] = {}  # of the first branch: in which output a tensor is kept
        for placeholder, given in self._read_optionals():
            value = self._first.outputs[given.value_index].op
            if value.type == "OptionalFromValue":
                self._outputs[value.inputs[0].name] = given.value_index
                for reader in placeholder.consumers():
                    if reader.type != "OptionalGetValue":
                        raise _CannotRecompute
                    self._values[reader.outputs[0].name] = value.inputs[0]
        self._run_again(self._values.values())

    def _read_optionals(self) -> Iterable[tuple[tf.Tensor, tf.Tensor]]:
        inputs = zip(self._second.inputs, self._backward.inputs[1:], strict=True)
        return [(t, g) for t, g in inputs if g.op is self._forward and g.dtype == tf.variant]

    def _run_again(self, tensors: Iterable[tf.Tensor]) -> None:
        """Decides what runs again, and what is kept as it must not or comes from such."""
        makeable: set[tf.Operation] = set()
        for op in self._first.get_operations():
            at_hand = all(t.op in makeable or t.name in self._outputs for t in op.inputs)
            if op.type == "Placeholder" or (
                at_hand and not op.control_inputs and calls.may_repeat(op)
            ):
                makeable.add(op)
        waiting = [*tensors]
        while waiting:
            tensor = waiting.pop()
            if tensor.op not in makeable:
                self.kept.add(self._outputs[tensor.name])
            elif tensor.op.type != "Placeholder" and tensor.op.name not in self.again:
                self.again.add(tensor.op.name)
                waiting.extend(tensor.op.inputs)

    def joined(self, inputs: Iterable[tf.Tensor], inside: Inside) -> tf.Graph:
        """The branch of the gradient, which first computes what it needs of the other."""
        body = tf_private.new_function_graph(f"{self._second.name}_recomputing")
        with body.as_default():
            given: dict[str, tf.Tensor] = {}
            late = []
            ours = {t.name for t in (*self._forward.inputs, *self._forward.outputs)}
            for tensor in inputs:
                if tensor.name in ours:
                    given[tensor.name] = _placeholder(tensor, "input")
                else:
                    late.append(tensor)
            outer = dict(
                zip((t.name for t in self._first.inputs), self._forward.inputs[1:], strict=True)
            )
            known = {name: given[t.name] for name, t in outer.items()}
            for name, output in self._outputs.items():
                if output in self.kept:
                    variant = given[self._forward.outputs[output].name]
                    tensor = self._first.get_tensor_by_name(name)
                    known[name] = tf.raw_ops.OptionalGetValue(
                        optional=variant, output_types=[tensor.dtype], output_shapes=[tensor.shape]
                    )[0]
            values = _inlined(self._first, list(self._values.values()), known)
            first_new = len(body.get_operations())
            for i, tensor in enumerate(late):  # the gradients that come in
                given[tensor.name] = _placeholder(tensor, f"grad_ys_{i}")
            known = dict(zip(self._values, values, strict=True))
            for placeholder, tensor in zip(
                self._second.inputs, self._backward.inputs[1:], strict=True
            ):
                if tensor.name in given:
                    known[placeholder.name] = given[tensor.name]
            body.outputs = _inlined(self._second, self._second.outputs, known)
            body.inputs = [given[t.name] for t in inputs]
        results = [t for t in body.outputs if t.dtype != tf.variant]
        if results:
            inside(BackwardPass.since(first_new, results[0], results))
        return body


def _placeholder(tensor: tf.Tensor, name: str) -> tf.Tensor:
    return tf.compat.v1.placeholder(tensor.dtype, tensor.shape, name)


def _inlined(
    function: tf.Graph, wanted: Sequence[tf.Tensor], known: dict[str, tf.Tensor]
) -> list[tf.Tensor]:
    """Copies what makes `wanted` from a function into the default graph.

    Args:
        function: the function.
        wanted: tensors of it.
        known: name of a tensor of the function to what stands for it.

    Returns:
        What stands for the tensors wanted.
    """
    nodes: dict[str, tf.compat.v1.NodeDef] = {}
    controls: list[tuple[str, tf.Operation]] = []
    used: dict[str, tf.Tensor] = {}
    waiting = [t.op for t in wanted if t.name not in known]
    while waiting:
        op = waiting.pop()
        if op.name in nodes:
            continue
        if op.type == "Placeholder":
            raise _CannotRecompute
        node = nodes[op.name] = op.node_def
        node.attr.pop("_class", None)
        used |= {t.name: known[t.name] for t in op.inputs if t.name in known}
        node.input[:] = [f"known/{t.name}" if t.name in known else t.name for t in op.inputs]
        waiting.extend(t.op for t in op.inputs if t.name not in known)
        before = [other for other in op.control_inputs if other.type != "Placeholder"]
        waiting.extend(o for o in before if not any(t.name in known for t in o.outputs))
        controls.extend((op.name, other) for other in op.control_inputs)
    library = function.as_graph_def().library
    graph_def = tf.compat.v1.GraphDef(
        node=nodes.values(), versions=function.graph_def_versions, library=library
    )
    names = [t.name for t in wanted if t.name not in known]
    given = {f"known/{name}": tensor for name, tensor in used.items()}
    made = tf.graph_util.import_graph_def(graph_def, given, [*names, *nodes], name="inlined")
    tensors = {**known, **dict(zip(names, made, strict=False))}
    ops = dict(zip(nodes, made[len(names) :], strict=True))
    for name, other in controls:
        stands_for = [known[t.name].op for t in other.outputs if t.name in known]
        tf_private.add_control_inputs(ops[name], stands_for or [ops[other.name]])
    return [tensors[t.name] for t in wanted]
