"""A step in a copy of its graph, on which plans are tried: TensorFlow cannot remove ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import tensorflow as tf

from memory_saving_gradients.graph import tf_private
from memory_saving_gradients.reading.read import Reading


def copied(reading: Reading) -> Reading:
    """The reading of the same step in a copy of its graph."""
    step = reading.step
    graph = _copy(step.graph)

    def ops(originals: Iterable[tf.Operation]) -> list[tf.Operation]:
        return [graph.get_operation_by_name(op.name) for op in originals]

    def tensors(originals: Iterable[tf.Tensor]) -> tuple[tf.Tensor, ...]:
        return tuple(graph.get_tensor_by_name(t.name) for t in originals)

    (target,) = tensors([step.target])
    copy = dataclasses.replace(
        step,
        target=target,
        results=tensors(step.results),
        new=frozenset(ops(step.new)),
        needed=frozenset(ops(step.needed)),
        sums=tuple((*ops([whole]), tuple(ops(running))) for whole, running in step.sums),
        pieces=frozenset(ops(step.pieces)),
        beside=frozenset(ops(step.beside)),
        after=frozenset(ops(step.after)),
        live_out=None if step.live_out is None else tensors(step.live_out),
        original=step.graph,
    )
    return dataclasses.replace(reading, step=copy, operations=ops(reading.operations))


def _copy(graph: tf.Graph) -> tf.Graph:
    """A copy of a graph, with the shapes that are known there."""
    copy = tf.Graph()
    with copy.as_default():
        tf.graph_util.import_graph_def(graph.as_graph_def(), name="")
    for op in graph.get_operations():
        for tensor in op.outputs:
            same = copy.get_tensor_by_name(tensor.name)
            if tensor.dtype in (tf.resource, tf.variant):
                tf_private.copy_handle_data(tensor, same)
            elif not same.shape.is_fully_defined():
                same.set_shape(tensor.shape)
    return copy
