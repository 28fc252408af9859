"""Gives a loop, or its gradient, other functions and more loop variables; an error undoes it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients.graph import tf_private
from memory_saving_gradients.graph.apart import apart
from memory_saving_gradients.graph.loops import UNDONE, LoopPair
from memory_saving_gradients.graph.transplant import transplanted
from memory_saving_gradients.rewriting.loop_functions import (
    Groups,
    condition_for,
    flat,
    function,
    is_stateful,
    round_function,
    while_op,
)


def change(
    op: tf.Operation, condition: Any, body: Any, more: Sequence[tf.Tensor], parallel: int
) -> list[tf.Tensor]:
    """Gives a loop other functions and more loop variables; an error undoes it."""
    condition_before, body_before = (
        tf_private.function_graph(op.graph, op.get_attr(name).name) for name in ("cond", "body")
    )
    before = op.get_attr("parallel_iterations")
    tf_private.can_be_undone(
        functools.partial(_change_back, op, condition_before, body_before, before)
    )
    return tf_private.change_loop(op, condition, body, more, parallel)


def _change_back(op: tf.Operation, condition: Any, body: Any, parallel: int) -> None:
    """Makes a loop run as before. Loop variables cannot be removed, so it passes them on."""
    own = len(body.inputs)
    like = {"own": body.inputs, "more": [*op.inputs][own:]}

    def make(carry: Groups) -> Groups:
        known = {t.name: now for t, now in zip(body.inputs, carry["own"], strict=True)}
        return {"own": transplanted(body, body.outputs, known, also=body.control_outputs)}

    with apart(op.graph):
        now = condition_for(condition, like), round_function(body.name, like, make)
        tf_private.change_loop(op, *now, [], parallel)


def new_gradient(
    pair: LoopPair, condition: Any, body: Any, more: Groups, parallel: int
) -> tf.Operation:
    """Replaces the gradient of a loop by one with other functions and more loop variables."""
    old = pair.backward
    new, stateful = flat(more), is_stateful(body)
    names = [tf_private.function_of(one, old.graph) for one in (condition, body)]
    shapes = [*map(tf.TensorShape, old.get_attr("output_shapes")), *(t.shape for t in new)]
    with old.graph.name_scope(None), old.graph.device(old.device):
        outputs = while_op(
            f"{old.name}/recomputing", [*old.inputs, *new], names, shapes, stateful, old, parallel
        )
    tf_private.can_be_undone(functools.partial(tf_private.set_number, outputs[0].op, UNDONE, 1))
    tf_private.add_control_inputs(outputs[0].op, old.control_inputs)
    for before, after in zip(old.outputs, outputs, strict=False):
        tf_private.reroute(before, after)
    # A function runs it though nothing reads it: if it has state, or without Grappler.
    change(old, *_without_rounds(old), [], parallel)
    return outputs[0].op


def _without_rounds(op: tf.Operation) -> tuple[Any, Any]:
    """The functions of a loop that ends before its first round."""
    like: Groups = {"own": [*op.inputs]}
    with apart(op.graph):
        never = function(f"{op.name}_cond", like, lambda carry: [tf.constant(False)])
        return never, round_function(f"{op.name}_body", like, lambda carry: {})
