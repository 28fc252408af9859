"""Plans each backward pass, and rewrites the graph by the plan."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients.console.progress_bar import shown
from memory_saving_gradients.console.warning import warn
from memory_saving_gradients.graph import tf_private
from memory_saving_gradients.graph.shapes import InputSizes, WrongSize
from memory_saving_gradients.options.budgets import BudgetError, OfDevice
from memory_saving_gradients.options.options import Request
from memory_saving_gradients.pipeline import pieces as pieces_of
from memory_saving_gradients.pipeline.decide import against_plain, decide, is_worth_it, plain
from memory_saving_gradients.pipeline.device_budget import in_bytes
from memory_saving_gradients.pipeline.fitting import (
    allocated_for_plain,
    plain_exceeds,
    temporary_bytes,
)
from memory_saving_gradients.pipeline.loops import Loops, choose, run_in_segments, ways_of
from memory_saving_gradients.pipeline.prove import apply, by_measurement
from memory_saving_gradients.pipeline.why import saves_little
from memory_saving_gradients.planning.plan_data import LoopPlan
from memory_saving_gradients.planning.simulate import plain_peak
from memory_saving_gradients.plans.plan import Plan
from memory_saving_gradients.proving.compiler import target
from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.reading.read import Reading, read
from memory_saving_gradients.rewriting.branches import has_branches, recompute_inside
from memory_saving_gradients.rewriting.pieces import in_pieces
from memory_saving_gradients.rewriting.rewrite import plain_when_differentiated, rewrite
from memory_saving_gradients.rewriting.running_sums import taken_apart
from memory_saving_gradients.runtimes.runtime import Runtime


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of a front door.

    Attributes:
        backward: the backward pass that TensorFlow made.
        request: what to plan for it.
        replica: the replica that it belongs to, under a distribution strategy.
        planned: called with the plan, if one was applied.
        variables: by name of a result, the reference variables that it is the gradient of.
    """

    backward: BackwardPass
    request: Request
    replica: Any
    planned: Callable[[Plan], object]
    variables: Mapping[str, Sequence[tf.Operation]]


def plan_and_rewrite(
    groups: Sequence[Call],
) -> Iterator[tuple[Call, BackwardPass, Plan, bool, tf_private.Edits]]:
    """Plans and rewrites each backward pass.

    Yields:
        The call, its backward pass after rewriting, the plan, whether the plan saves memory, and
        the edits.
    """
    highest = 0
    if len(groups) > 1 and any(isinstance(call.request.budget, float) for call in groups):
        readings = (read(call.backward, sizes=call.request.sizes) for call in groups)
        highest = max(plain_peak(reading.problem) for reading in readings)
    for call in groups:
        began = time.perf_counter()
        request = call.request
        if highest and isinstance(request.budget, float):  # it is a share of the whole step
            request = dataclasses.replace(request, budget=int(request.budget * highest))
        with shown(f"memory_saving_gradients: planning {len(call.backward.needed)} ops"):
            try:
                with tf_private.all_or_nothing():
                    step = taken_apart(call.backward, request.running_sums)
                    with tf_private.all_or_nothing() as edits:
                        plan = _plan_and_rewrite_one(step, request)
                saves = True
            except _SavesNothing as nothing:
                step, plan, saves, edits = call.backward, nothing.plan, False, []
        plan = dataclasses.replace(plan, seconds=time.perf_counter() - began)
        yield call, step, plan, saves, edits


def as_compiled(step: BackwardPass, request: Request) -> Plan | None:
    """The plan for a step, with what XLA's compiler allocates; None if it saves nothing.

    The step stays as it is.

    Args:
        step: the step, which XLA compiles.
        request: what to plan, for a batch size that is given.

    Raises:
        BudgetError: the plan misses the budget.
        CannotCompile: the compiler refuses the step, or is not installed.
    """
    with tf_private.undone():  # it is rewritten only to be compiled
        try:
            with tf_private.all_or_nothing():
                plan = _plan_and_rewrite_one(step, request)
        except _SavesNothing:
            return None
        size = plan.compiled_peak_bytes or temporary_bytes(step, request.sizes, request.device)
    return dataclasses.replace(plan, compiled_peak_bytes=size, compiled_for=target(request.device))


def _plan_and_rewrite_one(step: BackwardPass, request: Request) -> Plan:
    """Rewrites the step by a plan, and returns the plan."""
    reading = read(step, request.cost_model, request.sizes)
    if isinstance(request.budget, OfDevice):
        request = dataclasses.replace(request, budget=in_bytes(request, reading))
    allocated = allocated_for_plain(reading, request)
    if allocated is not None and isinstance(request.budget, float):
        request = dataclasses.replace(request, budget=int(request.budget * allocated))
    plan = _plan_as_asked(reading, request)
    if allocated is not None and plan.compiled_peak_bytes is not None:
        plan = dataclasses.replace(plan, baseline_compiled_bytes=allocated)
    return plan


def _plan_as_asked(reading: Reading, request: Request) -> Plan:
    """Rewrites a step, and makes regions run in pieces if the user allows it."""
    if request.in_pieces:
        return _plan_with_pieces(reading, request)
    try:
        return _plan_as_read(reading, request)
    except BudgetError as error:
        if not request.advised:
            raise
        advice = pieces_of.advice(reading, request, error.lowest_peak_bytes)
        raise BudgetError(f"{error}{advice}", error.budget_bytes, error.lowest_peak_bytes) from None


def _plan_with_pieces(reading: Reading, request: Request) -> Plan:
    """Makes regions of a step run in pieces, where that is better, and plans the step.

    Raises:
        BudgetError: the plan misses the budget.
        _SavesNothing: neither pieces nor a plan save memory.
    """
    if isinstance(request.budget, float):
        request = dataclasses.replace(request, budget=in_bytes(request, reading))
    pieces, ways = pieces_of.choose(reading, request)
    if not ways[0]:
        try:
            plan = _plan_as_read(reading, request)
        except _SavesNothing as nothing:
            plan = dataclasses.replace(nothing.plan, pieces=pieces.plans({}))
            raise _SavesNothing(plan) from None
        return dataclasses.replace(plan, pieces=pieces.plans({}))
    unmet: list[BudgetError] = []
    for counts in ways:
        try:
            plan = _plan_changed(
                reading, request, functools.partial(in_pieces, reading.step, counts)
            )
            return dataclasses.replace(plan, pieces=pieces.plans(counts))
        except BudgetError as error:
            unmet.append(error)
    raise min(unmet, key=lambda error: error.lowest_peak_bytes)


def _plan_as_read(reading: Reading, request: Request) -> Plan:
    """Rewrites a step by a plan in which no region runs in pieces, and returns the plan."""
    step = reading.step
    loops = Loops.of(reading, exact=not request.running_sums)
    unmet: list[BudgetError] = []
    for plans in choose(loops, reading, request):
        try:
            return _plan_with_loops(reading, request, plans)
        except _NoBetter:
            continue
        except BudgetError as error:
            unmet.append(error)
    try:
        return dataclasses.replace(_predicted(step, request, reading), loops=loops.plans({}))
    except _SavesNothing as nothing:
        raise _SavesNothing(dataclasses.replace(nothing.plan, loops=loops.plans({}))) from None
    except BudgetError as error:
        error = min([*unmet, error], key=lambda each: each.lowest_peak_bytes)
        plan = by_measurement(reading, request, error)
        if plan is None:
            raise error from None
        return plan


def _plan_with_loops(reading: Reading, request: Request, plans: Sequence[LoopPlan]) -> Plan:
    """Applies a plan to a step whose loops recompute their rounds, and returns the plan.

    Raises:
        BudgetError, _NoBetter: it misses the budget, or the overhead; the step is as before.
    """
    inside = functools.partial(_rewrite_inside, reading.step.runtime, request.most_runs)
    # A loop keeps loop variables of a change that was undone.
    loops = Loops.of(reading, exact=not request.running_sums)
    ways = ways_of(loops, plans)
    with tf_private.all_or_nothing():
        plan = _plan_changed(
            reading, request, lambda: run_in_segments(loops, ways, reading.step, inside)
        )
        if request.max_overhead is not None and plan.overhead > request.max_overhead:
            raise _NoBetter
    return dataclasses.replace(plan, loops=loops.plans(ways))


def _plan_changed(reading: Reading, request: Request, change: Callable[[], BackwardPass]) -> Plan:
    """Changes a step, applies a plan to the changed step, and returns the plan.

    Args:
        reading: the step.
        request: the user's request.
        change: changes the step.

    Raises:
        BudgetError: the plan misses the budget; the step is as before.
    """
    if isinstance(request.budget, float):
        request = dataclasses.replace(request, budget=in_bytes(request, reading))
    with tf_private.all_or_nothing():
        with tf_private.all_or_nothing() as edits:
            step = change()
        plain_when_differentiated(step.graph, edits)
        now = read(step, request.cost_model, request.sizes)
        if request.max_overhead is not None:
            added = float(now.problem.costs.sum() / reading.problem.costs.sum())
            left = max((1 + request.max_overhead) / added - 1, _NO_OVERHEAD)
            request = dataclasses.replace(request, max_overhead=left)
        try:
            plan = _predicted(step, request, now)
        except _SavesNothing:
            plan = plain(now, request, in_bytes(request, now))
            if request.verify:
                plan = apply(now, plan, request)
    return against_plain(plan, reading, now.problem)


# The least overhead that the planner accepts.
_NO_OVERHEAD = 1e-6


def _predicted(step: BackwardPass, request: Request, reading: Reading) -> Plan:
    """Applies the best plan by prediction, and returns it."""
    if _asks_for_branches(request, reading):
        with contextlib.suppress(_NoBetter):
            return _plan_with_branches(step, request, reading)
    try:
        reading, plan, saves = _decided(reading, request)
    except BudgetError:
        if request.budget is not None and has_branches(reading):
            with contextlib.suppress(BudgetError):
                return _plan_with_branches(step, request, reading)
        raise
    if request.advised and (not saves or saves_little(plan)):
        advice = pieces_of.advice(reading, request, plan.peak_bytes)
        if advice:
            warn(f"memory_saving_gradients:{advice}")
    if not saves and not plain_exceeds(reading, request, plan):
        raise _SavesNothing(plan)
    return apply(reading, plan, request)


class _SavesNothing(Exception):
    """A plan does not lower the peak."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan


def _decided(reading: Reading, request: Request) -> tuple[Reading, Plan, bool]:
    """The plan for a step, and whether it saves memory.

    If the batch size is not given, a plan that saves nothing at the nominal size may save memory at
    a larger one; so we try several.
    """
    anything_goes = reading.batch_size is not None and request.sizes.assumed
    if anything_goes and isinstance(request.budget, int):
        warn(
            "memory_saving_gradients: the batch size of the inputs is unknown, so memory_budget is "
            f"kept for a batch of {reading.batch_size}: say batch_size= together with memory_budget"
        )
        anything_goes = False
    if not anything_goes:
        plan = decide(reading, request)
        return reading, plan, is_worth_it(plan, reading, request.budget is not None)
    candidates: list[tuple[Reading, Plan, bool]] = []
    unmet: BudgetError | None = None
    for batch in (reading.batch_size, *_LARGER_BATCHES):
        try:
            sizes = InputSizes(batch)  # not `assumed`, so that a size the graph excludes raises
            if batch != reading.batch_size:
                reading = read(reading.step, request.cost_model, sizes)
            plan = decide(reading, request)
        except BudgetError as error:
            unmet = unmet or error
            continue
        except WrongSize:
            continue
        candidates.append((reading, plan, is_worth_it(plan, reading, request.budget is not None)))
        small, *others = _shares(plan)
        own = plan.peak_bytes / max(plan.baseline_peak_bytes, 1)
        if small <= 1 and own < _MUCH and max(others) <= _AS_GOOD * own:
            break
    if unmet and not candidates:
        raise unmet
    worth = [candidate for candidate in candidates if candidate[2]]
    return min(worth or candidates[:1], key=lambda candidate: math.prod(_shares(candidate[1])))


def _shares(plan: Plan) -> list[float]:
    """The peak of a plan as a share of the plain one, at small and large batches."""
    plans = [plan.at(batch) for batch in _BATCHES]
    return [plan.peak_bytes / max(plan.baseline_peak_bytes, 1) for plan in plans]


# If the batch size is not given: the sizes for which a plan should be good, the sizes that are
# tried besides the nominal one, the share of the plain peak below which a plan is good at its own
# size, and how much worse it may be at the others.
_BATCHES = (16, 128, 1024, 4096)
_LARGER_BATCHES = (1024, 4096)
_MUCH = 0.8
_AS_GOOD = 1.1


def _asks_for_branches(request: Request, reading: Reading) -> bool:
    """Whether the insides of branches are to be recomputed, too."""
    if request.plan:
        return (
            has_branches(reading)
            and request.plan.problem.fingerprint != reading.problem.fingerprint
        )
    return request.strategy == "memory" and request.budget is None and has_branches(reading)


def _plan_with_branches(step: BackwardPass, request: Request, before: Reading) -> Plan:
    """Applies a plan that recomputes inside branches as well, and returns it.

    Raises:
        _NoBetter: there is no budget, and the peak is not lower.
        BudgetError: there is a budget, and the plan misses it.
    """
    with tf_private.all_or_nothing():
        known = len(step.graph.get_operations())
        moved = recompute_inside(
            before, functools.partial(_rewrite_inside, step.runtime, request.most_runs)
        )
        added = step.graph.get_operations()[known:]
        reading = read(
            dataclasses.replace(step, new=step.new.union(added)),
            request.cost_model,
            request.sizes,
        )
        if isinstance(request.budget, float):
            request = dataclasses.replace(request, budget=in_bytes(request, before))
        plan = decide(reading, request)
        chosen = request.plan or request.budget is not None
        if not chosen and plan.peak_bytes >= decide(before, request).peak_bytes:
            raise _NoBetter
        rewrite(reading.in_order_of(plan.problem), plan.schedule, moved)
    return against_plain(plan, before, reading.problem)


class _NoBetter(Exception):
    """A changed step serves a request no better than the plain one."""


def _rewrite_inside(runtime: Runtime, most_runs: int, step: BackwardPass) -> None:
    """Plans and rewrites the step inside a branch, or in a round of a loop."""
    request = Request("memory", None, most_runs=most_runs)
    with contextlib.suppress(_SavesNothing):
        _plan_and_rewrite_one(dataclasses.replace(step, runtime=runtime), request)
