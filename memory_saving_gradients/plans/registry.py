"""The plans that were applied, by graph."""

from __future__ import annotations

import weakref

import tensorflow as tf

from memory_saving_gradients.plans.plan import Plan

_plans: weakref.WeakKeyDictionary[tf.Graph, list[Plan]] = weakref.WeakKeyDictionary()


def get_plans(graph: tf.Graph | None = None) -> list[Plan]:
    """The plans that were applied to a graph, newest last.

    Args:
        graph: a graph; the default graph if None. Of a `tf.function` it is
            `function.get_concrete_function(...).graph`.

    Returns:
        The plans; an empty list if there are none.

    Example:
        >>> get_plans(tf.Graph())
        []
    """
    return list(_plans.get(graph or tf.compat.v1.get_default_graph(), []))


def record_plan(graph: tf.Graph, plan: Plan) -> None:
    """Adds `plan` to those applied to `graph`."""
    _plans.setdefault(graph, []).append(plan)
