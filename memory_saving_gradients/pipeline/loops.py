"""Decides which loops recompute their rounds, and in segments of how many rounds."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import TypeAlias

import tensorflow as tf

from memory_saving_gradients.graph import order, tf_private
from memory_saving_gradients.graph.apart import apart
from memory_saving_gradients.graph.loops import (
    MOST_ROUNDS,
    LoopPair,
    StaysPlain,
    gradients_of_loops,
    pair_of,
)
from memory_saving_gradients.graph.shapes import Shapes
from memory_saving_gradients.options.budgets import BudgetError
from memory_saving_gradients.options.options import Request
from memory_saving_gradients.pipeline.decide import against_plain, decide, value
from memory_saving_gradients.pipeline.device_budget import in_bytes
from memory_saving_gradients.planning.plan_data import LoopPlan
from memory_saving_gradients.planning.problem import Problem
from memory_saving_gradients.plans.plan import Plan
from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.reading.loop_sizes import LoopSizes, sizes_of, with_loops
from memory_saving_gradients.reading.read import Reading
from memory_saving_gradients.rewriting.loops import Inside, one_level, two_levels

#: The length of the segments of each loop, in rounds; 0 for a loop that stays plain.
Segments: TypeAlias = dict[LoopPair, int]

# Strategies that may recompute the rounds of loops; "speed" keeps what is expensive.
_RUN_ROUNDS = frozenset({"memory", "auto", "budget", "overhead"})
# Segments must lower the peak to this share of that of plain loops.
_LOWER = 0.97


@dataclasses.dataclass(frozen=True)
class Loops:
    """The loops of a step.

    Attributes:
        sizes: the memory of each loop whose rounds can be recomputed.
        plain: the reason why others stay plain, by name.
    """

    sizes: dict[LoopPair, LoopSizes]
    plain: dict[str, str]

    @classmethod
    def of(cls, reading: Reading, exact: bool) -> Loops:
        """The loops of a step.

        Args:
            reading: the step.
            exact: whether results that agree only up to rounding are not accepted.
        """
        sizes, plain = {}, {}
        gradients = gradients_of_loops(reading.operations)
        uses = collections.Counter([*gradients, *gradients.values()])
        shapes = Shapes([*reading.step.needed] if gradients else [], reading.sizes)
        for op, forward in gradients.items():
            try:
                pair = pair_of(forward, op)
                if uses[op] > 1 or uses[forward] > 1:
                    raise StaysPlain("it is differentiated several times")
                if not reading.step.runtime.obeys_control_edges and _most(pair) is None:
                    raise StaysPlain("XLA has to know the maximum number of rounds")
                if exact and pair.sums:
                    raise StaysPlain(
                        f"its sum {pair.sums[0]} would agree only up to rounding "
                        "(running_sums=False)"
                    )
                sizes[pair] = sizes_of(pair, reading, shapes)
            except StaysPlain as why:
                plain[forward.name] = str(why)
        return cls(sizes, plain)

    def plans(self, segments: Segments) -> tuple[LoopPlan, ...]:
        """The loops as data for the plan, given their segments."""
        able = [
            LoopPlan(
                pair.name,
                sizes.rounds,
                every := segments.get(pair, 0),
                sizes.held(0),
                sizes.held(every),
            )
            for pair, sizes in self.sizes.items()
        ]
        return (*able, *(LoopPlan(name, why=why) for name, why in self.plain.items()))


def choose(loops: Loops, reading: Reading, request: Request) -> Segments:
    """The segments that serve a request best; empty if plain loops are better."""
    if request.plan:
        every = {loop.name: loop.every for loop in request.plan.loops}
        return {pair: every.get(pair.name, 0) for pair in loops.sizes}
    if not loops.sizes or request.strategy not in _RUN_ROUNDS or request.most_runs < 2:
        return {}
    plans = [
        (segments, plan)
        for segments in _ways(loops)
        if (plan := _planned(loops, segments, reading, request)) is not None
    ]
    if not plans:
        return [*_ways(loops)][-1]  # its error will tell the lowest peak
    cost = float(reading.problem.costs.sum())

    def better(way: tuple[Segments, Plan]) -> tuple[float, ...]:
        first, *others = value(way[1], request, cost)
        lower = request.strategy in ("budget", "auto") or any(way[0].values())
        return (first / (1 if lower else _LOWER), *others)

    return min(plans, key=better)[0]


def _ways(loops: Loops) -> Iterator[Segments]:
    """The alternatives: all loops plain, in single rounds, and in segments."""
    yield {}
    best = {pair: sizes.best for pair, sizes in loops.sizes.items()}
    single = {pair: min(every, 1) for pair, every in best.items()}
    if any(single.values()):
        yield single
    if best != single:
        yield best


def _planned(loops: Loops, segments: Segments, reading: Reading, request: Request) -> Plan | None:
    """The approximate plan for a step with these segments; None if no plan is good enough."""
    problem = with_loops(reading, segments, loops.sizes)
    added = problem.costs.sum() / reading.problem.costs.sum()
    if isinstance(request.budget, float):
        request = dataclasses.replace(request, budget=in_bytes(request, reading))
    if request.max_overhead is not None:
        allowed = (1 + request.max_overhead) / added - 1
        if allowed < 0:
            return None
        request = dataclasses.replace(request, max_overhead=allowed)
    try:
        return decide(dataclasses.replace(reading, problem=problem), request)
    except BudgetError:
        return None


def alternatives(reading: Reading, request: Request) -> list[Problem]:
    """The step with all loops plain, in single rounds, and in segments, as estimated.

    If loops cannot run again, or not in segments, the last ones are the same.
    """
    loops = Loops.of(reading, exact=not request.running_sums)
    problem = reading.problem
    found = [with_loops(reading, way, loops.sizes) if way else problem for way in _ways(loops)]
    return [*found, *found[-1:] * 2][:3]


def predicted_plan(reading: Reading, request: Request) -> Plan:
    """The plan of a step that is not rewritten; the effect of its loops' segments is estimated.

    Raises:
        BudgetError: no plan within the budget was found.
    """
    loops = Loops.of(reading, exact=not request.running_sums)
    segments = choose(loops, reading, request)
    plan = _planned(loops, segments, reading, request) if any(segments.values()) else None
    if plan is None:
        return dataclasses.replace(decide(reading, request), loops=loops.plans({}))
    plan = against_plain(plan, reading, plan.problem)
    return dataclasses.replace(plan, loops=loops.plans(segments))


def run_in_segments(
    loops: Loops, segments: Segments, step: BackwardPass, inside: Inside
) -> BackwardPass:
    """Makes the gradients of loops recompute their rounds; returns the changed step.

    Args:
        loops: the loops of the step.
        segments: the length of their segments.
        step: the step.
        inside: plans and rewrites a round of a gradient.
    """
    added = set()
    for pair, every in segments.items():
        most = None if step.runtime.obeys_control_edges else _most(pair)
        if every == 1:
            added.add(one_level(pair, most, inside))
        elif every:
            sizes = loops.sizes[pair]
            length = _length(pair, every, sizes)
            added.add(two_levels(pair, length, most, every, -(-sizes.rounds // every)))
    reordered = [name for pair, every in segments.items() if every for name in pair.sums]
    return dataclasses.replace(
        step,
        new=step.new | added,
        reordered=(*step.reordered, *reordered),
        needed=frozenset(order.needed(t.op for t in step.results)),
    )


def _most(pair: LoopPair) -> int | None:
    """The maximum number of rounds of a loop, if the graph tells it."""
    most = tf_private.constant(pair.forward.inputs[MOST_ROUNDS])
    return None if most is None or most < 0 else int(most)


def _length(pair: LoopPair, every: int, sizes: LoopSizes) -> int | tf.Tensor:
    """The rounds of a segment: computed at run time if the number of rounds is only known then."""
    most = pair.forward.inputs[MOST_ROUNDS]
    if tf_private.constant(most) is not None:
        return every
    with apart(most.graph, "recompute"):
        root = tf.sqrt(tf.cast(most, tf.float32) * max(sizes.square, 1 / max(sizes.rounds, 1)))
        return tf.maximum(tf.cast(tf.round(root), tf.int32), 1)
