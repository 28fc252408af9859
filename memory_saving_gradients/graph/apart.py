"""New ops of a graph that belong to us, not to what the user is building."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def apart(graph: tf.Graph, scope: str | None = None) -> Iterator[None]:
    """Within it, new ops of `graph` are out of the user's scopes and wait for nothing."""
    with (
        graph.as_default(),
        graph.name_scope(scope),
        graph.device(None),
        graph.control_dependencies(None),
    ):
        yield
