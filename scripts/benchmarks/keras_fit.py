"""Keras `fit` plainly, with other ways to recompute, and with `save_memory`.

In default processes; losses are compared in others, without oneDNN, where kernels are
deterministic. On 2 cores it takes about an hour.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import memory_saving_gradients as msg
from memory_saving_gradients.measure import function_peak
from scripts.benchmarks.common import Section, Step, measure_ways
from scripts.benchmarks.fresh import fresh
from test_models.keras_models import KERAS_MODELS, Recomputed, example

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


def fit_of(compiled: Callable[..., tuple], *arguments: Any) -> Callable[[], Any]:
    """`fit` on one batch of what `compiled` makes of the arguments."""
    model, x, y = compiled(*arguments)
    return functools.partial(model.fit, x, y, batch_size=len(x), verbose=0)


def fit_step(compiled: Callable[..., tuple], *arguments: Any, ours: bool) -> Step:
    """A step of `fit`, its peak in a fresh process, and what was planned if it is ours."""
    peak = function_peak(fit_of, compiled, *arguments)
    model, x, y = compiled(*arguments)
    model.train_on_batch(x, y)
    plans = msg.keras.get_plans(model) if ours else []
    run = functools.partial(model.train_on_batch, x, y)
    return Step(run, peak, plans[-1] if plans else None)


def losses(label: str, method: str, count: int = 5) -> list[float]:
    """The losses of the first steps."""
    model, x, y = compiled(label, method, False)
    return [float(model.train_on_batch(x, y)) for _ in range(count)]


def equal_losses(label: str, methods: list[str]) -> dict[str, bool]:
    """Whether the losses of each method are those of plain `fit`, bit for bit."""
    tf.config.experimental.enable_op_determinism()
    plain = losses(label, "plain")
    return {method: losses(label, method) == plain for method in methods}


def measured(jit: bool, label: str) -> dict[str, dict]:
    """Peak, prediction and time of each method on one model; the error of one that fails."""
    found = measure_ways(
        {
            way: functools.partial(fit_step, compiled, label, way, jit, ours=way in OURS)
            for way in METHODS
        }
    )
    if not jit:
        works = [way for way, row in found.items() if "error" not in row]
        same = fresh(equal_losses, label, works, TF_ENABLE_ONEDNN_OPTS="0")
        for way, equal in same.items():
            found[way]["equal_losses"] = equal
    return found


SECTIONS = {
    "graph": Section(KERAS_MODELS, functools.partial(measured, False)),
    "compiled": Section(
        KERAS_MODELS, functools.partial(measured, True), {"TF_NUM_INTEROP_THREADS": "1"}
    ),
}
