"""The commands of the command line."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import inspect
import os
import statistics
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from rich.box import SIMPLE_HEAD
from rich.table import Table

from memory_saving_gradients import measure
from memory_saving_gradients.console import first_plan
from memory_saving_gradients.console.progress_bar import bar
from memory_saving_gradients.doors.max_batch import max_batch
from memory_saving_gradients.doors.traced_step import Step, step_of_model, traced_step
from memory_saving_gradients.graph.devices import MEMORY_BYTES
from memory_saving_gradients.graph.shapes import bytes_of
from memory_saving_gradients.options.options import Options
from memory_saving_gradients.pipeline.decide import by_memory
from memory_saving_gradients.pipeline.device_budget import device_bytes
from memory_saving_gradients.pipeline.why import saves_little, why_little_is_saved
from memory_saving_gradients.planning.units import format_bytes
from memory_saving_gradients.plans.plan import Plan
from memory_saving_gradients.report.figures import check_matplotlib
from memory_saving_gradients.report.summary import rendered

# The number of steps that are timed for each way, in turns.
_ROUNDS = 5


def report(options: argparse.Namespace) -> None:
    """Reports what is saved on a model; see `report --help`."""
    if options.measure and options.device in MEMORY_BYTES:
        raise ValueError(
            f"--measure trains on this machine, and --device {options.device} plans for another "
            "device: leave one out"
        )
    if options.plot:
        check_matplotlib()
        options.plot.mkdir(parents=True, exist_ok=True)
    if options.json and not options.json.parent.is_dir():
        raise FileNotFoundError(f"--json {options.json}: there is no folder {options.json.parent}")
    model = load(options.target)
    asked = Options(**_options(options))
    step = traced_step(model, example_of(options.input_shape), asked)
    if options.verify and not step.compiled:
        raise ValueError(
            "--verify asks XLA's compiler, but XLA does not compile this model: name the GPU that "
            "it is for, such as --device h100"
        )
    plans = step.plans(options.batch_size, options.verify)
    for plan in plans:
        plan.summary()
        if saves_little(plan):
            print(f"\n{why_little_is_saved(plan, by_memory(plan))}")
    plan = max(plans, key=lambda plan: plan.peak_bytes)
    print("\n" + rendered(_in_all(model, step, plan, options)).rstrip())
    if options.measure:
        print("\n" + _measured(options))
    if options.plot:
        for path in _draw(plan, options.plot):
            print(f"written: {path}")
    if options.json:
        options.json.write_text(plan.to_json() + "\n")
        print(f"written: {options.json}")


def _in_all(model: Any, step: Step, plan: Plan, options: argparse.Namespace) -> Table:
    """A table of all that a device holds at the peak of a step, plain and as planned."""
    weights = sum(bytes_of(v.shape, v.dtype) for v in model.weights)
    inputs = options.batch_size * step.example_bytes
    rows = {
        "weights": (weights, weights),
        "optimizer, metrics": (max(0, step.variables_bytes - weights),) * 2,
        "inputs": (inputs, inputs),
        "activations, gradients, scratch": (
            plan.baseline_compiled_bytes or plan.baseline_peak_bytes,
            plan.compiled_peak_bytes or plan.peak_bytes,
        ),
    }
    title = "In all, compiled by XLA" if step.compiled else "In all"
    with contextlib.suppress(OSError):  # the system does not provide it
        has, used = device_bytes(options.device)
        title += (
            f", of {format_bytes(has)} that {'the system has free' if used is None else 'it has'}"
        )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_footer=True)
    plain, planned = (sum(column) for column in zip(*rows.values(), strict=True))
    table.add_column("what", "in all")
    table.add_column("plain", format_bytes(plain), justify="right")
    table.add_column("as planned", format_bytes(planned), justify="right")
    for name, sizes in rows.items():
        table.add_row(name, *map(format_bytes, sizes))
    return table


def largest_batch(options: argparse.Namespace) -> None:
    """Prints the largest batches; see `max-batch --help`."""
    model = load(options.target)
    example = example_of(options.input_shape)
    found = max_batch(model, options.memory, example, device=options.device, verify=options.verify)
    print(found)


def load(target: str) -> Any:
    """The compiled Keras model that TARGET names.

    Raises:
        ValueError: it names no model.
    """
    import keras

    if keras.config.backend() != "tensorflow":
        raise ValueError(
            f"Keras runs on {keras.config.backend()}: set KERAS_BACKEND=tensorflow, or unset it"
        )
    module, colon, name = target.partition(":")
    if target.endswith(".keras"):
        if Path(target).is_file() and not zipfile.is_zipfile(target):
            raise ValueError(f"{target} is no .keras file: it is truncated, or of another type")
        model = keras.models.load_model(target)
    elif colon and name:
        sys.path.insert(0, os.getcwd())
        imported: Any = importlib.import_module(module)
        make = functools.reduce(getattr, name.split("."), imported)
        model = make if isinstance(make, keras.Model) else _made(make)
    else:
        raise ValueError(f"TARGET must be a .keras file or MODULE:CALLABLE, got {target!r}")
    if not isinstance(model, keras.Model):
        raise ValueError(f"{target} gives {model!r}, which is no Keras model")
    if not model.compiled:
        model.compile("sgd", "mse")
    return model


def example_of(shape: str | None) -> tf.TensorSpec | None:
    """The spec of a batch, from the option --input-shape; None if it was not given.

    Raises:
        ValueError: `shape` is invalid.
    """
    if shape is None:
        return None
    sizes, _, dtype = shape.partition(":")
    try:
        return tf.TensorSpec((None, *map(int, sizes.split(","))), dtype or "float32")
    except (TypeError, ValueError):
        raise ValueError(
            f"--input-shape must be sizes such as 32,32,3, or 128:int32, got {shape!r}"
        ) from None


def _made(make: Callable[..., Any]) -> Any:
    """The result of a callable, called with `weights=None` if it has that parameter."""
    parameters = inspect.signature(make).parameters
    return make(**({"weights": None} if "weights" in parameters else {}))


def make_step(
    target: str, batch_size: int, chosen: dict[str, Any] | None, shape: str | None = None
) -> Callable[[], Any]:
    """A training step of a model on random inputs, with options of `save_memory`, or plain."""
    from memory_saving_gradients import keras as ours

    first_plan.no_longer()  # it is in the report
    model = load(target)
    if chosen:
        ours.save_memory(model, batch_size=batch_size, **chosen)
    random = np.random.default_rng(0)
    _, specs = step_of_model(model, example_of(shape))
    x, y = tf.nest.map_structure(functools.partial(_random, random, batch_size), specs)
    return functools.partial(model.train_on_batch, x, y)


def _options(options: argparse.Namespace) -> dict[str, Any]:
    """The chosen options, as arguments of `save_memory`."""
    chosen: dict[str, Any] = {
        "checkpoints": options.checkpoints or "memory",
        "device": options.device,
    }
    for name in ("memory_budget", "max_overhead"):
        if getattr(options, name) is not None:
            chosen[name] = getattr(options, name)
    return chosen | ({"pieces": True} if options.pieces else {})


def _random(random: np.random.Generator, batch_size: int, spec: tf.TensorSpec) -> np.ndarray:
    """Random values for an input; zeros for integers."""
    first, *rest = spec.shape
    shape = (first or batch_size, *(size or 1 for size in rest))
    if spec.dtype.is_floating:
        return random.standard_normal(shape).astype(spec.dtype.as_numpy_dtype)
    return np.zeros(shape, spec.dtype.as_numpy_dtype)


def _measured(options: argparse.Namespace) -> str:
    """Measures peaks in fresh processes, and times in turns in this process."""
    target, batch, shape = options.target, options.batch_size, options.input_shape
    ways = {"plain": None, "saving": _options(options)}
    peaks, steps = {}, {}
    with bar("measuring", 5) as tick:
        for name, way in ways.items():
            peaks[name] = measure.function_peak(make_step, target, batch, way, shape)
            tick()
        for name, way in ways.items():
            steps[name] = make_step(target, batch, way, shape)
            steps[name]()  # builds it
            tick()
        seconds = measure.step_times(steps, _ROUNDS)
        tick()
    plain, saving = peaks["plain"], peaks["saving"]
    times = {name: statistics.median(rounds) for name, rounds in seconds.items()}
    return (
        f"measured in `fit`, optimizer included: peak {format_bytes(plain)} -> "
        f"{format_bytes(saving)} ({plain / max(saving, 1):.2f}x less), "
        f"step {times['plain']:.3f} s -> {times['saving']:.3f} s "
        f"({times['saving'] / times['plain']:.2f}x)"
    )


def _draw(plan: Plan, folder: Path) -> list[Path]:
    """The pictures of a plan, as PNG and SVG, a page for browsers, and a trace for Perfetto."""
    figures = {
        "timeline": plan.plot(),
        "frontier": plan.plot_frontier(),
        "network": plan.plot_graph(),
    }
    paths = [folder / f"{name}.{kind}" for name in figures for kind in ("png", "svg")]
    for path in paths:
        figures[path.stem].savefig(path)
    page, trace = folder / "timeline.html", folder / "trace.json"
    plan.save_timeline(page)
    plan.save_trace(trace)
    return [*paths, page, trace]
