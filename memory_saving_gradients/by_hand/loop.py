"""`checkpoint_loop()`: a loop in segments of rounds, each a `checkpoint`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients.by_hand.checkpoint import checkpoint

# The rounds of a segment if nothing tells how many rounds there are: √1,024.
_EVERY = 32


@tf.autograph.experimental.do_not_convert
def checkpoint_loop(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Sequence[Any],
    every: int | tf.Tensor | None = None,
    *,
    shape_invariants: Any = None,
    maximum_iterations: int | None = None,
    name: str | None = None,
) -> Any:
    """Runs a loop that keeps its state once per segment of rounds, for the gradient.

    The values are those of `tf.while_loop`. The gradient runs one segment again at a time: of *n*
    rounds it holds the state of *n* / `every` segments and what `every` rounds compute. Random
    numbers and updates of variables happen once, as in `checkpoint`. It works in eager mode, in a
    `tf.function`, under XLA (with `maximum_iterations`) and in graphs of `tf.compat.v1`. In a graph
    `GradientTape(checkpoints="memory")` does the same for every loop by itself. In eager mode a
    segment is traced again for every new tensor that `cond` or `body` close over: what changes from
    step to step should be one of `loop_vars`.

    Args:
        cond: as in `tf.while_loop`: from the loop's variables to a boolean scalar.
        body: from the loop's variables to their next values, of the same structure.
        loop_vars: a list or tuple of tensors, or nests of them: the initial values.
        every: the rounds of a segment, an int or a scalar tensor. None takes the square root of
            `maximum_iterations`, or 32.
        shape_invariants: as in `tf.while_loop`.
        maximum_iterations: the most rounds.
        name: a prefix for the names of ops.

    Returns:
        The final values, with the structure of `loop_vars`.

    Raises:
        TypeError: `cond` or `body` is not callable, `every` is no int or tensor, or `loop_vars` is
            no list or tuple, or holds a `tf.TensorArray`.
        ValueError: `loop_vars` is empty, or `every` is not positive.

    Example:
        >>> w = tf.Variable(tf.eye(8) / 2)
        >>> with tf.GradientTape() as tape:
        ...     _, h = checkpoint_loop(
        ...         lambda i, h: i < 100, lambda i, h: (i + 1, tf.tanh(h @ w)), [0, tf.ones((4, 8))]
        ...     )
        >>> tape.gradient(h, w).shape
        TensorShape([8, 8])

    The segments are those of Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
    """
    _check(cond, body, loop_vars, every)
    if every is None:
        known = isinstance(maximum_iterations, int) and maximum_iterations > 0
        every = math.isqrt(maximum_iterations or 0) if known else _EVERY
    state = tf.nest.map_structure(tf.convert_to_tensor, (0, *loop_vars), expand_composites=True)
    most = tf.int32.max if maximum_iterations is None else maximum_iterations
    invariants = None
    if shape_invariants is not None:
        invariants = (tf.TensorShape([]), *shape_invariants)

    def goes_on(count: tf.Tensor, *state: Any) -> tf.Tensor:
        return tf.logical_and(count < most, cond(*state))

    def round_(count: tf.Tensor, *state: Any) -> tuple:
        results = body(*state)
        return count + 1, *(results if isinstance(results, list | tuple) else [results])

    def segment(*state: Any) -> Any:
        return tf.while_loop(
            goes_on, round_, state, invariants, maximum_iterations=every, name=name
        )

    def again(*state: Any) -> Any:
        return checkpoint(segment, *state)

    # Segments that run ahead would be alive together.
    _, *results = tf.while_loop(goes_on, again, state, invariants, parallel_iterations=1, name=name)
    return tf.nest.pack_sequence_as(loop_vars, tf.nest.flatten(results))


def _check(cond: Any, body: Any, loop_vars: Any, every: Any) -> None:
    for what, function in (("cond", cond), ("body", body)):
        if not callable(function):
            raise TypeError(f"{what} must be a function of the loop's variables, got {function!r}")
    if not isinstance(loop_vars, list | tuple):
        raise TypeError(f"loop_vars must be a list or tuple of tensors, got {loop_vars!r}")
    if not loop_vars:
        raise ValueError("loop_vars is empty: give the initial values of the loop's variables")
    if any(isinstance(value, tf.TensorArray) for value in tf.nest.flatten(loop_vars)):
        raise TypeError(
            "loop_vars holds a tf.TensorArray, which checkpoint_loop cannot keep by segments: use "
            'tf.while_loop under memory_saving_gradients.GradientTape(checkpoints="memory")'
        )
    if every is not None and not tf.is_tensor(every):
        if isinstance(every, bool) or not isinstance(every, int):
            raise TypeError(f"every must be an int or a scalar tensor, got {every!r}")
        if every < 1:
            raise ValueError(f"every must be 1 or more, got {every}")
