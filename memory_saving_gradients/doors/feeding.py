"""The batch size of the data that a Keras model is fitted to."""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

# The default batch size of `fit`.
_OF_KERAS = 32


def fed_batch(x: Any, batch_size: int | None) -> tuple[Any, int | None]:
    """The batch size of `x`, and `x` itself.

    For a generator, or a dataset whose type does not tell, we look at the first element; it is not
    lost.

    Args:
        x: the first argument of `fit`: arrays or tensors in any structure, a `tf.data.Dataset`, a
            generator, a `keras.utils.PyDataset` or the like, or a data loader.
        batch_size: the argument of `fit`.

    Returns:
        What to give to `fit` instead of `x`, and the batch size; None if it is unknown.

    Example:
        >>> fed_batch(tf.zeros((1000, 8)), 64)[1]
        64
        >>> fed_batch(tf.data.Dataset.range(50).batch(8), None)[1]
        8
    """
    if isinstance(x, tf.data.Dataset):
        return x, _of_element(x.element_spec) or _of_first(iter(x.take(1)))
    if isinstance(x, types.GeneratorType):
        first = list(itertools.islice(x, 1))
        return _again(first, x), _of_first(iter(first))
    if hasattr(x, "__getitem__") and hasattr(x, "__len__") and not hasattr(x, "shape"):
        if not isinstance(x, dict | list | tuple):  # a PyDataset
            return x, _of_element(x[0]) if len(x) else None
    elif isinstance(getattr(x, "batch_size", None), int):  # a data loader
        return x, x.batch_size
    examples = _of_element(x)
    return x, None if examples is None else min(examples, batch_size or _OF_KERAS)


def _again(first: list, rest: Iterator) -> Iterator:
    yield from first
    yield from rest


def _of_first(elements: Iterator) -> int | None:
    return _of_element(next(elements, None))


def _of_element(element: Any) -> int | None:
    """The first dimension of the first tensor or array in a structure."""
    for part in tf.nest.flatten(element):
        shape = getattr(part, "shape", None)
        if shape is not None and len(shape):
            return None if shape[0] is None else int(shape[0])
        if isinstance(part, int | float):  # rows as lists
            return None
    return None
