"""`checkpoint_sequential()`: a chain of layers in segments of equal cost, each a `checkpoint`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from memory_saving_gradients.by_hand.checkpoint import checkpoint
from memory_saving_gradients.by_hand.signatures import Cache, Called
from memory_saving_gradients.by_hand.split import Policy
from memory_saving_gradients.graph import tf_private
from memory_saving_gradients.graph.costs import estimate_seconds
from memory_saving_gradients.graph.devices import described
from memory_saving_gradients.graph.shapes import Shapes


@tf.autograph.experimental.do_not_convert
def checkpoint_sequential(
    functions: Iterable[Callable], segments: int, x: Any, *, policy: str | Policy | None = None
) -> Any:
    """Calls functions one after another, in segments of which only the inputs are kept.

    The segments have about equal cost by TensorFlow's own estimate. The activations of the last one
    are needed as soon as the gradients begin, so it does not run again.

    Args:
        functions: functions of one argument each, or a `keras.Sequential`.
        segments: the number of segments, at least 1.
        x: the argument of the first function: a tensor or any nest.
        policy: what to keep within each segment, as in `checkpoint`.

    Returns:
        The result of the last function.

    Raises:
        TypeError: `functions` is not iterable, or holds something that cannot be called.
        ValueError: there are no functions, or `segments` is not positive.

    Example:
        >>> layers = [tf.keras.layers.Dense(8, "tanh") for _ in range(6)]
        >>> with tf.GradientTape() as tape:
        ...     y = checkpoint_sequential(layers, 3, tf.ones((4, 8)))
        >>> len(tape.gradient(y, [layer.kernel for layer in layers]))
        6

    The interface is that of `torch.utils.checkpoint.checkpoint_sequential`.
    """
    layers = _layers(functions)
    if isinstance(segments, bool) or not isinstance(segments, int):
        raise TypeError(f"segments must be an int, got {segments!r}")
    if segments < 1:
        raise ValueError(f"segments must be 1 or more, got {segments}")
    if tf.executing_eagerly() and not tf_private.a_tape_records():
        return _run(layers, x)
    costs = _costs.get(Called.of(_run, (layers, x), {}), _run, _estimated)
    *parts, last = _segments(layers, costs, min(segments, len(layers)))
    for part in parts:
        x = checkpoint(_run, part, x, policy=policy)
    return _run(last, x)


def _layers(functions: Any) -> list[Callable]:
    layers = getattr(functions, "layers", functions)
    if not isinstance(layers, Iterable):
        raise TypeError(f"functions must be a list of functions, got {functions!r}")
    layers = list(layers)
    if not layers:
        raise ValueError("functions is empty: there is nothing to call")
    for layer in layers:
        if not callable(layer):
            raise TypeError(f"functions holds {layer!r}, which cannot be called")
    return layers


def _run(layers: Sequence[Callable], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


_run.__qualname__ = "a segment of checkpoint_sequential"  # the name in messages


def _estimated(called: Called, _: Any) -> list[float]:
    """The seconds of each layer of a call of `_run`."""
    ends: list[int] = []

    def noted(layers: Sequence[Callable], x: Any) -> None:
        ends[:] = [0]  # a function that creates variables is traced twice
        for layer in layers:
            x = layer(x)
            ends.append(len(tf.compat.v1.get_default_graph().get_operations()))

    def trace(*tensors: tf.Tensor) -> None:
        dataclasses.replace(called, function=noted).run(tensors)

    traced = tf.function(trace, autograph=False).get_concrete_function(*called.tensors)
    made = traced.graph.get_operations()
    operations = [op for op in made if op.type != "Placeholder"]
    seconds = estimate_seconds(operations, Shapes(operations), described("cpu"))
    spans = itertools.pairwise(ends)
    return [sum(seconds.get(op.name, 0.0) for op in made[a:b]) for a, b in spans]


def _segments(
    layers: Sequence[Callable], costs: Sequence[float], count: int
) -> list[list[Callable]]:
    """The layers in `count` runs whose costs are as equal as can be (least squares)."""
    until = np.cumsum([0.0, *costs])
    best = np.square(until)  # of the first i layers in one run, then in two ...
    choices: list[np.ndarray] = []
    for _ in range(count - 1):
        table = best[:, None] + np.square(until[None, :] - until[:, None])
        table[np.tril_indices(len(until))] = np.inf  # no run is empty
        table[0] = np.inf
        choices.append(table.argmin(axis=0))
        best = table.min(axis=0)
    ends = [len(layers)]
    for choice in reversed(choices):
        ends.insert(0, int(choice[ends[0]]))
    return [[*layers[a:b]] for a, b in itertools.pairwise([0, *ends])]


_costs = Cache()
