"""Builds loops from Python functions of loop variables, and lists of tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from memory_saving_gradients.graph import kinds, tf_private
from memory_saving_gradients.graph.rounds import ROUNDS
from memory_saving_gradients.graph.transplant import stand_in, transplanted

#: Loop variables by role; a loop has them in the order of the groups.
Groups: TypeAlias = dict[str, list[tf.Tensor]]

_LIKE_THE_LOOP = ("_lower_using_switch_merge", "_xla_propagate_compile_time_consts")

_made = itertools.count(1)


def flat(groups: Groups) -> list[tf.Tensor]:
    """Loop variables in the order in which a loop has them."""
    return [*itertools.chain(*groups.values())]


def function(name: str, like: Groups, make: Callable[[Groups], Sequence[tf.Tensor]]) -> Any:
    """A function of loop variables."""
    body = new_graph(name)
    with body.as_default():
        carry = {group: [loop_variable(t, group) for t in those] for group, those in like.items()}
        body.outputs = [*make(carry)]
        body.inputs = flat(carry)
    return body


def round_function(name: str, like: Groups, make: Callable[[Groups], Groups]) -> Any:
    """The function of a round; groups that `make` does not return are passed on unchanged."""
    return function(name, like, lambda carry: flat(carry | make(carry)))


def new_graph(name: str) -> Any:
    """The empty graph of a new function."""
    return tf_private.new_function_graph(f"{name}_recomputing_{next(_made)}")


def loop_variable(tensor: tf.Tensor, name: str) -> tf.Tensor:
    """A placeholder like a tensor, with the element type if it is a list."""
    placeholder = stand_in(tensor, name)
    tf_private.copy_handle_data(tensor, placeholder)
    return placeholder


def condition_for(condition: Any, like: Groups) -> Any:
    """The condition of a loop with additional loop variables, which come after its own."""
    return function(condition.name, like, lambda carry: [goes_on(condition, carry["own"])])


def goes_on(condition: Any, variables: Sequence[tf.Tensor]) -> tf.Tensor:
    """What the condition of a loop says of its loop variables."""
    known = {t.name: now for t, now in zip(condition.inputs, variables, strict=True)}
    (more,) = transplanted(condition, condition.outputs, known)
    return more


def loop(
    name: str,
    begin: Groups,
    like: Groups,
    has_more: Callable[[Groups], tf.Tensor],
    one_round: Callable[[Groups], Groups],
    of: tf.Operation,
    rounds: int,
    parallel: int,
) -> Groups:
    """Adds a loop to the default graph, with the attributes of another one; returns its results."""
    condition = function(f"{name}_cond", like, lambda carry: [has_more(carry)])
    body = round_function(name, like, one_round)
    graph = tf.compat.v1.get_default_graph()
    names = [tf_private.function_of(one, graph) for one in (condition, body)]
    shapes = [t.shape for t in flat(like)]
    results = while_op(name, flat(begin), names, shapes, is_stateful(body), of, parallel)
    tf_private.set_number(results[0].op, ROUNDS, rounds)
    return split(results, begin)


def is_stateful(body: Any) -> bool:
    """Whether an op of a function has state."""
    return any(op.op_def.is_stateful for op in body.get_operations() if op.type != "Placeholder")


def while_op(
    name: str,
    begin: Sequence[tf.Tensor],
    functions: Sequence[str],
    shapes: Sequence[tf.TensorShape],
    stateful: bool,
    of: tf.Operation,
    parallel: int,
) -> list[tf.Tensor]:
    """Adds a loop of named functions, with the attributes of another one; returns its results."""
    condition, body = functions
    results = (tf.raw_ops.While if stateful else tf.raw_ops.StatelessWhile)(
        input=list(begin),
        cond=condition,
        body=body,
        output_shapes=list(shapes),
        parallel_iterations=parallel,
        name=name,
    )
    tf_private.copy_attributes(of, results[0].op, _LIKE_THE_LOOP)
    for source, tensor in zip(begin, results, strict=True):
        tf_private.copy_handle_data(source, tensor)
    return list(results)


def split(variables: Sequence[tf.Tensor], like: Groups) -> Groups:
    """Loop variables by group, the inverse of `flat`."""
    waiting = iter(variables)
    return {group: [next(waiting) for _ in tensors] for group, tensors in like.items()}


def empty_list(like: tf.Tensor, most: int | None) -> tf.Tensor:
    """An empty list for tensors like `like`, with room for `most`."""
    return tf.raw_ops.EmptyTensorList(
        element_shape=_shape(like),
        max_num_elements=tf.constant(-1 if most is None else most),
        element_dtype=like.dtype,
    )


def push(list_: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """A list with one more element."""
    return tf.raw_ops.TensorListPushBack(input_handle=list_, tensor=tensor)


def pop(list_: tf.Tensor, like: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """A list without its last element, and that element."""
    left, tensor = tf.raw_ops.TensorListPopBack(
        input_handle=list_,
        element_shape=_shape(like),
        element_dtype=like.dtype,
        name=_name(like),
    )
    return left, _shaped(tensor, like)


def item(list_: tf.Tensor, index: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """One element of a list, which is not changed."""
    tensor = tf.raw_ops.TensorListGetItem(
        input_handle=list_,
        index=index,
        element_shape=_shape(like),
        element_dtype=like.dtype,
        name=_name(like),
    )
    return _shaped(tensor, like)


def _shape(like: tf.Tensor) -> tf.Tensor:
    known = -1 if like.shape.rank is None else [-1 if d is None else d for d in like.shape]
    return tf.constant(known, tf.int32)


def _name(like: tf.Tensor) -> str:
    """The name of what replaces a tensor of a function, like those of copies of its ops.

    Grappler sorts the terms of a sum by name, so the names must sort alike: "-" sorts before all
    that may follow. No copy may have the same name, as the importer would confuse the two.
    """
    return f"inlined/{like.op.name}-popped"


def _shaped(tensor: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """A tensor with a static shape, which Grappler needs to fuse ops."""
    if like.dtype not in kinds.HANDLES and like.dtype != tf.variant:
        tensor = tf.ensure_shape(tensor, like.shape, name=_name(like))
    tf_private.copy_handle_data(like, tensor)
    return tensor
