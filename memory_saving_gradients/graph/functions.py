"""What loops and branches hand on: what the first collected for the gradient.

The gradient of a loop or branch is another one, which reads the lists of the loop, or the optional
values of the branch. Both are variants, whose bytes only the bodies tell.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

import tensorflow as tf

from memory_saving_gradients.graph import calls, kinds, tf_private
from memory_saving_gradients.graph.shapes import Shapes

_LOOPS = frozenset({"While", "StatelessWhile"})
_MAKE_LISTS = frozenset({"TensorListFromTensor", "TensorListSplit", "TensorListScatterV2"})
_ADD_TO_LISTS = {"TensorListPushBack": 1, "TensorListSetItem": 2}  # which input is the element
_LIKE_LISTS = frozenset({"TensorListPopBack", "TensorListResize", "Identity", "ZerosLike"})

# The rounds of a loop whose length the graph does not tell.
_NOMINAL_ROUNDS = 16


def passed_on(op: tf.Operation, output: int) -> int | None:
    """The input that a loop hands on as an output, unchanged; None for what a round makes."""
    found = calls.bodies(op) if op.type in _LOOPS else []
    if not found:
        return None
    (body,) = found
    return output if kinds.owner(body.outputs[output]) is body.inputs[output] else None


def held_bytes(tensor: tf.Tensor, shapes: Shapes) -> int:
    """The bytes that a variant holds: a list of tensors, or an optional one.

    Args:
        tensor: a tensor of dtype variant.
        shapes: the shapes of its graph.

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
    if op.type in _LOOPS and calls.bodies(op):
        if (handed_on := passed_on(op, tensor.value_index)) is not None:
            return _bytes(op.inputs[handed_on], shapes)
        (body,) = calls.bodies(op)
        inside = shapes.within(op, body, body.get_operations())
        return rounds(op) * _collected(body, body.outputs[tensor.value_index], inside)
    if op.type in calls.BRANCHES:
        return max(
            (
                _bytes(
                    body.outputs[tensor.value_index],
                    shapes.within(op, body, body.get_operations()),
                )
                for body in calls.bodies(op)
            ),
            default=0,
        )
    return 0


def _bytes(tensor: tf.Tensor, shapes: Shapes) -> int:
    return held_bytes(tensor, shapes) if tensor.dtype == tf.variant else shapes.bytes(tensor)


def _collected(body: tf.Graph, collection: tf.Tensor, shapes: Shapes) -> int:
    """The bytes by which one round of a loop makes a list longer.

    What a variable owns, and what no round changes, takes none. What one round results in and the
    next one begins with can be in two lists: each has its part of the bytes.
    """
    lists = [list(_elements(body, output)) for output in body.outputs]
    shared = collections.Counter(element.name for one in lists for element in one)
    elements = _elements(body, collection)
    return sum(_bytes(element, shapes) // shared[element.name] for element in elements)


def _elements(body: tf.Graph, collection: tf.Tensor) -> Iterator[tf.Tensor]:
    """What a round adds to a list; the next round begins with its results."""
    begins_with = {
        t.name: kinds.owner(result) for t, result in zip(body.inputs, body.outputs, strict=False)
    }
    while collection.op.type in _ADD_TO_LISTS:
        element = kinds.owner(collection.op.inputs[_ADD_TO_LISTS[collection.op.type]])
        element = begins_with.get(element.name, element)
        if element.op.type not in kinds.SOURCES:
            yield element
        collection = collection.op.inputs[0]


def rounds(op: tf.Operation) -> int:
    """How often a loop goes round, where its condition compares a counter with a known number.

    Args:
        op: any op.

    Returns:
        The rounds; a nominal number where the graph does not tell it; 1 for what is no loop.
    """
    if op.type not in _LOOPS:
        return 1
    if kinds.is_gate(op):
        return 0
    condition = tf_private.function_graph(op.graph, op.get_attr("cond").name)
    if condition is None:
        return _NOMINAL_ROUNDS
    given = dict(zip((t.name for t in condition.inputs), op.inputs, strict=True))
    found = []
    waiting = [condition.outputs[0].op]
    while waiting:
        one = waiting.pop()
        if one.type == "Less":
            first, bound = (tf.get_static_value(given.get(t.name, t)) for t in one.inputs)
            if first is not None and bound is not None and bound > first:
                found.append(int(bound - first))
        elif one.type in ("LogicalAnd", "Identity"):
            waiting.extend(t.op for t in one.inputs)
    return min(found, default=_NOMINAL_ROUNDS)
