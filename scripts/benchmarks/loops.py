"""Networks written as a loop: measured peaks and times, and how the peak grows with the rounds.

Beside ours stand the plain step, `tf.recompute_grad` around the body of the loop, the same network
unrolled and, where JAX is installed, `jax.checkpoint` in `jax.lax.scan`. Sessions have default
options. On 2 cores it takes about 15 minutes.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from memory_saving_gradients import gradients
from scripts.benchmarks.common import Section, Step, in_session, measure_ways, run_in_jax
from test_models.loops import LoopLSTM, LoopResNet, NeuralODE
from test_models.model import Model

#: label: the model, and the batch.
NETWORKS: dict[str, tuple[Callable[..., Model], int]] = {
    "LSTM, 2 × 512 cells, 512 steps, batch 32": (LoopLSTM, 32),
    "LSTM, 256 cells, 1,000 steps, batch 32": (
        functools.partial(LoopLSTM, steps=1000, width=256, layers=1),
        32,
    ),
    "neural ODE, 1,000 steps, batch 64": (NeuralODE, 64),
    "ResNet of 200 equal blocks, batch 16": (LoopResNet, 16),
}

WAYS: dict[str, tuple[Callable[..., list], dict[str, Any]]] = {
    "tf.gradients": (tf.gradients, {}),
    "tf.recompute_grad": (tf.gradients, {"around": tf.recompute_grad}),
    "speed": (functools.partial(gradients, checkpoints="speed"), {}),
    "memory": (functools.partial(gradients, checkpoints="memory"), {}),
    "0.5": (functools.partial(gradients, memory_budget=0.5), {}),
    "unrolled": (functools.partial(gradients, checkpoints="memory"), {"unrolled": True}),
}

#: The networks that JAX trains, too, by their names in `peers_jax`.
IN_JAX = {"LSTM, 2 × 512 cells, 512 steps, batch 32": "lstm"}

#: The steps of a neural ODE, for the figure: nothing but its rounds grows.
ROUNDS = {f"{rounds}": rounds for rounds in (64, 256, 1024, 4096, 16384)}

#: What the figure compares; the last allows segments within segments.
LEVELS: dict[str, Callable[..., list]] = {
    **{way: WAYS[way][0] for way in ("tf.gradients", "memory")},
    "max_overhead=1.25": functools.partial(gradients, max_overhead=1.25),
}


def network(label: str) -> dict[str, Any]:
    make, batch = NETWORKS[label]

    def build(way: str) -> Step:
        differentiate, options = WAYS[way]
        return in_session(functools.partial(make, **options), batch, differentiate)

    return measure_ways({way: functools.partial(build, way) for way in WAYS})


def rounds(label: str) -> dict[str, int]:
    """The peak, in bytes, of a neural ODE of so many steps."""
    make = functools.partial(NeuralODE, steps=ROUNDS[label])
    return {way: in_session(make, 64, planned).peak_bytes for way, planned in LEVELS.items()}


def beside(label: str) -> dict[str, dict]:
    """Peak and time of each way in JAX."""
    return run_in_jax(IN_JAX[label])


SECTIONS = {
    "networks": Section(NETWORKS, network),
    "rounds": Section(ROUNDS, rounds),
}
if importlib.util.find_spec("jax"):
    SECTIONS["jax"] = Section(IN_JAX, beside)
