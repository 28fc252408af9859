"""Read, plan, rewrite: what every front door does once TensorFlow has differentiated."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from memory_saving_gradients.budgets import parse_budget, unreachable
from memory_saving_gradients.checkpoints import is_empty_collection, resolve
from memory_saving_gradients.graph.devices import check_device
from memory_saving_gradients.graph.read import Reading, read
from memory_saving_gradients.graph.rewrite import rewrite
from memory_saving_gradients.plan import Plan, record_plan
from memory_saving_gradients.planning.budget import UNBOUNDED, pinning, within
from memory_saving_gradients.planning.problem import Problem, Schedule, baseline
from memory_saving_gradients.planning.simulate import simulate
from memory_saving_gradients.planning.strategies import STRATEGIES, keep_given, without_expensive

# To say how low a budget may be, ever lower ones are tried in steps of this factor.
_A_LITTLE_LOWER = 0.97

logger = logging.getLogger("memory_saving_gradients")


@dataclasses.dataclass(frozen=True)
class Wish:
    """What the user asked for, checked as far as it can be before differentiation.

    Attributes:
        strategy: "memory", "speed", "collection", "list", "policy", or "budget" where the budget
            alone decides, or "plan".
        kept: the tensors to keep; None for a strategy that chooses by itself.
        budget: bytes (int), a share of the baseline peak (float), or None for no budget.
        most_runs: how often an op may run, with a budget.
        plan: the plan to apply; of the rest nothing counts then.
        device: the device to estimate costs for.
        cost_model: "analytical" or "measured".
    """

    strategy: str
    kept: list[tf.Tensor] | None
    budget: int | float | None = None
    most_runs: int = UNBOUNDED
    plan: Plan | None = None
    device: str = "cpu"
    cost_model: str = "analytical"

    @classmethod
    def of(
        cls,
        checkpoints: Any,
        forward: dict[str, tf.Operation],
        graph: tf.Graph,
        *,
        memory_budget: Any = None,
        max_recompute: int | None = None,
        plan: Plan | str | os.PathLike[str] | None = None,
        device: str = "cpu",
        cost_model: str = "analytical",
    ) -> Wish:
        """Checks the options of a front door; see `gradients` for what they mean."""
        check_device(device)
        if cost_model not in ("analytical", "measured"):
            raise ValueError(f'cost_model must be "analytical" or "measured", got {cost_model!r}')
        wish = cls("plan", None, device=device, cost_model=cost_model)
        if plan is not None:
            if checkpoints != "collection" or memory_budget is not None:
                raise ValueError("a plan decides all: leave out checkpoints and memory_budget")
            if not isinstance(plan, Plan | str | os.PathLike):
                raise TypeError(f"plan must be a Plan or the path of a saved one, got {plan!r}")
            return dataclasses.replace(
                wish, plan=plan if isinstance(plan, Plan) else Plan.load(plan)
            )
        if memory_budget is not None:
            most_runs = _most_runs(max_recompute)
            wish = dataclasses.replace(
                wish, budget=parse_budget(memory_budget), most_runs=most_runs
            )
            if checkpoints == "memory" or is_empty_collection(checkpoints, graph):
                return dataclasses.replace(wish, strategy="budget")
        elif max_recompute is not None:
            raise ValueError("max_recompute bounds what a memory_budget may do: give both")
        strategy, kept = resolve(checkpoints, forward, graph)
        return dataclasses.replace(wish, strategy=strategy, kept=kept)


def _most_runs(max_recompute: int | None) -> int:
    """How often an op may run that may be recomputed so often."""
    if max_recompute is None:
        return UNBOUNDED
    if isinstance(max_recompute, bool) or not isinstance(max_recompute, int):
        raise TypeError(f"max_recompute must be an int or None, got {max_recompute!r}")
    if max_recompute < 1:
        raise ValueError(f"max_recompute must be at least 1, got {max_recompute}")
    return max_recompute + 1


def save_memory(results: list[tf.Tensor], first_new: int, wish: Wish) -> None:
    """Rewrites a step that TensorFlow has just differentiated, if that lowers its peak.

    Args:
        results: the gradients, tensors of one graph.
        first_new: how many ops the graph had before it was differentiated.
        wish: what to plan.

    Raises:
        BudgetError: no plan within the budget was found; the graph is plain.
    """
    if not results:
        logger.info("%s: no y depends on any x, so there is nothing to recompute", wish.strategy)
        return
    began = time.perf_counter()
    with _no_garbage_collection():
        plan, saves = _plan_and_rewrite(results, first_new, wish)
    plan = dataclasses.replace(plan, seconds=time.perf_counter() - began)
    logger.info("%s%s", plan, "" if saves else " (not applied)")
    if saves or wish.budget is not None:
        record_plan(results[0].graph, plan)
    else:
        warnings.warn(_why_nothing_is_saved(plan), stacklevel=_callers_level())


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
    problem = reading.problem
    plain_peak = simulate(problem, baseline(problem)).peak
    budget = int(wish.budget * plain_peak) if isinstance(wish.budget, float) else wish.budget
    schedule, given = _schedule(reading, wish, budget)
    plan = Plan.of(wish.strategy, problem, schedule, given, budget)
    if budget is not None and plan.peak_bytes > budget:
        raise unreachable(problem, _lowest(reading, wish, schedule), budget)
    saves = plan.peak_bytes < plan.baseline_peak_bytes
    if saves:
        rewrite(reading, plan.schedule)
    return plan, saves


def _schedule(reading: Reading, wish: Wish, budget: int | None) -> tuple[Schedule, list[str]]:
    """The schedule that a wish leads to, and the names of the checkpoints that it gave."""
    problem = reading.problem
    if wish.plan:
        _check_same(wish.plan.problem, problem)
        return wish.plan.schedule, list(wish.plan.checkpoints)
    kept = [t for t in wish.kept or () if t.name in reading.tensor_of]
    tensors = {reading.tensor_of[t.name] for t in kept}
    names = [t.name for t in kept]
    if budget is not None:
        return within(_allowed(problem, wish, tensors), budget, wish.most_runs), names
    if wish.kept is not None:
        return keep_given(problem, tensors), names
    return STRATEGIES[wish.strategy](problem), names


def _lowest(reading: Reading, wish: Wish, schedule: Schedule) -> Schedule:
    """A schedule at which no slightly lower budget can be met, from one that missed a budget."""
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


def _allowed(problem: Problem, wish: Wish, kept: set[int]) -> Problem:
    """The problem in which only that may run twice which the wish allows."""
    if wish.strategy == "speed":
        return without_expensive(problem)
    return pinning(problem, kept)


def _callers_level() -> int:
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
        f"with {len(plan.recomputed)} ops recomputed: what is kept and what is alive at once in "
        "the largest stretch to recompute take as much as all activations together."
    )
