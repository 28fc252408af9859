"""Keras `fit` plainly, with other ways to recompute, and with `save_memory`.

In default processes. On 2 cores it takes about 15 minutes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

import memory_saving_gradients as msg
from memory_saving_gradients.measure import function_peak
from scripts.benchmarks.common import Section, Step, measure_ways
from test_models.keras_models import KERAS_MODELS, Recomputed, example

#: method: the options of `save_memory`
OURS: dict[str, dict] = {
    "memory": {"checkpoints": "memory"},
    "speed": {"checkpoints": "speed"},
    "budget 0.4": {"memory_budget": 0.4},
}
METHODS = ["plain", "recompute_grad", *OURS]


def compiled(label: str, method: str) -> tuple[keras.Model, Any, Any]:
    """A model that trains by a method, with a batch for it."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    build, batch = KERAS_MODELS[label]
    if method == "RematScope":
        with keras.RematScope(mode="full"):
            model = build(lambda part: part)
    else:
        model = build(Recomputed if method == "recompute_grad" else lambda part: part)
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
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


def measured(label: str) -> dict[str, dict]:
    """Peak, prediction and time of each method on one model; the error of one that fails."""
    return measure_ways(
        {
            way: functools.partial(fit_step, compiled, label, way, ours=way in OURS)
            for way in METHODS
        }
    )


SECTIONS = {"models": Section(KERAS_MODELS, measured)}
