"""Read, plan, rewrite: what every front door does once TensorFlow has differentiated.

In a `tf.function` that waits for the end of the trace. Then the whole step is known: all backward
passes, what is computed beside them, and the control dependencies that TensorFlow adds.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import gc
import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from memory_saving_gradients.budgets import BudgetError
from memory_saving_gradients.checkpoints import forward_operations
from memory_saving_gradients.decide import (
    WrongPlan,
    decide,
    is_worth_it,
    peak,
)
from memory_saving_gradients.graph import tf_private
from memory_saving_gradients.graph.backward import (
    BackwardPass,
    share_activations,
    whole_step,
    with_updates,
)
from memory_saving_gradients.graph.branches import has_branches, recompute_inside
from memory_saving_gradients.graph.joins import taken_apart
from memory_saving_gradients.graph.read import Reading, read
from memory_saving_gradients.graph.rewrite import as_differentiated, rewrite
from memory_saving_gradients.graph.runtimes.runtime import Runtime
from memory_saving_gradients.graph.shapes import WrongSize
from memory_saving_gradients.graph.trace import CannotMeasure
from memory_saving_gradients.options import Options, Wish
from memory_saving_gradients.plan import Plan, record_plan
from memory_saving_gradients.planning.simulate import plain_peak
from memory_saving_gradients.planning.strategies import STRATEGIES, WHAT
from memory_saving_gradients.progress import shown
from memory_saving_gradients.verify import apply
from memory_saving_gradients.warning import warn
from memory_saving_gradients.why import (
    saves_little,
    why_little_is_saved,
    why_nothing_is_saved,
)

#: The environment variable that makes our own errors end the step. Tests set it.
STRICT = "MEMORY_SAVING_GRADIENTS_STRICT"

logger = logging.getLogger("memory_saving_gradients")

#: What takes back edits of a graph, oldest first.
Edits: TypeAlias = list[Callable[[], object]]

# `graphs`: those that are being differentiated; `last`: the last step of a v1 graph, and the edits.
_under_way = threading.local()

_looked_at: contextvars.ContextVar[list[tuple[BackwardPass, Wish]] | None]
_looked_at = contextvars.ContextVar("looked_at", default=None)


@dataclasses.dataclass(frozen=True, eq=False)
class _Asked:
    """One call of a front door.

    Attributes:
        backward: what TensorFlow made.
        wish: what to plan for it.
        replica: the replica that it belongs to, under a distribution strategy.
        planned: called with the plan, if one was applied.
    """

    backward: BackwardPass
    wish: Wish
    replica: Any
    planned: Callable[[Plan], object]


def differentiate(
    call: Callable[[], Any],
    ys: Any,
    graph: tf.Graph,
    options: Options,
    planned: Callable[[Plan], object] = lambda plan: None,
) -> Any:
    """Has TensorFlow differentiate, and what that made rewritten, if it lowers the peak.

    In a `tf.function` it is rewritten when the trace ends.

    Args:
        call: differentiates in `graph`, the default graph; returns gradients in any structure.
        ys: what it differentiates: tensors in any structure.
        graph: the graph.
        options: what the user asks for.
        planned: called with the plan, if one is applied.

    Returns:
        What `call` returned.

    Raises:
        BudgetError: no plan within the budget was found; the graph is plain. In a `tf.function`
            the trace ends with it.
    """
    graphs = _under_way.__dict__.setdefault("graphs", set())
    if graph in graphs:  # asked by a gradient function, whose ops belong to a larger backward pass
        return call()
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
    results = _tensors(grads, graph)
    if not results:
        logger.info("%s: no y depends on any x, so there is nothing to recompute", wish.strategy)
        return grads
    asked = _Asked(
        BackwardPass.since(first_new, ours[0], results, wish.device),
        wish,
        tf.distribute.get_replica_context(),
        planned,
    )
    if tf_private.at_end_of_trace(graph, _finish_trace, asked):
        return grads
    moved = _save_memory([asked])
    return tf.nest.map_structure(
        lambda t: moved.get(getattr(t, "name", ""), t), grads, expand_composites=True
    )


def _tensors(grads: Any, graph: tf.Graph) -> list[tf.Tensor]:
    """The tensors of a graph in gradients of any structure."""
    flat = tf.nest.flatten(grads, expand_composites=True)
    return [t for t in flat if getattr(t, "graph", None) is graph]


def plan_updates(updates: tf.Operation) -> None:
    """Plans the last step of a v1 graph anew, with the ops that update its variables.

    Args:
        updates: what an optimizer made of the gradients.
    """
    last, _under_way.last = getattr(_under_way, "last", None), None
    if last is None or last[0].backward.graph is not updates.graph:
        return
    asked, edits = last
    step = with_updates(asked.backward, updates)
    if step.after.isdisjoint(r for t in step.results for r in t.consumers()):
        return
    for take_back in reversed(edits):
        take_back()
    _save_memory([dataclasses.replace(asked, backward=step)])
    _under_way.last = None


def _finish_trace(asked: list[_Asked]) -> None:
    """Rewrites the step that has been traced."""
    traced = [
        dataclasses.replace(one, backward=dataclasses.replace(one.backward, traced=True))
        for one in asked
    ]
    if traced:
        _save_memory(traced)


def _save_memory(asked: Sequence[_Asked]) -> dict[str, tf.Tensor]:
    """Rewrites a step, if that lowers its peak; an error leaves it plain.

    Returns:
        The tensors that take the place of gradients, by the name of those.

    Raises:
        BudgetError: no plan within a budget was found.
        WrongPlan: a plan that was given is one for another graph.
        WrongSize: the batch size that was given contradicts the graph.
        CannotMeasure: costs were to be measured, and the step cannot be run for it.
    """
    graph = asked[0].backward.graph
    looked_at = _looked_at.get()
    if looked_at is not None:
        looked_at += [(one.backward, one.wish) for one in _joined(asked)]
        return {}
    try:
        with _no_garbage_collection(), graph.as_default(), tf_private.all_or_nothing():
            outcomes = list(_plan_and_rewrite(_joined(asked)))
    except (BudgetError, WrongPlan, WrongSize, CannotMeasure):
        raise
    except Exception as error:
        if os.environ.get(STRICT):
            raise
        warn(_what_broke(error))
        return {}
    moved: dict[str, tf.Tensor] = {}
    _under_way.last = None
    for one, step, plan, saves, edits in outcomes:
        if not step.traced:
            _under_way.last = dataclasses.replace(one, backward=step), edits
        pairs = zip(one.backward.results, step.results, strict=True)
        moved |= {before.name: after for before, after in pairs if before is not after}
        chosen = WHAT.get(plan.strategy, "")
        logger.info("%s%s%s", plan, "" if saves else " (not applied)", chosen and f"; {chosen}")
        if saves or one.wish.budget is not None:
            record_plan(graph, plan)
            one.planned(plan)
            if saves_little(plan):
                warn(why_little_is_saved(plan))
        else:
            warn(why_nothing_is_saved(plan))
    return moved


@contextlib.contextmanager
def looking() -> Iterator[list[tuple[BackwardPass, Wish]]]:
    """Within it, what is traced in this thread stays plain, and is put into the list instead."""
    found: list[tuple[BackwardPass, Wish]] = []
    token = _looked_at.set(found)
    try:
        yield found
    finally:
        _looked_at.reset(token)


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


def _joined(asked: Sequence[_Asked]) -> list[_Asked]:
    """The backward passes that are planned apart: those of one forward pass are planned as one."""
    groups: list[_Asked] = []
    for one in asked:
        for i, other in enumerate(groups):
            if _go_together(other, one):
                groups[i] = dataclasses.replace(
                    other,
                    backward=other.backward.joined(one.backward),
                    planned=functools.partial(_call_each, {other.planned: None, one.planned: None}),
                )
                break
        else:
            groups.append(one)
    if groups[0].backward.traced and groups[0].backward.runtime.obeys_control_edges:
        passes = whole_step([one.backward for one in groups])
        groups = [
            dataclasses.replace(one, backward=backward)
            for one, backward in zip(groups, passes, strict=True)
        ]
    return groups


def _go_together(one: _Asked, other: _Asked) -> bool:
    choose_alike = (
        one.wish.strategy in (*STRATEGIES, "budget", "overhead") and one.wish == other.wish
    )
    return (
        one.backward.traced
        and choose_alike
        and one.replica is other.replica
        and not one.backward.hangs_off(other.backward)
        and not other.backward.hangs_off(one.backward)
        and share_activations(one.backward, other.backward)
    )


def _call_each(functions: Iterable[Callable[[Plan], object]], plan: Plan) -> None:
    for function in functions:
        function(plan)


def _plan_and_rewrite(
    groups: Sequence[_Asked],
) -> Iterator[tuple[_Asked, BackwardPass, Plan, bool, Edits]]:
    """Each backward pass, as it is now, with its plan, whether that saves memory, and the edits."""
    highest = 0
    if len(groups) > 1 and any(isinstance(one.wish.budget, float) for one in groups):
        readings = (read(one.backward, sizes=one.wish.sizes) for one in groups)
        highest = max(plain_peak(reading.problem) for reading in readings)
    for one in groups:
        began = time.perf_counter()
        wish = one.wish
        if highest and isinstance(wish.budget, float):  # a share is one of the whole step
            wish = dataclasses.replace(wish, budget=int(wish.budget * highest))
        with shown(f"memory_saving_gradients: planning {len(one.backward.needed)} ops"):
            try:
                with tf_private.all_or_nothing():
                    step = taken_apart(one.backward, wish.running_sums)
                    with tf_private.all_or_nothing() as edits:
                        plan = _plan_and_rewrite_one(step, wish)
                saves = True
            except _SavesNothing as nothing:
                step, plan, saves, edits = one.backward, nothing.plan, False, []
        plan = dataclasses.replace(plan, seconds=time.perf_counter() - began)
        yield one, step, plan, saves, edits


def _plan_and_rewrite_one(step: BackwardPass, wish: Wish) -> Plan:
    """The plan by which the step is rewritten."""
    reading = read(step, wish.cost_model, wish.sizes)
    if _asks_for_branches(wish, reading):
        with contextlib.suppress(_NoBetter):
            return _plan_with_branches(step, wish, reading)
    reading, plan, saves = _decided(reading, wish)
    if not saves:
        raise _SavesNothing(plan)
    return apply(reading, plan, wish)


class _SavesNothing(Exception):
    """A plan does not lower the peak."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan


def _decided(reading: Reading, wish: Wish) -> tuple[Reading, Plan, bool]:
    """The plan for a step, and whether it saves memory.

    Where nobody says how large the batch is, what saves nothing at the nominal size may save at a
    larger one.
    """
    anything_goes = reading.batch_size is not None and wish.sizes.assumed
    if anything_goes and isinstance(wish.budget, int):
        warn(
            f"memory_saving_gradients: the inputs leave their batch unknown, so memory_budget is "
            f"kept for a batch of {reading.batch_size}: say batch_size= where you say memory_budget"
        )
        anything_goes = False
    if not anything_goes:
        plan = decide(reading, wish)
        return reading, plan, is_worth_it(plan, reading, wish.budget is not None)
    found: list[tuple[Reading, Plan, bool]] = []
    unmet: BudgetError | None = None
    for batch in (reading.batch_size, *_LARGER_BATCHES):
        try:
            sizes = dataclasses.replace(wish.sizes, batch=batch)
            if batch != reading.batch_size:
                reading = read(reading.step, wish.cost_model, sizes)
            plan = decide(reading, wish)
        except BudgetError as error:
            unmet = unmet or error
            continue
        except WrongSize:
            continue
        found.append((reading, plan, is_worth_it(plan, reading, wish.budget is not None)))
        small, *others = _shares(plan)
        own = plan.peak_bytes / max(plan.baseline_peak_bytes, 1)
        if small <= 1 and own < _MUCH and max(others) <= _AS_GOOD * own:
            break
    if unmet and not found:
        raise unmet
    worth = [one for one in found if one[2]]
    return min(worth or found[:1], key=lambda one: math.prod(_shares(one[1])))


def _shares(plan: Plan) -> list[float]:
    """The peak of a plan as a share of the plain one, at small and large batches."""
    plans = [plan.at(batch) for batch in _BATCHES]
    return [one.peak_bytes / max(one.baseline_peak_bytes, 1) for one in plans]


# Where nobody says how large the batch is: what a plan shall be good for, what is tried beside the
# nominal size, what share of the plain peak a plan takes that is good at its own size, and how much
# worse it may be at others.
_BATCHES = (16, 128, 1024, 4096)
_LARGER_BATCHES = (1024, 4096)
_MUCH = 0.8
_AS_GOOD = 1.1


def _asks_for_branches(wish: Wish, reading: Reading) -> bool:
    """Whether what is inside branches is to be recomputed, too."""
    if wish.plan:
        return (
            has_branches(reading) and wish.plan.problem.fingerprint != reading.problem.fingerprint
        )
    return wish.strategy == "memory" and wish.budget is None and has_branches(reading)


def _plan_with_branches(step: BackwardPass, wish: Wish, plain: Reading) -> Plan:
    """A plan that recomputes inside branches as well, applied; raises where that is no better."""
    with tf_private.all_or_nothing():
        known = len(step.graph.get_operations())
        moved = recompute_inside(plain, functools.partial(_rewrite_inside, step.runtime))
        made = step.graph.get_operations()[known:]
        reading = read(
            dataclasses.replace(step, new=step.new.union(made)),
            wish.cost_model,
            wish.sizes,
        )
        plan = decide(reading, wish)
        if not wish.plan and plan.peak_bytes >= decide(plain, wish).peak_bytes:
            raise _NoBetter
        rewrite(reading.in_order_of(plan.problem), plan.schedule, moved)
    added = reading.problem.costs.sum() / plain.problem.costs.sum()
    return dataclasses.replace(
        plan,
        baseline_peak_bytes=plain_peak(plain.problem),
        overhead=float((1 + plan.overhead) * added - 1),
    )


class _NoBetter(Exception):
    """To recompute inside branches does not lower the peak."""


def _rewrite_inside(runtime: Runtime, step: BackwardPass) -> None:
    """Plans and rewrites the step inside a branch."""
    reading = read(dataclasses.replace(step, runtime=runtime))
    schedule = STRATEGIES["memory"](reading.problem)
    if peak(reading, schedule) < plain_peak(reading.problem):
        rewrite(reading, schedule)


def _what_broke(error: Exception) -> str:
    op = _op_at_fault(error)
    where = f' at the op "{op.name}" ({op.type})' if op is not None else ""
    return (
        f"memory_saving_gradients: {type(error).__name__}{where}: {error}. This is a fault of "
        "ours: the step stays as tf.gradients leaves it, so its gradients are right and no memory "
        "is saved. Please report it to the authors, with the model if you can; "
        f"{STRICT}=1 in the environment raises the error instead."
    )


def _op_at_fault(error: Exception) -> tf.Operation | None:
    """The op that the innermost function of ours was at work on."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        op = frame.f_locals.get("op")
        if isinstance(op, tf.Operation):
            found = op
    return found
