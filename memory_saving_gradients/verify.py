"""The proof of a plan, before the user's own run: a rehearsal, or a real run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

from memory_saving_gradients.budgets import BudgetError
from memory_saving_gradients.decide import decide
from memory_saving_gradients.graph import order, tf_private
from memory_saving_gradients.graph.read import Reading
from memory_saving_gradients.graph.rewrite import rewrite
from memory_saving_gradients.graph.shapes import Shapes
from memory_saving_gradients.graph.trace import CannotMeasure, stand_ins
from memory_saving_gradients.measure import session_peak
from memory_saving_gradients.options import Wish
from memory_saving_gradients.plan import Plan
from memory_saving_gradients.progress import shown
from memory_saving_gradients.warning import warn
from memory_saving_gradients.why import missed

# How often to plan again where a step takes more than the budget.
_ROUNDS = 3
# A budget that was missed is tightened by what it was missed by, and so much more.
_MARGIN = 0.99
# A rehearsal is no run: so far it may be off.
_TOLERANCE = 1.06


class _Missed(Exception):
    """The step took more than the budget."""


def apply(reading: Reading, plan: Plan, wish: Wish) -> Plan:
    """Rewrites a step by a plan that holds; plans anew where the first one does not.

    With `verify=True` a run is measured. Else, where there is a budget, the runtime rehearses the
    rewritten step; nothing runs. Without a budget, what that adds is part of the plan's peak.

    Args:
        reading: the step.
        plan: a plan for it.
        wish: what was asked for.

    Returns:
        The plan that was applied.

    Raises:
        BudgetError: no plan was found whose run keeps the budget; the graph is plain.
        CannotMeasure: the step cannot be run with stand-ins for inputs and variables.
    """
    runtime, budget = reading.step.runtime, plan.budget_bytes
    if wish.verify and runtime.runs_in_sessions:
        try:
            return _held(reading, plan, wish, budget, lambda plan, nodes: _measured(reading, plan))
        except CannotMeasure as error:
            if not reading.step.after:
                raise
            warn(f"memory_saving_gradients: this step and its updates are not measured: {error}")
    elif wish.verify:
        warn(
            "memory_saving_gradients: verify=True measures what TensorFlow's executor runs, and "
            "XLA runs this step: see measure.compiled_peak"
        )
    if budget is None:
        nodes = _rewrite(reading, plan)
        if not runtime.reorders(reading):
            return plan
        added = _added(reading, plan, nodes)
        if added <= (_TOLERANCE - 1) * plan.peak_bytes:
            return plan
        return dataclasses.replace(plan, peak_bytes=plan.peak_bytes + added)

    def rehearsed(plan: Plan, nodes: list[str]) -> tuple[int, Plan]:
        return plan.peak_bytes + _added(reading, plan, nodes), plan

    try:
        return _held(reading, plan, wish, int(budget * _TOLERANCE), rehearsed)
    except BudgetError as error:
        warn(
            f"memory_saving_gradients: with what TensorFlow makes of it, this step may take "
            f"{error.lowest_peak_bytes / 1e6:.1f} MB where {budget / 1e6:.1f} MB are allowed. "
            "verify=True measures it"
        )
        _rewrite(reading, plan)
        return plan


def _rewrite(reading: Reading, plan: Plan) -> list[str]:
    return rewrite(reading.in_order_of(plan.problem), plan.schedule)


def _added(reading: Reading, plan: Plan, nodes: list[str]) -> int:
    """The bytes that the runtime adds to the peak of a rewritten step."""
    ordered = reading.in_order_of(plan.problem)
    return ordered.step.runtime.rehearse(ordered, plan.schedule, nodes)


def _held(
    reading: Reading,
    plan: Plan,
    wish: Wish,
    most: int | None,
    proof: Callable[[Plan, list[str]], tuple[int, Plan]],
) -> Plan:
    """Rewrites the step by the first plan that a proof finds to take no more than `most` bytes.

    Args:
        reading: the step.
        plan: the first plan.
        wish: what was asked for.
        most: bytes, or None for any.
        proof: of a plan and the nodes that it runs gives the peak, and the plan with what it found.
    """
    budget, peaks = plan.budget_bytes, []
    for _ in range(_ROUNDS):
        with contextlib.suppress(_Missed), tf_private.all_or_nothing():
            found, proven = proof(plan, _rewrite(reading, plan))
            peaks.append(found)
            if most is not None and found > most:
                raise _Missed
            return dataclasses.replace(proven, budget_bytes=budget)
        allowed = int(plan.peak_bytes * (budget or 0) / peaks[-1] * _MARGIN)
        try:
            plan = decide(reading, dataclasses.replace(wish, budget=allowed))
        except BudgetError:
            break
    raise missed(reading, budget or 0, min(peaks))


def _measured(reading: Reading, plan: Plan) -> tuple[int, Plan]:
    """The peak of a run of the step as it is now, in bytes; the plan says it."""
    operations = order.dependencies(t.op for t in reading.step.results)
    shapes = Shapes([*operations], reading.sizes)
    with (
        shown("memory_saving_gradients: measuring a run"),
        stand_ins(reading.step, operations, shapes) as (session, fetches, fed),
    ):
        session.run(fetches, fed)
        peak = session_peak(session, fetches, fed)
    return peak, dataclasses.replace(plan, measured_peak_bytes=peak)
