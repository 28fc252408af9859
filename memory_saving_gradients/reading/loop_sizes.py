"""The bytes that a loop holds for its gradient, and the time of recomputing its rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import tensorflow as tf

from memory_saving_gradients.graph import calls, variants
from memory_saving_gradients.graph.loops import LoopPair, LoopWay
from memory_saving_gradients.graph.rounds import AT_ONCE, counted_rounds, expected_rounds
from memory_saving_gradients.graph.shapes import Shapes
from memory_saving_gradients.planning.problem import Problem, Tensor
from memory_saving_gradients.reading.bodies import of_calls, seconds_inside
from memory_saving_gradients.reading.read import Reading

#: The ways to run the loops of a step; loops that stay plain are not among them.
Ways = Mapping[LoopPair, LoopWay]


@dataclasses.dataclass(frozen=True)
class LoopSizes:
    """The memory and the time of a loop and its gradient.

    Attributes:
        pair: the loop.
        rounds: how many rounds are expected; a nominal number if unknown.
        counted: whether the number of rounds is known.
        lists: the number in the problem of each list whose elements can be recomputed, by output.
        list_bytes: the bytes of such lists, by their number.
        bytes: the bytes of tensors of a round, by name.
        seconds: the estimated seconds of ops of a round, by name.
        call_seconds: what it takes to call a kernel, in seconds.
    """

    pair: LoopPair
    rounds: int
    counted: bool
    lists: dict[int, int]
    list_bytes: dict[int, int]
    bytes: dict[str, int]
    seconds: dict[str, float]
    call_seconds: float

    @property
    def plain(self) -> int:
        """The bytes that the lists hold where nothing is recomputed."""
        return sum(self.list_bytes.values())

    def numbers(self, way: LoopWay) -> dict[int, None]:
        """The lists that a way no longer has, by their number in the problem."""
        stay = {number for i, number in self.lists.items() if i not in way.again}
        return dict.fromkeys(n for i, n in self.lists.items() if n not in stay)

    def states(self, way: LoopWay) -> int:
        """The bytes of the state at the start of a segment."""
        return sum(self.bytes[self.pair.body.inputs[i].name] for i in way.start.states)

    def new(self, way: LoopWay) -> int:
        """The bytes of the lists that a way adds: states, and what is kept of every round."""
        segments = -(-self.rounds // way.every)
        once = sum(self.bytes[t.name] for t in way.start.once)
        return segments * self.states(way) + self.rounds * once

    def held(self, way: LoopWay) -> int:
        """The bytes that a loop holds for its gradient."""
        gone = sum(self.list_bytes[number] for number in self.numbers(way))
        return self.plain - gone + self.new(way)

    def round(self, way: LoopWay) -> int:
        """The bytes that one recomputed round adds."""
        elements = {self.pair.elements[i].name: self.lists.get(i) for i in way.again}
        kept = {elements.get(t.name) for t in way.start.once}
        made = self.numbers(way).keys() - kept
        return sum(self.list_bytes[number] for number in made) // self.rounds

    def working(self, way: LoopWay) -> int:
        """The bytes that a segment needs while it runs again."""
        if way.within:
            shorter = -(-way.every // way.within)
            return shorter * self.states(way) + way.within * self.round(way)
        return min(AT_ONCE if way.every == 1 else way.every, self.rounds) * self.round(way)

    def square(self, way: LoopWay) -> float:
        """For n rounds, √(n · square) is the best length of a segment."""
        return self.states(way) / max(self.round(way), 1)

    def more_seconds(self, way: LoopWay) -> float:
        """The estimated seconds that recomputing takes, as lists save some."""
        pair, start, alone = self.pair, way.start, way.every == 1
        states = [] if alone else [pair.body.outputs[i] for i in start.states]
        again = self._seconds_of(way, [*states, *(pair.elements[i] for i in way.again)])
        again += self._seconds_of(way, states) if way.within else 0.0
        # A list takes a call to push an element, and one to pop it.
        pushed = len(start.once) + alone * (len(start.states) - len(way.again))
        return max(0.0, self.rounds * (again + 2 * pushed * self.call_seconds))

    def _seconds_of(self, way: LoopWay, wanted: Iterable[tf.Tensor]) -> float:
        """The estimated seconds of recomputing some tensors in a round."""
        known = {t.name for t in way.start.once}
        ops = dict[tf.Operation, None]()
        waiting = [*wanted]
        while waiting:
            tensor = waiting.pop()
            if tensor.name not in known:
                known.add(tensor.name)
                if made_from := self.pair.rounds.made_from(tensor, way.every == 1):
                    waiting.extend(made_from)
                    ops[tensor.op] = None
        return sum(self.seconds.get(op.name, 0.0) for op in ops)


def sizes_of(pair: LoopPair, reading: Reading, shapes: Shapes) -> LoopSizes:
    """The memory of a loop of a step.

    Args:
        pair: the loop and its gradient.
        reading: the step.
        shapes: the shapes of its tensors.
    """
    body = [op for op in pair.body.get_operations() if op.type != "Placeholder"]
    inside = shapes.within(pair.forward, pair.body, body)
    runtime = reading.step.runtime.within(pair.forward)
    names = {i: pair.forward.outputs[i].name for i in pair.able}
    lists = {i: reading.tensor_of[name] for i, name in names.items() if name in reading.tensor_of}
    read = {t.name for op in body for t in op.inputs} | {t.name for t in pair.body.outputs}
    seconds = seconds_inside(body, runtime, inside)
    seconds |= {op.name: of_calls(op, runtime, read, inside)[0] for op in body if calls.bodies(op)}
    tensors = [*pair.body.inputs, *(t for op in body for t in op.outputs)]
    return LoopSizes(
        pair,
        max(1, expected_rounds(pair.forward, shapes)),
        counted_rounds(pair.forward, shapes) is not None,
        lists,
        {number: reading.problem.tensors[number].bytes for number in lists.values()},
        {t.name: _bytes(t, inside) for t in tensors},
        seconds,
        runtime.call_seconds,
    )


def _bytes(tensor: tf.Tensor, shapes: Shapes) -> int:
    if tensor.dtype == tf.variant:
        return variants.held_bytes(tensor, shapes)
    return shapes.bytes(tensor) if tensor.dtype.size else 0


def with_loops(reading: Reading, ways: Ways, sizes: Mapping[LoopPair, LoopSizes]) -> Problem:
    """An estimate of the problem of a step whose loops recompute rounds.

    Args:
        reading: the step as it is.
        ways: how its loops recompute them.
        sizes: the memory of each loop.
    """
    problem = reading.problem
    tensors, ops = [*problem.tensors], [*problem.ops]
    place = {op.name: i for i, op in enumerate(problem.ops)}
    for pair, way in ways.items():
        numbers = sizes[pair].numbers(way)
        if not numbers or pair.backward.name not in place:
            continue
        # The gradient reads states instead of lists, which may hold results of the loop, too. An
        # output of the loop without bytes, its counter, gives them a name.
        states = len(tensors)
        tensors.append(Tensor(pair.forward.outputs[0].name, sizes[pair].new(way)))
        others = {
            reading.tensor_of.get(t.name)
            for i, t in enumerate(pair.forward.outputs)
            if i not in way.again
        }
        for number in numbers.keys() - others:
            tensors[number] = dataclasses.replace(tensors[number], bytes=0)
        again, first = ops[place[pair.backward.name]], ops[place[pair.forward.name]]
        outputs = (*first.outputs, states)
        invariants = (pair.forward.inputs[i].name for i in way.start.invariants)
        inputs = {*again.inputs, states}.union(
            reading.tensor_of[name] for name in invariants if name in reading.tensor_of
        )
        ops[place[first.name]] = dataclasses.replace(first, outputs=outputs, again=True)
        ops[place[again.name]] = dataclasses.replace(
            again,
            inputs=tuple(sorted(inputs - numbers.keys())),
            cost=again.cost + sizes[pair].more_seconds(way),
            workspace=again.workspace + sizes[pair].working(way),
        )
    return dataclasses.replace(problem, tensors=tuple(tensors), ops=tuple(ops))
