"""Measures Keras `fit` plainly, with other ways to recompute, and with `save_memory`.

In default processes; losses are compared in others, without oneDNN, where kernels are
deterministic. Writes keras_fit.json beside this file, from which scripts/benchmarks/render.py makes
tables.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
from rich.progress import track

import memory_saving_gradients as msg
from memory_saving_gradients import measure
from test_models.keras_models import KERAS_MODELS, Recomputed, example

Fit = Callable[[], Any]

#: method: the options of `save_memory`
OURS: dict[str, dict] = {
    "memory": {"checkpoints": "memory"},
    "speed": {"checkpoints": "speed"},
    "budget 0.4": {"memory_budget": 0.4},
}
METHODS = ["plain", "recompute_grad", "RematScope", *OURS]


def compiled(label: str, method: str, jit: bool) -> tuple[keras.Model, Any, Any]:
    """A model that trains by a method, with a batch for it."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    build, batch = KERAS_MODELS[label]
    if method == "RematScope":
        with keras.RematScope(mode="full"):
            model = build(lambda part: part)
    else:
        model = build(Recomputed if method == "recompute_grad" else lambda part: part)
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=jit)
    if method in OURS:
        msg.keras.save_memory(model, **OURS[method])
    return model, *example(model, batch)


def make_fit(label: str, method: str, jit: bool) -> Fit:
    """`fit` on one batch."""
    model, x, y = compiled(label, method, jit)
    return functools.partial(model.fit, x, y, batch_size=len(x), verbose=0)


def times(label: str, methods: list[str], jit: bool, rounds: int) -> dict[str, list[float]]:
    """Seconds of the steps of each method, in one process, in turns."""
    steps: dict[str, Fit] = {}
    for method in methods:
        model, x, y = compiled(label, method, jit)
        steps[method] = functools.partial(model.train_on_batch, x, y)
        steps[method]()
    return measure.step_times(steps, rounds)


def losses(label: str, method: str, count: int = 5) -> list[float]:
    """The losses of the first steps."""
    model, x, y = compiled(label, method, False)
    return [float(model.train_on_batch(x, y)) for _ in range(count)]


def equal_losses(label: str, methods: list[str]) -> dict[str, bool]:
    """Whether the losses of each method are those of plain `fit`, bit for bit."""
    tf.config.experimental.enable_op_determinism()
    plain = losses(label, "plain")
    return {method: losses(label, method) == plain for method in methods}


def equal_losses_without_onednn(label: str, methods: list[str]) -> dict[str, bool]:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.benchmarks.keras_fit", "--losses", label, *methods],
        env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure_model(label: str, jit: bool, rounds: int) -> dict[str, dict]:
    """Peak, prediction and time of each method on one model; the error of one that fails."""
    found: dict[str, dict] = {}
    for method in METHODS:
        try:
            found[method] = {"peak_bytes": measure.function_peak(make_fit, label, method, jit)}
        except RuntimeError as error:
            found[method] = {"error": re.sub(r"\x1b\[\d+m|\s+", " ", str(error))}
    works = [method for method in METHODS if "error" not in found[method]]
    for method, seconds in times(label, works, jit, rounds).items():
        found[method]["seconds"] = statistics.median(seconds)
    for method in [method for method in OURS if method in works]:
        model, x, y = compiled(label, method, jit)
        model.train_on_batch(x, y)
        for plan in msg.keras.get_plans(model)[-1:]:
            found[method] |= {"predicted_bytes": plan.peak_bytes, "overhead": plan.overhead}
            found["plain"]["predicted_bytes"] = plan.baseline_peak_bytes
    if not jit:
        for method, equal in equal_losses_without_onednn(label, works).items():
            found[method]["equal_losses"] = equal
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(KERAS_MODELS), help="keep other results")
    parser.add_argument("--jit", choices=["yes", "no", "both"], default="both")
    parser.add_argument("--losses", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    if options.losses:
        label, *methods = options.losses
        print(json.dumps(equal_losses(label, methods)))
        return
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    results["machine"] = (
        f"{platform.machine()}, {os.cpu_count()} cores, TensorFlow {tf.__version__}, "
        f"Keras {keras.__version__}"
    )
    modes = {"yes": [True], "no": [False], "both": [False, True]}[options.jit]
    for jit in modes:
        rows = results.setdefault("compiled" if jit else "graph", {})
        for label in track(options.only or KERAS_MODELS, description="models"):
            rows[label] = measure_model(label, jit, options.rounds)
            options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
