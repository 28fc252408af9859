"""Replaces ops that make gradients wait for one another: long sums, and identities of many tensors.

An `AddN` runs when its last term is there, and until then all terms are alive. Running sums add one
term after the other, in the buffer of the first.

The kernel of `AddN` adds from left to right, starting from the first term that no other op will
read (`aggregate_ops.cc`); before that, Grappler sorts the terms by name (`CanonicalizeNode`).
Running sums in this order round in the same way. But terms may become ready in another order: in an
unrolled loop, the gradient of "step0" comes last. Where too many terms would wait for that, we add
them as they come, and the sum agrees with the plain one only up to rounding.

Keras passes all gradients through one `IdentityN` to its optimizers. Grappler removes it; we remove
it first, to see the real dependencies.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence

import tensorflow as tf

from memory_saving_gradients.graph import kinds, tf_private
from memory_saving_gradients.graph.apart import apart
from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.runtimes import grappler

# Sums of smaller terms stay whole: adding them takes less time than launching an op.
_LEAST_BYTES = 2**15

# The kernel adds groups of this many terms, and adds each group to the sum of the previous ones.
# The first group has the remainder, but at least two terms.
_AT_A_TIME = 8

# The most terms that may wait in a sum that stays whole, or in running sums that round as the plain
# step does. If more would wait, terms are added as they come.
_MOST_WAITING = 8


def taken_apart(step: BackwardPass, running_sums: bool = True) -> BackwardPass:
    """Removes what makes gradients wait for one another, as far as the values allow.

    A sum stays whole if it is small, if something waits for it by a control edge, or if few terms
    would wait and the plain order of its terms is not known.

    Args:
        step: a backward pass, as TensorFlow made it.
        running_sums: whether to replace sums of many terms by running sums.

    Returns:
        The backward pass after the replacements.
    """
    if not step.runtime.keeps_running_sums:
        return step
    handing_on = {op for op in step.after if op.type == "IdentityN"}
    for op in handing_on:
        _read_past(op)
    added = (op for op in step.new & step.needed if op.type == "AddN") if running_sums else ()
    many = sorted((op for op in added if len(op.inputs) > _MOST_WAITING), key=lambda op: op.name)
    unused = {op.name for op in step.new - step.needed}
    everything = step.graph.get_operations() if many else ()
    waited_for = {op for other in everything for op in other.control_inputs}
    sums: dict[tf.Operation, tuple[tf.Operation, ...]] = {}
    reordered = []
    for op in many:
        small = _least_bytes(op.outputs[0]) < _LEAST_BYTES
        if small or op in waited_for or tf_private.in_control_flow(op):
            continue
        terms = sorted(op.inputs, key=lambda t: t.name.removesuffix(":0"))
        definite = _is_read_once(step, *terms[:2]) and not grappler.is_merged(op, unused)
        if _most_waiting(op, terms) > _MOST_WAITING:
            terms = list(op.inputs)
            reordered.append(op.name)
        elif not definite:
            continue
        sums[op] = _running(op, terms)
    last = {op.outputs[0].name: running[-1].outputs[0] for op, running in sums.items()}
    made = frozenset(one for running in sums.values() for one in running)
    return dataclasses.replace(
        step,
        results=tuple(last.get(t.name, t) for t in step.results),
        new=step.new | made,
        needed=(step.needed - sums.keys()) | made,
        after=step.after - handing_on,
        sums=(*step.sums, *sums.items()),
        reordered=(*step.reordered, *reordered),
    )


def _read_past(op: tf.Operation) -> None:
    """Makes the readers of an `IdentityN` read its inputs, as Grappler does."""
    for given, handed_on in zip(op.inputs, op.outputs, strict=True):
        tf_private.reroute(handed_on, given)


def _most_waiting(op: tf.Operation, terms: Sequence[tf.Tensor]) -> int:
    """The most terms alive at once if made in the order of `op` and added in that of `terms`."""
    place = {t.name: i for i, t in enumerate(terms)}
    made: set[int] = set()
    added = most = 0
    for term in op.inputs:
        made.add(place[term.name])
        most = max(most, len(made) - max(added - 1, 0))
        while added in made:
            added += 1
    return most


def _least_bytes(tensor: tf.Tensor) -> int:
    """The bytes of a tensor, if unknown dimensions are 1024."""
    known = [size or 2**10 for size in (tensor.shape.as_list() if tensor.shape.rank else [])]
    return int(tf.TensorShape(known).num_elements()) * tensor.dtype.size


def _is_read_once(step: BackwardPass, *tensors: tf.Tensor) -> bool:
    """Whether the buffer of one of the tensors is held only by the one op that reads it.

    The kernel swaps the first such term with the first term of all; between the first two terms the
    order does not matter.
    """
    results = {t.name for t in step.results} if step.live_out is None else set()
    return any(_only_reader(t, results) for t in tensors)


def _only_reader(tensor: tf.Tensor, results: Collection[str]) -> bool:
    while True:
        readers = [op for op in tensor.consumers() if op.type not in kinds.SHAPE_ONLY]
        if len(readers) != 1 or tensor.name in results or tensor.op.type == "Unpack":
            return False
        shown = kinds.shown_input(tensor.op, tensor.value_index)
        if shown is None:
            return tensor.op.type not in kinds.SOURCES
        tensor = tensor.op.inputs[shown]


def _running(op: tf.Operation, terms: Sequence[tf.Tensor]) -> tuple[tf.Operation, ...]:
    """Adds running sums to the graph, and makes the readers of the sum read the last of them."""
    total, made = op.outputs[0], []

    def added(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        both = tf.raw_ops.AddN(inputs=[one, other], name="running")
        both.set_shape(total.shape)
        tf_private.set_unmerged(both.op)
        if groups := tf_private.colocation(op):
            tf_private.set_colocation(both.op, groups)
        made.append(both.op)
        return both

    first = (len(terms) - 2) % _AT_A_TIME + 2
    rest = [terms[i : i + _AT_A_TIME] for i in range(first, len(terms), _AT_A_TIME)]
    with apart(op.graph, f"{op.name}/"), op.graph.device(op.device):
        parts = [functools.reduce(added, part) for part in (terms[:first], *rest)]
        last = functools.reduce(added, parts)
    tf_private.add_control_inputs(made[0], op.control_inputs)
    tf_private.reroute(total, last)
    return tuple(made)
