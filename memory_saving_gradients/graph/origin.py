"""Where an op comes from, in the user's terms: the path of a layer, or a line of code."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import re
import sys
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
    differentiated = _differentiated(op)
    scope = differentiated.name.rpartition("/")[0]
    return scope or _line(differentiated)


def _differentiated(op: tf.Operation) -> tf.Operation:
    """The op whose gradient `op` computes; `op` itself if it is no gradient.

    If the name does not tell, it is the op of an activation that `op` reads, or else the op that
    its first input differentiates.
    """
    while match := _PREFIX.match(op.name) or op.type == "AddN":
        if match is not True and (named := _longest_name(op, op.name[match.end() :])):
            return named
        before = [tensor.op for tensor in op.inputs if tensor.op.type != "Const"]
        activations = (
            other for other in before if not _PREFIX.match(other.name) and other.type != "AddN"
        )
        if (activation := next(activations, None)) or not before:
            return activation or op
        op = before[0]
    return op


def _longest_name(op: tf.Operation, path: str) -> tf.Operation | None:
    """The op that the longest possible beginning of a path names."""
    parts = [part.removesuffix("_grad") for part in path.split("/")]
    for length in range(len(parts), 0, -1):
        with contextlib.suppress(KeyError):
            return op.graph.get_operation_by_name("/".join(parts[:length]))
    return None


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
