"""New ops of a graph outside the scopes and dependencies of the user's code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def apart(graph: tf.Graph, scope: str | None = None) -> Iterator[None]:
    """Within it, new ops of `graph` are outside the user's scopes, and wait only for their data."""
    with (
        graph.as_default(),
        graph.name_scope(scope),
        graph.device(None),
        graph.control_dependencies(None),
    ):
        yield
