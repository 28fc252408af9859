"""Where an op comes from, in the user's terms: the path of a layer, or a line of code."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import tensorflow as tf

_OURS = str(Path(__file__).parents[1])

# The prefix of names of gradient ops; the name of the op that they differentiate follows.
_PREFIX = re.compile(r"^(.*/)?(gradient_tape|gradients(_\d+)?)/")


def origin(op: tf.Operation) -> str:
    """The scope in which `op` was created (in Keras the path of its layer), else the user's line.

    The gradient of an op has the origin of that op; a sum of gradients that of its first term.

    Args:
        op: any op.

    Returns:
        The origin; an empty string if it is unknown.

    Example:
        >>> with tf.Graph().as_default(), tf.name_scope("block_1"):
        ...     origin(tf.zeros((2, 2), name="start").op)
        'block_1'
    """
    return origins([op])[0]


def origins(operations: Sequence[tf.Operation]) -> tuple[str, ...]:
    """The origins of ops of one graph: see `origin`."""
    every = operations[0].graph.get_operations() if operations else []
    named = {op.name: op for op in every}
    differentiated = [_differentiated(op, named) for op in operations]
    return tuple(op.name.rpartition("/")[0] or _line(op) for op in differentiated)


def _differentiated(op: tf.Operation, named: Mapping[str, tf.Operation]) -> tf.Operation:
    """The op whose gradient `op` computes; `op` itself if it is no gradient.

    If the name does not tell, it is the op of an activation that `op` reads, or else the op that
    its first input differentiates.
    """
    while match := _PREFIX.match(op.name) or op.type == "AddN":
        if match is not True and (of := _longest_name(op.name[match.end() :], named)):
            return of
        before = [tensor.op for tensor in op.inputs if tensor.op.type != "Const"]
        activations = (
            other for other in before if not _PREFIX.match(other.name) and other.type != "AddN"
        )
        if (activation := next(activations, None)) or not before:
            return activation or op
        op = before[0]
    return op


def _longest_name(path: str, named: Mapping[str, tf.Operation]) -> tf.Operation | None:
    """The op that the longest possible beginning of a path names."""
    parts = [part.removesuffix("_grad") for part in path.split("/")]
    paths = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((named[path] for path in paths if path in named), None)


def _line(op: tf.Operation) -> str:
    """The innermost line of the user's code that created `op`."""
    for frame in reversed(op.traceback):
        if not _is_of_a_library(frame.filename):
            line = linecache.getline(frame.filename, frame.lineno).strip()
            return f"{os.path.basename(frame.filename)}:{frame.lineno}: {line}".rstrip(": ")
    return ""


@functools.cache
def _is_of_a_library(file: str) -> bool:
    libraries = [os.path.dirname(tf.__file__), _OURS]
    libraries += [
        os.path.dirname(sys.modules[name].__file__ or "")
        for name in ("keras", "tf_keras")
        if name in sys.modules
    ]
    return file.startswith(tuple(libraries))
