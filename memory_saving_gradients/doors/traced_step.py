"""Traces a training step in order to analyse it: nothing is rewritten, nothing runs."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients.doors.patching import patch
from memory_saving_gradients.graph.devices import MEMORY_BYTES
from memory_saving_gradients.graph.shapes import InputSizes, bytes_of
from memory_saving_gradients.graph.tf_private import is_compiled_apart, keras_would_compile
from memory_saving_gradients.options.options import Options, Request
from memory_saving_gradients.pipeline.fitting import temporary_bytes
from memory_saving_gradients.pipeline.pieces import predicted_plan
from memory_saving_gradients.pipeline.plan_and_rewrite import as_compiled
from memory_saving_gradients.pipeline.save import looking, no_garbage_collection
from memory_saving_gradients.plans.plan import Plan
from memory_saving_gradients.proving.compiler import target
from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.reading.read import Reading, read
from memory_saving_gradients.rewriting.running_sums import taken_apart

#: The advice if the shapes of inputs are unknown.
_HOW = "give example=, one batch as the step takes it (on the command line: --input-shape)"


@dataclasses.dataclass(frozen=True)
class Step:
    """A traced step.

    Attributes:
        passes: its backward passes, each with its request.
        variables_bytes: the bytes of all variables that it reads or writes: weights, and the state
            of the optimizer and the metrics.
        example_bytes: the bytes of inputs per example of a batch.
        compiled: whether XLA compiles it.
        traced: the object that keeps the graph alive.
    """

    passes: list[tuple[BackwardPass, Request]]
    variables_bytes: int
    example_bytes: int
    compiled: bool
    traced: Any = dataclasses.field(repr=False)

    @no_garbage_collection()
    def readings(self, batch_size: int) -> list[Reading]:
        """Each backward pass as a problem, for a batch of that size."""
        sizes = InputSizes(batch_size)
        return [read(step, request.cost_model, sizes) for step, request in self.passes]

    @no_garbage_collection()
    def plans(self, batch_size: int, verify: bool = False) -> list[Plan]:
        """The plans for the requests, for a batch of that size.

        Args:
            batch_size: the size of the batch.
            verify: whether to ask XLA's compiler what it allocates, plain and as planned.

        Raises:
            BudgetError: no plan within the budget was found.
            CannotCompile: the compiler refuses the step, or is not installed.
        """
        plans = []
        for step, request in self.passes:
            began = time.perf_counter()
            request = dataclasses.replace(request, sizes=InputSizes(batch_size))
            plan = as_compiled(step, request) if verify else None
            plan = plan or predicted_plan(read(step, request.cost_model, request.sizes), request)
            if verify:
                plain = temporary_bytes(step, request.sizes, request.device)
                plan = dataclasses.replace(
                    plan,
                    baseline_compiled_bytes=plain,
                    compiled_peak_bytes=plan.compiled_peak_bytes or plain,
                    compiled_for=target(request.device),
                )
            plans.append(dataclasses.replace(plan, seconds=time.perf_counter() - began))
        return plans

    @no_garbage_collection()
    def allocated(self, batch_size: int, strategy: str, most: float | None) -> tuple[int, float]:
        """What XLA's compiler allocates for the step, in bytes, and the overhead of the plan.

        Args:
            batch_size: the size of the batch.
            strategy: "plain" or a strategy.
            most: the most overhead, for the strategy "overhead".

        Raises:
            CannotCompile: the compiler refuses the step, or is not installed.
        """
        found = []
        for step, given in self.passes:
            request = Request(
                strategy,
                None,
                max_overhead=most,
                device=given.device,
                cost_model=given.cost_model,
                sizes=InputSizes(batch_size),
                running_sums=given.running_sums,
            )
            plan = None if strategy == "plain" else as_compiled(step, request)
            if plan:
                found.append((plan.compiled_peak_bytes or 0, plan.overhead))
            else:
                found.append((temporary_bytes(step, request.sizes, request.device), 0.0))
        return max(size for size, _ in found), max(overhead for _, overhead in found)


@no_garbage_collection()
def traced_step(step: Any, example: Any = None, options: Options | None = None) -> Step:
    """Traces a step for batches of any size.

    It is traced for XLA if it is compiled (`jit_compile=True`). Keras compiles `fit` on a GPU, so a
    model is traced for XLA where `options.device` names a GPU, too.

    Args:
        step: a Keras model, or a `tf.function` that computes gradients.
        example: one batch as `fit` or the function takes it, arrays or tensors or their
            `tf.TensorSpec`: of a model `(x, y)` or `x`, of a function the tuple of its arguments.
            The first dimension of each is the batch. None where the step tells: a model with
            inputs, a function with an `input_signature`.
        options: the options, where the step does not set its own.

    Returns:
        The step.

    Raises:
        TypeError: `step` is neither.
        ValueError: it does not tell its inputs, or computes no gradients.
    """
    options = options or Options("memory")
    if _is_model(step):
        function, arguments = step_of_model(step, example)
        on_gpu = options.device in MEMORY_BYTES and keras_would_compile(step)
        compiled = on_gpu or bool(step.compiled and step.jit_compile)
    else:
        function, arguments = _of_function(step, example)
        compiled = is_compiled_apart(step)
    with looking() as passes, patch.of(options):

        def anew(*arguments: Any) -> Any:
            passes.clear()  # if variables are created, TensorFlow traces twice
            return function(*arguments)

        traced = tf.function(anew, jit_compile=compiled).get_concrete_function(*arguments)
    if not passes:
        raise ValueError(
            "the step computes no gradients: it must call tf.GradientTape.gradient or tf.gradients"
        )
    captured = {id(tensor) for tensor in traced.captured_inputs}
    inputs = [t for t in traced.inputs if id(t) not in captured and t.dtype != tf.resource]
    return Step(
        passes=[
            (taken_apart(backward, request.running_sums), request) for backward, request in passes
        ],
        variables_bytes=sum(bytes_of(v.shape, v.dtype) for v in traced.graph.variables),
        example_bytes=sum(
            bytes_of(t.shape[1:], t.dtype) for t in inputs if t.shape.rank and t.shape[0] is None
        ),
        compiled=compiled,
        traced=traced,
    )


def _is_model(step: Any) -> bool:
    models = (getattr(sys.modules.get(name), "Model", None) for name in ("keras", "tf_keras"))
    return isinstance(step, tuple(model for model in models if isinstance(model, type)))


def _of_function(step: Any, example: Any) -> tuple[Callable[..., Any], Sequence[Any]]:
    if not hasattr(step, "python_function"):
        raise TypeError(
            f"expected a Keras model or a tf.function that computes gradients, got {step!r}"
        )
    if example is not None:
        arguments = example if isinstance(example, tuple) else (example,)
        return step.python_function, tf.nest.map_structure(_any_batch, arguments)
    if step.input_signature is None:
        raise ValueError(f"the function has no input_signature: {_HOW}")
    return step.python_function, step.input_signature


def step_of_model(model: Any, example: Any = None) -> tuple[Callable[..., Any], Sequence[Any]]:
    """A training step of a model: its own if it is compiled, else one with a loss of ours.

    Args:
        model: a Keras model.
        example: as in `traced_step`.

    Returns:
        The step, and its arguments, as `tf.TensorSpec`s of any batch.

    Raises:
        ValueError: the model does not tell its inputs.
    """
    if example is not None:
        x, y = (*example, None)[:2] if isinstance(example, tuple) else (example, None)
    else:
        x, y = _symbolic(model, "input"), None
    x = tf.nest.map_structure(_any_batch, x)
    if not model.compiled:

        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                outputs = tf.nest.flatten(model(x, training=True))
                loss = sum(tf.reduce_mean(tf.square(tf.cast(o, tf.float32))) for o in outputs)
                loss = tf.add_n([loss, *model.losses])
            return tape.gradient(loss, model.trainable_variables)

        return step, (x,)
    _build_optimizer(model)
    if y is None:
        outputs = _outputs(model, None if example is None else x)
        y = _targets(tf.nest.map_structure(_any_batch, outputs), model.loss)
    return lambda x, y: model.train_step((x, y)), (x, tf.nest.map_structure(_any_batch, y))


def _build_optimizer(model: Any) -> None:
    """Makes the optimizer's variables, so that they do not cost a second, slow trace."""
    if model.built and not getattr(model.optimizer, "built", True):
        model.optimizer.build(model.trainable_variables)


def _symbolic(model: Any, what: str) -> Any:
    """The symbolic input (or output) of a model."""
    for name in (what, f"{what}s"):  # a Sequential has a list, of one
        with contextlib.suppress(AttributeError, ValueError):
            ends = getattr(model, name)
            return ends if name == what else ends[0]
    raise ValueError(f'model "{model.name}" does not tell its inputs: {_HOW}')


def _outputs(model: Any, x: Any) -> Any:
    """The outputs of a model: symbolic ones, or else those for an example of its input."""
    try:
        return _symbolic(model, "output")
    except ValueError:
        if x is None:
            raise
    return model(tf.nest.map_structure(lambda t: tf.zeros((1, *t.shape[1:]), t.dtype), x))


def _targets(outputs: Any, loss: Any) -> Any:
    """Specs of targets that fit the outputs and losses of a model."""
    if isinstance(loss, dict):
        names = outputs if isinstance(outputs, dict) else dict(zip(loss, outputs, strict=True))
        return {name: _targets(names[name], each) for name, each in loss.items()}
    if isinstance(outputs, list | tuple):
        losses = loss if isinstance(loss, list | tuple) else [loss] * len(outputs)
        return [_targets(*pair) for pair in zip(outputs, losses, strict=True)]
    name = loss if isinstance(loss, str) else getattr(loss, "name", getattr(loss, "__name__", ""))
    if "sparse" in str(name):
        return tf.TensorSpec(outputs.shape[:-1], tf.int32)
    return outputs


def _any_batch(value: Any) -> Any:
    """The spec of a value with a batch of any size; a value that is no tensor is returned as is."""
    shape = getattr(value, "shape", None)
    if shape is None:
        return value
    dtype = tf.as_dtype(getattr(value.dtype, "name", value.dtype))
    return tf.TensorSpec((None, *shape[1:]) if len(shape) else (), dtype)
