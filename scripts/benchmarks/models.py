"""Measures every test model with `tf.gradients`, every strategy and budgets; the time to rewrite.

In a default session: oneDNN as installed, all threads. Writes models.json beside this file, from
which scripts/benchmarks/render.py makes tables. With --laboratory there is one inter-op thread and
no oneDNN, where kernels are deterministic, and laboratory.json says what is equal.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.update({"TF_ENABLE_ONEDNN_OPTS": "0"} if "--laboratory" in sys.argv else {})

import keras
import numpy as np
import tensorflow as tf
from rich.progress import track

from memory_saving_gradients import (
    BudgetError,
    GradientTape,
    get_plans,
    gradients,
    gradients_memory,
    gradients_speed,
    measure,
)
from test_models import (
    GPT,
    LSTM,
    VGG16,
    Chain,
    CifarResNet,
    DenseNet,
    Inception,
    MobileNet,
    Model,
    PixelCNN,
    ResNet50,
    SegNet,
    Transformer,
    UNet,
    build_v1,
)

LABORATORY = "--laboratory" in sys.argv

METHODS: dict[str, Callable[..., list]] = {
    "tf.gradients": tf.gradients,
    "memory": gradients_memory,
    "speed": gradients_speed,
}

#: label: (builder, batch)
MODELS: dict[str, tuple[Callable[[], Model], int]] = {
    "chain, 64 layers, 2048 × 256": (Chain, 2048),
    "ResNet-56, CIFAR, batch 128": (functools.partial(CifarResNet, 56), 128),
    "ResNet-110, CIFAR, batch 128": (functools.partial(CifarResNet, 110), 128),
    "ResNet-50, 96 px, batch 32": (ResNet50, 32),
    "U-Net, 128 px, batch 4": (UNet, 4),
    "DenseNet, 2 × 12 layers, batch 64": (DenseNet, 64),
    "GPT, 6 layers, batch 8": (GPT, 8),
    "VGG16, half width, 128 px, batch 16": (functools.partial(VGG16, 128, width=32), 16),
    "MobileNet, 128 px, batch 32": (functools.partial(MobileNet, 128), 32),
    "ResNet-50, 224 px, batch 8": (functools.partial(ResNet50, 224), 8),
    "Inception, 128 px, batch 32": (functools.partial(Inception, 128), 32),
    "SegNet, 64 px, batch 16": (SegNet, 16),
    "PixelCNN++, batch 8": (PixelCNN, 8),
    "LSTM, 2 × 96 cells, batch 64": (LSTM, 64),
    "Transformer, 4 + 4 layers, batch 32": (Transformer, 32),
}


#: The budgets, as shares of the baseline peak, and more of them for the models with a goal there.
SHARES = (0.7, 0.5, 0.4, 0.3, 0.2)
MORE_SHARES = {
    "chain, 64 layers, 2048 × 256": (0.13,),
    "ResNet-110, CIFAR, batch 128": (0.14,),
    "GPT, 6 layers, batch 8": (0.15,),
}


def methods_for(label: str) -> dict[str, Callable[..., list]]:
    """The methods to measure a model with: all strategies, and a budget for every share."""
    shares = sorted((*SHARES, *MORE_SHARES.get(label, ())), reverse=True)
    budgets = {f"budget {s:g}": functools.partial(gradients, memory_budget=s) for s in shares}
    return METHODS | budgets


def measure_model(
    make: Callable[[], Model], batch: int, methods: dict[str, Callable[..., list]], rounds: int
) -> dict[str, dict]:
    """Peak, prediction, time and equality of each method on one model."""
    steps: dict[str, Callable[[], Any]] = {}
    found: dict[str, dict] = {}
    plain: list[np.ndarray] | None = None
    for method, differentiate in methods.items():
        model = make()
        with tf.Graph().as_default() as graph:
            step = build_v1(model, batch)
            try:
                grads = differentiate(step.loss, step.variables)
            except BudgetError as error:
                found[method] = {"unreachable": str(error)}
                continue
            fetches = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads]
            config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=int(LABORATORY))
            session = tf.compat.v1.Session(config=config)
            session.run(tf.compat.v1.global_variables_initializer())
        feed = step.feed(model.example(batch))
        values = session.run(fetches, feed)
        plain = plain or values
        steps[method] = functools.partial(session.run, fetches, feed)
        found[method] = {
            "peak_bytes": measure.session_peak(session, fetches, feed),
        }
        if LABORATORY:
            pairs = zip(values, plain, strict=True)
            found[method]["bit_equal"] = all(np.array_equal(a, b) for a, b in pairs)
        for plan in get_plans(graph)[-1:]:
            found[method] |= {
                "predicted_bytes": plan.peak_bytes,
                "budget_bytes": plan.budget_bytes,
                "overhead": plan.overhead,
                "lower_bound": plan.lower_bound,
                "planning_seconds": plan.seconds,
            }
            found["tf.gradients"]["predicted_bytes"] = plan.baseline_peak_bytes
    times = measure.step_times(steps, rounds)
    for method, seconds in times.items():
        ratios = [
            ours / theirs for ours, theirs in zip(seconds, times["tf.gradients"], strict=True)
        ]
        found[method]["seconds"] = statistics.median(seconds)
        found[method]["time_ratio"] = statistics.quantiles(ratios, n=4)
    return found


def rewriting_time(make: Callable[[], Model], batch: int) -> dict[str, float]:
    """Seconds that `tf.gradients` takes on a model, and those that its rewriting adds."""
    with tf.Graph().as_default() as graph:
        step = build_v1(make(), batch)
        ops = len(graph.get_operations())
        began = time.perf_counter()
        tf.gradients(step.loss, step.variables)
        plain = time.perf_counter() - began
        gradients_memory(step.loss, step.variables)
        return {"ops": ops, "tf_gradients": plain, "ours": get_plans(graph)[-1].seconds}


def keras_rewriting_time() -> dict[str, float]:
    """The same with the tape, for EfficientNetV2-B0 of Keras."""
    model = keras.applications.EfficientNetV2B0(weights=None, input_shape=(96, 96, 3))
    taken: dict[str, float] = {}

    @tf.function(autograph=False)
    def step(images: tf.Tensor) -> list:
        with tf.GradientTape() as plain, GradientTape() as ours:
            loss = tf.reduce_mean(model(images, training=True))
        taken["ops"] = len(loss.graph.get_operations())
        began = time.perf_counter()
        plain.gradient(loss, model.trainable_variables)
        taken["tf_gradients"] = time.perf_counter() - began
        return ours.gradient(loss, model.trainable_variables)

    graph = step.get_concrete_function(tf.TensorSpec((16, 96, 96, 3))).graph
    return taken | {"ours": get_plans(graph)[-1].seconds}


#: What the rewriting is timed on.
REWRITTEN: dict[str, tuple[Callable[[], Model], int]] = {
    **{
        f"chain, {layers:,} layers": (functools.partial(Chain, layers, width=16), 256)
        for layers in (52, 526, 1052)
    },
    **{label: MODELS[label] for label in MODELS if label.startswith(("ResNet-56", "ResNet-110"))},
    "GPT, 6 layers, batch 8": (GPT, 8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--laboratory", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(MODELS), help="keep the other results")
    options = parser.parse_args()
    output = Path(__file__).with_name("laboratory.json" if LABORATORY else "models.json")
    results = json.loads(output.read_text()) if options.only else {"models": {}}
    results["machine"] = (
        f"{platform.machine()}, {os.cpu_count()} cores, TensorFlow {tf.__version__}"
    )
    for label in track(options.only or MODELS, description="models"):
        methods = METHODS if LABORATORY else methods_for(label)
        results["models"][label] = measure_model(*MODELS[label], methods, options.rounds)
        output.write_text(json.dumps(results, indent=1) + "\n")
    if not LABORATORY:
        rewriting_time(Chain, 256)  # warms up
        results["rewriting"] = {
            label: rewriting_time(*what) for label, what in track(REWRITTEN.items())
        }
        results["rewriting"]["EfficientNetV2-B0 of Keras"] = keras_rewriting_time()
    output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
