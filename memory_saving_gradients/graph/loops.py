"""A loop and its gradient as TensorFlow makes them, and what of a round can be recomputed.

For its gradient a loop pushes the values of each round to lists, one for each tensor; the gradient
is a loop that pops them, the last round first. Loops that do not match this pattern stay unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable
from typing import Any

import tensorflow as tf

from memory_saving_gradients.graph import calls, kinds, tf_private

#: The indices of these inputs of a loop (the first two) and of its gradient.
_COUNTER, MOST_ROUNDS, COUNTED = 0, 1, 2
#: The attribute that marks the gradient of a change that was undone: nothing reads it.
UNDONE = "_memory_saving_undone"
# What an op that reads a variable may be in a round that runs again: its value is read before.
_OF_SHAPES = frozenset({"VariableShape"})
_READS = frozenset({"ReadVariableOp", *_OF_SHAPES})
# What may take the value of a variable instead of the variable.
_TAKE_VALUES = calls.LOOPS | calls.BRANCHES | {"PartitionedCall", "StatefulPartitionedCall"}


class StaysPlain(Exception):
    """The rounds of a loop cannot be recomputed; the message says why."""


@dataclasses.dataclass(frozen=True)
class Start:
    """The tensors from which a round can be recomputed.

    Attributes:
        states: inputs of the body that rounds change, by index.
        invariants: inputs of the body that no round changes, by index.
        once: tensors of the body that must not be computed twice.
        reads: what is replaced by the value of a variable: what an op of the body reads or, where a
            function in the body reads it, its handle. Name to the index of the variable's input.
    """

    states: tuple[int, ...]
    invariants: tuple[int, ...]
    once: tuple[tf.Tensor, ...]
    reads: dict[str, int]


@dataclasses.dataclass(frozen=True, eq=False)
class LoopPair:
    """A loop and its gradient.

    Attributes:
        forward: the loop.
        backward: its gradient.
        condition: the function of the loop's condition.
        body: the function of a round of the loop.
        gradient: the function of a round of the gradient.
        gradient_condition: the function of the gradient's condition.
        elements: by output of the loop that is a list for its gradient, the tensor that a round
            pushes to it.
        popped: by input of the gradient that is such a list, the output of the loop.
        able: the lists whose elements can be recomputed, by output.
        rounds: what depends on what in a round.
        sums: names of sums of three or more terms in a round, which agree only up to rounding when
            they run again: see `_long_sums`.
    """

    forward: tf.Operation
    backward: tf.Operation
    condition: Any
    body: Any
    gradient: Any
    gradient_condition: Any
    elements: dict[int, tf.Tensor]
    popped: dict[int, int]
    able: tuple[int, ...]
    rounds: Rounds
    sums: tuple[str, ...]

    @property
    def name(self) -> str:
        return str(self.forward.name)

    def way(self, every: int, kept: Iterable[str] = (), within: int = 0) -> LoopWay:
        """The loop with segments of `every` rounds, which keeps the elements `kept` of each round.

        With `within`, a segment is recomputed in shorter segments of so many rounds.

        Raises:
            StaysPlain: they cannot be recomputed.
        """
        kept = frozenset(kept)
        wanted = [self.elements[i] for i in self.able if self.elements[i].name not in kept]
        start = self.rounds.start(wanted, every == 1, kept)
        if any(i in self.elements for i in start.states):
            raise StaysPlain("its rounds read the lists of its gradient")
        left = kept - {t.name for t in start.once}
        again = tuple(i for i in self.able if self.elements[i].name not in left)
        return LoopWay(self, every, within, kept, again, start)


@dataclasses.dataclass(frozen=True, eq=False)
class LoopWay:
    """How the gradient of a loop recomputes its rounds.

    Attributes:
        pair: the loop and its gradient.
        every: the rounds of a segment.
        within: the rounds of the shorter segments that a segment is recomputed in; 0 where it is
            recomputed as a whole.
        kept: the names of elements that are kept for every round.
        again: the lists that the gradient no longer pops, by output: of what is recomputed, and of
            what is kept to recompute it.
        start: what is recomputed from.
    """

    pair: LoopPair
    every: int
    within: int
    kept: frozenset[str]
    again: tuple[int, ...]
    start: Start


def hands_on(body: Any, index: int) -> bool:
    """Whether a round of a loop passes a loop variable on unchanged."""
    return kinds.owner(body.outputs[index]) is body.inputs[index]


def gradients_of_loops(operations: Iterable[tf.Operation]) -> dict[tf.Operation, tf.Operation]:
    """The gradients of loops among some ops, each with its loop."""
    pairs = ((op, loop_behind(op)) for op in operations)
    return {op: loop for op, loop in pairs if loop is not None}


def loop_behind(op: tf.Operation) -> tf.Operation | None:
    """The loop whose gradient `op` is, recognised by its number of rounds; else None."""
    if op.type not in calls.LOOPS or kinds.is_gate(op) or len(op.inputs) <= COUNTED:
        return None
    return loop_counted_by(op.inputs[COUNTED])


def loop_counted_by(tensor: tf.Tensor) -> tf.Operation | None:
    """The loop whose number of rounds a tensor is; None for another tensor."""
    counted = kinds.owner(tensor)
    is_counter = counted.op.type in calls.LOOPS and counted.value_index == _COUNTER
    return counted.op if is_counter and not kinds.is_gate(counted.op) else None


def pair_of(forward: tf.Operation, backward: tf.Operation) -> LoopPair:
    """A loop and its gradient.

    Args:
        forward: the loop.
        backward: its gradient, of `gradients_of_loops`.

    Raises:
        StaysPlain: they do not match the pattern, or nothing can be recomputed.
    """
    functions = [
        tf_private.function_graph(op.graph, op.get_attr(attribute).name)
        for op in (forward, backward)
        for attribute in ("cond", "body")
    ]
    if None in functions:
        raise StaysPlain("nothing tells what it runs")
    condition, body, gradient_condition, gradient = functions
    if any(op.op_def.is_stateful and op.type not in _OF_SHAPES for op in calls.flattened(gradient)):
        raise StaysPlain("its gradient has effects or reads variables")
    elements = _lists(forward, backward, body)
    popped = {
        i: t.value_index
        for i, t in enumerate(backward.inputs)
        if t.op is forward and t.value_index in elements and _only_popped(gradient, i)
    }
    if not popped:
        raise StaysPlain("its gradient reads nothing of its rounds")
    rounds = Rounds(forward, body, elements)
    able = tuple(i for i in sorted(set(popped.values())) if rounds.repeats(elements[i]))
    if not able:
        raise StaysPlain("all that its gradient reads comes from ops that must not run twice")
    pair = LoopPair(
        forward,
        backward,
        condition,
        body,
        gradient,
        gradient_condition,
        elements,
        popped,
        able,
        rounds,
        tuple(f"{forward.name}/{name}" for name in _long_sums(body)),
    )
    for every in (1, 2):
        pair.way(every)  # raises
    return pair


def _lists(forward: tf.Operation, backward: tf.Operation, body: Any) -> dict[int, tf.Tensor]:
    """The outputs of a loop that are lists for this gradient only, and what a round pushes."""
    elements = {}
    for i, output in enumerate(body.outputs):
        pushed = kinds.owner(output)
        if (
            pushed.op.type == "TensorListPushBack"
            and pushed.op.inputs[0] is body.inputs[i]
            and len(body.inputs[i].consumers()) == 1
            and forward.inputs[i].op.type == "EmptyTensorList"
            and all(
                reader is backward or UNDONE in reader.node_def.attr
                for reader in forward.outputs[i].consumers()
            )
        ):
            elements[i] = pushed.op.inputs[1]
    return elements


def _only_popped(gradient: Any, index: int) -> bool:
    """Whether a round of a gradient only pops a list, once."""
    readers = gradient.inputs[index].consumers()
    return (
        len(readers) == 1
        and readers[0].type == "TensorListPopBack"
        and kinds.owner(gradient.outputs[index]) is readers[0].outputs[0]
    )


def _long_sums(body: Any) -> list[str]:
    """The sums in a round that are an `AddN` of three or more terms, or that Grappler makes one.

    Grappler merges sums of the same shape if each is read only by the next one. The kernel of the
    `AddN` starts from the first term whose buffer nothing else holds, such as a list for the
    gradient.
    """
    sums = dict.fromkeys(o for o in calls.flattened(body) if o.type in ("Add", "AddV2", "AddN"))
    return [
        op.name
        for op in sums
        if op.outputs[0].dtype.is_floating
        and (
            len(op.inputs) > 2
            or any(
                t.op in sums
                and len(t.consumers()) == 1
                and t.shape.is_compatible_with(op.outputs[0].shape)
                for t in op.inputs
            )
        )
    ]


def _only_reads(op: tf.Operation) -> bool:
    """Whether an op calls functions that only read values of variables."""
    return op.type in _TAKE_VALUES and all(
        inner.type in _READS or _only_reads(inner)
        for body in calls.bodies(op)
        for inner in body.get_operations()
        if any(t.dtype == tf.resource for t in inner.inputs)
    )


class Rounds:
    """The dependencies within a round of a loop, and which tensors may be computed twice."""

    def __init__(self, forward: tf.Operation, body: Any, elements: dict[int, tf.Tensor]) -> None:
        self._body = body
        self._index = {t.name: i for i, t in enumerate(body.inputs)}
        self._pushes = {kinds.owner(body.outputs[i]).op for i in elements}
        self._invariant = {i for i in range(len(body.inputs)) if hands_on(body, i)}
        read_only = tf_private.read_only_inputs(forward)
        #: variables that no round writes to: name of the handle to the input of the body
        self._variables = {
            t.name: i for i, t in enumerate(body.inputs) if i in read_only & self._invariant
        }
        self._reads = self._variables | {
            op.outputs[0].name: self._variables[handle.name]
            for op in body.get_operations()
            if op.type == "ReadVariableOp"
            and (handle := kinds.owner(op.inputs[0])).name in self._variables
        }
        #: ops that depend on something that must not be computed twice, such as random numbers
        self._drawn: set[tf.Operation] = set()
        for op in body.get_operations():
            if any(t.op in self._drawn or not self.repeats(t) for t in op.inputs):
                self._drawn.add(op)

    def repeats(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor of the body can be recomputed.

        A mask that is computed from random numbers takes fewer bytes than those, so it is kept.
        """
        op = tensor.op
        if op.type == "Placeholder" or tensor.name in self._reads:
            return True
        handles = [kinds.owner(t) for t in op.inputs if t.dtype == tf.resource]
        if op in self._pushes or not all(t.name in self._variables for t in handles):
            return False
        if handles:
            known = all(map(tf_private.shape_and_dtype_of_variable, handles))
            return known and _only_reads(op) and calls.may_repeat(op, calls.writers(op))
        return calls.may_repeat(op) and not (tensor.dtype == tf.bool and op in self._drawn)

    def start(self, wanted: Iterable[tf.Tensor], alone: bool, kept: Container[str]) -> Start:
        """The tensors from which some tensors of a round can be recomputed.

        Args:
            wanted: tensors of the body.
            alone: whether the round is recomputed on its own, not after the rounds before it.
            kept: the names of tensors that need not be recomputed.
        """
        states, invariants, reads, seen = set[int](), set[int](), {}, set[str]()
        once: dict[str, tf.Tensor] = {}
        waiting = [*wanted]
        while waiting:
            tensor = waiting.pop()
            if tensor.name in seen:
                continue
            seen.add(tensor.name)
            if tensor.name in self._reads:
                reads[tensor.name] = self._reads[tensor.name]
            elif tensor.name in kept or not self.repeats(tensor):
                once[tensor.name] = tensor
            else:
                waiting.extend(self.made_from(tensor, alone))
                if tensor.op.type == "Placeholder":
                    i = self._index[tensor.name]
                    (invariants if i in self._invariant else states).add(i)
        if any(t.dtype == tf.resource for t in once.values()):
            raise StaysPlain("a round makes a resource")
        if any(self._body.inputs[i].dtype == tf.resource for i in states | invariants):
            raise StaysPlain("a round reads a resource other than a variable that it only reads")
        return Start(tuple(sorted(states)), tuple(sorted(invariants)), tuple(once.values()), reads)

    def made_from(self, tensor: tf.Tensor, alone: bool) -> list[tf.Tensor]:
        """What a tensor that can be recomputed is recomputed from; nothing if it is there anyway.

        Args:
            tensor: a tensor of the body.
            alone: whether the round is recomputed on its own, from its state.
        """
        if tensor.name in self._reads:
            return []
        if tensor.op.type == "Placeholder":
            stays = alone or self._index[tensor.name] in self._invariant
            return [] if stays else [self._body.outputs[self._index[tensor.name]]]
        return [*tensor.op.inputs]

    def is_state(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor of the body is a loop variable that rounds change."""
        i = self._index.get(tensor.name)
        return i is not None and i not in self._invariant
