"""A round of a loop, of its recomputation and of its gradient, in the default graph.

All sums are added in the order of TensorFlow's gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients.graph import kinds, tf_private
from memory_saving_gradients.graph.loops import LoopPair, LoopWay
from memory_saving_gradients.graph.transplant import transplanted
from memory_saving_gradients.rewriting.loop_functions import Groups
from memory_saving_gradients.rewriting.values import with_values

_SUMS = frozenset({"Add", "AddV2", "AddN"})
# Sums, and what Grappler moves out of them.
_MERGED = _SUMS | {"Mul"}


def forward_round(
    way: LoopWay, own: Sequence[tf.Tensor | None], also: Sequence[tf.Tensor]
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """A round of the loop, without the lists that its gradient no longer needs.

    Returns:
        The loop variables after the round, and the values of the tensors `also` of the body.
    """
    pair = way.pair
    names = [t.name for t in pair.body.inputs]
    known = {name: t for name, t in zip(names, own, strict=True) if t is not None}
    others = [i for i in range(len(names)) if i not in way.again]
    wanted = [*(pair.body.outputs[i] for i in others), *also]
    with _merged_as(pair) as alone:
        results = transplanted(pair.body, wanted, known, also=pair.body.control_outputs)
    # Grappler does not fuse an op that has control outputs.
    tf_private.add_control_inputs(kinds.owner(results[0]).op, alone)
    after = dict(zip(others, results, strict=False))
    return [after.get(i, own[i]) for i in range(len(names))], results[len(others) :]


def recomputed(
    pair: LoopPair, wanted: Sequence[tf.Tensor], known: Mapping[str, tf.Tensor]
) -> list[tf.Tensor]:
    """Recomputes tensors of a round."""
    with _merged_as(pair):
        known = with_values(pair.body, wanted, known)
        return transplanted(pair.body, wanted, known, waiting_for_others=False)


@contextlib.contextmanager
def _merged_as(pair: LoopPair) -> Iterator[list[tf.Operation]]:
    """Within it, copied ops are marked so that Grappler merges them as it does those of the loop.

    Grappler merges an op into its only reader. A list for the gradient was one more reader, which
    copies no longer have. Yields a list, which contains such copies at the end.
    """
    graph = tf.compat.v1.get_default_graph()
    first_new = len(graph.get_operations())
    alone: list[tf.Operation] = []
    yield alone
    several = {
        op.name
        for op in pair.body.get_operations()
        if op.outputs and op.outputs[0].dtype.is_floating and len(op.outputs[0].consumers()) > 1
    }
    for op in graph.get_operations()[first_new:]:
        if op.name.partition("/")[2] in several and len(op.outputs[0].consumers()) == 1:
            if op.type in _MERGED:
                tf_private.set_unmerged(op)
            alone.append(op)


def gradient_round(
    pair: LoopPair, own: list[tf.Tensor], values: Mapping[int, tf.Tensor]
) -> list[tf.Tensor]:
    """A round of the gradient, with recomputed values instead of those that it would pop."""
    known = {t.name: now for t, now in zip(pair.gradient.inputs, own, strict=True)}
    for i, list_ in pair.popped.items():
        if list_ in values:
            (popping,) = pair.gradient.inputs[i].consumers()
            known[popping.outputs[0].name] = own[i]
            known[popping.outputs[1].name] = values[list_]
    return transplanted(
        pair.gradient, pair.gradient.outputs, known, also=pair.gradient.control_outputs
    )


def add_in_turn(before: Sequence[tf.Tensor], after: Sequence[tf.Tensor]) -> None:
    """Makes a product that a round adds to a sum wait for what earlier rounds add to it.

    Else each of the rounds that run at once would hold its own gradients of weights. Sums of more
    than two terms stay as they are: their order depends on what holds the terms.

    Args:
        before: the loop variables of a round of a gradient.
        after: their values after it.
    """
    for total, result in zip(before, after, strict=True):
        added = kinds.owner(result).op
        terms = [kinds.owner(t) for t in added.inputs] if added.type in _SUMS else []
        others = [t.op for t in terms if t is not total]
        if len(terms) == 2 and len(others) == 1 and _is_for_one_sum(others[0]):
            tf_private.add_control_inputs(others[0], [total.op])


def _is_for_one_sum(op: tf.Operation) -> bool:
    """Whether an op is a product that nothing else reads: others would wait for the sum as well."""
    return op.type in kinds.EXPENSIVE and sum(len(t.consumers()) for t in op.outputs) == 1


def at_hand(way: LoopWay) -> Groups:
    """The inputs of the gradient from outside: loop invariants, and values of variables.

    Variables are read before the loop, as an update may come before the gradient.
    """
    pair, start = way.pair, way.start
    reads = {}
    for name, i in start.reads.items():
        if i not in reads:
            shape, dtype = _of_variable(pair.body.get_tensor_by_name(name))
            value = tf.raw_ops.ReadVariableOp(resource=pair.forward.inputs[i], dtype=dtype)
            value.set_shape(shape)
            tf_private.add_control_inputs(value.op, pair.forward.control_inputs)
            tf_private.add_control_inputs(pair.forward, [value.op])
            reads[i] = value
    return {
        "invariants": [pair.forward.inputs[i] for i in start.invariants],
        "reads": [*reads.values()],
    }


def _of_variable(tensor: tf.Tensor) -> tuple[Any, tf.DType]:
    """The shape and dtype of a variable, given a value or the handle of it."""
    known = tf_private.shape_and_dtype_of_variable(tensor) if tensor.dtype == tf.resource else None
    return known or (tensor.shape, tensor.dtype)


def known_from(way: LoopWay, carry: Groups, begin: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
    """The replacements for tensors of the body when a round is recomputed."""
    inputs, start = way.pair.body.inputs, way.start
    names = [inputs[i].name for i in start.states] + [t.name for t in start.once]
    known = dict(zip(names, begin, strict=True))
    known |= {inputs[i].name: t for i, t in zip(start.invariants, carry["invariants"], strict=True)}
    values = dict(zip(dict.fromkeys(start.reads.values()), carry["reads"], strict=True))
    return known | {name: values[i] for name, i in start.reads.items()}
