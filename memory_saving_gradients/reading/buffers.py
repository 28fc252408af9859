"""Buffer assignment: which tensors own memory, which are views of them, and how many bytes."""

from __future__ import annotations

import collections
from collections.abc import Collection, Container, Sequence

import tensorflow as tf

from memory_saving_gradients.graph import calls, kinds
from memory_saving_gradients.graph.shapes import Shapes
from memory_saving_gradients.graph.variants import held_bytes, passed_on, same_lists
from memory_saving_gradients.runtimes.runtime import Runtime

#: The tensors that are too small to matter hold, together, at most this share of all bytes.
NEGLIGIBLE = 0.0005

# TensorFlow runs these without the outputs that nothing reads.
_WITHOUT_UNREAD = calls.BRANCHES | calls.LOOPS


class Buffers:
    """The buffers of a step.

    Args:
        operations: the ops of the step, each after those that it waits for.
        shapes: the shapes of their tensors.
        runtime: the runtime.
        results: the tensors that live to the end of the step.
        read: the names of the tensors that are read.
    """

    def __init__(
        self,
        operations: Sequence[tf.Operation],
        shapes: Shapes,
        runtime: Runtime,
        results: Collection[tf.Tensor],
        read: Container[str],
    ) -> None:
        self._shown: dict[str, tf.Tensor] = {}
        self._bytes: dict[str, int] = {}  # also of views, and of tensors without a buffer
        own: set[str] = set()
        copied = _copied(operations) if runtime.copies_gathered else set()
        for op in operations:
            same = same_lists(op, read) if runtime.lists_refer else {}
            for i, tensor in enumerate(op.outputs):
                shown = kinds.shown_input(op, i)
                shown = passed_on(op, i) if shown is None else shown
                if shown is not None and tensor.dtype not in kinds.HANDLES:
                    self._shown[tensor.name] = shown = self.shown_by(op.inputs[shown])
                    self._bytes[tensor.name] = self.bytes(shown)
                elif tensor.dtype in kinds.HANDLES or (
                    op.type in kinds.SOURCES and op not in copied
                ):
                    continue
                elif op.type not in _WITHOUT_UNREAD or tensor.name in read:
                    known = tensor.dtype != tf.variant
                    size = shapes.bytes(tensor) if known else held_bytes(tensor, shapes)
                    size = runtime.untold_bytes(op, i, shapes) or size
                    self._bytes[tensor.name] = size
                    if same.get(i, i) == i:
                        own.add(tensor.name)
                    else:
                        self._shown[tensor.name] = op.outputs[same[i]]
        self.kernels = runtime.kernels(operations, results, self._bytes)
        #: by name of a tensor without a buffer, the tensors that its readers read instead
        self.made_of = self.kernels.made_of
        owned = [self._bytes[name] for name in own - self.made_of.keys()]
        left_out, total = 0, sum(owned)
        self._largest_left_out = 0
        for size, count in sorted(collections.Counter(owned).items()):
            left_out += size * count
            if left_out > NEGLIGIBLE * total:
                break
            self._largest_left_out = size

    def is_view(self, op: tf.Operation) -> bool:
        """Whether an op allocates no buffer for its outputs."""
        return bool(op.outputs) and all(
            tensor.name in self._shown or tensor.name in self.made_of for tensor in op.outputs
        )

    def shown_by(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._shown.get(tensor.name, tensor)

    def read_for(self, tensor: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """The tensors in memory that a reader of `tensor` reads."""
        shown = self.shown_by(tensor)
        return tuple(self.shown_by(t) for t in self.made_of.get(shown.name, (shown,)))

    def bytes(self, tensor: tf.Tensor) -> int:
        return self._bytes.get(tensor.name, 0)

    def mask_bytes(self, op: tf.Operation) -> int:
        """The bytes of the masks that an op's first kernel makes: one for each element."""
        return sum(self.bytes(t) // t.dtype.size for t in self.kernels.masked.get(op, ()))

    def matters(self, tensor: tf.Tensor) -> bool:
        return self.bytes(tensor) > self._largest_left_out


def _copied(operations: Sequence[tf.Operation]) -> set[tf.Operation]:
    """The reads of variables that make a copy."""
    reads = [op for op in operations if op.type == "ReadVariableOp"]
    handles = {op.inputs[0].name: op.inputs[0] for op in reads}
    gathered = {name for name, handle in handles.items() if kinds.is_gathered(handle)}
    return {op for op in reads if op.inputs[0].name in gathered}
