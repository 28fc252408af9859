"""The tensors of a problem: which ones matter, and which of them each op reads and makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from memory_saving_gradients.graph import kinds, order
from memory_saving_gradients.planning.problem import Tensor
from memory_saving_gradients.reading.buffers import Buffers


def numbered(
    ordered: Sequence[tf.Operation], buffers: Buffers
) -> tuple[dict[str, int], list[Tensor]]:
    """The number of each tensor that matters, by name, and the tensors."""
    tensor_of: dict[str, int] = {}
    tensors: list[Tensor] = []
    for op in ordered:
        for tensor in op.outputs:
            shown = buffers.shown_by(tensor)
            if not buffers.matters(tensor) or shown.name in buffers.made_of:
                continue
            if shown.name not in tensor_of:
                tensor_of[shown.name] = len(tensors)
                tensors.append(Tensor(shown.name, buffers.bytes(shown)))
            tensor_of[tensor.name] = tensor_of[shown.name]
    return tensor_of, tensors


def touches(op: tf.Operation, tensor_of: dict[str, int], buffers: Buffers) -> bool:
    return any(t.name in tensor_of for t in op.outputs) or bool(reads(op, tensor_of, buffers))


def reads(op: tf.Operation, tensor_of: dict[str, int], buffers: Buffers) -> tuple[int, ...]:
    """The tensors that `op` reads, each once."""
    if op.type in kinds.SHAPE_ONLY:
        return ()
    read = (t for t in op.inputs if t.op.type not in order.BACK_EDGES)
    return numbers((one for t in read for one in buffers.read_for(t)), tensor_of)


def numbers(tensors: Iterable[tf.Tensor], tensor_of: dict[str, int]) -> tuple[int, ...]:
    """The numbers of tensors that matter, each once."""
    return tuple(dict.fromkeys(tensor_of[t.name] for t in tensors if t.name in tensor_of))


def makes(op: tf.Operation, tensor_of: dict[str, int], buffers: Buffers) -> tuple[int, ...]:
    """The tensors that `op` makes, views not among them."""
    shown = (buffers.shown_by(t) for t in op.outputs)
    return numbers((t for t in shown if t.op is op), tensor_of)
