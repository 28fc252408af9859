"""Peaks and times on the GPU that is there, in about twenty minutes.

`python -m scripts.benchmarks.gpu` trains three networks plainly and with recomputation, with and
without XLA, and one by Keras's `fit`, compares gradients bit by bit, and trains a batch that does
not fit plainly. Where JAX is installed for the GPU, two of the networks are trained by
`jax.checkpoint`, too. It writes `gpu.json`, with the device and the versions. Without a GPU it
takes small networks, and says so.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import memory_saving_gradients as msg
from memory_saving_gradients.measure import StepPeak
from scripts.benchmarks.common import Step, measure_ways, run_in_jax, timed
from scripts.benchmarks.fresh import fresh
from scripts.benchmarks.stamp import stamp
from test_models import GPT, Model, ResNet50, UNet

#: The networks and their batches: on a GPU, and small ones.
MODELS: dict[str, tuple[Callable[[], Model], int]] = {
    "ResNet-50, 224 px, batch 64": (functools.partial(ResNet50, size=224), 64),
    "GPT, 12 layers, batch 8": (
        functools.partial(GPT, layers=12, width=768, length=1024, vocabulary=8192, heads=12),
        8,
    ),
    "U-Net, 256 px, batch 16": (functools.partial(UNet, size=256), 16),
}
SMALL: dict[str, tuple[Callable[[], Model], int]] = {
    "ResNet-50, 32 px, batch 4": (functools.partial(ResNet50, size=32, width=8), 4),
    "GPT, 2 layers, batch 4": (functools.partial(GPT, layers=2, width=32, length=32), 4),
    "U-Net, 32 px, batch 4": (functools.partial(UNet, size=32, width=8, levels=2), 4),
}

#: How many times its batch the first network trains beyond what the GPU holds plainly.
BEYOND = 24

#: Keras's ResNet-50 and its batch: on a GPU, and a small one.
FIT = {"Keras fit, ResNet-50, mixed_float16, 224 px, batch 64": (224, 64)}
SMALL_FIT = {"Keras fit, ResNet-50, mixed_float16, 32 px, batch 4": (32, 4)}

#: The networks that JAX trains, too, by their names in `peers_jax`.
IN_JAX = {"ResNet-50, 224 px, batch 64": "resnet50", "GPT, 12 layers, batch 8": "gpt12"}

#: way: the options of the tape; None for TensorFlow's own.
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "memory": {"checkpoints": "memory"},
    "speed": {"checkpoints": "speed"},
    "budget 0.5": {"memory_budget": 0.5},
}


def differentiated(
    model: Model, options: dict[str, Any] | None, jit: bool
) -> tf.types.experimental.PolymorphicFunction:
    """A function of a batch that returns the loss and the gradients."""

    @tf.function(jit_compile=jit, autograph=False)
    def step(*inputs: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() if options is None else msg.GradientTape(**options) as tape:
            loss = model.loss(*inputs)
        found = tape.gradient(loss, model.variables)
        return [loss, *(tf.convert_to_tensor(grad) for grad in found if grad is not None)]

    return step


def build(label: str, way: str, jit: bool, times_batch: int = 1) -> Step:
    """A network's training step, and the peak of its third run."""
    began = time.monotonic()
    make, batch = (MODELS | SMALL)[label]
    model = make()
    step = differentiated(model, WAYS[way], jit)
    inputs = [tf.constant(array) for array in model.example(batch)]
    inputs = [tf.concat([each] * times_batch, 0) for each in inputs]

    def run() -> Any:
        return step(*inputs)[0].numpy()

    peak = peak_of_third(run)
    report(f"{label}, {way}, {jit=}", peak, began)
    return Step(run, peak, next(reversed(msg.get_plans(step)), None))


def report(step: str, peak: int, began: float) -> None:
    """Says what was measured, as the whole may not end."""
    took = time.monotonic() - began
    print(f"{step}: {peak / 1e6:,.0f} MB, built in {took:.0f} s", file=sys.stderr, flush=True)


def peak_of_third(run: Callable[[], Any]) -> int:
    """The peak of a step's third run: what is made once is there by then."""
    run()
    run()
    meter = StepPeak()
    run()
    return meter.bytes()


def measured(label: str, jit: bool) -> dict[str, dict]:
    """Peak, prediction and time of each way on one network."""
    return measure_ways({way: functools.partial(build, label, way, jit) for way in WAYS})


def build_fit(label: str, way: str) -> Step:
    """Keras's training step, as `compile` makes it, and the peak of its third run."""
    began = time.monotonic()
    size, batch = (FIT | SMALL_FIT)[label]
    model = keras.applications.ResNet50(
        weights=None, input_shape=(size, size, 3), classifier_activation=None
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, jit_compile=True)
    if (options := WAYS[way]) is not None:
        msg.keras.save_memory(model, **options)
    images, labels = tf.random.normal([batch, size, size, 3]), tf.zeros([batch], tf.int32)

    def run() -> Any:
        return model.train_on_batch(images, labels)

    peak = peak_of_third(run)
    report(f"{label}, {way}", peak, began)
    return Step(run, peak, next(reversed(msg.keras.get_plans(model)), None) if options else None)


def measured_fit(label: str) -> dict[str, dict]:
    """Peak, prediction and time of each way of training by Keras."""
    keras.config.set_dtype_policy("mixed_float16")
    return measure_ways({way: functools.partial(build_fit, label, way) for way in WAYS})


def unequal(label: str) -> dict[str, int]:
    """How many gradients of each way differ from the plain ones in a bit, without XLA.

    A budget that cannot be met is left out: deterministic losses take more memory.
    """
    tf.config.experimental.enable_op_determinism()
    make, batch = (MODELS | SMALL)[label]
    model = make()
    inputs = [tf.constant(array) for array in model.example(batch)]
    found = {}
    for way, options in WAYS.items():
        with contextlib.suppress(msg.BudgetError):
            step = differentiated(model, options, jit=False)
            found[way] = [each.numpy() for each in step(*inputs)]
    return {
        way: sum(
            not np.array_equal(one, other) for one, other in zip(ours, found["plain"], strict=True)
        )
        for way, ours in found.items()
    }


def unequal_gradients(labels: Sequence[str]) -> dict[str, dict[str, int]]:
    """`unequal` of each network."""
    return {label: unequal(label) for label in labels}


def beyond(label: str) -> dict[str, dict]:
    """Peak and time of a batch that is `BEYOND` times as large, without XLA."""
    found: dict[str, dict] = {}
    for way in ("plain", "memory"):
        try:
            step = build(label, way, False, BEYOND)
        except tf.errors.ResourceExhaustedError:
            found[way] = {"error": "out of memory"}
        else:
            found[way] = {"peak_bytes": step.peak_bytes, **timed({way: step.run}, way)[way]}
    return found


def device() -> str:
    """The name of the first GPU; "" if there is none."""
    gpus = tf.config.list_physical_devices("GPU")
    return str(tf.config.experimental.get_device_details(gpus[0])["device_name"]) if gpus else ""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.gpu", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    parser.add_argument("--seconds", type=float, default=1200, help="begin nothing after this time")
    options = parser.parse_args(arguments)
    name = fresh(device)  # a process that holds the GPU would leave no room for others
    print(name or "there is no GPU: small networks, on the processor")
    content: dict[str, Any] = stamp() | {"device": name or "cpu", "results": {}}
    began = time.monotonic()
    for part, measure in parts(bool(name)).items():
        if time.monotonic() - began > options.seconds:
            print(f"{part}: left out, as the time is up")
            continue
        try:
            content["results"][part] = fresh(measure)
        except subprocess.CalledProcessError as error:
            content["results"][part] = {"error": f"the process failed: {error.returncode}"}
        options.output.write_text(json.dumps(content, indent=1) + "\n")
        print(f"{part}, at {time.monotonic() - began:.0f} s")
        print(json.dumps(content["results"][part], indent=1), flush=True)


def parts(on_gpu: bool) -> dict[str, functools.partial]:
    """What is measured, by its name in the results."""
    labels = [*(MODELS if on_gpu else SMALL)]
    found: dict[str, functools.partial] = {}
    for label in labels:
        found[f"{label}, without XLA"] = functools.partial(measured, label, False)
        found[f"{label}, XLA"] = functools.partial(measured, label, True)
    for label in FIT if on_gpu else SMALL_FIT:
        found[f"{label}, XLA"] = functools.partial(measured_fit, label)
    found["unequal gradients"] = functools.partial(unequal_gradients, labels)
    if on_gpu:
        found[f"{labels[0]}, times {BEYOND}"] = functools.partial(beyond, labels[0])
    if on_gpu and importlib.util.find_spec("jax"):
        for label in IN_JAX:
            found[f"JAX, {label}"] = functools.partial(run_in_jax, IN_JAX[label])
    return found


if __name__ == "__main__":
    main()
