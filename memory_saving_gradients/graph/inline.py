"""Inlines the `tf.function`s that a step calls, so that they are planned with it."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from memory_saving_gradients.graph import tf_private

_lock = threading.Lock()
_within = threading.local()  # `depth`: how many `inlined_calls` this thread is in
_users = 0  # the sum of the depths of all threads
_original: Callable | None = None  # TensorFlow's own `__call__` of a `tf.function`


@contextlib.contextmanager
def inlined_calls() -> Iterator[None]:
    """Within it, a `tf.function` that this thread calls in a graph runs its Python body there.

    A call would be a single op, whose gradient keeps all activations inside. Functions with their
    own `jit_compile=True` and functions of saved models are still called.
    """
    _enter()
    _within.depth = getattr(_within, "depth", 0) + 1
    try:
        yield
    finally:
        _within.depth -= 1
        _leave()


def _enter() -> None:
    global _users, _original
    with _lock:
        if not _users:
            _original = tf_private.FUNCTION.__call__
            tf_private.FUNCTION.__call__ = _calling(_original)
        _users += 1


def _leave() -> None:
    global _users
    with _lock:
        _users -= 1
        if not _users:
            tf_private.FUNCTION.__call__ = _original


def _calling(original: Callable) -> Callable:
    @functools.wraps(original)
    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        inside = getattr(_within, "depth", 0) and not tf.executing_eagerly()
        if not inside or tf_private.is_compiled_apart(function):
            return original(function, *args, **kwargs)
        args, kwargs = tf.nest.map_structure(_tensor, (args, kwargs))
        with tf.name_scope(_scope(function.python_function)):
            return tf_private.body(function)(*args, **kwargs)

    return call


def _scope(called: Callable) -> str:
    """The scope name for a callable: a function `_block`, a lambda, a partial, any object."""
    while isinstance(called, functools.partial):
        called = called.func
    name = getattr(called, "__name__", type(called).__name__)
    return re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or "function"


def _tensor(value: Any) -> Any:
    """The value, or the tensor that `tf.function` would make of an array."""
    return tf.convert_to_tensor(value) if isinstance(value, np.ndarray) else value
