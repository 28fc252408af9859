"""Makes the gradient of a loop recompute the rounds of the loop.

TensorFlow's loop pushes the values of every round to lists, and its gradient pops them: the bytes
grow with the number of rounds. We edit the loop so that it pushes only the state at the start of a
round. On *one level* each round of the gradient recomputes its round, a few at a time. On *two
levels* the loop becomes a loop over segments of `every` rounds, and pushes the state at the start
of a segment; the gradient runs a segment again as TensorFlow's loop did, and then TensorFlow's own
gradient over it. With segments of √n rounds, n rounds need O(√n) bytes (Chen et al., "Training Deep
Nets with Sublinear Memory Cost", 2016; for recurrent networks Gruslys et al., "Memory-Efficient
Backpropagation Through Time", 2016). A segment and TensorFlow's gradient over it are a loop and its
gradient as well: on *three levels* they run in two levels again, and n rounds need O(∛n) bytes.

All sums are added in the order of TensorFlow's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from memory_saving_gradients.graph import tf_private
from memory_saving_gradients.graph.apart import apart
from memory_saving_gradients.graph.loops import LoopPair, LoopWay, hands_on, pair_of
from memory_saving_gradients.graph.rounds import AGAIN, AT_ONCE, ROUNDS
from memory_saving_gradients.graph.transplant import transplanted
from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.rewriting.loop_edits import change, new_gradient
from memory_saving_gradients.rewriting.loop_functions import (
    Groups,
    condition_for,
    empty_list,
    flat,
    function,
    goes_on,
    item,
    loop,
    loop_variable,
    new_graph,
    pop,
    push,
    round_function,
    split,
)
from memory_saving_gradients.rewriting.loop_rounds import (
    add_in_turn,
    at_hand,
    forward_round,
    gradient_round,
    known_from,
    recomputed,
)
from memory_saving_gradients.rewriting.rewrite import behind_gates
from memory_saving_gradients.runtimes.kernels import apart_from_gradient

#: Plans and rewrites the step in a round of a gradient.
Inside: TypeAlias = Callable[[BackwardPass], object]


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
            after, new = forward_round(way, carry["own"], pushed)
            return {"own": after, "lists": [*map(push, carry["lists"], new)]}

        body = round_function(pair.body.name, like, forward)
        condition = condition_for(pair.condition, like)
        lists = change(pair.forward, condition, body, lists, parallel)
        outside = at_hand(way)
        like = {"lists": lists, **outside}

        body = _round_of_gradient(way, like, pushed, used, inside)
        condition = condition_for(pair.gradient_condition, {"own": pair.gradient.inputs, **like})
        gradient = new_gradient(pair, condition, body, like, parallel)
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
            kept, once = forward_round(way, [own.get(i) for i in range(count)], start.once)
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
    return split(change(pair.forward, condition, body, flat(begin), parallel=1), begin)


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
        **at_hand(way),
    }
    like = {"own": pair.gradient.inputs, **begin}
    refilled = {i: list_ for i, list_ in pair.popped.items() if list_ in way.again}

    def backward(carry: Groups) -> Groups:
        segments, every, done = carry["counts"]
        before = (segments - 1 - done) * every  # the rounds before this segment
        rounds = tf.cast(carry["own"][2], tf.int32)
        rounds = tf.where(tf.equal(done, 0), rounds - before, every)
        popped = [*map(pop, carry["states"], states)]
        again = _segment_again(way, carry, [t for _, t in popped], before, rounds, length, expected)
        full = dict(zip(way.again, again["lists"], strict=True))
        own = list(carry["own"])
        own[0] = tf.zeros_like(own[0])
        own[2] = tf.cast(again["place"][0], own[2].dtype)
        own = [full[refilled[i]] if i in refilled else _given(t) for i, t in enumerate(own)]
        results = _gradient_of_segment(pair, own, expected)
        if way.within:
            results = _in_shorter_segments(again, results, way.within, length, expected)
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
    return new_gradient(pair, condition, body, begin, parallel=1)


def _gradient_of_segment(
    pair: LoopPair, begin: Sequence[tf.Tensor], expected: int
) -> list[tf.Tensor]:
    """Runs TensorFlow's gradient over a segment; returns its results."""

    def one_round(carry: Groups) -> Groups:
        before = carry["grad_ys"]
        after = gradient_round(pair, before, {})
        add_in_turn(before, after)
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


def _in_shorter_segments(
    again: Groups, results: list[tf.Tensor], within: int, length: int | None, expected: int
) -> list[tf.Tensor]:
    """Makes the gradient of a segment recompute shorter segments; returns its results.

    Args:
        again: the results of the loop that runs the segment again.
        results: those of its gradient.
        within: the rounds of a shorter segment.
        length: the maximum number of rounds of the segment, if lists need a fixed capacity.
        expected: their expected number.
    """
    pair = pair_of(again["place"][0].op, results[0].op)
    with tf_private.all_or_nothing() as edits:
        gradient = two_levels(pair.way(within), within, length, within, -(-expected // within))
        edits.clear()  # the function that they are in has not run yet
    return [*gradient.outputs][: len(results)]


def _segment_again(
    way: LoopWay,
    carry: Groups,
    states: list[tf.Tensor],
    before: tf.Tensor,
    rounds: tf.Tensor,
    length: int | None,
    expected: int,
) -> Groups:
    """Runs a segment again; returns the results, with the lists for its gradient."""
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
        known = known_from(way, carry, [*carry["states"], *once])
        wanted = [
            *(pair.body.outputs[i] for i in start.states),
            *(pair.elements[i] for i in way.again),
        ]
        results = recomputed(pair, wanted, known)
        new = len(start.states)
        return {
            "place": [place + 1, rounds, before],
            "states": results[:new],
            "lists": [*map(push, carry["lists"], results[new:])],
        }

    def has_more(carry: Groups) -> tf.Tensor:
        return carry["place"][0] < carry["place"][1]

    return loop("again", within, like, has_more, one_round, pair.forward, expected, AT_ONCE)


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
        known = known_from(way, carry, [t for _, t in popped])
        values = recomputed(pair, [pair.elements[i] for i in way.again], known)
        values = [*map(apart_from_gradient, values)]
        first_new = len(body.get_operations())
        own = [loop_variable(t, f"grad_ys_{i}") for i, t in enumerate(pair.gradient.inputs)]
        grads = gradient_round(pair, own, dict(zip(way.again, values, strict=True)))
        add_in_turn(own, grads)
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
