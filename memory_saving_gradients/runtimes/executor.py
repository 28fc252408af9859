"""TensorFlow's executor: the memory that ops use in it, and the order in which it runs them."""

from __future__ import annotations

import os
from collections.abc import Collection, Container, Iterable, Mapping

import networkx as nx
import tensorflow as tf

from memory_saving_gradients.graph import calls, normalisation, tf_private
from memory_saving_gradients.graph.devices import Device
from memory_saving_gradients.runtimes import grappler, kernels, merges
from memory_saving_gradients.runtimes.runtime import Runtime, ShapeOf
from memory_saving_gradients.runtimes.xla import Xla


class Executor(Runtime):
    """TensorFlow's executor, with Eigen's or oneDNN's kernels, or on a GPU."""

    call_seconds = 2e-6  # a loop of many small ops takes 3 µs an op

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        if device["type"] != "GPU":
            chosen = tf.config.threading.get_inter_op_parallelism_threads()
            self.threads = chosen or os.cpu_count() or 1

    def scratch(self, op: tf.Operation, shape: ShapeOf) -> int:
        return kernels.workspace(op, shape) if self._on_cpu(op) else 0

    def untouched(self, op: tf.Operation, shape: ShapeOf) -> int:
        return kernels.untouched(op, shape) if self._on_cpu(op) else 0

    def untold_bytes(self, op: tf.Operation, output: int, shape: ShapeOf) -> int:
        return kernels.untold_bytes(op, output, shape) if self._on_cpu(op) else 0

    def within(self, op: tf.Operation) -> Runtime:
        return Xla(self.device) if calls.is_compiled(op) else self

    def reuses(self, op: tf.Operation) -> bool:
        if not normalisation.keeps_statistics(op) or tf_private.colocation(op):
            return False
        device = tf.DeviceSpec.from_string(op.device).device_type
        anywhere = device is None and not tf.config.list_physical_devices("GPU")
        return self.device["type"] == "CPU" and (device == "CPU" or anywhere)

    def runs_early(
        self, graph: nx.DiGraph, late: Container[tf.Operation]
    ) -> dict[tf.Operation, tf.Operation]:
        return grappler.multiplied_early(graph, late)

    def merged(
        self, fetches: Iterable[Collection[tf.Operation]]
    ) -> list[Mapping[tf.Operation, tf.Operation]]:
        merges_ops = self.device["type"] != "GPU" and tf_private.onednn_enabled()
        if not merges_ops:
            return super().merged(fetches)
        merged: list[Mapping[tf.Operation, tf.Operation]] = []
        for ops in fetches:
            pairs = merges.merged(ops)
            if not any(pairs.items() <= known.items() for known in merged):
                merged.append(pairs)
        return merged

    def _on_cpu(self, op: tf.Operation) -> bool:
        device = op.device.upper() or str(self.device["type"])
        return "GPU" not in device
