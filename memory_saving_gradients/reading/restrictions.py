"""Restrictions on ops: which may not run twice, wait for others, or be waited for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from memory_saving_gradients.graph import calls, kinds, order, tf_private
from memory_saving_gradients.graph.shapes import Shapes
from memory_saving_gradients.reading import references
from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.reading.buffers import Buffers

# Ops that begin and end a v1 loop or branch.
_SWITCHES = frozenset({"Switch", "RefSwitch"})
_BEGINS = _SWITCHES | {"Enter", "RefEnter"}
_ENDS = frozenset({"Merge", "RefMerge", "Exit", "RefExit"})
_COMPARISONS = frozenset({"Greater", "GreaterEqual", "Less", "LessEqual"})


def conditional(operations: Sequence[tf.Operation]) -> set[tf.Operation]:
    """The ops of v1 loops and branches, which run in a frame of their own, or conditionally.

    Such an op cannot run twice, cannot wait for an op outside, and no op outside can wait for it.
    """
    depth: dict[tf.Operation, int] = {}  # of loops and branches around the outputs of the op
    inside: set[tf.Operation] = set()
    for op in operations:
        before = (*(t.op for t in op.inputs), *op.control_inputs)
        depth[op] = max((depth.get(other, 0) for other in before), default=0)
        if op.type in _BEGINS and not (op.type in _SWITCHES and _is_loop_merge(op.inputs[0].op)):
            depth[op] += 1
        elif op.type in _ENDS and not _is_loop_merge(op):
            depth[op] -= 1
        if depth[op] > 0 or op.type in _BEGINS | _ENDS or tf_private.in_control_flow(op):
            inside.add(op)
    return inside


def _is_loop_merge(op: tf.Operation) -> bool:
    return any(t.op.type in order.BACK_EDGES for t in op.inputs)


def foldable(operations: Sequence[tf.Operation], backward: set[tf.Operation]) -> set[tf.Operation]:
    """The backward ops that read no activation, which Grappler may fold into constants.

    Control inputs of such an op move to the ops that absorb the constant, which could close a
    cycle.
    """
    constant: set[tf.Operation] = set()
    for op in operations:
        if op.type in kinds.SHAPE_ONLY:
            known = all(t.shape.is_fully_defined() or t.op in constant for t in op.inputs)
        elif op in backward and op.inputs and not op.op_def.is_stateful:
            known = all(t.op in constant for t in op.inputs)
        else:
            known = op.type == "Const"
        if known:
            constant.add(op)
    return constant


def from_the_start(
    foldable: Iterable[tf.Operation], backward: set[tf.Operation], shapes: Shapes
) -> set[tf.Operation]:
    """The backward ops that could be constants, but whose outputs are too large for that.

    As nothing delays them, they run when the step begins: for example the gradient of a mean.
    """
    large = [
        op
        for op in foldable
        if op in backward and sum(map(shapes.bytes, op.outputs)) > _LARGEST_CONSTANT
    ]
    return backward.intersection(order.leading_to(large))


# The largest constant that TensorFlow folds, in bytes (`common_runtime/constant_folding.cc`).
_LARGEST_CONSTANT = 10 * 2**20


def pinned(
    operations: Sequence[tf.Operation],
    conditional: set[tf.Operation],
    buffers: Buffers,
    step: BackwardPass,
) -> set[tf.Operation]:
    """The forward ops that must not run twice: a second run could differ, have effects, or fail.

    Element-wise ops that turn random numbers into something smaller, such as a dropout mask, are
    pinned as well: to keep the mask takes fewer bytes than to keep the numbers.
    """
    pinned = set()
    later = frozenset(step.graph.get_operations()[step.end :]) if step.traced else None
    changing = references.reads_that_change(operations, step.needed)
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
            or op in conditional
            or op in changing
            or any(t.dtype in handles or tf_private.is_reference(t) for t in touched)
            or not step.runtime.may_copy(op)
            or out_bytes < drawn.get(op, 0)
        ):
            pinned.add(op)
        elif order.depends_on_time(op) and not op.outputs[0].dtype.is_integer:
            # Its kernel starts from the first term that no other op will read; a second run would
            # be such a reader and change the rounding.
            pinned.add(op)
    return pinned
