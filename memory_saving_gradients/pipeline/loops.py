"""Decides which loops recompute their rounds, in segments of how many, and what these keep."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence

import tensorflow as tf

from memory_saving_gradients.graph import order, tf_private
from memory_saving_gradients.graph.apart import apart
from memory_saving_gradients.graph.live import loop_variables
from memory_saving_gradients.graph.loops import (
    MOST_ROUNDS,
    LoopPair,
    LoopWay,
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
from memory_saving_gradients.reading.loop_sizes import LoopSizes, Ways, sizes_of, with_loops
from memory_saving_gradients.reading.loop_ways import frontier
from memory_saving_gradients.reading.read import Reading
from memory_saving_gradients.rewriting.loops import Inside, one_level, two_levels

# Strategies that may recompute the rounds of loops; "speed" keeps what is expensive.
_RUN_ROUNDS = frozenset({"memory", "speed", "auto", "budget", "overhead"})
# Segments must lower the peak to this share of that of plain loops.
_LOWER = 0.97
# How many ways are tried before that of the fewest bytes, as an estimate may be wrong.
_TRIED = 2


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

    def plans(self, ways: Ways) -> tuple[LoopPlan, ...]:
        """The loops as data for the plan, given how they run."""
        able = [_plan(sizes, ways.get(pair)) for pair, sizes in self.sizes.items()]
        return (*able, *(LoopPlan(name, why=why) for name, why in self.plain.items()))


def _plan(sizes: LoopSizes, way: LoopWay | None) -> LoopPlan:
    name, rounds, plain = sizes.pair.name, sizes.rounds, sizes.plain
    if way is None:
        return LoopPlan(name, rounds, plain_bytes=plain, held_bytes=plain)
    kept = tuple(sorted(way.kept))
    return LoopPlan(name, rounds, way.every, way.within, plain, sizes.held(way), kept)


def choose(loops: Loops, reading: Reading, request: Request) -> list[tuple[LoopPlan, ...]]:
    """How loops may run to serve a request better than plain loops do, the best first."""
    if request.plan:
        given = request.plan.loops
        return [given] if any(loop.every for loop in given) else []
    if not loops.sizes or request.strategy not in _RUN_ROUNDS or request.most_runs < 2:
        return []
    deep = request.strategy in ("budget", "overhead") and request.most_runs > 2
    ways = frontier(loops.sizes, request.strategy == "speed", deep)
    plans = [
        (way, plan) for way in ways if (plan := _planned(loops, way, reading, request)) is not None
    ]
    if not plans:
        return [loops.plans(ways[-1])]  # its error will tell the lowest peak
    cost = float(reading.problem.costs.sum())

    def better(each: tuple[Ways, Plan]) -> tuple[float, ...]:
        first, *others = value(each[1], request, cost)
        lower = request.strategy in ("budget", "auto") or each[0]
        return (first / (1 if lower else _LOWER), *others)

    best_first = (way for way, _ in sorted(plans, key=better))
    chosen = [*itertools.takewhile(bool, best_first)]
    tried = [*chosen[:_TRIED], ways[-1]] if chosen else []
    return [*dict.fromkeys(map(loops.plans, tried))]


def ways_of(loops: Loops, plans: Sequence[LoopPlan]) -> Ways:
    """The ways to run loops that plans tell."""
    given = {loop.name: loop for loop in plans if loop.every}
    return {
        pair: pair.way(loop.every, loop.kept, loop.within)
        for pair in loops.sizes
        if (loop := given.get(pair.name))
    }


def _planned(loops: Loops, ways: Ways, reading: Reading, request: Request) -> Plan | None:
    """The approximate plan for a step with such loops; None if no plan is good enough."""
    problem = with_loops(reading, ways, loops.sizes)
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


def alternatives(reading: Reading, request: Request) -> list[tuple[LoopPlan, ...]]:
    """The loops of a step as they may run: plain, with what is cheap recomputed, and with all.

    Of the last there are two, which hold different bytes. If loops cannot run again, all are plain.
    """
    loops = Loops.of(reading, exact=not request.running_sums)
    if not loops.sizes:
        return [()] * 4
    plain, *ways = frontier(loops.sizes)
    *_, cheap = frontier(loops.sizes, cheap=True)
    return [loops.plans(way) for way in (plain, cheap, *(2 * ways or [plain] * 2)[-2:])]


def as_if(reading: Reading, request: Request, plans: Sequence[LoopPlan]) -> Problem:
    """A step as estimated if its loops ran in a given way."""
    if not any(plan.every for plan in plans):
        return reading.problem
    loops = Loops.of(reading, exact=not request.running_sums)
    return with_loops(reading, ways_of(loops, plans), loops.sizes)


def predicted_plan(reading: Reading, request: Request) -> Plan:
    """The plan of a step that is not rewritten; the effect of its loops' segments is estimated.

    Raises:
        BudgetError: no plan within the budget was found.
    """
    loops = Loops.of(reading, exact=not request.running_sums)
    for plans in choose(loops, reading, request):
        plan = _planned(loops, ways_of(loops, plans), reading, request)
        if plan is not None:
            plan = against_plain(plan, reading, plan.problem)
            return dataclasses.replace(plan, loops=plans)
    return dataclasses.replace(decide(reading, request), loops=loops.plans({}))


def run_in_segments(loops: Loops, ways: Ways, step: BackwardPass, inside: Inside) -> BackwardPass:
    """Makes the gradients of loops recompute their rounds; returns the changed step.

    Args:
        loops: the loops of the step.
        ways: how they run.
        step: the step.
        inside: plans and rewrites a round of a gradient.
    """
    added = set()
    read = {t.name for op in step.needed for t in op.inputs} | {t.name for t in step.results}
    used = {pair: loop_variables(pair.backward, read) or () for pair in ways}
    for pair, way in ways.items():
        most = None if step.runtime.obeys_control_edges else _most(pair)
        if way.every == 1:
            added.add(one_level(way, most, used[pair], inside))
        else:
            sizes = loops.sizes[pair]
            length = _length(way, sizes)
            segments = -(-sizes.rounds // way.every)
            added.add(two_levels(way, length, most, way.every, segments))
    return dataclasses.replace(
        step,
        new=step.new | added,
        reordered=(*step.reordered, *(name for pair in ways for name in pair.sums)),
        needed=frozenset(order.needed(t.op for t in step.results)),
    )


def _most(pair: LoopPair) -> int | None:
    """The maximum number of rounds of a loop, if the graph tells it."""
    most = tf_private.constant(pair.forward.inputs[MOST_ROUNDS])
    return None if most is None or most < 0 else int(most)


def _length(way: LoopWay, sizes: LoopSizes) -> int | tf.Tensor:
    """The rounds of a segment: computed at run time if the number of rounds is only known then."""
    most = way.pair.forward.inputs[MOST_ROUNDS]
    if way.within or tf_private.constant(most) is not None:
        return way.every
    with apart(most.graph, "recompute"):
        root = tf.sqrt(tf.cast(most, tf.float32) * max(sizes.square(way), 1 / max(sizes.rounds, 1)))
        return tf.maximum(tf.cast(tf.round(root), tf.int32), 1)
