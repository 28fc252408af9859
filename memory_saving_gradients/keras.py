"""`save_memory()`: a Keras model trains in less memory. `MemoryReport`: reports the effect."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.util
import inspect
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Unpack

import keras
import tensorflow as tf

from memory_saving_gradients.by_hand.keras_layer import Checkpoint
from memory_saving_gradients.console import first_plan
from memory_saving_gradients.console.warning import warn
from memory_saving_gradients.doors.feeding import fed_batch
from memory_saving_gradients.doors.patching import patch
from memory_saving_gradients.graph import tf_private
from memory_saving_gradients.measure import StepPeak
from memory_saving_gradients.options.checkpoints_argument import Checkpoints
from memory_saving_gradients.options.options import MoreOptions, Options
from memory_saving_gradients.planning.units import format_bytes
from memory_saving_gradients.plans import registry
from memory_saving_gradients.plans.plan import Plan
from memory_saving_gradients.report import figures, summary

__all__ = ["Checkpoint", "MemoryReport", "get_plans", "save_memory"]

_options: weakref.WeakKeyDictionary[Any, Options] = weakref.WeakKeyDictionary()
_fed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # the batch of each `fit`


def save_memory(
    model: Any,
    checkpoints: Checkpoints = "memory",
    memory_budget: int | str | float | None = None,
    **more: Unpack[MoreOptions],
) -> Any:
    """Makes `fit`, `train_on_batch` and custom training steps of a model save memory.

    The model's `train_step` then runs with `tf.GradientTape` patched; a `train_step` of your own
    must use that. `evaluate`, `predict`, saving and loading are untouched. Copies of the model
    (`keras.models.clone_model`, `copy.deepcopy`, pickle) save memory as well; one that is loaded
    from a file does not. To go back to plain training, call `save_memory(model, checkpoints=None)`.

    By default the peak is near the lowest possible one, and each step takes longer. For everyday
    training we recommend `save_memory(model, memory_budget="device")`: it recomputes only what does
    not fit into the device, and nothing if the plain step fits.

    Args:
        model: a Keras model, functional, sequential or subclassed, before or after `compile`.
        checkpoints: which forward tensors to keep, as in `gradients`; None undoes an earlier call.
        memory_budget: the peak of a step to stay within, as in `gradients`.
        **more: max_overhead, max_recompute, plan, plan_cache, device, cost_model, batch_size,
            verify, running_sums and pieces, as in `gradients`; the default `batch_size` is that of
            `fit`.

    Returns:
        The model.

    Raises:
        TypeError: `model` is no Keras model, or an option is of a wrong type.
        ValueError: Keras does not run on TensorFlow, the strategy is unknown, or the budget is not
            positive.

    Example:
        >>> model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
        >>> model = save_memory(model)
        >>> model.compile("sgd", "mse")
    """
    if not isinstance(model, _model_classes()):
        raise TypeError(
            f"model must be a keras.Model, got {model!r} of type {type(model).__name__}"
        )
    if isinstance(model, keras.Model) and keras.config.backend() != "tensorflow":
        raise ValueError(
            f'Keras runs on the backend "{keras.config.backend()}", and only TensorFlow graphs can '
            'be rewritten: set the environment variable KERAS_BACKEND to "tensorflow".'
        )
    options = None
    if checkpoints is not None:
        options = Options.beside_memory(checkpoints, memory_budget, **more)
    return _save_memory(model, options)


def _save_memory(model: Any, options: Options | None) -> Any:
    for name in ("train_step", "fit", "__reduce_ex__", "__deepcopy__"):
        model.__dict__.pop(name, None)
    registry.of_models.pop(model, None)
    _options.pop(model, None)
    _fed.pop(model, None)
    if options is not None:
        registry.of_models[model] = []
        _options[model] = options
        model.__dict__["train_step"] = _saving(model, options)
        if options.batch_size is None:
            model.__dict__["fit"] = _telling_the_batch(model)
        model.__dict__["__reduce_ex__"] = functools.partial(_reduced, model)
        model.__dict__["__deepcopy__"] = functools.partial(_deepcopied, model)
        _carry_over_to_clones()
    model.train_function = None  # so that it is traced anew
    return model


def get_plans(model: Any) -> list[Plan]:
    """The plans for a model since `save_memory(model)`, one for each traced step.

    Args:
        model: a model that was given to `save_memory`.

    Raises:
        ValueError: it was not given to `save_memory`.
    """
    return registry.get_plans(model)


def _model_classes() -> Any:
    """`keras.Model`, and that of Keras 2 if it is loaded."""
    keras_2 = sys.modules.get("tf_keras")
    return (keras.Model,) if keras_2 is None else (keras.Model, keras_2.Model)


def _saving(model: Any, options: Options) -> Callable[..., Any]:
    """The model's own training step, run under `patch`."""
    step = model.train_step
    plans = registry.of_models[model]

    @functools.wraps(step)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        batch_size = options.batch_size
        if model in _fed:
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            batch_size = max(1, _fed[model] // replicas)
        saving = patch.of(dataclasses.replace(options, batch_size=batch_size))
        with saving as patched, _built_outside(model):
            patched.plans = plans
            return step(*args, **kwargs)

    return train_step


@contextlib.contextmanager
def _built_outside(model: Any) -> Iterator[None]:
    """Lets Keras make the variables of its optimizer and metrics outside the trace.

    It makes them in the first step. A `tf.function` that makes variables is traced once more, so
    the step would be planned twice.
    """
    metrics = (m for m in model.metrics if type(m).__name__ == "CompileMetrics")
    with contextlib.ExitStack() as stack:
        for part in () if tf.distribute.has_strategy() else (model.optimizer, *metrics):
            if hasattr(part, "build") and "build" not in part.__dict__:
                part.__dict__["build"] = functools.partial(_build_outside, part.build)
                stack.callback(part.__dict__.pop, "build")
        yield


def _build_outside(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with tf_private.outside_of_traces():
        return build(*args, **kwargs)


def _telling_the_batch(model: Any) -> Callable[..., Any]:
    """Wraps the model's `fit` to learn the batch size, which the graph of its step leaves open."""
    fit = model.fit

    @functools.wraps(fit)
    def telling(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = inspect.signature(fit).bind(*args, **kwargs)
        except TypeError:
            return fit(*args, **kwargs)  # it raises the right error
        if "x" in bound.arguments:
            x, batch = fed_batch(bound.arguments["x"], bound.arguments.get("batch_size"))
            bound.arguments["x"] = x
            if batch is not None and batch != _fed.get(model):
                model.train_function = None  # so that it is planned for this size
                _fed[model] = batch
        return fit(*bound.args, **bound.kwargs)

    return telling


def _reduced(model: Any, protocol: Any) -> tuple:
    """The data from which pickle and `copy` make a copy of `model`."""
    plain: Any = type(model)
    made_from = plain.__reduce_ex__(model, protocol)
    try:
        pickle.dumps(_options[model])
    except Exception as error:  # whatever the user's checkpoints raise
        warn(
            f'memory_saving_gradients: the copy of model "{model.name}" trains plain, as its '
            f"checkpoints cannot be pickled ({error}): call save_memory on the copy."
        )
        return made_from
    return _copied, (_options[model], made_from)


def _copied(options: Options, made_from: tuple) -> Any:
    make, arguments, *state = made_from
    model = make(*arguments)
    if state:
        model.__setstate__(*state)
    return _save_memory(model, options)


def _deepcopied(model: Any, memo: dict) -> Any:
    make, arguments, *_ = _reduced(model, pickle.HIGHEST_PROTOCOL)
    return make(*copy.deepcopy(arguments, memo))


def _carry_over_to_clones() -> None:
    """Patches `clone_model`, wherever it was imported to, so that clones save memory as well."""
    for module in [*sys.modules.values()]:
        names = getattr(module, "__dict__", {})  # anything may be in sys.modules
        function = names.get("clone_model")
        made_by = getattr(function, "__module__", None) or ""
        if made_by.startswith(("keras.", "tf_keras.")) and not hasattr(function, "carries_over"):
            names["clone_model"] = _cloning(function)


@functools.cache
def _cloning(clone_model: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clone_model)
    def cloned(model: Any, *args: Any, **kwargs: Any) -> Any:
        clone = clone_model(model, *args, **kwargs)
        options = _options.get(model)
        if options is None:
            return clone
        return _save_memory(clone, options)

    cloned.__dict__["carries_over"] = True
    return cloned


class MemoryReport(keras.callbacks.Callback):
    """Prints the plan of a model, and the measured peak of its training step.

    The plan is printed after the first batch, the measured peak after the second: the first batch
    builds the step, so its memory is not representative. Later, one step of each epoch is measured,
    by `measure.StepPeak`; if that is not possible, the report says so.

    Args:
        log_dir: a folder for TensorBoard, to which the summary of the plan, its figure (if
            matplotlib is installed) and the measured peak of each epoch are written; None for none.

    Attributes:
        measured_bytes: the peak of the last step that was measured, in bytes; None before.

    Raises:
        ImportError: `log_dir` is given and TensorBoard is not installed.

    Example:
        >>> model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
        >>> save_memory(model).compile("sgd", "mse")
        >>> x, y = tf.zeros((8, 4)), tf.zeros((8, 1))
        >>> history = model.fit(x, y, callbacks=[MemoryReport()], verbose=0)  # doctest: +SKIP
        memory_saving_gradients: memory: predicted peak 1.3 MB -> 0.5 MB ...
    """

    def __init__(self, log_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        if log_dir is not None and importlib.util.find_spec("tensorboard") is None:
            raise ImportError("log_dir needs TensorBoard: pip install tensorboard")
        self.log_dir = log_dir
        self.measured_bytes: int | None = None
        self._known = 0  # the number of plans that have been reported
        self._built = False  # whether a batch has run, so that the next one can be measured
        self._epoch = 0
        self._measured_epoch = -1
        self._meter: StepPeak | None = None
        self._writer: Any = None

    def on_train_begin(self, logs: dict | None = None) -> None:
        if self.model not in registry.of_models:
            warn(
                f'memory_saving_gradients: model "{self.model.name}" trains plain, as it was not '
                "given to memory_saving_gradients.keras.save_memory"
            )
        first_plan.no_longer()  # the plan is reported below
        self._known = len(registry.of_models.get(self.model, []))
        self._built, self._measured_epoch = False, -1
        if self.log_dir is not None:
            self._writer = tf.summary.create_file_writer(os.fspath(self.log_dir))

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        if self._built and self._measured_epoch < self._epoch:
            self._measured_epoch = self._epoch
            try:
                self._meter = StepPeak()
            except OSError as error:
                print(f"memory_saving_gradients: the peak cannot be measured here: {error}")

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if not self._built:
            self._built = True
            self._tell_plans()
        elif self._meter is not None:
            first = self.measured_bytes is None
            self.measured_bytes = self._meter.bytes()
            self._meter = None
            if first:
                peak = format_bytes(self.measured_bytes)
                print(f"memory_saving_gradients: measured peak {peak} above the start")
            if self._writer is not None:
                with self._writer.as_default(step=self._epoch):
                    tf.summary.scalar("memory/measured_mb", self.measured_bytes / 1e6)

    def on_train_end(self, logs: dict | None = None) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _tell_plans(self) -> None:
        plans = registry.of_models.get(self.model, [])
        distinct: dict[Any, Plan] = {}
        for plan in plans[self._known :]:  # Keras traces twice, with the same plan
            distinct.setdefault((plan.schedule, plan.peak_bytes), plan)
        told = [*distinct.values()] or plans[-1:]
        described = "\n".join(summary.short(plan) for plan in told)
        described = described or "nothing was planned; see the warning above"
        print(f"memory_saving_gradients: {described}")
        if self._writer is None:
            return
        with self._writer.as_default(step=self._epoch):
            tf.summary.text("memory/plan", described.replace("\n", "  \n"))
            for plan in told[-1:]:
                tf.summary.text("memory/summary", f"```\n{summary.text(plan)}\n```")
                tf.summary.scalar("memory/baseline_mb", plan.baseline_peak_bytes / 1e6)
                tf.summary.scalar("memory/predicted_mb", plan.peak_bytes / 1e6)
                if importlib.util.find_spec("matplotlib"):
                    picture = tf.io.decode_png(figures.png(plan.plot()), channels=4)
                    tf.summary.image("memory/timeline", picture[None])
