"""`gradients()`: `tf.gradients`, with activations recomputed instead of kept."""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, cast

import tensorflow as tf

from memory_saving_gradients.checkpoints import Checkpoints, forward_operations, is_eager, resolve
from memory_saving_gradients.graph.read import Reading, read
from memory_saving_gradients.graph.rewrite import as_differentiated, rewrite
from memory_saving_gradients.plan import Plan, record_plan
from memory_saving_gradients.planning.strategies import STRATEGIES, keep_given

logger = logging.getLogger("memory_saving_gradients")

# Taken before anyone can replace it by ours.
_tf_gradients = tf.compat.v1.gradients


def gradients(
    ys: Any,
    xs: Any,
    grad_ys: Any = None,
    checkpoints: Checkpoints = "collection",
    *,
    name: str = "gradients",
    colocate_gradients_with_ops: bool = True,
    gate_gradients: bool = False,
    aggregation_method: int | None = None,
    stop_gradients: Any = None,
    unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
) -> list:
    """Differentiates as `tf.gradients` does, in less memory.

    TensorFlow differentiates; then the backward ops are made to read recomputed activations
    where those were not kept. The values are those of `tf.gradients`, bit for bit where the
    kernels are deterministic.

    Args:
        ys: a tensor or list of tensors to be differentiated.
        xs: a tensor, variable or Keras variable, or a list of them, to differentiate by.
        grad_ys: as in `tf.gradients`.
        checkpoints: which forward tensors to keep for the backward pass. One of
            `"collection"` (those in the graph collection "checkpoints"),
            `"memory"` (the lowest peak found with every op run at most twice),
            `"speed"` (only cheap ops run twice),
            a list of tensors, ops, their names, or regular expressions that are searched in
            the names of tensors, or
            a function from a `tf.Operation` to bool that says whether to keep the op's outputs.
        name: as in `tf.gradients`.
        colocate_gradients_with_ops: as in `tf.compat.v1.gradients`.
        gate_gradients: as in `tf.gradients`.
        aggregation_method: as in `tf.gradients`.
        stop_gradients: as in `tf.gradients`.
        unconnected_gradients: as in `tf.gradients`.

    Returns:
        A list with the gradient of each x: a tensor, an `IndexedSlices`, or None.

    Raises:
        RuntimeError: called outside a graph.
        TypeError: `checkpoints`, or an entry of it, is of a wrong type.
        ValueError: a checkpoint is not in the forward graph, or the strategy is unknown.

    Example:
        >>> with tf.Graph().as_default():
        ...     x = tf.compat.v1.placeholder(tf.float32, (None, 8))
        ...     y = tf.reduce_sum(tf.tanh(tf.tanh(tf.tanh(x))))
        ...     grads = gradients(y, x, checkpoints=["Tanh_1"])
        >>> grads[0].shape
        TensorShape([None, 8])

    The idea and the interface are those of OpenAI's gradient-checkpointing (T. Salimans and
    Y. Bulatov, 2018).
    """
    xs = tf.nest.map_structure(_plain_variable, xs)
    graph = _graph_of(ys, xs)
    targets = [y for y in tf.nest.flatten(ys, expand_composites=True) if isinstance(y, tf.Tensor)]
    forward = forward_operations(targets)
    strategy, kept = resolve(checkpoints, forward, graph)
    first_new = len(graph.get_operations())
    with as_differentiated(graph, forward):
        grads = _tf_gradients(
            ys,
            xs,
            grad_ys=grad_ys,
            name=name,
            colocate_gradients_with_ops=colocate_gradients_with_ops,
            gate_gradients=gate_gradients,
            aggregation_method=aggregation_method,
            stop_gradients=stop_gradients,
            unconnected_gradients=unconnected_gradients,
        )
    results = [t for t in tf.nest.flatten(grads, expand_composites=True) if t is not None]
    save_memory(results, first_new, strategy, kept)
    return grads


def save_memory(
    results: list[tf.Tensor], first_new: int, strategy: str, kept: list[tf.Tensor] | None
) -> None:
    """Rewrites a step that TensorFlow has just differentiated, if that lowers its peak.

    Args:
        results: the gradients, tensors of one graph.
        first_new: how many ops the graph had before it was differentiated.
        strategy: the name of the strategy.
        kept: the tensors to keep; None for a strategy that chooses by itself.
    """
    if not results:
        logger.info("%s: no y depends on any x, so there is nothing to recompute", strategy)
        return
    began = time.perf_counter()
    reading = read(results, first_new)
    plan = _make_plan(reading, strategy, kept)
    saves = plan.peak_bytes < plan.baseline_peak_bytes
    if saves:
        rewrite(reading, plan.schedule)
    plan = dataclasses.replace(plan, seconds=time.perf_counter() - began)
    logger.info("%s%s", plan, "" if saves else " (not applied)")
    if saves:
        record_plan(results[0].graph, plan)
    else:
        warnings.warn(_why_nothing_is_saved(plan), stacklevel=3)


def _make_plan(reading: Reading, strategy: str, kept: list[tf.Tensor] | None) -> Plan:
    problem = reading.problem
    if kept is None:
        return Plan.of(strategy, problem, STRATEGIES[strategy](problem))
    ours = {reading.tensor_of[t.name] for t in kept if t.name in reading.tensor_of}
    names = [t.name for t in kept if t.name in reading.tensor_of]
    return Plan.of(strategy, problem, keep_given(problem, ours), names)


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


def _graph_of(ys: Any, xs: Any) -> tf.Graph:
    """The graph to differentiate in."""
    if tf.executing_eagerly():
        raise RuntimeError(
            "memory_saving_gradients rewrites graphs, and eager execution has none: call "
            "gradients() inside a tf.function or a tf.compat.v1 graph."
        )
    for label, values in (("ys", ys), ("xs", xs)):
        for value in tf.nest.flatten(values):
            if is_eager(value) and not isinstance(value, tf.Variable):
                raise ValueError(
                    f"{label} has an eager tensor, {value!r}, which is in no graph: compute it "
                    "inside the tf.function or graph that calls gradients()."
                )
    return tf.compat.v1.get_default_graph()


def _plain_variable(x: Any) -> Any:
    """The TensorFlow variable in a Keras variable; anything else as it is."""
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(x, getattr(keras, "Variable", ())):
        return cast(Any, x)._value
    return x


def _with(strategy: str) -> Callable[..., list]:
    """`gradients` with a fixed strategy and the parameters of `tf.compat.v1.gradients`."""

    def fixed(
        ys: Any,
        xs: Any,
        grad_ys: Any = None,
        name: str = "gradients",
        colocate_gradients_with_ops: bool = True,
        gate_gradients: bool = False,
        aggregation_method: int | None = None,
        stop_gradients: Any = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> list:
        return gradients(
            ys,
            xs,
            grad_ys,
            strategy,
            name=name,
            colocate_gradients_with_ops=colocate_gradients_with_ops,
            gate_gradients=gate_gradients,
            aggregation_method=aggregation_method,
            stop_gradients=stop_gradients,
            unconnected_gradients=unconnected_gradients,
        )

    fixed.__name__ = fixed.__qualname__ = f"gradients_{strategy}"
    fixed.__doc__ = (
        f'`gradients` with `checkpoints="{strategy}"`, to put in the place of `tf.gradients`: '
        "its parameters are those of `tf.compat.v1.gradients`."
    )
    return fixed


gradients_collection = _with("collection")
gradients_memory = _with("memory")
gradients_speed = _with("speed")
