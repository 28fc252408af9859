"""Eager training with `checkpoint()` around the blocks of a network: peak memory and time.

Beside it stand the plain tape, `tf.recompute_grad` around the same blocks, and the same blocks in a
`tf.function`. Peaks are those of fresh processes; times are ratios to the plain eager step. On 2
cores it takes about 10 minutes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from memory_saving_gradients import checkpoint
from memory_saving_gradients.measure import function_peak
from scripts.benchmarks.common import Section, Step, measure_ways
from test_models import GPT, CifarResNet, Model

NETWORKS: dict[str, tuple[Callable[[], Model], int]] = {
    "ResNet-56, CIFAR, batch 128": (functools.partial(CifarResNet, 56), 128),
    "GPT, 6 layers, batch 8": (GPT, 8),
}


def _recompute_grad(part: Callable, *inputs: tf.Tensor) -> tf.Tensor:
    return tf.recompute_grad(part)(*inputs)


#: way: what stands around each block, and whether the step is a `tf.function`.
WAYS: dict[str, tuple[Callable | None, bool]] = {
    "plain": (None, False),
    "checkpoint": (checkpoint, False),
    'checkpoint, policy="speed"': (functools.partial(checkpoint, policy="speed"), False),
    "tf.recompute_grad": (_recompute_grad, False),
    "plain, tf.function": (None, True),
    "checkpoint, tf.function": (checkpoint, True),
    "tf.recompute_grad, tf.function": (_recompute_grad, True),
}


def make_step(network: str, way: str) -> Callable[[], list]:
    """A step of a network: the gradients of one batch."""
    make, batch = NETWORKS[network]
    around, in_function = WAYS[way]
    model = make()
    inputs = [tf.constant(array) for array in model.example(batch)]
    model.loss(*(x[:2] for x in inputs))  # makes the variables
    if around is not None:
        model.block = around  # type: ignore[method-assign]

    def step(*inputs: tf.Tensor) -> list:
        with tf.GradientTape() as tape:
            loss = model.loss(*inputs)
        return tape.gradient(loss, model.variables)

    run = tf.function(step, autograph=False) if in_function else step
    return lambda: run(*inputs)


def differs(network: str, way: str) -> float:
    """The largest difference from plain gradients, relative to the largest element of each."""
    tf.keras.utils.set_random_seed(1)
    ours, plain = (tf.nest.flatten(make_step(network, w)(), True) for w in (way, "plain"))
    pairs = ((np.asarray(a), np.asarray(b)) for a, b in zip(ours, plain, strict=True))
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)) for a, b in pairs)


def measured(network: str) -> dict[str, Any]:
    def build(way: str) -> Step:
        peak = function_peak(make_step, network, way)
        return Step(make_step(network, way), peak)

    found = measure_ways({way: functools.partial(build, way) for way in WAYS})
    for way, row in found.items():
        row["differs"] = differs(network, way)
    return found


SECTIONS = {"networks": Section(NETWORKS, measured)}
