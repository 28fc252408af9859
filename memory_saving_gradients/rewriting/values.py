"""Copies ops that read variables in functions; they get the values of the variables instead.

When a round of a loop is recomputed, an update may have changed a variable. So its value is read
before the loop, and a loop, branch or call in the round must take that value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients.graph import calls, kinds, order, tf_private
from memory_saving_gradients.graph.transplant import transplanted
from memory_saving_gradients.rewriting.loop_functions import function, is_stateful

_STATELESS = {
    "While": "StatelessWhile",
    "If": "StatelessIf",
    "Case": "StatelessCase",
    "StatefulPartitionedCall": "PartitionedCall",
}
# Attributes that a copy with other inputs does not have: places beside other ops, and variables.
_OF_THE_ORIGINAL = ("_class", "_read_only_resource_inputs")
# The types of inputs, without that which selects a branch: of a loop, and of the others.
_TYPES = ("T", "Tin")


def with_values(
    body: Any, wanted: Sequence[tf.Tensor], known: Mapping[str, tf.Tensor]
) -> dict[str, tf.Tensor]:
    """`known`, with what is known of variables: their shapes, and the results of functions.

    Args:
        body: the function.
        wanted: the tensors of it that are to be copied.
        known: by name of a tensor of the function, the tensor to use instead; for the handle of a
            variable it is the value.
    """
    values = {
        t.name: known[t.name]
        for t in body.inputs
        if t.dtype == tf.resource and t.name in known and known[t.name].dtype != tf.resource
    }
    known = dict(known)
    needed = order.leading_to(t.op for t in wanted) if values else {}
    for op in body.get_operations():
        handles = [kinds.owner(t).name for t in op.inputs if t.dtype == tf.resource]
        if op not in needed or not handles or not values.keys() >= {*handles}:
            continue
        if op.type == "ReadVariableOp":
            known[op.outputs[0].name] = values[handles[0]]
        elif op.type == "VariableShape":
            known[op.outputs[0].name] = tf.shape(values[handles[0]], op.outputs[0].dtype)
        else:
            read = [kinds.owner(t) if t.dtype == tf.resource else t for t in op.inputs]
            begin = transplanted(body, read, known, waiting_for_others=False)
            known |= {t.name: new for t, new in zip(op.outputs, _copy(op, begin), strict=True)}
    return known


def _copy(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """A copy of an op that calls functions, with other inputs, values of variables among them."""
    graph = tf.compat.v1.get_default_graph()
    node = tf.compat.v1.NodeDef()
    node.CopyFrom(op.node_def)
    for name in _OF_THE_ORIGINAL:
        node.attr.pop(name, None)
    node.input[:] = [f"known/{i}" for i in range(len(inputs))]
    stateful = False
    for _, attribute in sorted(node.attr.items()):
        single = attribute.WhichOneof("value") == "func"
        for called in [attribute.func] if single else attribute.list.func:
            new = _taking(op, called.name, inputs)
            stateful = stateful or is_stateful(new)
            called.name = tf_private.function_of(new, graph)
    if not stateful:
        node.op = _STATELESS.get(op.type, op.type)
    passed = [*inputs][op.type in calls.BRANCHES :]
    for name in node.attr.keys() & {*_TYPES}:
        node.attr[name].list.type[:] = [t.dtype.as_datatype_enum for t in passed]
    if op.type in calls.LOOPS:
        shapes = zip(node.attr["output_shapes"].list.shape, op.inputs, inputs, strict=True)
        for shape, was, now in shapes:
            if now.dtype != was.dtype:
                shape.CopyFrom(now.shape.as_proto())
    imported = tf.graph_util.import_graph_def(
        tf.compat.v1.GraphDef(node=[node], versions=op.graph.graph_def_versions),
        {f"known/{i}": t for i, t in enumerate(inputs)},
        [node.name],
        name="inlined",
    )
    for old, new in zip(op.outputs, imported[0].outputs, strict=True):
        if old.dtype == new.dtype:
            tf_private.copy_handle_data(old, new)
    return [*imported[0].outputs]


def _taking(op: tf.Operation, name: str, inputs: Sequence[tf.Tensor]) -> Any:
    """A function that an op calls, which takes values for variables."""
    old = tf_private.function_graph(op.graph, name)
    passed = [*inputs][-len(old.inputs) :] if old.inputs else []  # the first may select a branch
    pairs = zip(old.inputs, passed, strict=True)
    like = [now if now.dtype != was.dtype else was for was, now in pairs]

    def make(carry: Any) -> list[tf.Tensor]:
        known = {t.name: now for t, now in zip(old.inputs, carry["own"], strict=True)}
        return transplanted(old, old.outputs, with_values(old, old.outputs, known))

    return function(old.name, {"own": like}, make)
