"""Recomputes the layers inside the branches of an `If`.

The gradient of an `If` is another `If`, which reads the residuals of the branches: optional values,
or, in a graph for XLA, tensors that only one of the branches fills. We give the second `If` new
branches: each runs the layers of its forward branch again, and recomputation inside it is planned
as for any other step. What must not run twice (random numbers, reads of variables) is kept as
before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import networkx as nx
import tensorflow as tf

from memory_saving_gradients.graph import calls, order, tf_private
from memory_saving_gradients.graph.transplant import MissingInput, stand_in, transplanted
from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.reading.read import Reading
from memory_saving_gradients.rewriting.rewrite import behind_gates
from memory_saving_gradients.runtimes.kernels import apart_from_gradient
from memory_saving_gradients.runtimes.runtime import Runtime

_IFS = frozenset({"If", "StatelessIf"})
_BRANCHES = ("then_branch", "else_branch")
# The types of ops that a branch returns for residuals of the other branch.
_NOTHING = frozenset({"OptionalNone", "FakeParam"})

#: Rewrites a step inside a branch.
Inside = Callable[[BackwardPass], object]


class _CannotRecompute(Exception):
    """The branch needs a tensor that must not be recomputed and is not kept."""


def has_branches(reading: Reading) -> bool:
    """Whether a step has an `If` whose gradient could recompute its branches."""
    return bool(_pairs(reading))


def recompute_inside(reading: Reading, inside: Inside) -> dict[tuple[str, int], str]:
    """Makes the gradients of `If`s recompute the forward branches.

    Args:
        reading: the step.
        inside: plans and rewrites the step inside a branch.

    Returns:
        By (op, input), for inputs that now read another `If`, the name of the tensor read before.
    """
    before: dict[tuple[str, int], str] = {}
    for forward, backward in _pairs(reading):
        try:
            new = _recomputing(forward, backward, inside)
        except (MissingInput, _CannotRecompute):
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
    """The `If`s of a step and their gradients.

    A gradient with state runs whether or not something reads it, so it cannot be replaced.
    """
    backward = [
        op
        for op, described in zip(reading.operations, reading.problem.ops, strict=True)
        if op.type == "StatelessIf" and described.backward
    ]
    pairs = ((_forward_of(op, reading.step.runtime), op) for op in backward)
    return [(forward, op) for forward, op in pairs if forward is not None]


def _forward_of(op: tf.Operation, runtime: Runtime) -> tf.Operation | None:
    """The `If` whose gradient `op` is; None if that is not clear."""
    if runtime.obeys_control_edges:
        forwards = {t.op for t in op.inputs if t.dtype == tf.variant}
        return forwards.pop() if len(forwards) == 1 and next(iter(forwards)).type in _IFS else None
    # Its incoming gradients may come from another `If`, which is earlier.
    ifs = {t.op for t in op.inputs if t.op.type in _IFS and t.op.inputs[0] is op.inputs[0]}
    return next((one for one in reversed(op.graph.get_operations()) if one in ifs), None)


def _recomputing(forward: tf.Operation, backward: tf.Operation, inside: Inside) -> tf.Operation:
    """The gradient of an `If` with branches that recompute."""
    pairs = [_Pair(forward, backward, branch) for branch in _BRANCHES]
    kept = set().union(*(pair.kept for pair in pairs))
    if not any(pair.again for pair in pairs):
        raise _CannotRecompute
    inputs: dict[str, tf.Tensor] = {t.name: t for t in forward.inputs[1:]}
    for tensor in backward.inputs[1:]:
        if tensor.op is not forward or tensor.value_index in kept:
            inputs[tensor.name] = tensor
    node = backward.node_def
    for pair in pairs:
        body = pair.joined(inputs.values(), inside)
        node.attr[pair.branch].func.name = tf_private.function_of(body, backward.graph)
    del node.attr["Tin"].list.type[:]
    node.attr["Tin"].list.type.extend(t.dtype.as_datatype_enum for t in inputs.values())
    for name in ("_read_only_resource_inputs", "_class"):
        node.attr.pop(name, None)
    input_map = {f"given/{i}:0": t for i, t in enumerate([backward.inputs[0], *inputs.values()])}
    node.input[:] = input_map
    node.name = f"{backward.name}/recomputing"
    return _add(node, input_map, backward.graph)


def _add(
    node: tf.compat.v1.NodeDef, input_map: dict[str, tf.Tensor], graph: tf.Graph
) -> tf.Operation:
    graph_def = tf.compat.v1.GraphDef(node=[node], versions=graph.graph_def_versions)
    with graph.as_default(), graph.name_scope(None), graph.control_dependencies(None):
        (made,) = tf.graph_util.import_graph_def(graph_def, input_map, [node.name], name="")
    return made


class _Pair:
    """One branch of an `If` and the same branch of its gradient.

    Attributes:
        branch: the name of its attribute.
        kept: the outputs of the `If` that the gradient still reads, by index.
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
        #: by name of a tensor of the second branch, the tensor of the first that it is
        self._values: dict[str, tf.Tensor] = {}
        #: by name of a tensor of the first branch, the output of the `If` that keeps it
        self._outputs: dict[str, int] = {}
        for placeholder, passed in zip(self._second.inputs, backward.inputs[1:], strict=True):
            if passed.op is forward:
                self._take(placeholder, passed.value_index)
        self._run_again(self._values.values())

    def _take(self, placeholder: tf.Tensor, output: int) -> None:
        """Notes the tensors of the first branch that the second reads by an output of the `If`."""
        value = self._first.outputs[output]
        if value.op.type == "OptionalFromValue":
            value = value.op.inputs[0]
            if any(reader.type != "OptionalGetValue" for reader in placeholder.consumers()):
                raise _CannotRecompute
            read = [reader.outputs[0] for reader in placeholder.consumers()]
        elif value.op.type in _NOTHING:
            return
        else:
            read = [placeholder]
        self._outputs[value.name] = output
        self._values |= {tensor.name: value for tensor in read}

    def _run_again(self, tensors: Iterable[tf.Tensor]) -> None:
        """Decides what runs again, and what is kept as it cannot be recomputed."""
        makeable: set[tf.Operation] = set()
        # Not in the order of creation: inputs of a loop may have been added to it later.
        for op in nx.topological_sort(order.dependencies(self._first.get_operations())):
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
        """The new branch of the gradient, which first recomputes the forward branch."""
        body = tf_private.new_function_graph(f"{self._second.name}_recomputing")
        with body.as_default():
            stand_ins: dict[str, tf.Tensor] = {}
            late = []
            ours = {t.name for t in (*self._forward.inputs, *self._forward.outputs)}
            for tensor in inputs:
                if tensor.name in ours:
                    stand_ins[tensor.name] = stand_in(tensor, "input")
                else:
                    late.append(tensor)
            outer = dict(
                zip((t.name for t in self._first.inputs), self._forward.inputs[1:], strict=True)
            )
            known = {name: stand_ins[t.name] for name, t in outer.items()}
            for name, output in self._outputs.items():
                if output in self.kept:
                    kept = known[name] = stand_ins[self._forward.outputs[output].name]
                    tensor = self._first.get_tensor_by_name(name)
                    if kept.dtype == tf.variant != tensor.dtype:
                        known[name] = tf.raw_ops.OptionalGetValue(
                            optional=kept, output_types=[tensor.dtype], output_shapes=[tensor.shape]
                        )[0]
            values = transplanted(self._first, list(self._values.values()), known)
            first_new = len(body.get_operations())
            for i, tensor in enumerate(late):  # the incoming gradients
                stand_ins[tensor.name] = stand_in(tensor, f"grad_ys_{i}")
            known = dict(zip(self._values, map(apart_from_gradient, values), strict=True))
            for placeholder, tensor in zip(
                self._second.inputs, self._backward.inputs[1:], strict=True
            ):
                if tensor.name in stand_ins:
                    known[placeholder.name] = stand_ins[tensor.name]
            body.outputs = transplanted(self._second, self._second.outputs, known)
            body.inputs = [stand_ins[t.name] for t in inputs]
        results = [t for t in body.outputs if t.dtype != tf.variant]
        if results:
            inside(BackwardPass.since(first_new, results[0], results))
            body.outputs = [*map(behind_gates, body.outputs)]
        return body
