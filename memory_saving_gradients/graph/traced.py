"""A run of a session with TensorFlow's full trace."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any, NamedTuple

import tensorflow as tf


class Trace(NamedTuple):
    """A traced run.

    Attributes:
        nodes: the `NodeExecStats` of every node that ran.
        kernel_seconds: op name to the time of its kernels on a GPU. There a node ends when its
            kernels are queued.
    """

    nodes: list[Any]
    kernel_seconds: dict[str, float]


def traced(session: tf.compat.v1.Session, fetches: Any, feed_dict: dict | None = None) -> Trace:
    """Runs `fetches` once with a trace.

    Args:
        session: the session to run in.
        fetches: what to fetch.
        feed_dict: the inputs.
    """
    metadata = tf.compat.v1.RunMetadata()
    options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
    session.run(fetches, feed_dict, options=options, run_metadata=metadata)
    return of_devices(metadata.step_stats.dev_stats)


def of_devices(devices: Iterable[Any]) -> Trace:
    """The trace in the `DeviceStepStats` of a run.

    Beside a GPU there is a device for each of its streams, one for all of them and one for copies
    (as in TensorFlow's `timeline.py`); their nodes are called "op name:op type".
    """
    nodes = []
    seconds: collections.Counter[str] = collections.Counter()
    for device in devices:
        if device.device.endswith("/stream:all"):
            for kernel in device.node_stats:
                seconds[kernel.node_name.split(":")[0]] += kernel.all_end_rel_micros * 1e-6
        elif "/stream:" not in device.device and "/memcpy" not in device.device:
            nodes += device.node_stats
    return Trace(nodes, dict(seconds))
