"""The plan that fits a budget best by the report of XLA's own compiler."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from memory_saving_gradients.console.progress_bar import shown
from memory_saving_gradients.console.warning import warn
from memory_saving_gradients.graph import tf_private
from memory_saving_gradients.graph.shapes import InputSizes
from memory_saving_gradients.options.budgets import BudgetError
from memory_saving_gradients.options.options import Request
from memory_saving_gradients.pipeline.decide import decide
from memory_saving_gradients.pipeline.why import missed
from memory_saving_gradients.planning.simulate import simulate
from memory_saving_gradients.planning.stretches import fewer_stretches
from memory_saving_gradients.planning.units import format_bytes
from memory_saving_gradients.plans.plan import Plan
from memory_saving_gradients.proving import compiler
from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.reading.copied import copied
from memory_saving_gradients.reading.read import Reading
from memory_saving_gradients.rewriting.rewrite import behind_gates, rewrite

# The most plans that are compiled before the one of "memory" is tried.
_ROUNDS = 3
# The share of a budget that a compiled step should use, and the factor by which it may exceed it.
_LEAST_USED = 0.95
_NEARLY = 1.02
# XLA hardly allocates more than so many times what is predicted for a plain step.
_AT_MOST = 3
# Recomputation is moved earlier, to save gates, only where at most this share of the peak is alive:
# predictions are not accurate enough to go closer.
_EARLY = 0.9
# A step of at most this many ops compiles in about a quarter of a minute.
_SOON = 10_000


def compiles_soon(reading: Reading, request: Request) -> bool:
    """Whether the compiler is there, and does not take long for the step."""
    return len(reading.step.needed) <= _SOON and compiler.is_installed(request.device)


def allocated_for_plain(reading: Reading, request: Request) -> int | None:
    """The bytes that XLA allocates for the plain step, with `verify=True` or for a share of them.

    None if its compiler is not asked, or if the size of the batch is not known yet.
    """
    if _any_batch(reading, request) or not _asks_for_plain(request):
        return None
    return _allocated_for_plain(reading, request)


def _any_batch(reading: Reading, request: Request) -> bool:
    return reading.batch_size is not None and request.sizes.assumed


def _asks_for_plain(request: Request) -> bool:
    return request.verify or isinstance(request.budget, float)


def plain_exceeds(reading: Reading, request: Request, plan: Plan) -> bool:
    """Whether XLA allocates more for the plain step than the budget of a plan that changes nothing.

    Its compiler is asked if it compiles the step, and soon, and if that is not out of question.
    """
    budget = plan.budget_bytes
    if budget is None or _AT_MOST * plan.baseline_peak_bytes < budget:
        return False
    return (_allocated_for_plain(reading, request) or 0) > _NEARLY * budget


def _allocated_for_plain(reading: Reading, request: Request) -> int | None:
    """The bytes that XLA allocates for the plain step; None if its compiler is not asked."""
    asked = request.verify or compiles_soon(reading, request)
    if asked and not reading.step.runtime.runs_in_sessions:
        with contextlib.suppress(compiler.CannotCompile):  # it is told when a plan is checked
            return temporary_bytes(reading.step, reading.sizes, request.device)
    return None


def follow(reading: Reading, plan: Plan) -> list[str]:
    """Rewrites a step by a plan; returns the names of what runs, in order."""
    return rewrite(reading.in_order_of(plan.problem), plan.schedule)


def fit(reading: Reading, plan: Plan, request: Request) -> Plan:
    """Rewrites a step by the plan that fits a budget best by XLA's own report, and returns it.

    Without a budget it is the given one, with what XLA allocates for it.

    Args:
        reading: the step.
        plan: the first plan.
        request: the user's request. A budget that is a share is one of what XLA allocates for the
            plain step.

    Raises:
        BudgetError: `verify=True`, and no plan was found that keeps the budget.
        CannotCompile: the compiler refuses the step.
    """
    budget, plain = plan.budget_bytes, None
    if _any_batch(reading, request) and _asks_for_plain(request):  # at the batch of this plan
        plain = temporary_bytes(reading.step, reading.sizes, request.device)
        budget = int(request.budget * plain) if isinstance(request.budget, float) else budget
    target = compiler.target(request.device)
    copy = copied(reading)

    def compiled(plan: Plan) -> Plan:
        plan = plan if budget is None else _with_fewer_gates(plan)
        with tf_private.undone():
            follow(copy, plan)
            allocated = temporary_bytes(copy.step, reading.sizes, request.device)
        return dataclasses.replace(
            plan,
            compiled_peak_bytes=allocated,
            baseline_compiled_bytes=plain,
            compiled_for=target,
            budget_bytes=budget,
        )

    chosen = _best(reading, _tried(reading, plan, request, compiled), request, budget)
    follow(reading, chosen)
    return chosen


def _best(reading: Reading, tried: Sequence[Plan], request: Request, budget: int | None) -> Plan:
    """The plan that serves a request best by what XLA allocates; raises `BudgetError`."""
    lowest = min(tried, key=_compiled_peak)
    if budget is None:
        return lowest
    fitting = [candidate for candidate in tried if _compiled_peak(candidate) <= _NEARLY * budget]
    if fitting:
        return min(fitting, key=lambda candidate: candidate.overhead)
    if request.verify:
        raise missed(reading, budget, _compiled_peak(lowest), lowest)
    warn(
        f"memory_saving_gradients: XLA's compiler for {lowest.compiled_for} allocates "
        f"{format_bytes(_compiled_peak(lowest))} for this step where {format_bytes(budget)} are "
        "allowed. verify=True makes that an error"
    )
    return lowest


def _tried(
    reading: Reading, plan: Plan, request: Request, compiled: Callable[[Plan], Plan]
) -> list[Plan]:
    """Some plans as compiled: the given one, then others whose predicted peak is adjusted.

    Args:
        reading: the step.
        plan: the first plan.
        request: the user's request.
        compiled: compiles a copy of the step, rewritten by a plan.
    """
    tried = [compiled(plan)]
    while (allowed := _next_peak(tried)) is not None:
        try:
            plan = decide(reading, dataclasses.replace(request, budget=allowed))
        except BudgetError:
            break
        tried.append(compiled(plan))
    if request.strategy == "budget" and not any(map(_fits, tried)):  # that of "memory" may fit
        by_memory = decide(reading, dataclasses.replace(request, strategy="memory", budget=None))
        tried.append(compiled(dataclasses.replace(by_memory, strategy=request.strategy)))
    return tried


def _next_peak(tried: list[Plan]) -> int | None:
    """The predicted peak to plan for next; None if the plans so far are enough."""
    budget, size = tried[-1].budget_bytes, _compiled_peak(tried[-1])
    if budget is None or len(tried) == _ROUNDS:
        return None
    least = _LEAST_USED * budget if tried[-1].overhead > 0 else 0
    fits = least <= size <= _NEARLY * budget
    return None if fits else int(tried[-1].peak_bytes * budget / max(size, 1))


def _with_fewer_gates(plan: Plan) -> Plan:
    """The plan with stretches of recomputation joined where few bytes are alive."""
    most = int(_EARLY * simulate(plan.problem, plan.schedule).peak)
    schedule = fewer_stretches(plan.problem, plan.schedule, most)
    if tuple(schedule) == plan.schedule:
        return plan
    judged = Plan.of(plan.strategy, plan.problem, schedule, plan.given)
    return dataclasses.replace(
        plan,
        schedule=judged.schedule,
        peak_bytes=judged.peak_bytes,
        overhead=judged.overhead,
        checkpoints=judged.checkpoints,
        recomputed=judged.recomputed,
    )


def _compiled_peak(plan: Plan) -> int:
    return plan.compiled_peak_bytes or 0


def _fits(plan: Plan) -> bool:
    return plan.budget_bytes is None or _compiled_peak(plan) <= _NEARLY * plan.budget_bytes


def temporary_bytes(step: BackwardPass, sizes: InputSizes, device: str) -> int:
    """The bytes that XLA allocates for a step as it is now, if its inputs have these sizes."""
    with shown(f"memory_saving_gradients: compiling {len(step.needed)} ops"), tf.init_scope():
        returned = [*map(behind_gates, (step.target, *step.results))]
        function, inputs = compiler.as_function(step, returned, sizes)
        return compiler.temporary_bytes(function, inputs, device)
