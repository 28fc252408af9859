"""Which tensor owns the memory that a tensor shows, and how much it is."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import tensorflow as tf

from memory_saving_gradients.graph import functions, kinds
from memory_saving_gradients.graph.runtimes.runtime import Runtime
from memory_saving_gradients.graph.shapes import Shapes

#: The tensors that are left out of a problem hold, together, at most this share of all bytes.
NEGLIGIBLE = 0.0005


class Buffers:
    """The buffers of a step.

    Args:
        operations: the ops of the step, each after those that it waits for.
        shapes: the shapes of their tensors.
        runtime: what runs them.
    """

    def __init__(
        self, operations: Sequence[tf.Operation], shapes: Shapes, runtime: Runtime
    ) -> None:
        self._shown: dict[str, tf.Tensor] = {}
        self._bytes: dict[str, int] = {}  # of views, too
        owned = []
        for op in operations:
            for i, tensor in enumerate(op.outputs):
                shown = kinds.shown_input(op, i)
                shown = functions.passed_on(op, i) if shown is None else shown
                if shown is not None and tensor.dtype not in kinds.HANDLES:
                    self._shown[tensor.name] = shown = self.shown_by(op.inputs[shown])
                    self._bytes[tensor.name] = self.bytes(shown)
                elif kinds.is_of_the_step(op) and tensor.dtype not in kinds.HANDLES:
                    known = tensor.dtype != tf.variant
                    size = shapes.bytes(tensor) if known else functions.held_bytes(tensor, shapes)
                    size = runtime.untold_bytes(op, i, shapes) or size
                    self._bytes[tensor.name] = size
                    owned.append(self._bytes[tensor.name])
        left_out, total = 0, sum(owned)
        self._largest_left_out = 0
        for size, count in sorted(collections.Counter(owned).items()):
            left_out += size * count
            if left_out > NEGLIGIBLE * total:
                break
            self._largest_left_out = size

    def is_view(self, op: tf.Operation) -> bool:
        return bool(op.outputs) and all(tensor.name in self._shown for tensor in op.outputs)

    def shown_by(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._shown.get(tensor.name, tensor)

    def bytes(self, tensor: tf.Tensor) -> int:
        return self._bytes.get(tensor.name, 0)

    def matters(self, tensor: tf.Tensor) -> bool:
        return self.bytes(tensor) > self._largest_left_out
