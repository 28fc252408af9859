"""Reference variables of v1 graphs, whose reads change when the variable does.

A read is a view of the variable's own buffer, so an op that runs again must not read a variable
that has been written to in the meantime. Variables that the forward pass writes to are read only
once; and an update by a gradient waits, as we pass the gradient on only after the last read of the
step. Resource variables need none of this: a write copies the variable while an earlier value is
alive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients.graph import kinds, order, tf_private
from memory_saving_gradients.graph.apart import apart


def variable_of(x: Any) -> tf.Operation | None:
    """The reference variable that `x`, a tensor or variable of a graph, is or is a view of."""
    op = getattr(x, "op", None)
    if op is None or not op.outputs:
        return None
    owner = kinds.owner(op.outputs[getattr(x, "value_index", 0)])
    return owner.op if tf_private.is_reference(owner) else None


def reads_that_change(
    operations: Sequence[tf.Operation], step: Collection[tf.Operation]
) -> set[tf.Operation]:
    """The ops that would read other values if they ran again after the forward pass.

    Args:
        operations: the ops that may run twice.
        step: all ops of the step.
    """
    variables = [op for op in operations if op.outputs and tf_private.is_reference(op.outputs[0])]
    changing: set[tf.Operation] = set()
    for variable in variables:
        readers = _readers(variable)
        if any(_writes_in(writer, readers, step) for writer in _writers(variable)):
            changing |= readers
    return changing


def after_last_read(
    gradient: tf.Tensor, variables: Iterable[tf.Operation], step: Collection[tf.Operation]
) -> tf.Tensor:
    """The gradient, delayed until the step has read its variables for the last time.

    Args:
        gradient: the gradient.
        variables: the reference variables that it is with respect to; none for resource variables.
        step: all ops of the step, with the copies.
    """
    waiting = [op for variable in variables for op in _readers(variable) if op in step]
    last: dict[tf.Operation, None] = {}
    seen: set[tf.Operation] = set()
    while waiting:
        op = waiting.pop()
        if not tf_private.in_control_flow(op):
            last[op] = None
        elif op not in seen:  # an op outside can only wait for the exits of the loop or branch
            seen.add(op)
            waiting += [r for t in op.outputs for r in t.consumers() if r in step]
    last.pop(gradient.op, None)
    if not last or tf_private.in_control_flow(gradient.op):
        return gradient
    with (
        apart(gradient.graph),
        gradient.graph.device(gradient.op.device),
        gradient.graph.control_dependencies([*last]),
    ):
        return tf.identity(gradient, f"{gradient.op.name}/after_last_read")


def _readers(variable: tf.Operation) -> set[tf.Operation]:
    """The ops that read a variable, or a view of it, but do not write to it."""
    readers: set[tf.Operation] = set()
    waiting = [variable.outputs[0]]
    while waiting:
        for op in waiting.pop().consumers():
            shown = [t for t in op.outputs if kinds.owner(t).op is variable]
            waiting += shown
            if not shown:
                readers.add(op)
    return readers - _writers(variable)


def _writers(variable: tf.Operation) -> set[tf.Operation]:
    """The ops that write to a variable."""
    return {
        op
        for op in variable.outputs[0].consumers()
        if not op.type.startswith("Ref") and any(arg.is_ref for arg in op.op_def.input_arg)
    }


def _writes_in(
    writer: tf.Operation, readers: Collection[tf.Operation], step: Collection[tf.Operation]
) -> bool:
    """Whether a step may write to a variable before its gradients are computed.

    Either the step waits for the write, or the new value is computed from the old one without the
    gradients, as for a moving average. Initial values do not belong to the step, and updates by
    gradients come later.
    """
    if writer in step:
        return True
    before = {*order.needed([writer])}
    return not before.isdisjoint(readers) and not any(
        tf_private.made_by_differentiation(op) for op in before
    )
