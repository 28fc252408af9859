"""The bytes that a loop holds for its gradient, plain or with segments that run again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import tensorflow as tf

from memory_saving_gradients.graph.loops import LoopPair
from memory_saving_gradients.graph.rounds import AT_ONCE, counted_rounds, expected_rounds
from memory_saving_gradients.graph.shapes import Shapes
from memory_saving_gradients.planning.problem import Problem, Tensor
from memory_saving_gradients.reading.read import Reading


@dataclasses.dataclass(frozen=True)
class LoopSizes:
    """The memory of a loop and its gradient.

    Attributes:
        rounds: how many rounds are expected; a nominal number if unknown.
        counted: whether the number of rounds is known.
        round: the bytes that a round holds for the gradient and that can be recomputed.
        begin: the bytes of the state from which a single round is recomputed.
        segment: the bytes of the state from which a segment of rounds is recomputed.
        once: the bytes of a round that must not be computed twice.
    """

    rounds: int
    counted: bool
    round: int
    begin: int
    segment: int
    once: int

    def held(self, every: int) -> int:
        """The bytes held if segments of `every` rounds run again; 0 means that none do."""
        if every == 0:
            return self.rounds * self.round
        if every == 1:
            return self.rounds * (self.begin + self.once)
        return -(-self.rounds // every) * self.segment + self.rounds * self.once

    def working(self, every: int) -> int:
        """The bytes that a segment of `every` rounds needs while it runs again."""
        return min(AT_ONCE if every == 1 else every, self.rounds) * self.round

    @property
    def square(self) -> float:
        """For n rounds, √(n · square) is the best length of a segment."""
        return self.segment / max(self.round, 1)

    @property
    def best(self) -> int:
        """The length of a segment that needs the fewest bytes; 0 if the plain loop does."""
        if not self.counted:
            return dataclasses.replace(self, rounds=_MANY, counted=True).best
        root = math.sqrt(self.rounds * self.square)
        ways = [0, 1, *(max(2, f(root)) for f in (math.floor, math.ceil))]
        return min(ways, key=lambda every: (self.held(every) + self.working(every), every))


def sizes_of(pair: LoopPair, reading: Reading, shapes: Shapes) -> LoopSizes:
    """The memory of a loop of a step.

    Args:
        pair: the loop and its gradient.
        reading: the step.
        shapes: the shapes of its tensors.
    """
    inside = shapes.within(pair.forward, pair.body, pair.body.get_operations())
    counted = counted_rounds(pair.forward, shapes)
    rounds = max(1, expected_rounds(pair.forward, shapes))
    held = sum(reading.problem.tensors[i].bytes for i in _numbers(pair, reading))

    def of(tensors: Iterable[tf.Tensor]) -> int:
        return sum(inside.bytes(t) for t in tensors if t.dtype.size)

    begin, go_on = (
        of(pair.body.inputs[i] for i in start.states) for start in (pair.to_begin, pair.to_go_on)
    )
    once = of(pair.to_begin.once)
    return LoopSizes(rounds, counted is not None, held // rounds, begin, go_on, once)


def _numbers(pair: LoopPair, reading: Reading) -> dict[int, None]:
    """The tensors of the problem that are lists whose elements can be recomputed."""
    names = (pair.forward.outputs[i].name for i in pair.again)
    return dict.fromkeys(reading.tensor_of[name] for name in names if name in reading.tensor_of)


# The rounds assumed for `best` if the number is unknown: so many that short segments are wrong.
_MANY = 1000


def with_loops(
    reading: Reading, every: Mapping[LoopPair, int], sizes: Mapping[LoopPair, LoopSizes]
) -> Problem:
    """An estimate of the problem of a step whose loops run in segments.

    Args:
        reading: the step as it is.
        every: the length of the segments of each loop, in rounds.
        sizes: the memory of each loop.
    """
    problem = reading.problem
    tensors, ops = [*problem.tensors], [*problem.ops]
    place = {op.name: i for i, op in enumerate(problem.ops)}
    for pair, rounds in every.items():
        numbers = [*_numbers(pair, reading)]
        if not rounds or not numbers or pair.backward.name not in place:
            continue
        # The gradient reads states instead of lists, which may hold results of the loop, too. An
        # output of the loop without bytes, its counter, gives them a name.
        states = len(tensors)
        tensors.append(Tensor(pair.forward.outputs[0].name, sizes[pair].held(rounds)))
        others = {
            reading.tensor_of.get(t.name)
            for i, t in enumerate(pair.forward.outputs)
            if i not in pair.again
        }
        for number in set(numbers) - others:
            tensors[number] = dataclasses.replace(tensors[number], bytes=0)
        again, first = ops[place[pair.backward.name]], ops[place[pair.forward.name]]
        outputs = (*first.outputs, states)
        ops[place[first.name]] = dataclasses.replace(first, outputs=outputs, again=True)
        # On two levels the first run pushes nothing that the gradient needs. On one level the
        # second does not either, and the gradient pops none of it.
        calls = (3 if rounds == 1 else 1) * len(pair.again) * sizes[pair].rounds
        more = first.cost - calls * reading.step.runtime.call_seconds
        ops[place[again.name]] = dataclasses.replace(
            again,
            inputs=(*(i for i in again.inputs if i not in numbers), states),
            cost=again.cost + max(more, 0.0),
            workspace=again.workspace + sizes[pair].working(rounds),
        )
    return dataclasses.replace(problem, tensors=tuple(tensors), ops=tuple(ops))
