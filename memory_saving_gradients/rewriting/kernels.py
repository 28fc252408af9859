"""Makes XLA's kernels read and write what plans expect of them."""

from __future__ import annotations

from collections.abc import Container, Sequence

import tensorflow as tf

from memory_saving_gradients.graph import gate, kinds, order, tf_private
from memory_saving_gradients.runtimes.fusion import ELEMENT_WISE
from memory_saving_gradients.runtimes.partial_sums import PRODUCTS


def write_kept(loops: Sequence[tf.Operation], later: Container[str]) -> None:
    """Makes the forward pass read what is kept from memory.

    XLA:CPU fuses chains of element-wise ops into each of their readers, past what is kept.

    Args:
        loops: the loops that kept tensors pass.
        later: names of the ops of the backward pass, and of copies.
    """
    for tensor in _passing(loops):
        readers = [*tensor.consumers()]
        is_fused = tensor.op.type in ELEMENT_WISE and tensor.op.name not in later
        if is_fused and sum(not kinds.is_gate(op) for op in readers) > 1:
            (written,), _ = gate.passed([tensor], [tensor], barrier=False)
            tf_private.reroute(tensor, written, {*tensor.consumers()}.difference(readers))


def write_operands(barriers: Sequence[tf.Operation]) -> None:
    """Makes XLA write what passes a barrier before a product reads it, too.

    It fuses element-wise ops into the product, which then reads what these are made of: that would
    be in memory as well.
    """
    for tensor in _passing(barriers):
        if tensor.op.type in ELEMENT_WISE and any(
            reader.type in PRODUCTS for reader in order.readers(tensor)
        ):
            gate.write_out(tensor)


def _passing(gates: Sequence[tf.Operation]) -> list[tf.Tensor]:
    """The tensors that pass gates, each once."""
    owners = (kinds.owner(t) for op in gates for t in op.inputs)
    return [*{tensor.name: tensor for tensor in owners}.values()]


def pass_sums(barriers: Sequence[tf.Operation], backward: Container[str]) -> None:
    """Makes barriers pass the sums of which means are made: XLA divides in a kernel of its own.

    It sums up in one kernel, into which it fuses no division; behind a barrier the readers divide.
    In half precision the sums have more bits than their means, so these pass as they are.

    Args:
        barriers: the barriers, each after those that it reads through.
        backward: names of the ops of the backward pass, whose results others may read.
    """
    passed: dict[str, tuple[tf.Tensor, tf.Operation]] = {}  # behind barriers, with their means
    for barrier in barriers:
        for i, tensor in enumerate(barrier.inputs):
            mean = passed[tensor.name][1] if tensor.name in passed else None
            if mean is None and _is_mean(tensor.op) and tensor.op.name not in backward:
                mean = tensor.op
                total = tf.reduce_sum(*mean.inputs, keepdims=mean.get_attr("keep_dims"))
                tf_private.update_input(barrier, i, total)
            if mean is not None:
                later = barrier.outputs[i]
                passed[later.name] = later, mean
    for later, mean in passed.values():
        x, axes = mean.inputs
        counted = tf.gather(tf.shape(x), tf.cast(axes, tf.int32) % tf.rank(x))
        count = tf.cast(tf.reduce_prod(counted), later.dtype)
        tf_private.reroute(later, later / count, {*barriers})


def _is_mean(op: tf.Operation) -> bool:
    return op.type == "Mean" and op.outputs[0].dtype in (tf.float32, tf.float64)


def add_to_late_zeros(op: tf.Operation) -> tf.Tensor:
    """Makes a gradient of max pooling start from zeros that are made when it runs; returns it.

    XLA:GPU adds the gradients to an array of zeros. That is a constant, which ReLUs of this shape
    share, so it is made at the start of the step and stays. If other zeros are added, which are
    unknown until the gradient is there, XLA adds to these instead.
    """
    grads = op.outputs[0]
    zero = tf.cast(gate.never(op.inputs[2:3]), grads.dtype)
    added = tf.broadcast_to(zero, tf.shape(op.inputs[0])) + grads
    tf_private.reroute(grads, added, {added.op})
    return added


def run_in_branch(op: tf.Operation) -> tf.Tensor:
    """Moves a gradient of max pooling into a branch that always runs, and returns it.

    XLA:CPU looks up the place of each maximum in tables of all indices. They depend on nothing, so
    outside a branch they would be made at the start of the step and stay.
    """
    node = op.node_def
    given = [f"given/{i}:0" for i in range(len(op.inputs))]
    node.input[:] = given
    node.attr.pop("_class", None)

    def made() -> tf.Tensor:
        inputs = dict(zip(given, map(tf.identity, op.inputs), strict=True))
        graph_def = tf.compat.v1.GraphDef(node=[node])
        (again,) = tf.graph_util.import_graph_def(graph_def, inputs, [f"{node.name}:0"], name="")
        return again

    grads = op.outputs[0]
    in_branch = tf.cond(gate.never(op.inputs[2:3]), lambda: tf.zeros_like(grads), made)
    in_branch.set_shape(grads.shape)
    tf_private.reroute(grads, in_branch)
    return in_branch


def write_over_logits(op: tf.Operation) -> None:
    """Makes a GPU write the gradient that a cross entropy makes over the logits.

    XLA:GPU computes a softmax in one kernel, which reads each row of the logits several times, and
    so writes the gradient elsewhere. If maximum and sum of each row are there before, each element
    of the gradient needs only one element of the logits. The formulas are those of TensorFlow's
    kernel (`tf2xla/kernels/xent_ops.cc`).
    """
    logits, labels = op.inputs
    most = tf.reduce_max(logits, 1, keepdims=True)
    total = tf.reduce_sum(tf.exp(logits - most), 1, keepdims=True)
    (most, total), _ = gate.passed([most, total], [], barrier=True)
    if op.type == "SparseSoftmaxCrossEntropyWithLogits":
        classes = tf.shape(logits, labels.dtype)[1]
        is_class = (labels >= 0) & (labels < classes)
        invalid = tf.where(is_class, tf.zeros((), logits.dtype), float("nan"))
        labels = tf.one_hot(labels, tf.cast(classes, tf.int32), dtype=logits.dtype)
        labels += invalid[:, tf.newaxis]
    tf_private.reroute(op.outputs[1], tf.exp(logits - most) / total - labels)
