"""A run of a session with TensorFlow's full trace."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def traced_nodes(
    session: tf.compat.v1.Session, fetches: Any, feed_dict: dict | None = None
) -> list:
    """Runs `fetches` once and returns the `NodeExecStats` of every node that ran.

    Args:
        session: the session to run in.
        fetches: what to fetch.
        feed_dict: the inputs.
    """
    metadata = tf.compat.v1.RunMetadata()
    options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
    session.run(fetches, feed_dict, options=options, run_metadata=metadata)
    return [node for device in metadata.step_stats.dev_stats for node in device.node_stats]
