"""Makes the gradient of a loop recompute the rounds of the loop.

TensorFlow's loop pushes the values of every round to lists, and its gradient pops them: the bytes
grow with the number of rounds. We edit the loop so that it pushes only the state at the start of a
round. On *one level* each round of the gradient recomputes its round, a few at a time. On *two
levels* the loop becomes a loop over segments of `every` rounds, and pushes the state at the start
of a segment; the gradient runs a segment again as TensorFlow's loop did, and then TensorFlow's own
gradient over it. With segments of √n rounds, n rounds need O(√n) bytes (Chen et al., "Training Deep
Nets with Sublinear Memory Cost", 2016; for recurrent networks Gruslys et al., "Memory-Efficient
Backpropagation Through Time", 2016).

All sums are added in the order of TensorFlow's gradient.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from memory_saving_gradients.graph import kinds, tf_private
from memory_saving_gradients.graph.apart import apart
from memory_saving_gradients.graph.loops import UNDONE, LoopPair, LoopWay, hands_on
from memory_saving_gradients.graph.rounds import AGAIN, AT_ONCE, ROUNDS
from memory_saving_gradients.graph.transplant import transplanted
from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.rewriting.loop_functions import (
    Groups,
    condition_for,
    empty_list,
    flat,
    function,
    goes_on,
    is_stateful,
    item,
    loop,
    loop_variable,
    new_graph,
    pop,
    push,
    round_function,
    split,
    while_op,
)
from memory_saving_gradients.rewriting.rewrite import behind_gates
from memory_saving_gradients.rewriting.values import with_values
from memory_saving_gradients.runtimes.kernels import apart_from_gradient

#: Plans and rewrites the step in a round of a gradient.
Inside: TypeAlias = Callable[[BackwardPass], object]

_SUMS = frozenset({"Add", "AddV2", "AddN"})
# Sums, and what Grappler moves out of them.
_MERGED = _SUMS | {"Mul"}


def one_level(way: LoopWay, most: int | None, used: Container[int], inside: Inside) -> tf.Operation:
    """Makes each round of the gradient of a loop recompute its round.

    Args:
        way: the loop, and what its gradient recomputes.
        most: the maximum number of rounds, if lists need a fixed capacity.
        used: the loop variables of the gradient that something needs.
        inside: plans and rewrites a round of the gradient.

    Returns:
        The new gradient.
    """
    pair, start = way.pair, way.start
    pushed = [*(pair.body.inputs[i] for i in start.states), *start.once]
    parallel = min(AT_ONCE, pair.forward.get_attr("parallel_iterations"))
    with apart(pair.forward.graph, "recompute"):
        lists = [empty_list(t, most) for t in pushed]
        like: Groups = {"own": pair.body.inputs, "lists": lists}

        def forward(carry: Groups) -> Groups:
            after, new = _round(way, carry["own"], pushed)
            return {"own": after, "lists": [*map(push, carry["lists"], new)]}

        body = round_function(pair.body.name, like, forward)
        condition = condition_for(pair.condition, like)
        lists = _change(pair.forward, condition, body, lists, parallel)
        outside = _at_hand(way)
        like = {"lists": lists, **outside}

        body = _round_of_gradient(way, like, pushed, used, inside)
        condition = condition_for(pair.gradient_condition, {"own": pair.gradient.inputs, **like})
        gradient = _new_gradient(pair, condition, body, like, parallel)
    tf_private.set_number(pair.forward, AGAIN, 1)
    return gradient


def two_levels(
    way: LoopWay, every: int | tf.Tensor, most: int | None, rounds: int, segments: int
) -> tf.Operation:
    """Makes the gradient of a loop recompute segments of its rounds.

    Args:
        way: the loop, and what its gradient recomputes.
        every: the rounds of a segment, of which the last may have fewer: an int if lists need a
            fixed capacity, else an int or an int32 tensor of the loop's graph.
        most: the maximum number of rounds, if lists need a fixed capacity.
        rounds: the expected number of rounds of a segment.
        segments: the expected number of segments.

    Returns:
        The new gradient.
    """
    pair = way.pair
    with apart(pair.forward.graph, "recompute"):
        kept = _forward_in_segments(way, tf.convert_to_tensor(every, tf.int32), most, rounds)
        length = None if most is None else int(every)
        gradient = _backward_in_segments(way, kept, length, rounds)
    tf_private.set_number(pair.forward, AGAIN, 1)
    for op in (pair.forward, gradient):
        tf_private.set_number(op, ROUNDS, segments)
    return gradient


def _forward_in_segments(way: LoopWay, every: tf.Tensor, most: int | None, rounds: int) -> Groups:
    """Turns a loop into one over segments; returns its lists, and the counts it ends with."""
    pair, start = way.pair, way.start
    states = [pair.body.inputs[i] for i in start.states]
    length = None if most is None else -(-most // int(tf.get_static_value(every)))
    begin: Groups = {
        "counts": [tf.constant(0), every],
        "once": [empty_list(t, most) for t in start.once],
        "states": [empty_list(t, length) for t in states],
    }
    like = {"own": pair.body.inputs, **begin}
    count = len(pair.body.inputs)
    stay = [i for i in range(count) if i not in way.again]

    def forward(carry: Groups) -> Groups:
        done, every = carry["counts"]
        own = carry["own"]
        kept = [own[i] for i in start.states]
        within: Groups = {
            "place": [tf.constant(0), every],
            "own": [own[i] for i in stay],
            "once": carry["once"],
        }
        like = {**within, "own": [pair.body.inputs[i] for i in stay]}

        def one_round(carry: Groups) -> Groups:
            place, every = carry["place"]
            own = dict(zip(stay, carry["own"], strict=True))
            kept, once = _round(way, [own.get(i) for i in range(count)], start.once)
            return {
                "place": [place + 1, every],
                "own": [kept[i] for i in stay],
                "once": [*map(push, carry["once"], once)],
            }

        def has_more(carry: Groups) -> tf.Tensor:
            place, every = carry["place"]
            own = {
                pair.condition.inputs[i].name: t for i, t in zip(stay, carry["own"], strict=True)
            }
            (more,) = transplanted(pair.condition, pair.condition.outputs, own)
            return tf.logical_and(place < every, more)

        results = loop("segment", within, like, has_more, one_round, pair.forward, rounds, 1)
        after = dict(zip(stay, results["own"], strict=True))
        unchanged = {i for i in stay if hands_on(pair.body, i)}
        return {
            "own": [t if i in unchanged else after.get(i, t) for i, t in enumerate(own)],
            "counts": [done + 1, every],
            "once": results["once"],
            "states": [*map(push, carry["states"], kept)],
        }

    body = round_function(pair.body.name, like, forward)
    condition = condition_for(pair.condition, like)
    return split(_change(pair.forward, condition, body, flat(begin), parallel=1), begin)


def _backward_in_segments(
    way: LoopWay, kept: Groups, length: int | None, expected: int
) -> tf.Operation:
    """The gradient of a loop over segments."""
    pair, start = way.pair, way.start
    states = [pair.body.inputs[i] for i in start.states]
    segments, every = kept["counts"]
    begin: Groups = {
        "counts": [segments, every, tf.constant(0)],
        "states": kept["states"],
        "once": kept["once"],
        **_at_hand(way),
    }
    like = {"own": pair.gradient.inputs, **begin}
    refilled = {i: list_ for i, list_ in pair.popped.items() if list_ in way.again}

    def backward(carry: Groups) -> Groups:
        segments, every, done = carry["counts"]
        before = (segments - 1 - done) * every  # the rounds before this segment
        rounds = tf.cast(carry["own"][2], tf.int32)
        rounds = tf.where(tf.equal(done, 0), rounds - before, every)
        popped = [*map(pop, carry["states"], states)]
        full = _segment_again(way, carry, [t for _, t in popped], before, rounds, length, expected)
        own = list(carry["own"])
        own[0] = tf.zeros_like(own[0])
        own[2] = tf.cast(rounds, own[2].dtype)
        own = [full[refilled[i]] if i in refilled else _given(t) for i, t in enumerate(own)]
        results = _gradient_of_segment(pair, own, expected)
        unchanged = {
            i
            for i in range(len(pair.gradient.inputs))
            if i in refilled or i in (0, 2) or hands_on(pair.gradient, i)
        }
        return {
            "own": [carry["own"][i] if i in unchanged else t for i, t in enumerate(results)],
            "counts": [segments, every, done + 1],
            "states": [left for left, _ in popped],
        }

    body = round_function(pair.gradient.name, like, backward)
    condition = function(
        pair.gradient_condition.name,
        like,
        lambda carry: [carry["counts"][2] < carry["counts"][0]],
    )
    return _new_gradient(pair, condition, body, begin, parallel=1)


def _gradient_of_segment(
    pair: LoopPair, begin: Sequence[tf.Tensor], expected: int
) -> list[tf.Tensor]:
    """Runs TensorFlow's gradient over a segment; returns its results."""

    def one_round(carry: Groups) -> Groups:
        before = carry["grad_ys"]
        after = _gradient(pair, before, {})
        _add_in_turn(before, after)
        return {"grad_ys": after}

    results = loop(
        "segment_grad",
        {"grad_ys": [*begin]},
        {"grad_ys": pair.gradient.inputs},
        lambda carry: goes_on(pair.gradient_condition, carry["grad_ys"]),
        one_round,
        pair.backward,
        expected,
        AT_ONCE,
    )
    return results["grad_ys"]


def _segment_again(
    way: LoopWay,
    carry: Groups,
    states: list[tf.Tensor],
    before: tf.Tensor,
    rounds: tf.Tensor,
    length: int | None,
    expected: int,
) -> dict[int, tf.Tensor]:
    """Runs a segment again; returns the lists for its gradient."""
    pair, start = way.pair, way.start
    lists = []
    for i in way.again:
        lists.append(empty_list(pair.elements[i], length))
        tf_private.copy_handle_data(pair.forward.inputs[i], lists[-1])
    within: Groups = {
        "place": [tf.constant(0), rounds, before],
        "states": states,
        "lists": lists,
        **{group: carry[group] for group in ("once", "invariants", "reads")},
    }
    like = {**within, "states": [pair.body.inputs[i] for i in start.states]}

    def one_round(carry: Groups) -> Groups:
        place, rounds, before = carry["place"]
        once = [
            item(t, before + place, like) for t, like in zip(carry["once"], start.once, strict=True)
        ]
        known = _known(way, carry, [*carry["states"], *once])
        wanted = [
            *(pair.body.outputs[i] for i in start.states),
            *(pair.elements[i] for i in way.again),
        ]
        results = _again(pair, wanted, known)
        new = len(start.states)
        return {
            "place": [place + 1, rounds, before],
            "states": results[:new],
            "lists": [*map(push, carry["lists"], results[new:])],
        }

    def has_more(carry: Groups) -> tf.Tensor:
        return carry["place"][0] < carry["place"][1]

    results = loop("again", within, like, has_more, one_round, pair.forward, expected, AT_ONCE)
    return dict(zip(way.again, results["lists"], strict=True))


def _round(
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


def _again(
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


def _gradient(
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


def _add_in_turn(before: Sequence[tf.Tensor], after: Sequence[tf.Tensor]) -> None:
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


def _at_hand(way: LoopWay) -> Groups:
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


def _known(way: LoopWay, carry: Groups, begin: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
    """The replacements for tensors of the body when a round is recomputed."""
    inputs, start = way.pair.body.inputs, way.start
    names = [inputs[i].name for i in start.states] + [t.name for t in start.once]
    known = dict(zip(names, begin, strict=True))
    known |= {inputs[i].name: t for i, t in zip(start.invariants, carry["invariants"], strict=True)}
    values = dict(zip(dict.fromkeys(start.reads.values()), carry["reads"], strict=True))
    return known | {name: values[i] for name, i in start.reads.items()}


def _given(tensor: tf.Tensor) -> tf.Tensor:
    """An input of the gradient of a segment.

    Grappler sorts the terms of a sum by name; with this name it sorts like the loop variable.
    """
    return tensor if tensor.dtype == tf.resource else tf.identity(tensor, "gradients/given")


def _round_of_gradient(
    way: LoopWay,
    more: Groups,
    pushed: Sequence[tf.Tensor],
    used: Container[int],
    inside: Inside,
) -> Any:
    """The function of a round of the gradient, which recomputes its round as planned.

    Args:
        way: the loop, and what its gradient recomputes.
        more: the new loop variables.
        pushed: the tensors of the body that the loop pushes.
        used: the loop variables that something needs. TensorFlow does not run the others, unless a
            gate waits for them.
        inside: plans and rewrites the step in the function.
    """
    pair = way.pair
    body = new_graph(pair.gradient.name)
    with body.as_default():
        carry = {group: [loop_variable(t, group) for t in those] for group, those in more.items()}
        popped = [*map(pop, carry["lists"], pushed)]
        known = _known(way, carry, [t for _, t in popped])
        values = _again(pair, [pair.elements[i] for i in way.again], known)
        values = [*map(apart_from_gradient, values)]
        first_new = len(body.get_operations())
        own = [loop_variable(t, f"grad_ys_{i}") for i, t in enumerate(pair.gradient.inputs)]
        grads = _gradient(pair, own, dict(zip(way.again, values, strict=True)))
        _add_in_turn(own, grads)
        carry = {"own": own, **carry}
        body.inputs = flat(carry)
        after = {"own": grads, "lists": [left for left, _ in popped]}
        body.outputs = flat(carry | after)
        results = [
            t
            for i, t in enumerate(grads)
            if i in used and t.op.type != "Placeholder" and t.dtype != tf.resource
        ]
        if results:
            inside(BackwardPass.since(first_new, results[0], results))
            body.outputs = [*map(behind_gates, body.outputs)]
    return body


def _change(
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


def _new_gradient(
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
    _change(old, *_without_rounds(old), [], parallel)
    return outputs[0].op


def _without_rounds(op: tf.Operation) -> tuple[Any, Any]:
    """The functions of a loop that ends before its first round."""
    like: Groups = {"own": [*op.inputs]}
    with apart(op.graph):
        never = function(f"{op.name}_cond", like, lambda carry: [tf.constant(False)])
        return never, round_function(f"{op.name}_body", like, lambda carry: {})
