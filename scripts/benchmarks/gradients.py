"""Measures steps whose memory is that of gradients: sums of many, weights' gradients, optimizers.

In default sessions, and through `fit` in default processes. Writes gradients.json beside this file,
from which scripts/benchmarks/render.py makes a table.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
from rich.progress import track

import memory_saving_gradients as msg
from memory_saving_gradients import measure
from test_models import LSTM, DenseNet, Model, PaperDenseNet, WeightDecay, build_v1
from test_models.keras_models import example, gpt, resnet50

ROUNDS = 9

#: label: (builder, batch, inter-op threads, budget beside "memory")
IN_SESSIONS: dict[str, tuple[Callable[[], Model], int, int, str]] = {
    "DenseNet as in the paper, 2 × 12 layers, batch 64": (PaperDenseNet, 64, 0, "190MB"),
    "DenseNet, 2 × 12 layers, batch 64": (DenseNet, 64, 0, "245MB"),
    "LSTM, 2 × 96 cells, batch 64": (LSTM, 64, 0, "60MB"),
    "weight decay, 8 dense layers of 1,024, batch 256, one thread": (WeightDecay, 256, 1, "40MB"),
}

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD with momentum": functools.partial(keras.optimizers.SGD, 0.01, momentum=0.9),
    "Adam": keras.optimizers.Adam,
}

#: label: (builder, batch, optimizer, budget beside "memory")
THROUGH_FIT: dict[str, tuple[Callable, int, str, str]] = {
    "`fit` of ResNet-50, 96 px, batch 16, SGD with momentum": (
        resnet50,
        16,
        "SGD with momentum",
        "55MB",
    ),
    "`fit` of ResNet-50, 96 px, batch 16, Adam": (resnet50, 16, "Adam", "60MB"),
    "`fit` of a GPT of 91 M weights, batch 1 × 128, Adam": (gpt, 1, "Adam", "60MB"),
}


def session_step(label: str, method: str) -> tuple[Callable[[], Any], int, list[msg.Plan]]:
    """A step in a session, its peak in bytes, and what was planned."""
    make, batch, threads, _ = IN_SESSIONS[label]
    model = make()
    with tf.Graph().as_default() as graph:
        step = build_v1(model, batch)
        if method == "plain":
            grads = tf.gradients(step.loss, step.variables)
        else:
            grads = msg.gradients(step.loss, step.variables, **options_of(method))
        fetches = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads]
        config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=threads)
        session = tf.compat.v1.Session(config=config)
        session.run(tf.compat.v1.global_variables_initializer())
    feed = step.feed(model.example(batch))
    session.run(fetches, feed)
    peak = measure.session_peak(session, fetches, feed)
    return functools.partial(session.run, fetches, feed), peak, msg.get_plans(graph)


def fitted(label: str, method: str) -> tuple[keras.Model, Any, Any]:
    """A model that trains by a method, with a batch for it."""
    keras.utils.set_random_seed(0)
    build, batch, optimizer, _ = THROUGH_FIT[label]
    model = build(lambda part: part)
    loss = "sparse_categorical_crossentropy"
    model.compile(OPTIMIZERS[optimizer](), loss, jit_compile=False)
    if method != "plain":
        msg.keras.save_memory(model, **options_of(method))
    return model, *example(model, batch)


def make_fit(label: str, method: str) -> Callable[[], Any]:
    """`fit` on one batch."""
    model, x, y = fitted(label, method)
    return functools.partial(model.fit, x, y, batch_size=len(x), verbose=0)


def fit_step(label: str, method: str) -> tuple[Callable[[], Any], int, list[msg.Plan]]:
    """A step of `fit`, its peak in a fresh process in bytes, and what was planned."""
    peak = measure.function_peak(make_fit, label, method)
    model, x, y = fitted(label, method)
    step = functools.partial(model.train_on_batch, x, y)
    step()
    return step, peak, [] if method == "plain" else msg.keras.get_plans(model)


def options_of(method: str) -> dict[str, Any]:
    return {"checkpoints": "memory"} if method == "memory" else {"memory_budget": method}


def measure_row(make: Callable[..., tuple], label: str, budget: str) -> dict[str, dict]:
    """Peak, prediction and time of a step: plain, `memory`, and within the budget."""
    found: dict[str, dict] = {}
    steps = {}
    for method in ("plain", "memory", budget):
        try:
            steps[method], peak, plans = make(label, method)
        except msg.BudgetError as error:
            found[method] = {"unreachable": str(error)}
            continue
        found[method] = {"peak_bytes": peak}
        for plan in plans[-1:]:
            found[method] |= {"predicted_bytes": plan.peak_bytes, "overhead": plan.overhead}
    times = measure.step_times(steps, ROUNDS)
    for method, seconds in times.items():
        ratios = [ours / plain for ours, plain in zip(seconds, times["plain"], strict=True)]
        found[method]["seconds"] = statistics.median(seconds)
        found[method]["time_ratio"] = statistics.quantiles(ratios, n=4)
    return found


def main() -> None:
    output = Path(__file__).with_suffix(".json")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, TensorFlow {tf.__version__}"
    results: dict[str, Any] = {"machine": machine, "rows": {}}
    rows = {label: (session_step, row[-1]) for label, row in IN_SESSIONS.items()}
    rows |= {label: (fit_step, row[-1]) for label, row in THROUGH_FIT.items()}
    for label, (make, budget) in track(rows.items(), description="steps"):
        results["rows"][label] = measure_row(make, label, budget)
        output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
