"""Chooses a plan for a reading and a request. Nothing is edited here."""

from __future__ import annotations

import dataclasses
import itertools
import math

from memory_saving_gradients.console.progress_bar import shown
from memory_saving_gradients.graph.tf_private import Refusal
from memory_saving_gradients.options.options import Request
from memory_saving_gradients.pipeline.answers import Question, answer
from memory_saving_gradients.pipeline.device_budget import in_bytes
from memory_saving_gradients.pipeline.why import unreachable
from memory_saving_gradients.planning.packing import allocated
from memory_saving_gradients.planning.problem import Problem, Schedule, baseline
from memory_saving_gradients.planning.search import UNBOUNDED
from memory_saving_gradients.planning.simulate import plain_peak, simulate
from memory_saving_gradients.plans.plan import Plan
from memory_saving_gradients.reading.read import Reading

# A plan is applied only if its peak is below this share of the plain one: predictions are no more
# accurate than that.
_WORTH_IT = 0.99

# The most schedules that are laid out for one budget, and the share of it that they should use.
_LAYOUTS = 4
_LEAST_USED = 0.97


class WrongPlan(Refusal, ValueError):
    """A given plan was made for another graph."""


def peak(reading: Reading, schedule: Schedule) -> int:
    return allocated(reading.problem, schedule)


def decide(reading: Reading, request: Request) -> Plan:
    """The plan for a step; raises `BudgetError` if it misses the budget.

    The ops of its problem are in the order of its schedule: see `Reading.in_order_of`.
    """
    budget = in_bytes(request, reading)
    schedule, given = _within(reading, request, budget)
    if budget is not None and peak(reading, schedule) > budget:
        raise unreachable(reading, schedule, budget, request.most_runs != UNBOUNDED, given)
    return _judged(reading, request, schedule, given, budget)


def plain(reading: Reading, request: Request, budget: int | None) -> Plan:
    """The plan that recomputes nothing, whatever the budget."""
    plan = _judged(reading, request, baseline(reading.problem), [], budget)
    return dataclasses.replace(plan, peak_bytes=plan.baseline_peak_bytes)


def against_plain(plan: Plan, before: Reading, now: Problem) -> Plan:
    """The plan of a changed step, with peak and overhead relative to the plain step.

    Args:
        plan: the plan.
        before: the plain step.
        now: the changed step, for which the plan was made.
    """
    added = float(now.costs.sum() / before.problem.costs.sum())
    return dataclasses.replace(
        plan,
        baseline_peak_bytes=plain_peak(before.problem),
        baseline_one_thread_bytes=before.one_thread,
        overhead=(1 + plan.overhead) * added - 1,
    )


def value(plan: Plan, request: Request, cost: float) -> tuple[float, ...]:
    """What a request wants to be low, to compare the plans of a step and of changed ones.

    Args:
        plan: the plan, relative to its own step.
        request: the request.
        cost: the cost of the plain step.
    """
    seconds = (1 + plan.overhead) * plan.problem.costs.sum() / cost
    if request.strategy == "budget":
        return (seconds, plan.peak_bytes)
    if request.strategy == "auto":
        return (seconds * plan.peak_bytes,)
    return (plan.peak_bytes, seconds)


def _judged(
    reading: Reading, request: Request, schedule: Schedule, given: list[str], budget: int | None
) -> Plan:
    ordered, moved, _ = reading.problem.in_order_of(schedule)
    reading = reading.in_order_of(ordered)
    plan = Plan.of(request.strategy, ordered, moved, given, budget)
    return dataclasses.replace(
        plan,
        batch_size=reading.batch_size,
        batch_assumed=reading.batch_size is not None and request.sizes.assumed,
        growing=reading.growing,
        baseline_one_thread_bytes=reading.one_thread,
        labels=reading.labels,
    )


def _within(reading: Reading, request: Request, budget: int | None) -> tuple[Schedule, list[str]]:
    """The schedule for a request, and the names of its given checkpoints.

    Planning counts the bytes alive. If tensors are laid out, they take more or less than that, so
    this plans for other numbers of bytes until the layout just fits the budget.
    """
    schedule, given = _schedule(reading, request, budget)
    problem = reading.problem
    if budget is None or request.plan or not problem.packed:
        return schedule, given
    tried: list[tuple[int, float, Schedule]] = []  # the excess, the cost
    while True:
        simulation = simulate(problem, schedule)
        size = allocated(problem, schedule, simulation)
        tried.append((max(0, size - budget), simulation.cost, schedule))
        is_plain = simulation.cost <= math.fsum(problem.costs)
        if size <= budget and (is_plain or size >= _LEAST_USED * budget):
            break
        if len(tried) == _LAYOUTS or size == 0:
            break
        schedule, _ = _schedule(reading, request, int(simulation.peak * budget / size))
    return min(tried, key=lambda one: one[:2])[2], given


def _schedule(reading: Reading, request: Request, budget: int | None) -> tuple[Schedule, list[str]]:
    """The schedule for a request, and the names of its given checkpoints."""
    problem = reading.problem
    if request.plan:
        _check_same(request.plan.problem, problem)
        index_of = {op.name: i for i, op in enumerate(problem.ops)}
        planned = [index_of[op.name] for op in request.plan.problem.ops]
        return [planned[i] for i in request.plan.schedule], list(request.plan.given)
    kept = [t for t in request.kept or () if reading.numbers_of(t.name)]
    tensors = frozenset(number for t in kept for number in reading.numbers_of(t.name))
    question = Question(
        problem.structure,
        request.strategy,
        None if request.kept is None else tensors,
        budget,
        request.max_overhead,
        request.most_runs,
    )
    return answer(question, problem, request.plan_cache), [t.name for t in kept]


def by_memory(plan: Plan) -> Plan | None:
    """The plan of "memory" for the same step, if the checkpoints were given; else None."""
    if plan.strategy not in ("collection", "list", "policy"):
        return None
    problem = plan.problem
    question = Question(problem.structure, "memory", None, None, None, UNBOUNDED)
    with shown(f'memory_saving_gradients: planning {len(problem.ops)} ops by "memory"'):
        return Plan.of("memory", problem, answer(question, problem))


def _check_same(planned: Problem, read: Problem) -> None:
    """Raises if a plan for one problem does not fit the other."""
    if planned.fingerprint == read.fingerprint:
        return
    pairs = itertools.zip_longest(planned.ops, read.ops)
    names = ((a and a.name, b and b.name) for a, b in pairs)
    ours, theirs = next(((a, b) for a, b in names if a != b), (None, None))
    where = (
        f'the plan has "{ours}" where the graph has "{theirs}"'
        if ours != theirs
        else "the ops have the same names but other shapes or connections"
    )
    raise WrongPlan(
        f"the plan was made for another graph: {where}. Make a new one, with checkpoints or a "
        "budget."
    )


def is_worth_it(plan: Plan, reading: Reading, budgeted: bool) -> bool:
    """Whether a plan saves enough memory to be applied."""
    if budgeted:
        return plan.peak_bytes < plan.baseline_peak_bytes
    least = min(plan.baseline_peak_bytes, reading.alternative_peak)
    return plan.peak_bytes < _WORTH_IT * least
