"""Eager training with `checkpoint()` around the blocks of a network: peak memory and time.

Beside it stand the plain tape, `tf.recompute_grad` around the same blocks, and the same blocks in a
`tf.function`. Peaks are those of fresh processes; times are ratios to the plain eager step in the
same process, in turns.

Writes eager.json beside this file, from which scripts/benchmarks/render.py makes a table.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from rich.progress import track

from memory_saving_gradients import checkpoint
from memory_saving_gradients.measure import function_peak, step_times
from test_models import GPT, CifarResNet, Model

NETWORKS: dict[str, tuple[Callable[[], Model], int]] = {
    "ResNet-56, CIFAR, batch 128": (functools.partial(CifarResNet, 56), 128),
    "GPT, 6 layers, batch 8": (GPT, 8),
    "GPT, 6 layers, dropout, batch 8": (functools.partial(GPT, dropout=0.1), 8),
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


def rows_of(network: str, rounds: int) -> dict[str, Any]:
    peaks = {way: function_peak(make_step, network, way) for way in WAYS}
    steps = {way: make_step(network, way) for way in WAYS}
    times = {way: statistics.median(found) for way, found in step_times(steps, rounds).items()}
    compared = "dropout" not in network
    return {
        way: {
            "peak_bytes": peaks[way],
            "time_ratio": times[way] / times["plain"],
            "differs": differs(network, way) if compared else None,
        }
        for way in WAYS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(NETWORKS), help="keep the other results")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    output = Path(__file__).with_name("eager.json")
    results = json.loads(output.read_text()) if options.only and output.exists() else {}
    for network in track(options.only or NETWORKS, description="networks"):
        results[network] = rows_of(network, options.rounds)
        output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
