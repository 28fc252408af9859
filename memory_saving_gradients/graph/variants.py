"""How many bytes a variant holds: a list that a loop collects, an optional value of a branch.

The gradient of a loop reads the lists of the loop, that of a branch its optional values. Both are
variants; only the ops that fill them tell how large they are.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import tensorflow as tf

from memory_saving_gradients.graph import calls, kinds
from memory_saving_gradients.graph.loops import hands_on
from memory_saving_gradients.graph.rounds import expected_rounds
from memory_saving_gradients.graph.shapes import Shapes

_MAKE_LISTS = frozenset({"TensorListFromTensor", "TensorListSplit", "TensorListScatterV2"})
_ADD_TO_LISTS = {"TensorListPushBack": 1, "TensorListSetItem": 2}  # which input is the element
_LIKE_LISTS = frozenset({"TensorListPopBack", "TensorListResize", "Identity", "ZerosLike"})


def passed_on(op: tf.Operation, output: int) -> int | None:
    """The input that a loop returns unchanged as this output; None if rounds change it."""
    bodies = calls.bodies(op) if op.type in calls.LOOPS else []
    if not bodies:
        return None
    (body,) = bodies
    return output if hands_on(body, output) else None


def same_lists(op: tf.Operation, read: Container[str]) -> dict[int, int]:
    """The outputs of a loop that are lists of the same tensors, each with the last of them.

    The result of a round that the next one begins with may be in a list of results, and in lists
    for the gradient. All hold the same buffers.

    Args:
        op: any op.
        read: the names of the tensors that are read; other lists are left out.
    """
    bodies = calls.bodies(op) if op.type in calls.LOOPS else []
    if not bodies:
        return {}
    (body,) = bodies
    lists = {
        i: frozenset(element.name for element in _elements(body, output))
        for i, output in enumerate(body.outputs)
        if output.dtype == tf.variant and op.outputs[i].name in read
    }
    last = {elements: i for i, elements in lists.items() if elements}
    return {i: last[elements] for i, elements in lists.items() if elements}


def held_bytes(tensor: tf.Tensor, shapes: Shapes) -> int:
    """The bytes that a variant holds: a list of tensors, or an optional tensor.

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
    if op.type in calls.LOOPS and calls.bodies(op):
        if (handed_on := passed_on(op, tensor.value_index)) is not None:
            return _bytes(op.inputs[handed_on], shapes)
        (body,) = calls.bodies(op)
        inside = shapes.within(op, body, body.get_operations())
        collection = body.outputs[tensor.value_index]
        return expected_rounds(op, shapes) * _collected(body, collection, inside)
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


def _collected(body: tf.Graph, collection: tf.Tensor, shapes: Shapes) -> int:
    """The bytes that one round of a loop adds to a list.

    Elements that are variables, or that no round changes, add none.
    """
    last = kinds.owner(collection)
    if last.op.type in calls.LOOPS:  # a segment of the rounds
        return held_bytes(last, shapes)
    return sum(_bytes(element, shapes) for element in _elements(body, collection))


def _elements(body: tf.Graph, collection: tf.Tensor) -> Iterator[tf.Tensor]:
    """The tensors that a round adds to a list, loop variables replaced by the round's results."""
    begins_with = {
        t.name: kinds.owner(result) for t, result in zip(body.inputs, body.outputs, strict=False)
    }
    while (collection := kinds.owner(collection)).op.type in _ADD_TO_LISTS:
        element = kinds.owner(collection.op.inputs[_ADD_TO_LISTS[collection.op.type]])
        element = begins_with.get(element.name, element)
        if element.op.type not in kinds.SOURCES:
            yield element
        collection = collection.op.inputs[0]
