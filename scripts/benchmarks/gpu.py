"""Peaks and times on the GPU that is there, in at most eight minutes.

`python -m scripts.benchmarks.gpu` trains three networks plainly and with recomputation, with and
without XLA, and writes `gpu.json`, with the device and the versions. Without a GPU it takes small
networks, and says so. Send us the file: no GPU has been at hand here.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

import memory_saving_gradients as msg
from memory_saving_gradients.measure import StepPeak
from scripts.benchmarks.common import Step, measure_ways
from scripts.benchmarks.fresh import fresh
from scripts.benchmarks.stamp import stamp
from test_models import GPT, Model, ResNet50, UNet

#: Seconds after which no further network is begun.
MOST_SECONDS = 8 * 60

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

#: way: the options of the tape; None for TensorFlow's own.
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "memory": {"checkpoints": "memory"},
    "speed": {"checkpoints": "speed"},
    "budget 0.5": {"memory_budget": 0.5},
}


def build(label: str, way: str, jit: bool) -> Step:
    """A network's training step, and the peak of its third run."""
    make, batch = (MODELS | SMALL)[label]
    model, options = make(), WAYS[way]
    inputs = [tf.constant(array) for array in model.example(batch)]

    @tf.function(jit_compile=jit, autograph=False)
    def step(*inputs: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() if options is None else msg.GradientTape(**options) as tape:
            loss = model.loss(*inputs)
        found = tape.gradient(loss, model.variables)
        return [loss, *(tf.convert_to_tensor(grad) for grad in found if grad is not None)]

    def run() -> Any:
        return step(*inputs)[0].numpy()

    run()
    run()
    meter = StepPeak()
    run()
    return Step(run, meter.bytes(), next(reversed(msg.get_plans(step)), None))


def measured(label: str, jit: bool) -> dict[str, dict]:
    """Peak, prediction and time of each way on one network."""
    return measure_ways({way: functools.partial(build, label, way, jit) for way in WAYS})


def device() -> str:
    """The name of the first GPU; "" if there is none."""
    gpus = tf.config.list_physical_devices("GPU")
    return str(tf.config.experimental.get_device_details(gpus[0])["device_name"]) if gpus else ""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.gpu", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    options = parser.parse_args(arguments)
    name = fresh(device)  # a process that holds the GPU would leave no room for others
    print(name or "there is no GPU: small networks, on the processor")
    content: dict[str, Any] = stamp() | {"device": name or "cpu", "results": {}}
    began = time.monotonic()
    for label in MODELS if name else SMALL:
        for jit in (False, True):
            if time.monotonic() - began > MOST_SECONDS:
                print(f"{label}: left out, as the time is up")
                continue
            row = fresh(measured, label, jit)
            content["results"].setdefault(label, {})["compiled" if jit else "graph"] = row
            options.output.write_text(json.dumps(content, indent=1) + "\n")
            for way, found in row.items():
                peak, ratio = found.get("peak_bytes", 0) / 1e6, found.get("time_ratio", 0.0)
                said = found.get("error") or f"{peak:,.0f} MB, {ratio:.2f}x the time"
                print(f"{label}{', XLA' if jit else ''}, {way}: {said}", flush=True)


if __name__ == "__main__":
    main()
