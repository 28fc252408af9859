"""`checkpoint_loop()`: an eager loop in segments of rounds, each a `checkpoint`."""

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
    every: int | None = None,
    *,
    shape_invariants: Any = None,
    maximum_iterations: int | None = None,
) -> Any:
    """Runs a loop in eager mode that keeps its state once per segment of rounds, for the gradient.

    The values are those of `tf.while_loop`. The gradient runs one segment again at a time: of *n*
    rounds it holds the state of *n* / `every` segments and what `every` rounds compute. Random
    numbers and updates of variables happen once, as in `checkpoint`. A segment is traced once, and
    again for every new tensor that `cond` or `body` close over: what changes from step to step
    should be one of `loop_vars`.

    In a `tf.function` or graph, use `tf.while_loop` under
    `memory_saving_gradients.GradientTape(checkpoints="memory")`, which does this by itself.

    Args:
        cond: as in `tf.while_loop`: from the loop's variables to a boolean scalar.
        body: from the loop's variables to their next values, of the same structure.
        loop_vars: a list or tuple of tensors, or nests of them: the initial values.
        every: the rounds of a segment. None takes the square root of `maximum_iterations`, or 32.
        shape_invariants: as in `tf.while_loop`.
        maximum_iterations: the most rounds.

    Returns:
        The final values, with the structure of `loop_vars`.

    Raises:
        RuntimeError: it is called in a graph.
        TypeError: `cond` or `body` is not callable, `every` is no int, or `loop_vars` is no list or
            tuple, or holds a `tf.TensorArray`.
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
    every = every or math.isqrt(max(maximum_iterations or 0, 0)) or _EVERY
    most = tf.int32.max if maximum_iterations is None else maximum_iterations
    invariants = None
    if shape_invariants is not None:
        invariants = (tf.TensorShape([]), *shape_invariants)

    def goes_on(count: tf.Tensor, *state: Any) -> tf.Tensor:
        return tf.logical_and(count < most, cond(*state))

    def one_round(count: tf.Tensor, *state: Any) -> tuple:
        results = body(*state)
        return count + 1, *(results if isinstance(results, list | tuple) else [results])

    def segment(*state: Any) -> Any:
        return tf.while_loop(goes_on, one_round, state, invariants, maximum_iterations=every)

    state = tf.nest.map_structure(tf.convert_to_tensor, (0, *loop_vars), expand_composites=True)
    while goes_on(*state):
        state = checkpoint(segment, *state)
    return tf.nest.pack_sequence_as(loop_vars, tf.nest.flatten(state[1:]))


def _check(cond: Any, body: Any, loop_vars: Any, every: Any) -> None:
    if not tf.executing_eagerly():
        raise RuntimeError(
            "checkpoint_loop is for eager mode. In a tf.function or graph, use tf.while_loop under "
            'memory_saving_gradients.GradientTape(checkpoints="memory"), which recomputes loops in '
            "segments by itself."
        )
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
    if every is not None and (isinstance(every, bool) or not isinstance(every, int)):
        raise TypeError(f"every must be an int, got {every!r}")
    if every is not None and every < 1:
        raise ValueError(f"every must be 1 or more, got {every}")
