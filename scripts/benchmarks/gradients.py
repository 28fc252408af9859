"""Steps whose memory is that of gradients: sums of many, weights' gradients, optimizers.

In default sessions, and through `fit` in default processes. On 2 cores it takes about 25 minutes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import memory_saving_gradients as msg
from scripts.benchmarks.common import Section, Step, in_session, measure_ways
from scripts.benchmarks.keras_fit import fit_step
from test_models import LSTM, DenseNet, Model, PaperDenseNet, WeightDecay
from test_models.keras_models import example, gpt, resnet50

#: label: (builder, batch, inter-op threads, budget beside "memory")
IN_SESSIONS: dict[str, tuple[Callable[[], Model], int, int | None, str]] = {
    "DenseNet as in the paper, 2 × 12 layers, batch 64": (PaperDenseNet, 64, None, "190MB"),
    "DenseNet, 2 × 12 layers, batch 64": (DenseNet, 64, None, "245MB"),
    "LSTM, 2 × 96 cells, batch 64": (LSTM, 64, None, "60MB"),
    "weight decay, 8 dense layers of 1,024, batch 256, one thread": (WeightDecay, 256, 1, "40MB"),
}

#: label: (builder, batch, optimizer, budget beside "memory")
THROUGH_FIT: dict[str, tuple[Callable, int, Callable[[], Any], str]] = {
    "`fit` of ResNet-50, 96 px, batch 16, SGD with momentum": (
        resnet50,
        16,
        functools.partial(keras.optimizers.SGD, 0.01, momentum=0.9),
        "55MB",
    ),
    "`fit` of ResNet-50, 96 px, batch 16, Adam": (resnet50, 16, keras.optimizers.Adam, "60MB"),
    "`fit` of a GPT of 91 M weights, batch 1 × 128, Adam": (gpt, 1, keras.optimizers.Adam, "60MB"),
}


def session_step(label: str, method: str) -> Step:
    """A step in a session."""
    make, batch, threads, _ = IN_SESSIONS[label]
    differentiate = tf.gradients
    if method != "plain":
        differentiate = functools.partial(msg.gradients, **options_of(method))
    return in_session(make, batch, differentiate, threads)


def compiled(label: str, method: str) -> tuple[keras.Model, Any, Any]:
    """A model that trains by a method, with a batch for it."""
    keras.utils.set_random_seed(0)
    build, batch, optimizer, _ = THROUGH_FIT[label]
    model = build(lambda part: part)
    loss = "sparse_categorical_crossentropy"
    model.compile(optimizer(), loss, jit_compile=False)
    if method != "plain":
        msg.keras.save_memory(model, **options_of(method))
    return model, *example(model, batch)


def options_of(method: str) -> dict[str, Any]:
    return {"checkpoints": "memory"} if method == "memory" else {"memory_budget": method}


def measured(label: str) -> dict[str, dict]:
    """Peak, prediction and time of a step: plain, `memory`, and within the budget."""
    *_, budget = IN_SESSIONS.get(label) or THROUGH_FIT[label]

    def build(way: str) -> Step:
        if label in IN_SESSIONS:
            return session_step(label, way)
        return fit_step(compiled, label, way, ours=way != "plain")

    ways = ("plain", "memory", budget)
    return measure_ways({way: functools.partial(build, way) for way in ways})


SECTIONS = {"rows": Section([*IN_SESSIONS, *THROUGH_FIT], measured)}
