"""Checks a plan before the user's own run: by a rehearsal, a real run, or XLA's compiler."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable

import tensorflow as tf

from memory_saving_gradients.console.progress_bar import shown
from memory_saving_gradients.console.warning import warn
from memory_saving_gradients.graph import order, tf_private
from memory_saving_gradients.graph.shapes import Shapes
from memory_saving_gradients.measure import available_bytes, session_peak, step_peak
from memory_saving_gradients.options.budgets import BudgetError
from memory_saving_gradients.options.options import Request
from memory_saving_gradients.pipeline import fitting
from memory_saving_gradients.pipeline.decide import decide, plain
from memory_saving_gradients.pipeline.why import missed
from memory_saving_gradients.planning.simulate import plain_peak
from memory_saving_gradients.planning.units import format_bytes
from memory_saving_gradients.plans.plan import Plan
from memory_saving_gradients.proving.compiler import CannotCompile
from memory_saving_gradients.reading.copied import copied
from memory_saving_gradients.reading.measured_costs import CannotMeasure, stand_ins
from memory_saving_gradients.reading.read import Reading
from memory_saving_gradients.rewriting.rehearsal import added_bytes

# The most plans that are tried if a step exceeds the budget.
_ROUNDS = 3
# After a miss, the budget is scaled down by the ratio of the miss, and by this factor.
_MARGIN = 0.99
# The allocator and the process agree within this share, and within the usual noise of a process.
_AGREE = 0.1
_NOISE = 8 * 2**20
# If no plan is predicted to keep a budget, a plan within this factor of it is measured.
_PERHAPS = 1.25
# A rehearsal is less accurate than a run: it may exceed the budget by this factor.
_TOLERANCE = 1.06

logger = logging.getLogger("memory_saving_gradients")


def apply(reading: Reading, plan: Plan, request: Request) -> Plan:
    """Rewrites a step by a plan, checks it, and plans again if it misses the budget.

    With `verify=True` we measure a run, or compile the step if XLA will compile it. Without it, if
    there is a budget, we simulate what the runtime makes of the rewritten step; nothing runs.

    Args:
        reading: the step.
        plan: a plan for it.
        request: the user's request.

    Returns:
        The plan that was applied.

    Raises:
        BudgetError: no plan was found that keeps the budget; the graph is plain.
        CannotMeasure: the step cannot be run with stand-ins for inputs and variables.
    """
    runtime, budget = reading.step.runtime, plan.budget_bytes
    if not runtime.runs_in_sessions:
        return _compiled(reading, plan, request)
    if request.verify:
        try:
            return _first_proven(
                reading,
                copied(reading),
                plan,
                request,
                budget,
                lambda rewritten, plan, nodes: _measured(rewritten, plan),
            )
        except CannotMeasure as error:
            if not reading.step.after:
                raise
            warn(
                "memory_saving_gradients: this step was not measured together with its updates: "
                f"{error}"
            )
    if budget is None:
        fitting.follow(reading, plan)
        return plan

    try:
        # In place: nearly all plans pass, and a copy takes long.
        most = int(budget * _TOLERANCE)
        return _first_proven(reading, reading, plan, request, most, _rehearsed)
    except BudgetError as error:
        warn(
            "memory_saving_gradients: after TensorFlow's own graph optimisations, this step may "
            f"take {format_bytes(error.lowest_peak_bytes)} where {format_bytes(budget)} are "
            "allowed. verify=True measures it"
        )
        fitting.follow(reading, plan)
        return plan


def _compiled(reading: Reading, plan: Plan, request: Request) -> Plan:
    """Rewrites a step that XLA compiles.

    With `verify=True`, or with a budget if the step compiles quickly, we ask the compiler how much
    it allocates, and adjust the plan to use the whole budget. A budget that is a share is then a
    share of what XLA allocates for the plain step.
    """
    soon = plan.budget_bytes is not None and fitting.compiles_soon(reading, request)
    if request.verify or soon:
        try:
            return fitting.fit(reading, plan, request)
        except CannotCompile as error:
            if request.verify:
                raise CannotMeasure(str(error)) from error
            logger.info("this step's budget is only checked by prediction: %s", error)
    fitting.follow(reading, plan)
    return plan


def _rehearsed(rewritten: Reading, plan: Plan, nodes: list[str]) -> tuple[int, Plan]:
    """The peak of a step as the runtime optimises it, in bytes, and the plan."""
    ordered = rewritten.in_order_of(plan.problem)
    return plan.peak_bytes + added_bytes(ordered, plan.schedule, nodes), plan


def _first_proven(
    reading: Reading,
    tried_on: Reading,
    plan: Plan,
    request: Request,
    most: int | None,
    proof: Callable[[Reading, Plan, list[str]], tuple[int, Plan]],
) -> Plan:
    """Rewrites the step by the first plan that is proven to need at most `most` bytes.

    Args:
        reading: the step.
        tried_on: the step or a copy of it, on which plans are tried.
        plan: the first plan.
        request: the user's request.
        most: bytes, or None for any.
        proof: called with that step, rewritten by a plan, the plan, and the names of its runs;
            returns the peak, and the plan with the result recorded.
    """
    budget = plan.budget_bytes
    tried: list[tuple[int, Plan]] = []
    for _ in range(_ROUNDS):
        with tf_private.all_or_nothing() as edits:
            peak, proven = proof(tried_on, plan, fitting.follow(tried_on, plan))
            is_kept = most is None or peak <= most
            if not is_kept or tried_on is not reading:
                tf_private.take_back(edits)
        if is_kept:
            if tried_on is not reading:
                fitting.follow(reading, plan)
            return dataclasses.replace(proven, budget_bytes=budget)
        tried.append((peak, proven))
        allowed = int(plan.peak_bytes * (budget or 0) / peak * _MARGIN)
        try:
            plan = decide(reading, dataclasses.replace(request, budget=allowed))
        except BudgetError:
            break
    lowest, plan = min(tried, key=lambda pair: pair[0])
    raise missed(reading, budget or 0, lowest, plan)


def by_measurement(reading: Reading, request: Request, error: BudgetError) -> Plan | None:
    """Looks for a plan that keeps a budget as measured, if none does as predicted.

    We measure the plain step, and then the plan of the lowest predicted peak, if that is close.

    Args:
        reading: the step.
        request: the user's request.
        error: the error of the prediction.

    Returns:
        The plan that was applied; None if no run keeps the budget, or none can be measured.
    """
    budget = error.budget_bytes
    on_cpu = reading.step.runtime.runs_in_sessions and not tf.config.list_physical_devices("GPU")
    if not on_cpu or not _has_room(reading):
        return None
    try:
        unchanged = plain(reading, request, budget)
        peak, plan = _measured(reading, unchanged)
        if peak <= budget:
            warn(_kept_by_run(error, "the plain step, which stays as it is,", peak))
            return plan
        if request.verify or error.lowest_peak_bytes > _PERHAPS * budget:
            return None
        lowest = decide(reading, dataclasses.replace(request, budget=error.lowest_peak_bytes))
        copy = copied(reading)
        fitting.follow(copy, lowest)
        peak, plan = _measured(copy, lowest)
        if peak > budget:
            return None
        fitting.follow(reading, lowest)
        warn(_kept_by_run(error, "the plan of that peak", peak))
        return dataclasses.replace(plan, budget_bytes=budget)
    except Exception as unexpected:  # the caller raises the original error instead
        logger.info("this step is not measured: %s", unexpected)
        return None


def _kept_by_run(error: BudgetError, what: str, peak: int) -> str:
    return (
        f"memory_saving_gradients: memory_budget of {format_bytes(error.budget_bytes)} is kept by "
        "no plan as predicted: the lowest predicted peak is "
        f"{format_bytes(error.lowest_peak_bytes)}. "
        f"But {what} takes {format_bytes(peak)}, as measured"
    )


def _has_room(reading: Reading) -> bool:
    """Whether this machine has memory for the plain step, even at twice its predicted peak."""
    with contextlib.suppress(OSError):
        return 2 * plain_peak(reading.problem) < available_bytes()
    return False


def _measured(reading: Reading, plan: Plan) -> tuple[int, Plan]:
    """The measured peak of a run of the step as it is now, in bytes, and the plan with it.

    It is the larger one of the memory requested from TensorFlow's allocator and the growth of the
    process: oneDNN's allocator returns chunks that can be nearly twice as large as requested.
    Without oneDNN, tensors are in the C library's heap, and the growth of the process depends on
    what it ran before, so we do not use it.
    """
    operations = order.needed(t.op for t in reading.step.results)
    shapes = Shapes([*operations], reading.sizes)
    with (
        shown("memory_saving_gradients: measuring a run"),
        stand_ins(reading.step, operations, shapes) as (session, fetches, fed),
    ):
        session.run(fetches, fed)
        asked = session_peak(session, fetches, fed)
        grown = asked
        if tf_private.onednn_enabled():
            with contextlib.suppress(OSError):  # the system does not provide it
                grown = step_peak(functools.partial(session.run, fetches, fed))
    agree = abs(grown - asked) <= max(_AGREE * asked, _NOISE)
    return asked if agree else max(asked, grown), dataclasses.replace(
        plan, measured_peak_bytes=asked, process_peak_bytes=None if agree else grown
    )
