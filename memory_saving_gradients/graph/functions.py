"""What loops and branches hand on: what the first collected for the gradient.

The gradient of a loop or branch is another one, which reads the lists of the loop, or the optional
values of the branch. Both are variants, whose bytes only the bodies tell.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Container, Iterable, Iterator

import numpy as np
import tensorflow as tf

from memory_saving_gradients.graph import calls, kinds, tf_private
from memory_saving_gradients.graph.loops import hands_on, loop_behind
from memory_saving_gradients.graph.shapes import Shapes

_MAKE_LISTS = frozenset({"TensorListFromTensor", "TensorListSplit", "TensorListScatterV2"})
_ADD_TO_LISTS = {"TensorListPushBack": 1, "TensorListSetItem": 2}  # which input is the element
_LIKE_LISTS = frozenset({"TensorListPopBack", "TensorListResize", "Identity", "ZerosLike"})

#: The attribute of a loop that tells how many rounds are expected.
ROUNDS = "_memory_saving_rounds"
# The rounds of a loop whose length the graph does not tell.
_NOMINAL_ROUNDS = 16
_SIGNS = {"Add": 1, "AddV2": 1, "Sub": -1}  # what a step is added with
_COMPARISONS = frozenset({"Less", "LessEqual", "Greater", "GreaterEqual"})


def passed_on(op: tf.Operation, output: int) -> int | None:
    """The input that a loop hands on as an output, unchanged; None for what a round makes."""
    found = calls.bodies(op) if op.type in calls.LOOPS else []
    if not found:
        return None
    (body,) = found
    return output if hands_on(body, output) else None


def held_bytes(tensor: tf.Tensor, shapes: Shapes, without: Container[int] = ()) -> int:
    """The bytes that a variant holds: a list of tensors, or an optional one.

    Args:
        tensor: a tensor of dtype variant.
        shapes: the shapes of its graph.
        without: the lists of the same loop that are thought away, by output.

    Returns:
        Bytes; 0 for other variants.
    """
    op = tensor.op
    if op.type in _MAKE_LISTS or op.type == "OptionalFromValue":
        return sum(_bytes(t, shapes) for t in op.inputs[: 1 if op.type in _MAKE_LISTS else None])
    if op.type in _ADD_TO_LISTS:
        added = op.inputs[_ADD_TO_LISTS[op.type]]
        return _bytes(op.inputs[0], shapes) + _bytes(added, shapes)
    if op.type in _LIKE_LISTS:
        return _bytes(op.inputs[0], shapes)
    if op.type in calls.LOOPS and calls.bodies(op):
        if (handed_on := passed_on(op, tensor.value_index)) is not None:
            return _bytes(op.inputs[handed_on], shapes)
        (body,) = calls.bodies(op)
        inside = shapes.within(op, body, body.get_operations())
        others = [output for i, output in enumerate(body.outputs) if i not in without]
        collection = body.outputs[tensor.value_index]
        return rounds(op, shapes) * _collected(body, collection, others, inside)
    if op.type in calls.BRANCHES:
        return max(
            (
                _bytes(
                    body.outputs[tensor.value_index],
                    shapes.within(op, body, body.get_operations()),
                )
                for body in shapes.bodies(op)
            ),
            default=0,
        )
    return 0


def _bytes(tensor: tf.Tensor, shapes: Shapes) -> int:
    return held_bytes(tensor, shapes) if tensor.dtype == tf.variant else shapes.bytes(tensor)


def _collected(
    body: tf.Graph, collection: tf.Tensor, outputs: Iterable[tf.Tensor], shapes: Shapes
) -> int:
    """The bytes by which one round of a loop makes a list longer.

    What a variable owns, and what no round changes, takes none. What one round results in and the
    next one begins with can be in two lists among `outputs`: each has its part of the bytes.
    """
    last = kinds.owner(collection)
    if last.op.type in calls.LOOPS:  # a segment of the rounds
        return held_bytes(last, shapes)
    lists = [list(_elements(body, output)) for output in outputs]
    shared = collections.Counter(element.name for one in lists for element in one)
    elements = _elements(body, collection)
    return sum(_bytes(element, shapes) // shared[element.name] for element in elements)


def _elements(body: tf.Graph, collection: tf.Tensor) -> Iterator[tf.Tensor]:
    """What a round adds to a list; the next round begins with its results."""
    begins_with = {
        t.name: kinds.owner(result) for t, result in zip(body.inputs, body.outputs, strict=False)
    }
    while (collection := kinds.owner(collection)).op.type in _ADD_TO_LISTS:
        element = kinds.owner(collection.op.inputs[_ADD_TO_LISTS[collection.op.type]])
        element = begins_with.get(element.name, element)
        if element.op.type not in kinds.SOURCES:
            yield element
        collection = collection.op.inputs[0]


def rounds(op: tf.Operation, shapes: Shapes) -> int:
    """How often a loop goes round, as far as it can be foretold.

    Args:
        op: any op.
        shapes: the shapes of its graph.

    Returns:
        The rounds; a nominal number where nothing tells it; 1 for what is no loop.
    """
    if op.type not in calls.LOOPS:
        return 1
    counted = counted_rounds(op, shapes)
    return _NOMINAL_ROUNDS if counted is None else counted


def counted_rounds(op: tf.Operation, shapes: Shapes) -> int | None:
    """The rounds of a loop whose condition compares a counter with a known number, else None."""
    if kinds.is_gate(op):
        return 0
    if ROUNDS in op.node_def.attr:
        return int(op.get_attr(ROUNDS))
    if (loop := loop_behind(op)) is not None:
        return counted_rounds(loop, shapes)
    condition = tf_private.function_graph(op.graph, op.get_attr("cond").name)
    if condition is None or not calls.bodies(op):
        return None
    found = []
    waiting = [condition.outputs[0].op]
    while waiting:
        one = waiting.pop()
        if one.type in _COMPARISONS:
            found.append(_counted(op, one, shapes))
        elif one.type in ("LogicalAnd", "Identity"):
            waiting.extend(t.op for t in one.inputs)
    return min((count for count in found if count is not None), default=None)


def _counted(op: tf.Operation, comparison: tf.Operation, shapes: Shapes) -> int | None:
    """How often a comparison in the condition of a loop holds; None where nothing tells it."""
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
    nearer = up - down  # by so much the two come nearer to each other in a round
    passed = (high - low) / nearer if nearer > 0 else math.inf
    if not math.isfinite(passed):
        return None
    return math.floor(passed) + 1 if or_equal else math.ceil(passed)


def _known(op: tf.Operation, tensor: tf.Tensor, shapes: Shapes) -> float | None:
    """The number that a tensor of a loop's functions is when the loop begins."""
    place = _place(tensor)
    known = tf_private.constant(tensor) if place is None else shapes.constant(op.inputs[place])
    return None if known is None or np.ndim(known) else np.asarray(known).item()


def _step(op: tf.Operation, body: tf.Graph, tensor: tf.Tensor, shapes: Shapes) -> float | None:
    """By how much a tensor of a loop's functions is larger after a round; None if it varies."""
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
    """Which input of its function a tensor shows; None for another tensor."""
    shown = kinds.owner(tensor)
    return next((i for i, given in enumerate(tensor.graph.inputs) if given is shown), None)
