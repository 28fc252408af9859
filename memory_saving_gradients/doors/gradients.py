"""`gradients()`: `tf.gradients`, with activations recomputed instead of kept."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, cast

import tensorflow as tf

from memory_saving_gradients.doors.replaced import note_call
from memory_saving_gradients.graph import tf_private
from memory_saving_gradients.options.checkpoints_argument import Checkpoints, is_eager
from memory_saving_gradients.options.options import BatchSize, Options
from memory_saving_gradients.pipeline.save import differentiate
from memory_saving_gradients.plans.plan import Plan


@tf.autograph.experimental.do_not_convert
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
    memory_budget: int | str | float | None = None,
    max_overhead: float | None = None,
    max_recompute: int | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    plan_cache: str | os.PathLike[str] | None = None,
    device: str | None = None,
    cost_model: str = "analytical",
    batch_size: BatchSize = None,
    verify: bool = False,
    running_sums: bool = True,
    pieces: bool | int = False,
) -> list:
    """Differentiates as `tf.gradients` does, in less memory.

    TensorFlow differentiates; then the backward ops are rewritten to read recomputed activations
    instead of kept ones. The values are those of `tf.gradients`, bit for bit where the kernels are
    deterministic.

    Args:
        ys: a tensor or list of tensors to be differentiated.
        xs: a tensor, variable or Keras variable, or a list of them, to differentiate by.
        grad_ys: as in `tf.gradients`.
        checkpoints: which forward tensors to keep for the backward pass. One of
            `"collection"` (those in the graph collection "checkpoints"),
            `"memory"` (the cheapest plan within 5 % of the lowest peak found),
            `"speed"` (the same, but only cheap ops are recomputed),
            `"auto"` (the knee: most of what "memory" saves, at a lower cost),
            `"articulation"` (√n of the tensors where the network is one tensor wide, the textbook
            method: planned in milliseconds, but saves less),
            a list of tensors, ops, their names, or regular expressions that are searched in
            the names of tensors, or
            a function from a `tf.Operation` to bool that tells whether to keep the op's outputs.
        name: as in `tf.gradients`.
        colocate_gradients_with_ops: as in `tf.compat.v1.gradients`.
        gate_gradients: as in `tf.gradients`.
        aggregation_method: as in `tf.gradients`.
        stop_gradients: as in `tf.gradients`.
        unconnected_gradients: as in `tf.gradients`.
        memory_budget: the peak to stay within, at the least overhead found: bytes (int), a string
            (`"800MB"`, `"1.5GiB"`), a float, 0 < f <= 1, as a share of the baseline peak, or
            `"device"`: nine tenths (`"80% of device"`: four fifths) of the GPU's memory, or of the
            system's free memory, less variables and inputs. It counts all that a step has allocated
            at once (activations, gradients, recomputed copies), but not variables, constants and
            fed inputs. If necessary the plan runs ops more than twice. With a budget, `checkpoints`
            may be left out; tensors given there are kept.
        max_overhead: the extra cost to stay within, a float above 0 as a share of the plain step's
            estimated cost, at the lowest peak found. Give it instead of a budget.
        max_recompute: how often a strategy, a budget or an overhead may recompute an op; 1 means
            that it runs at most twice. None sets no bound.
        plan: a plan of the same graph to apply again, or the path of one written by `Plan.save`;
            then nothing is planned.
        plan_cache: a folder of plans. A plan for the same step and options is read from there
            instead of planned; a new one is stored there. It serves later runs: within one process
            a step that is traced again is not planned again anyway.
        device: the device to estimate costs for: "cpu", "t4", "v100", "a100", "h100", or "local"
            for this machine's own device; by default its first GPU, else "cpu". Under XLA it is
            also the device for which the step is compiled to check a budget; the named GPUs need
            the extra `xla-gpu` for that, else the budget is only checked by prediction.
        cost_model: "analytical" uses TensorFlow's estimate of each op for `device`; "measured" runs
            the plain step a few times with stand-ins for inputs and variables, and measures each
            op's time and scratch space.
        batch_size: the size of the inputs' unknown first dimension, or a mapping of names of inputs
            to whole shapes; without it, the plan is chosen to do well at any size.
        verify: whether to check the plan while the step is built: by measuring a run of it
            (`plan.measured_peak_bytes`), or, if XLA compiles it, by its compiler's report
            (`plan.compiled_peak_bytes`); if a budget is missed, we plan again.
        running_sums: whether sums of many gradients (of a weight that is read many times) add each
            term as it comes, so that one buffer is alive instead of all. If this order is not that
            of the plain step, the sum agrees with it up to rounding, and `plan.labels.reordered`
            names it.
        pieces: whether what is computed row by row around the largest tensors, such as the logits
            of a language model or the scores of attention, may run on slices of the rows, one after
            the other. True lets the planner choose how many; with a budget only if it cannot be
            kept otherwise. An int of at least 2 is the number for the largest tensor. Gradients of
            weights are then sums of those of the slices: equal to rounding.

    Returns:
        A list with the gradient of each x: a tensor, an `IndexedSlices`, or None.

    Raises:
        BudgetError: no plan within `memory_budget` was found; the graph is plain.
        CannotMeasure: `verify=True`, and the step cannot be run or compiled for it.
        RuntimeError: called outside a graph.
        TypeError: `checkpoints`, an entry of it, or another option is of a wrong type.
        ValueError: a checkpoint is not in the forward graph, the strategy is unknown, or a budget
            is not positive, the plan is one of another graph, or `batch_size` contradicts the
            graph.

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
    options = Options(
        checkpoints,
        memory_budget=memory_budget,
        max_overhead=max_overhead,
        max_recompute=max_recompute,
        plan=plan,
        device=device,
        plan_cache=plan_cache,
        cost_model=cost_model,
        batch_size=batch_size,
        verify=verify,
        running_sums=running_sums,
        pieces=pieces,
    )
    return differentiated(
        options,
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


def differentiated(
    options: Options,
    ys: Any,
    xs: Any,
    planned: Callable[[Plan], object] = lambda plan: None,
    **arguments: Any,
) -> list:
    """`tf.gradients` of `ys` with respect to `xs`, saving memory.

    Args:
        options: the options.
        ys: as in `gradients`.
        xs: as in `gradients`.
        planned: called with the plan, if one is applied.
        **arguments: further ones of `tf.compat.v1.gradients`.
    """
    note_call()
    variables = tf.nest.map_structure(_plain_variable, xs)
    _check_in_a_graph(ys, variables)
    graph = tf.compat.v1.get_default_graph()
    return differentiate(
        lambda: tf_private.GRADIENTS(ys, variables, **arguments),
        ys,
        variables,
        graph,
        options,
        planned,
    )


def _check_in_a_graph(ys: Any, xs: Any) -> None:
    """Raises if there is no graph to rewrite, or if `ys` or `xs` are eager tensors."""
    if tf.executing_eagerly():
        raise RuntimeError(
            "memory_saving_gradients rewrites graphs, and eager execution has none: call "
            "gradients() inside a tf.function or a tf.compat.v1 graph."
        )
    for label, values in (("ys", ys), ("xs", xs)):
        for value in tf.nest.flatten(values, expand_composites=True):
            if is_eager(value) and not isinstance(value, tf.Variable):
                raise ValueError(
                    f"{label} has an eager tensor, {value!r}, which is in no graph: compute it "
                    "inside the tf.function or graph that calls gradients()."
                )


def _plain_variable(x: Any) -> Any:
    """The TensorFlow variable of a Keras variable; other values are returned as they are."""
    variable = getattr(sys.modules.get("keras"), "Variable", None)
    if isinstance(variable, type) and isinstance(x, variable):
        return cast(Any, x)._value
    return x


def _with(strategy: str) -> Callable[..., list]:
    """`gradients` with a fixed strategy and the parameters of `tf.compat.v1.gradients`."""

    @tf.autograph.experimental.do_not_convert
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
        **options: Any,
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
            **options,
        )

    fixed.__name__ = fixed.__qualname__ = f"gradients_{strategy}"
    fixed.__doc__ = (
        f'`gradients` with `checkpoints="{strategy}"`, a drop-in replacement for `tf.gradients`: '
        "its parameters are those of `tf.compat.v1.gradients` and the options of `gradients`."
    )
    return fixed


gradients_collection = _with("collection")
gradients_memory = _with("memory")
gradients_speed = _with("speed")
