"""What every front door does: TensorFlow differentiates, then we plan and rewrite.

In a `tf.function` planning waits for the end of the trace. Then the whole step is known: all
backward passes, the ops beside and after them, and the control dependencies that TensorFlow adds.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import gc
import logging
import os
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients.console.warning import warn
from memory_saving_gradients.graph import order, tf_private
from memory_saving_gradients.options.checkpoints_argument import forward_operations
from memory_saving_gradients.options.options import Options, Request
from memory_saving_gradients.pipeline.decide import by_memory
from memory_saving_gradients.pipeline.plan_and_rewrite import Call, plan_and_rewrite
from memory_saving_gradients.pipeline.why import (
    saves_little,
    why_little_is_saved,
    why_nothing_is_saved,
)
from memory_saving_gradients.planning.strategies import STRATEGIES, WHAT
from memory_saving_gradients.plans.plan import Plan
from memory_saving_gradients.plans.registry import record_plan
from memory_saving_gradients.reading import references
from memory_saving_gradients.reading.backward import (
    BackwardPass,
    share_activations,
    whole_step,
    with_updates,
)
from memory_saving_gradients.rewriting.rewrite import as_differentiated, behind_gates

#: The environment variable that makes internal errors raise. Tests set it.
STRICT = "MEMORY_SAVING_GRADIENTS_STRICT"

logger = logging.getLogger("memory_saving_gradients")

# `graphs`: graphs being differentiated; `last`: the last step of a v1 graph, and its edits.
_under_way = threading.local()

_looked_at: contextvars.ContextVar[list[tuple[BackwardPass, Request]] | None]
_looked_at = contextvars.ContextVar("looked_at", default=None)


def differentiate(
    call: Callable[[], Any],
    ys: Any,
    xs: Any,
    graph: tf.Graph,
    options: Options,
    planned: Callable[[Plan], object] = lambda plan: None,
) -> Any:
    """Lets TensorFlow differentiate, and rewrites the result if that lowers the peak.

    In a `tf.function` it is rewritten when the trace ends.

    Args:
        call: differentiates in `graph`, the default graph; returns gradients in any structure.
        ys: the tensors to differentiate, in any structure.
        xs: what to differentiate by; the gradients have its structure.
        graph: the graph.
        options: the user's options.
        planned: called with the plan, if one is applied.

    Returns:
        The gradients that `call` returned.

    Raises:
        BudgetError: no plan within the budget was found; the graph is plain. In a `tf.function` it
            is raised at the end of the trace.
    """
    graphs = _under_way.__dict__.setdefault("graphs", set())
    if graph in graphs:  # called by a gradient function, as part of a larger backward pass
        return call()
    flat = tf.nest.flatten(ys, expand_composites=True)
    ours = [y for y in flat if tf.is_tensor(y) and getattr(y, "graph", None) is graph]
    forward = forward_operations(ours)
    request = options.request(forward, graph)
    first_new = len(graph.get_operations())
    graphs.add(graph)
    try:
        with as_differentiated(graph, forward):
            grads = call()
    finally:
        graphs.remove(graph)
    results = _tensors(grads, graph)
    if not results:
        logger.info("%s: no y depends on any x, so there is nothing to recompute", request.strategy)
        return grads
    asked = Call(
        BackwardPass.since(first_new, ours[0], results, request.device),
        request,
        tf.distribute.get_replica_context(),
        planned,
        _reference_variables(xs, grads, graph),
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


def _reference_variables(xs: Any, grads: Any, graph: tf.Graph) -> dict[str, list[tf.Operation]]:
    """By name of a gradient, the reference variables that it is the gradient of."""
    variables: dict[str, list[tf.Operation]] = {}
    for x, grad in zip(tf.nest.flatten(xs), tf.nest.flatten(grads), strict=True):
        variable = references.variable_of(x)
        for tensor in _tensors(grad, graph) if variable is not None else ():
            variables.setdefault(tensor.name, []).append(variable)
    return variables


def plan_updates(updates: tf.Operation) -> None:
    """Plans the last step of a v1 graph again, with the ops that update its variables.

    Args:
        updates: the op with which an optimizer applies the gradients.
    """
    last, _under_way.last = getattr(_under_way, "last", None), None
    if last is None or last[0].backward.graph is not updates.graph:
        return
    asked, edits = last
    step = with_updates(asked.backward, updates)
    if step.after.isdisjoint(r for t in step.results for r in t.consumers()):
        return
    tf_private.take_back(edits)
    step = with_updates(asked.backward, updates)  # which no longer need copies
    _save_memory([dataclasses.replace(asked, backward=step)])
    _under_way.last = None


def _finish_trace(asked: list[Call]) -> None:
    """Rewrites the step that has been traced."""
    traced = [
        dataclasses.replace(call, backward=dataclasses.replace(call.backward, traced=True))
        for call in asked
    ]
    if traced:
        _save_memory(traced)


def _save_memory(asked: Sequence[Call]) -> dict[str, tf.Tensor]:
    """Rewrites a step, if that lowers its peak; an internal error leaves it plain.

    Returns:
        By name of a gradient, the tensor that replaces it.

    Raises:
        BudgetError: no plan within a budget was found.
        WrongPlan: a given plan was made for another graph.
        WrongSize: the given batch size contradicts the graph.
        CannotMeasure: the step was to be measured, and cannot be run.
    """
    graph = asked[0].backward.graph
    looked_at = _looked_at.get()
    if looked_at is not None:
        looked_at += [(call.backward, call.request) for call in _joined(asked)]
        return {}
    try:
        with no_garbage_collection(), graph.as_default(), tf_private.all_or_nothing():
            outcomes = list(plan_and_rewrite(_joined(asked)))
    except tf_private.Refusal:
        raise
    except Exception as error:
        if os.environ.get(STRICT):
            raise
        warn(_what_broke(error))
        return {}
    moved: dict[str, tf.Tensor] = {}
    _under_way.last = None
    for call, step, plan, saves, edits in outcomes:
        if not step.traced:
            _under_way.last = dataclasses.replace(call, backward=step), edits
        pairs = zip(call.backward.results, map(behind_gates, step.results), strict=True)
        moved |= {before.name: after for before, after in pairs if before is not after}
        if saves and call.variables:
            moved |= _after_last_reads(call, moved)
        chosen = WHAT.get(plan.strategy, "")
        logger.info("%s%s%s", plan, "" if saves else " (not applied)", chosen and f"; {chosen}")
        if saves or call.request.budget is not None:
            record_plan(graph, plan)
            call.planned(plan)
            if saves_little(plan):
                warn(why_little_is_saved(plan, by_memory(plan)))
        else:
            warn(why_nothing_is_saved(plan, by_memory(plan)))
    return moved


def _after_last_reads(call: Call, moved: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """By name of a gradient with respect to reference variables, the tensor that replaces it."""
    results = {t.name: moved.get(t.name, t) for t in call.backward.results}
    step = order.needed(t.op for t in results.values())
    return {
        name: references.after_last_read(results[name], variables, step)
        for name, variables in call.variables.items()
    }


@contextlib.contextmanager
def looking() -> Iterator[list[tuple[BackwardPass, Request]]]:
    """Within it, steps traced in this thread stay plain, and are added to the list instead."""
    passes: list[tuple[BackwardPass, Request]] = []
    token = _looked_at.set(passes)
    try:
        yield passes
    finally:
        _looked_at.reset(token)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disables garbage collection: traversing the cycles of a graph takes longer than planning.

    At its end only what was made within it is traversed; else Python would traverse all objects.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.collect(0)
            gc.enable()


def _joined(asked: Sequence[Call]) -> list[Call]:
    """The calls, with backward passes that share a forward pass joined into one."""
    groups: list[Call] = []
    for call in asked:
        for i, other in enumerate(groups):
            if _go_together(other, call):
                groups[i] = dataclasses.replace(
                    other,
                    backward=other.backward.joined(call.backward),
                    planned=functools.partial(
                        _call_each, {other.planned: None, call.planned: None}
                    ),
                )
                break
        else:
            groups.append(call)
    if groups[0].backward.traced and groups[0].backward.runtime.obeys_control_edges:
        passes = whole_step([call.backward for call in groups])
        groups = [
            dataclasses.replace(call, backward=backward)
            for call, backward in zip(groups, passes, strict=True)
        ]
    return groups


def _go_together(one: Call, other: Call) -> bool:
    choose_alike = (
        one.request.strategy in (*STRATEGIES, "budget", "overhead") and one.request == other.request
    )
    return (
        one.backward.traced
        and choose_alike
        and one.replica is other.replica
        and not one.backward.depends_on(other.backward)
        and not other.backward.depends_on(one.backward)
        and share_activations(one.backward, other.backward)
    )


def _call_each(functions: Iterable[Callable[[Plan], object]], plan: Plan) -> None:
    for function in functions:
        function(plan)


def _what_broke(error: Exception) -> str:
    op = _op_at_fault(error)
    where = f' at the op "{op.name}" ({op.type})' if op is not None else ""
    return (
        f"memory_saving_gradients: {type(error).__name__}{where}: {error}. This is a fault of "
        "ours: the step stays as tf.gradients makes it, so its gradients are right but no memory "
        "is saved. Please report it to the authors, with the model if you can; "
        f"{STRICT}=1 in the environment raises the error instead."
    )


def _op_at_fault(error: Exception) -> tf.Operation | None:
    """The op that the innermost of our functions was working on.

    All functions name it `op`, so that we can find it in the frames of any error.
    """
    innermost = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        op = frame.f_locals.get("op")
        if isinstance(op, tf.Operation):
            innermost = op
    return innermost
