"""How many rounds a loop runs, as far as its condition and its counter tell."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from memory_saving_gradients.graph import calls, kinds, tf_private
from memory_saving_gradients.graph.loops import COUNTED, loop_counted_by
from memory_saving_gradients.graph.shapes import Shapes

#: The attribute of a loop that tells how many rounds are expected.
ROUNDS = "_memory_saving_rounds"
#: The attribute that marks a loop whose gradient recomputes its rounds.
AGAIN = "_memory_saving_again"
#: How many rounds run at once where each holds little; elsewhere one, as their memory adds up. Then
#: the gradients of weights overlap with the next round, which takes a tenth to a quarter less time.
AT_ONCE = 4
# The rounds of a loop whose number the graph does not tell.
_NOMINAL_ROUNDS = 16
_SIGNS = {"Add": 1, "AddV2": 1, "Sub": -1}  # of the number that each round adds to the counter
_COMPARISONS = frozenset({"Less", "LessEqual", "Greater", "GreaterEqual"})


def expected_rounds(op: tf.Operation, shapes: Shapes) -> int:
    """The number of rounds that a loop is expected to run.

    Args:
        op: any op.
        shapes: the shapes of its graph.

    Returns:
        The rounds; a nominal number if they are unknown; 1 if `op` is no loop.
    """
    if op.type not in calls.LOOPS:
        return 1
    counted = counted_rounds(op, shapes)
    return _NOMINAL_ROUNDS if counted is None else counted


def counted_rounds(op: tf.Operation, shapes: Shapes) -> int | None:
    """The rounds of a loop whose condition compares a counter with a known number; else None."""
    if kinds.is_gate(op):
        return 0
    if ROUNDS in op.node_def.attr:
        return int(op.get_attr(ROUNDS))
    if len(op.inputs) > COUNTED and (pushed := _pushed(op.inputs[COUNTED], shapes)) is not None:
        counter, there = pushed
        if (loop := loop_counted_by(counter)) is not None:
            return counted_rounds(loop, there)
    condition = tf_private.function_graph(op.graph, op.get_attr("cond").name)
    if condition is None or not calls.bodies(op):
        return None
    counts = []
    waiting = [condition.outputs[0].op]
    while waiting:
        term = waiting.pop()
        if term.type in _COMPARISONS:
            counts.append(_counted(op, term, shapes))
        elif term.type in ("LogicalAnd", "Identity"):
            waiting.extend(t.op for t in term.inputs)
    return min((count for count in counts if count is not None), default=None)


def _pushed(tensor: tf.Tensor, shapes: Shapes) -> tuple[tf.Tensor, Shapes] | None:
    """What the gradient of a loop pops, where a round of that loop makes it, and the shapes there.

    Args:
        tensor: a tensor of a round of the gradient.
        shapes: the shapes of the round.

    Returns:
        The tensor itself if it comes from no list; None if nothing tells.
    """
    tensor = kinds.owner(tensor)
    if tensor.op.type == "TensorListPopBack":
        found = _pushed(tensor.op.inputs[0], shapes)
        if found is None or found[0].op.type not in calls.LOOPS or not calls.bodies(found[0].op):
            return None
        filled, there = found
        (body,) = calls.bodies(filled.op)
        push = kinds.owner(body.outputs[filled.value_index]).op
        if push.type != "TensorListPushBack":
            return None
        return _pushed(push.inputs[1], there.within(filled.op, body, body.get_operations()))
    if tensor.op.type != "Placeholder":
        return tensor, shapes
    if tensor.dtype != tf.variant or shapes.caller is None:  # rounds change other loop variables
        return None
    caller, outside = shapes.caller
    passed = [*caller.inputs][-len(tensor.graph.inputs) :]
    place = _place(tensor)
    return None if place is None else _pushed(passed[place], outside)


def _counted(op: tf.Operation, comparison: tf.Operation, shapes: Shapes) -> int | None:
    """How many rounds a comparison in the condition of a loop holds; None if unknown."""
    (body,) = calls.bodies(op)
    low, high = (_known(op, t, shapes) for t in comparison.inputs)
    up, down = (_step(op, body, t, shapes) for t in comparison.inputs)
    if low is None or high is None or up is None or down is None:
        return None
    if comparison.type.startswith("Greater"):
        low, high, up, down = high, low, down, up
    or_equal = comparison.type.endswith("Equal")
    if low > high or (low == high and not or_equal):
        return 0
    nearer = up - down  # by how much each round brings the two closer
    passed = (high - low) / nearer if nearer > 0 else math.inf
    if not math.isfinite(passed):
        return None
    return math.floor(passed) + 1 if or_equal else math.ceil(passed)


def _known(op: tf.Operation, tensor: tf.Tensor, shapes: Shapes) -> float | None:
    """The value of a tensor of a loop's functions when the loop begins; None if unknown."""
    place = _place(tensor)
    known = tf_private.constant(tensor) if place is None else shapes.constant(op.inputs[place])
    return None if known is None or np.ndim(known) else np.asarray(known).item()


def _step(op: tf.Operation, body: tf.Graph, tensor: tf.Tensor, shapes: Shapes) -> float | None:
    """By how much a tensor of a loop's functions grows in a round; None if that varies."""
    place = _place(tensor)
    if place is None:
        return 0
    before, after = body.inputs[place], kinds.owner(body.outputs[place])
    if after is before:
        return 0
    read = [kinds.owner(t) for t in after.op.inputs]
    added = [t for t in read if t is not before]
    if after.op.type not in _SIGNS or len(added) != 1:
        return None
    size, place = _known(op, added[0], shapes), _place(added[0])
    stays = place is None or kinds.owner(body.outputs[place]) is body.inputs[place]
    if size is None or not stays or (after.op.type == "Sub" and read[0] is not before):
        return None
    return _SIGNS[after.op.type] * size


def _place(tensor: tf.Tensor) -> int | None:
    """The index of the function's input that a tensor is, or is a view of; else None."""
    shown = kinds.owner(tensor)
    return next(
        (i for i, placeholder in enumerate(tensor.graph.inputs) if placeholder is shown), None
    )
