"""What makes a copy wait for the backward pass where control edges do not: in a graph for XLA.

XLA drops control edges, merges ops that compute the same, computes again what it can fuse into a
reader, and orders the rest as it likes. Only data holds an op back. So a *gate* stands between the
kept tensors and the ops that read them in the backward pass, and hands its inputs on, in their
buffers: any type and any value (NaN, -0.0) pass unchanged. It is one of two things:

- On XLA:GPU an optimization barrier. It costs nothing when the program runs. XLA drops whatever
  nobody reads behind it, so what has to be there first passes as well, and is read from there.
- On XLA:CPU, which takes barriers out before it orders ops, a loop that runs no round. Whether it
  would run one depends on an element of each tensor that has to be there first; it never does, but
  XLA cannot know. (A GPU would ask its host each time.) A small operand that is not kept (a weight)
  is held back by a `select` alike.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from memory_saving_gradients.graph import kinds, tf_private

# What XLA computes with, and so what can carry a dependency. The rest are handles.
_CARRIERS = frozenset(
    {tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128, tf.bool}
    | {tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64}
)


@dataclasses.dataclass(frozen=True)
class Gate:
    """A gate at one place of a schedule.

    Attributes:
        tensors: what passes it.
        after: what has to be there first, for a loop; None for a barrier, where that passes, too.
    """

    tensors: list[tf.Tensor]
    after: list[tf.Tensor] | None = None


def never(after: Iterable[tf.Tensor]) -> tf.Tensor:
    """A scalar of the default graph that is false, and known when all of `after` are there."""
    elements = [tf.zeros(1)] + [_element(t) for t in after if t.dtype in _CARRIERS]
    bits = tf.bitcast(tf.concat(elements, 0), tf.int32)
    # No square is 2 modulo 4.
    return tf.reduce_any(tf.equal(tf.bitwise.bitwise_and(bits * bits, 3), 2))


#: The name under which the gradient of every barrier is registered.
HANDED_ON = "MemorySavingGradientsBarrier"


@tf.RegisterGradient(HANDED_ON)
def _hand_on(op: tf.Operation, *grads: tf.Tensor) -> Sequence[tf.Tensor]:
    return grads


tf_private.save_without(HANDED_ON)


def barrier_node(
    name: str, inputs: Sequence[str], tensors: Sequence[tf.Tensor]
) -> tf.compat.v1.NodeDef:
    """The barrier that hands on `tensors`, read by the names of `inputs`."""
    node = tf.compat.v1.NodeDef(name=name, op="XlaOptimizationBarrier", input=inputs)
    node.attr["T"].list.type.extend(t.dtype.as_datatype_enum for t in tensors)
    node.attr["_gradient_op_type"].s = HANDED_ON.encode()
    node.attr[kinds.GATE].b = True
    return node


def loop_node(
    name: str, inputs: Sequence[str], tensors: Sequence[tf.Tensor]
) -> tf.compat.v1.NodeDef:
    """The loop that hands on `tensors`, read by the names of `inputs`; the first one is `never`."""
    node = tf.compat.v1.NodeDef(name=name, op="StatelessWhile", input=inputs)
    specs = tuple((tuple(t.shape) if t.shape.rank is not None else None, t.dtype) for t in tensors)
    for role, function in zip(("cond", "body"), _loop(specs), strict=True):
        function.add_to_graph(tensors[0].graph)
        node.attr[role].func.name = function.name
    node.attr["T"].list.type.extend(t.dtype.as_datatype_enum for t in tensors)
    node.attr["output_shapes"].list.shape.extend(t.shape.as_proto() for t in tensors)
    node.attr["parallel_iterations"].i = 1
    node.attr[kinds.GATE].b = True
    return node


def passed(
    tensors: Sequence[tf.Tensor], after: Sequence[tf.Tensor], barrier: bool
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Both, in a graph for XLA; the tensors are there when all of `after` are.

    Args:
        tensors: what passes the gate.
        after: what has to be there first; to be read from what this returns.
        barrier: whether the gate is a barrier, as for a GPU, or a loop.
    """

    @tf.custom_gradient
    def through(*inputs: tf.Tensor) -> tuple[Sequence[tf.Tensor], Callable]:
        outputs = _added(barrier_node, inputs) if barrier else _added(loop_node, inputs)
        return outputs, lambda *grads: grads

    if barrier:
        outputs = through(*tensors, *after)
        return outputs[: len(tensors)], outputs[len(tensors) :]
    return through(never(after), *tensors)[1:], [*after]


def _added(
    make: Callable[[str, Sequence[str], Sequence[tf.Tensor]], tf.compat.v1.NodeDef],
    tensors: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """What a gate in the default graph makes of some tensors."""
    input_map = {f"given/{i}:0": t for i, t in enumerate(tensors)}
    graph_def = tf.compat.v1.GraphDef(node=[make("gate", [*input_map], tensors)])
    (op,) = tf.graph_util.import_graph_def(graph_def, input_map, ["gate"], name="held")
    return list(op.outputs)


@functools.cache
def _loop(specs: tuple[tuple[tuple | None, tf.DType], ...]) -> tuple:
    """The condition and the body of the loop for tensors of these shapes and types."""
    signature = [tf.TensorSpec(shape, dtype) for shape, dtype in specs]
    with tf.init_scope():
        condition = tf.function(lambda never, *rest: never, signature, autograph=False)
        body = tf.function(
            lambda *tensors: [tf.zeros_like(t) for t in tensors], signature, autograph=False
        )
        return condition.get_concrete_function(), body.get_concrete_function()


def hold_back(op: tf.Operation, until: Callable[[], tf.Tensor], exempt: set[str]) -> None:
    """Makes `op` wait by its inputs that are neither in `exempt` nor compile-time data.

    Args:
        op: an op of the default graph.
        until: gives the `never` of what to wait for; called if something has to wait.
        exempt: names of ops whose outputs need no holding back.
    """
    held = [
        (index, tensor)
        for index, tensor in enumerate(op.inputs)
        if kinds.owner(tensor).op.name not in exempt and may_wait(tensor)
    ]
    if held:
        for index, tensor in held:
            later = tf.where(until(), tf.zeros((), tensor.dtype), tensor)
            later.set_shape(tensor.shape)
            tf_private.update_input(op, index, later)


def hold_together(op: tf.Operation) -> None:
    """Has `op`, of the default graph, read its operands through a barrier of their own."""
    held = [(index, tensor) for index, tensor in enumerate(op.inputs) if may_wait(tensor)]
    if len(held) > 1:
        outputs = _added(barrier_node, [tensor for _, tensor in held])
        for (index, _), later in zip(held, outputs, strict=True):
            tf_private.update_input(op, index, later)


def write_out(tensor: tf.Tensor) -> None:
    """Has XLA write `tensor` to memory, instead of computing it where it is read."""
    with tensor.graph.gradient_override_map({"XlaOptimizationBarrier": HANDED_ON}):
        written = tf_private.optimization_barrier(tensor)
    tf_private.reroute(tensor, written)


def may_wait(tensor: tf.Tensor) -> bool:
    """Whether XLA need not know `tensor` when it compiles, as it must shapes and axes."""
    is_shape = tensor.dtype.is_integer and (tensor.shape.rank is None or tensor.shape.rank < 2)
    return tensor.dtype in _CARRIERS and not is_shape and tensor.op.type != "Const"


def _element(tensor: tf.Tensor) -> tf.Tensor:
    """The first element of `tensor` as a float vector; an empty one if it has none.

    The barrier keeps XLA from computing that element alone.
    """
    first = tf.reshape(tf_private.optimization_barrier(tensor), [-1])[:1]
    if first.dtype.is_complex:
        first = tf.math.real(first)
    return tf.cast(first, tf.float32)
