"""Copies loops that read variables, which get the values of these instead.

When a round of a loop is recomputed, an update may have changed a variable. So its value is read
before the loop, and a loop in the round must take that value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients.graph import calls, kinds, order, tf_private
from memory_saving_gradients.graph.transplant import transplanted
from memory_saving_gradients.rewriting.loop_functions import function, is_stateful, while_op


def with_values(
    body: Any, wanted: Sequence[tf.Tensor], known: Mapping[str, tf.Tensor]
) -> dict[str, tf.Tensor]:
    """`known`, with what is known of variables: their shapes, and the results of loops.

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
        elif op.type in calls.LOOPS:
            read = [kinds.owner(t) if t.dtype == tf.resource else t for t in op.inputs]
            begin = transplanted(body, read, known, waiting_for_others=False)
            known |= {t.name: new for t, new in zip(op.outputs, _copy(op, begin), strict=True)}
    return known


def _copy(op: tf.Operation, begin: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """A copy of a loop that begins with other tensors, values of variables among them."""

    def like(those: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        pairs = zip(those, begin, strict=True)
        return [now if now.dtype != was.dtype else was for was, now in pairs]

    def copied(name: str) -> Any:
        old = tf_private.function_graph(op.graph, op.get_attr(name).name)

        def make(carry: Any) -> list[tf.Tensor]:
            known = {t.name: now for t, now in zip(old.inputs, carry["own"], strict=True)}
            return transplanted(old, old.outputs, with_values(old, old.outputs, known))

        return function(old.name, {"own": like(old.inputs)}, make)

    condition, body = copied("cond"), copied("body")
    graph = tf.compat.v1.get_default_graph()
    names = [tf_private.function_of(one, graph) for one in (condition, body)]
    shapes = [t.shape for t in like(op.outputs)]
    parallel = op.get_attr("parallel_iterations")
    return while_op(f"inlined/{op.name}", begin, names, shapes, is_stateful(body), op, parallel)
