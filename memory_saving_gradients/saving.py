"""Read, plan, rewrite: what every front door does once TensorFlow has differentiated."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from memory_saving_gradients.budgets import unreachable
from memory_saving_gradients.checkpoints import forward_operations
from memory_saving_gradients.graph import tf_private
from memory_saving_gradients.graph.branches import has_branches, recompute_inside
from memory_saving_gradients.graph.read import Reading, read
from memory_saving_gradients.graph.rewrite import as_differentiated, rewrite
from memory_saving_gradients.options import Options, Wish
from memory_saving_gradients.plan import Plan, record_plan
from memory_saving_gradients.planning.budget import pinning, within
from memory_saving_gradients.planning.problem import Problem, Schedule, baseline
from memory_saving_gradients.planning.search import restored
from memory_saving_gradients.planning.simulate import simulate
from memory_saving_gradients.planning.strategies import STRATEGIES, keep_given, without_expensive

# A plan that promises less than this is not applied: predictions are no better.
_WORTH_IT = 0.99

# To say how low a budget may be, ever lower ones are tried in steps of this factor.
_A_LITTLE_LOWER = 0.97

logger = logging.getLogger("memory_saving_gradients")


_under_way = threading.local()


def differentiate(
    call: Callable[[], Any], ys: Any, graph: tf.Graph, options: Options
) -> tuple[Any, Plan | None]:
    """Has TensorFlow differentiate, then rewrites what that made, if it lowers the peak.

    Args:
        call: differentiates in `graph`, the default graph; returns gradients in any structure.
        ys: what it differentiates: tensors in any structure.
        graph: the graph.
        options: what the user asks for.

    Returns:
        What `call` returned, and the plan that was applied; None if the graph is plain.

    Raises:
        BudgetError: no plan within the budget was found; the graph is plain.
    """
    graphs = _under_way.__dict__.setdefault("graphs", set())
    if graph in graphs:  # asked by a gradient function, whose ops belong to a larger backward pass
        return call(), None
    flat = tf.nest.flatten(ys, expand_composites=True)
    ours = [y for y in flat if tf.is_tensor(y) and getattr(y, "graph", None) is graph]
    forward = forward_operations(ours)
    wish = options.wish(forward, graph)
    first_new = len(graph.get_operations())
    graphs.add(graph)
    try:
        with as_differentiated(graph, forward):
            grads = call()
    finally:
        graphs.remove(graph)
    flat = tf.nest.flatten(grads, expand_composites=True)
    results = [t for t in flat if getattr(t, "graph", None) is graph]
    return grads, save_memory(results, first_new, wish)


def save_memory(results: list[tf.Tensor], first_new: int, wish: Wish) -> Plan | None:
    """Rewrites a step that TensorFlow has just differentiated, if that lowers its peak.

    Args:
        results: the gradients, tensors of one graph.
        first_new: how many ops the graph had before it was differentiated.
        wish: what to plan.

    Returns:
        The plan, if the graph keeps to it.

    Raises:
        BudgetError: no plan within the budget was found; the graph is plain.
    """
    if not results:
        logger.info("%s: no y depends on any x, so there is nothing to recompute", wish.strategy)
        return None
    began = time.perf_counter()
    with _no_garbage_collection():
        plan, saves = _plan_and_rewrite(results, first_new, wish)
    plan = dataclasses.replace(plan, seconds=time.perf_counter() - began)
    logger.info("%s%s", plan, "" if saves else " (not applied)")
    if saves or wish.budget is not None:
        record_plan(results[0].graph, plan)
        return plan
    warnings.warn(_why_nothing_is_saved(plan), stacklevel=callers_level())
    return None


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A graph is one large cycle; to walk through it again and again takes longer than planning."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _plan_and_rewrite(results: list[tf.Tensor], first_new: int, wish: Wish) -> tuple[Plan, bool]:
    """The plan, and whether it saves memory, so that it was applied."""
    reading = read(results, first_new, wish.device, wish.cost_model)
    if _asks_for_branches(wish, reading):
        with contextlib.suppress(_NoBetter):
            return _plan_with_branches(results, first_new, wish, reading), True
    plan = _plan(reading, wish)
    if wish.budget is None:
        least_peak = min(plan.baseline_peak_bytes, _peak(reading, reading.perhaps))
        saves = plan.peak_bytes < _WORTH_IT * least_peak
    else:
        saves = plan.peak_bytes < plan.baseline_peak_bytes
    if saves:
        rewrite(reading, plan.schedule)
    return plan, saves


def _asks_for_branches(wish: Wish, reading: Reading) -> bool:
    """Whether what is inside branches is to be recomputed, too."""
    if wish.plan:
        return (
            has_branches(reading) and wish.plan.problem.fingerprint != reading.problem.fingerprint
        )
    return wish.strategy == "memory" and wish.budget is None and has_branches(reading)


def _plan_with_branches(
    results: list[tf.Tensor], first_new: int, wish: Wish, plain: Reading
) -> Plan:
    """A plan that recomputes inside branches as well, applied; raises where that is no better."""
    with tf_private.all_or_nothing():
        moved = recompute_inside(plain, functools.partial(_rewrite_inside, wish.device))
        reading = read(results, first_new, wish.device, wish.cost_model)
        plan = _plan(reading, wish)
        if not wish.plan and plan.peak_bytes >= _plan(plain, wish).peak_bytes:
            raise _NoBetter
        rewrite(reading, plan.schedule, moved)
    added = reading.problem.costs.sum() / plain.problem.costs.sum()
    return dataclasses.replace(
        plan,
        baseline_peak_bytes=_peak(plain, baseline(plain.problem)),
        overhead=float((1 + plan.overhead) * added - 1),
    )


class _NoBetter(Exception):
    """To recompute inside branches does not lower the peak."""


def _rewrite_inside(device: str, results: list[tf.Tensor], first_new: int) -> None:
    """Plans and rewrites the step inside a branch."""
    reading = read(results, first_new, device)
    schedule = STRATEGIES["memory"](reading.problem)
    if _peak(reading, schedule) < _peak(reading, baseline(reading.problem)):
        rewrite(reading, schedule)


def _peak(reading: Reading, schedule: Schedule) -> int:
    return simulate(reading.problem, schedule).peak


def _plan(reading: Reading, wish: Wish) -> Plan:
    """The plan for a step; raises `BudgetError` if it misses the budget."""
    problem = reading.problem
    budget = wish.budget
    if isinstance(budget, float):
        budget = int(budget * _peak(reading, baseline(problem)))
    schedule, given = _schedule(reading, wish, budget)
    if budget is not None and _peak(reading, schedule) > budget:
        lowest = _lowest(reading, wish)
        if _peak(reading, lowest) > budget:
            raise unreachable(problem, lowest, budget)
        schedule = restored(problem, lowest, budget)
    return Plan.of(wish.strategy, problem, schedule, given, budget)


def _schedule(reading: Reading, wish: Wish, budget: int | None) -> tuple[Schedule, list[str]]:
    """The schedule that a wish leads to, and the names of the checkpoints that it gave."""
    problem = reading.problem
    if wish.plan:
        _check_same(wish.plan.problem, problem)
        return wish.plan.schedule, list(wish.plan.checkpoints)
    kept = [t for t in wish.kept or () if t.name in reading.tensor_of]
    tensors = None if wish.kept is None else frozenset(reading.tensor_of[t.name] for t in kept)
    question = _Question(problem.structure, wish.strategy, tensors, budget, wish.most_runs, problem)
    return _answer(question), [t.name for t in kept]


@dataclasses.dataclass(frozen=True)
class _Question:
    """What a planner is asked; equal for two problems that differ in names alone."""

    structure: str
    strategy: str
    kept: frozenset[int] | None
    budget: int | None
    most_runs: int
    problem: Problem = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=4)
def _answer(question: _Question) -> Schedule:
    """The schedule; replicas of a model, and a graph that is traced again, get the same one."""
    problem, kept = question.problem, question.kept
    if question.budget is not None:
        allowed = (
            without_expensive(problem)
            if question.strategy == "speed"
            else pinning(problem, set(kept or ()))
        )
        return within(allowed, question.budget, question.most_runs)
    if kept is not None:
        return keep_given(problem, set(kept))
    return STRATEGIES[question.strategy](problem)


def _lowest(reading: Reading, wish: Wish) -> Schedule:
    """A schedule at which no slightly lower budget can be met.

    It is the same whatever budget was missed: its peak, given as a budget, is met.
    """
    schedule, _ = _schedule(reading, wish, 0)
    while True:
        peak = simulate(reading.problem, schedule).peak
        lower, _ = _schedule(reading, wish, int(_A_LITTLE_LOWER * peak))
        if simulate(reading.problem, lower).peak >= peak:
            return schedule
        schedule = lower


def _check_same(planned: Problem, read: Problem) -> None:
    """Raises if a plan for one problem is not one for the other."""
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
    raise ValueError(
        f"the plan was made for another graph: {where}. Plan anew, with checkpoints or a budget."
    )


def callers_level() -> int:
    """The `stacklevel` of the user's own line, for a warning of the function that asks."""
    inside = os.path.dirname(__file__), os.path.dirname(tf.__file__)
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    return level


def _why_nothing_is_saved(plan: Plan) -> str:
    problem = plan.problem
    peak = plan.baseline_peak_bytes / 1e6
    intro = (
        f'memory_saving_gradients: checkpoints="{plan.strategy}" saves nothing here, so the graph '
        "stays as tf.gradients leaves it. "
    )
    if not any(not op.pinned and not op.backward and op.outputs for op in problem.ops):
        return intro + (
            "The backward pass reads no activation that could be computed twice: all of them come "
            "from inputs, variables, or ops with state."
        )
    return intro + (
        f"The predicted peak is {peak:.1f} MB as it is and would be {plan.peak_bytes / 1e6:.1f} MB "
        f"with {len(plan.recomputed)} ops recomputed. What is kept and what is alive at once in "
        "the largest stretch to recompute take as much as all activations together, or as those "
        "of one loss, where several do not wait for one another."
    )
