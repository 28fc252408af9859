"""The plans that were applied, by graph and by model."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from memory_saving_gradients.console.first_plan import say_first
from memory_saving_gradients.graph import tf_private
from memory_saving_gradients.plans.plan import Plan

_plans: weakref.WeakKeyDictionary[tf.Graph, list[Plan]] = weakref.WeakKeyDictionary()

#: The plans of each Keras model that saves memory.
of_models: weakref.WeakKeyDictionary[Any, list[Plan]] = weakref.WeakKeyDictionary()


def get_plans(of: Any = None) -> list[Plan]:
    """The plans that were applied, newest last.

    Args:
        of: what they were applied to: a `tf.function`, for all its traces, a concrete function, a
            Keras model that was given to `save_memory`, or a graph. None stands for the default
            graph, and in eager mode for all graphs of the process.

    Returns:
        The plans; an empty list if there are none.

    Raises:
        RuntimeError: it is called inside a `tf.function`, whose plan is made when its trace ends.
        TypeError: `of` is none of these.
        ValueError: `of` is a model that was not given to `save_memory`.

    Example:
        >>> get_plans(tf.Graph())
        []
    """
    if of is None:
        return _of_here()
    if isinstance(of, tf.Graph):
        return list(_plans.get(of, []))
    if hasattr(of, "python_function"):
        return [plan for trace in tf_private.traces(of) for plan in _plans.get(trace.graph, [])]
    if isinstance(getattr(of, "graph", None), tf.Graph):
        return list(_plans.get(of.graph, []))
    if hasattr(of, "train_step"):
        if of not in of_models:
            raise ValueError(
                f'model "{of.name}" was not given to memory_saving_gradients.keras.save_memory'
            )
        return list(of_models[of])
    raise TypeError(
        "get_plans takes a tf.function, a concrete function, a Keras model or a graph, got "
        f"{of!r} of type {type(of).__name__}"
    )


def _of_here() -> list[Plan]:
    """The plans of the default graph, or in eager mode of all graphs."""
    if tf.executing_eagerly():
        return [plan for plans in _plans.values() for plan in plans]
    graph = tf.compat.v1.get_default_graph()
    plans = list(_plans.get(graph, []))
    if not plans and graph.building_function:
        raise RuntimeError(
            "the plan of a tf.function is made when its trace ends: ask for it after the first "
            "call, by get_plans(step), where step is the function"
        )
    return plans


def record_plan(graph: tf.Graph, plan: Plan) -> None:
    """Adds `plan` to those applied to `graph`; prints it if it is the first of the process."""
    _plans.setdefault(graph, []).append(plan)
    say_first(f"memory_saving_gradients: {plan}{_hint(plan)}")


def _hint(plan: Plan) -> str:
    """What to try instead of the default strategy."""
    if plan.strategy != "memory" or plan.budget_bytes is not None:
        return ""
    return '; memory_budget="device" recomputes only what does not fit'
