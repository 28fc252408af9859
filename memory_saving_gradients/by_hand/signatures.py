"""Calls of Python functions, with tensors separated from the rest, and a cache of their traces."""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from memory_saving_gradients.graph import tf_private

_Traced = TypeVar("_Traced")


@dataclasses.dataclass(frozen=True, eq=False)
class Called:
    """A call: a function with its arguments and closure, with tensors separated from the rest.

    Attributes:
        function: the function, or the one of a method.
        nest: arguments, keywords and the contents of the function's closure.
        leaves: the flat `nest`, with composite tensors split into parts, but not variables.
        tensors: the tensors among the leaves.
    """

    function: Any
    nest: Any
    leaves: list
    tensors: list[tf.Tensor]

    @classmethod
    def of(cls, function: Callable, args: Sequence, kwargs: dict[str, Any]) -> Called:
        """The call `function(*args, **kwargs)`."""
        while isinstance(function, functools.partial):
            args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
            function = function.func
        if isinstance(function, types.MethodType):
            args, function = (function.__self__, *args), function.__func__
        nest = [*args], dict(kwargs), _closed_over(function)
        leaves = [
            tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf
            for leaf in flattened(nest)
        ]
        return cls(function, nest, leaves, [leaf for leaf in leaves if _is_tensor(leaf)])

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__qualname__)

    def run(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Makes the call with other tensors."""
        given = iter(tensors)
        leaves = [next(given) if _is_tensor(leaf) else leaf for leaf in self.leaves]
        args, kwargs, contents = packed(self.nest, leaves)
        function = _closing_over(self.function, contents)
        if not isinstance(function, tf_private.FUNCTION):
            function = tf_private.body(tf.function(function))
        return function(*args, **kwargs)


class Cache:
    """A cache of traces by call; an entry is removed when one of its arguments is deleted."""

    def __init__(self) -> None:
        self._traced: dict[Hashable, Any] = {}

    def get(
        self, called: Called, policy: Callable, trace: Callable[[Called, Any], _Traced]
    ) -> _Traced:
        """The trace of a call, shared by all calls that differ only in the values of tensors."""
        others = [leaf for leaf in called.leaves if not _is_tensor(leaf)]
        code = getattr(called.function, "__code__", called.function)
        defaults = getattr(called.function, "__defaults__", None)
        objects = _told_by([code, policy, *tf.nest.flatten(defaults), *others])
        specs = tuple(_spec(leaf) for leaf in called.leaves)
        kinds = tf.nest.map_structure(lambda leaf: type(leaf).__name__, called.nest)
        around = tf_private.device(), tf_private.keras_mode()
        try:
            key = (repr(kinds), specs, around, *map(_identity, objects))
            hash(key)
        except TypeError:  # an argument can neither be hashed nor referenced weakly
            return trace(called, policy)
        if key not in self._traced:
            self._traced[key] = trace(called, policy)
            for one in filter(_can_be_followed, objects):
                weakref.finalize(one, self._traced.pop, key, None).atexit = False
        return self._traced[key]


def flattened(nest: Any) -> list:
    """The leaves of a nest, with composite tensors split into parts, but not variables."""
    return [part for leaf in tf.nest.flatten(nest) for part in _parts(leaf)]


def packed(nest: Any, leaves: Sequence) -> Any:
    """Leaves in the structure of a nest; the inverse of `flattened`."""
    left = iter(leaves)
    rebuilt = []
    for leaf in tf.nest.flatten(nest):
        parts = [next(left) for _ in _parts(leaf)]
        whole = isinstance(leaf, tf.Variable)
        rebuilt.append(
            parts[0] if whole else tf.nest.pack_sequence_as(leaf, parts, expand_composites=True)
        )
    return tf.nest.pack_sequence_as(nest, rebuilt)


def _parts(leaf: Any) -> list:
    whole = isinstance(leaf, tf.Variable)
    return [leaf] if whole else tf.nest.flatten(leaf, expand_composites=True)


def _closed_over(function: Any) -> list:
    return [_contents(cell) for cell in getattr(function, "__closure__", None) or ()]


def _told_by(objects: Iterable) -> list:
    """The objects that identify a call: functions are replaced by their code and closure."""
    identities, seen = [], set()
    waiting = [*objects]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, types.FunctionType):
            identities.append(one)
        elif id(one) not in seen:
            seen.add(id(one))
            identities.append(one.__code__)
            waiting += tf.nest.flatten([_closed_over(one), one.__defaults__, one.__kwdefaults__])
    return identities


class _Empty:
    """Stands for the contents of an empty cell of a closure."""


_EMPTY = _Empty()


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _closing_over(function: Any, contents: Sequence) -> Any:
    """The function, with other tensors in its closure."""
    holds = [any(map(_is_tensor, flattened(one))) for one in contents]
    if not any(holds):
        return function
    cells = (
        types.CellType(content) if other else cell
        for cell, content, other in zip(function.__closure__, contents, holds, strict=True)
    )
    code, known = function.__code__, function.__globals__
    closed = types.FunctionType(code, known, function.__name__, function.__defaults__, tuple(cells))
    closed.__kwdefaults__ = function.__kwdefaults__
    # AutoGraph's directives for a function are in its dictionary.
    closed.__dict__.update(function.__dict__)
    return closed


def _is_tensor(leaf: Any) -> bool:
    return tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable)


def _spec(leaf: Any) -> Hashable:
    return (leaf.dtype, tuple(leaf.shape)) if _is_tensor(leaf) else None


def _can_be_followed(one: Any) -> bool:
    try:
        weakref.ref(one)
    except TypeError:
        return False
    return True


def _identity(one: Any) -> Hashable:
    """The identity of an object: its id, or its value if it cannot be referenced weakly."""
    return ("object", id(one)) if _can_be_followed(one) else (type(one), one)
