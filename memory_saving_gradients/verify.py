"""One real run of the rewritten step: the proof of a plan, before the user's own run."""

from __future__ import annotations

import contextlib
import dataclasses

from memory_saving_gradients.budgets import BudgetError
from memory_saving_gradients.decide import decide
from memory_saving_gradients.graph import order, tf_private
from memory_saving_gradients.graph.read import Reading
from memory_saving_gradients.graph.rewrite import rewrite
from memory_saving_gradients.graph.shapes import Shapes
from memory_saving_gradients.graph.trace import stand_ins
from memory_saving_gradients.measure import session_peak
from memory_saving_gradients.options import Wish
from memory_saving_gradients.plan import Plan
from memory_saving_gradients.progress import shown
from memory_saving_gradients.warning import warn
from memory_saving_gradients.why import missed

# How often to plan again where the run takes more than the budget.
_ROUNDS = 3
# A budget that was missed is tightened by what it was missed by, and so much more.
_MARGIN = 0.99


class _Missed(Exception):
    """The run took more than the budget."""


def verified(reading: Reading, plan: Plan, wish: Wish) -> Plan:
    """Rewrites a step by a plan, and measures a run; plans anew where that misses the budget.

    Args:
        reading: the step.
        plan: a plan for it.
        wish: what was asked for.

    Returns:
        The plan that was applied, with its `measured_peak_bytes`.

    Raises:
        BudgetError: no plan was found whose run keeps the budget; the graph is plain.
        CannotMeasure: the step cannot be run with stand-ins for inputs and variables.
    """
    if not reading.step.runtime.runs_in_sessions:
        warn(
            "memory_saving_gradients: verify=True measures what TensorFlow's executor runs, and "
            "XLA runs this step: see measure.compiled_peak"
        )
        rewrite(reading, plan.schedule)
        return plan
    budget = plan.budget_bytes
    peaks: list[int] = []
    for _ in range(_ROUNDS):
        with contextlib.suppress(_Missed), tf_private.all_or_nothing():
            rewrite(reading, plan.schedule)
            with shown("memory_saving_gradients: measuring a run"):
                peaks.append(_measured(reading))
            if budget is not None and peaks[-1] > budget:
                raise _Missed
            return dataclasses.replace(plan, budget_bytes=budget, measured_peak_bytes=peaks[-1])
        allowed = int(plan.peak_bytes * (budget or 0) / peaks[-1] * _MARGIN)
        try:
            plan = decide(reading, dataclasses.replace(wish, budget=allowed))
        except BudgetError:
            break
    raise missed(reading, budget or 0, min(peaks))


def _measured(reading: Reading) -> int:
    """The peak of a run of the step as it is now, in bytes."""
    operations = order.dependencies(t.op for t in reading.step.results)
    shapes = Shapes([*operations], reading.sizes)
    with stand_ins(reading.step.results, operations, shapes) as (session, fetches, fed):
        session.run(fetches, fed)
        return session_peak(session, fetches, fed)
