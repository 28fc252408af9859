"""Gates: data dependencies that delay a copy until the backward pass, in a graph for XLA.

XLA drops control edges, merges ops that compute the same, recomputes what it can fuse into a
reader, and schedules the rest freely. Only a data dependency delays an op. So a *gate* stands
between the kept tensors and the ops that read them in the backward pass. It passes its inputs on in
their buffers: values of any type (NaN, -0.0) are unchanged. There are two kinds:

- On XLA:GPU an optimization barrier, which costs nothing at run time. XLA drops the operands that
  nothing reads behind the barrier, so tensors that must be there first pass through it as well, and
  are read from it.
- On XLA:CPU, which removes barriers before it fuses, a loop that runs no round. Its condition
  reads an element of what passes, and of each other tensor that must be there first; it is always
  false, but XLA cannot know. (On a GPU the host would evaluate it each time.) A small operand that
  is not kept, such as a weight, is delayed by a `select` in the same way.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from memory_saving_gradients.graph import kinds, tf_private

# The dtypes that XLA computes with, which can carry a dependency. The others are handles.
_CARRIERS = frozenset(
    {tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128, tf.bool}
    | {tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64}
)


@dataclasses.dataclass(frozen=True)
class Gate:
    """A gate at one place of a schedule.

    Attributes:
        tensors: the tensors that pass through it.
        after: for a loop, the tensors that must be there first; None for a barrier, through which
            these pass, too.
    """

    tensors: list[tf.Tensor]
    after: list[tf.Tensor] | None = None


def never(after: Iterable[tf.Tensor]) -> tf.Tensor:
    """A scalar of the default graph that is always false, but computed from all of `after`."""
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
    """The node of a barrier that passes on `tensors`, whose names are `inputs`."""
    node = tf.compat.v1.NodeDef(name=name, op="XlaOptimizationBarrier", input=inputs)
    node.attr["T"].list.type.extend(t.dtype.as_datatype_enum for t in tensors)
    node.attr["_gradient_op_type"].s = HANDED_ON.encode()
    node.attr[kinds.GATE].b = True
    return node


def passes_as_vector(tensor: tf.Tensor) -> bool:
    """Whether a tensor should pass a barrier as a vector, which has only one layout.

    XLA:GPU may give other tensors the layout of what they are transposed from: it writes them so
    before the barrier, and transposes behind it. Images have the layout that cuDNN wants.
    """
    return tensor.op.type == "Transpose" or (tensor.shape.rank == 3 and tensor.op.type != "Mean")


def reshape_node(
    name: str, inputs: Sequence[str], dtype: tf.DType, of_shape: tf.DType
) -> tf.compat.v1.NodeDef:
    """The node that reshapes what is named first to the shape that is named second.

    Args:
        name: its name.
        inputs: the names.
        dtype: the dtype of the tensor.
        of_shape: that of the shape.
    """
    node = tf.compat.v1.NodeDef(name=name, op="Reshape", input=inputs)
    node.attr["T"].type = dtype.as_datatype_enum
    node.attr["Tshape"].type = of_shape.as_datatype_enum
    return node


def loop_node(
    name: str, inputs: Sequence[str], tensors: Sequence[tf.Tensor]
) -> tf.compat.v1.NodeDef:
    """The node of a loop that passes on `tensors`, named `inputs`; the first one is `never`."""
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
    """Passes tensors through a gate that waits for others, in a graph for XLA.

    Args:
        tensors: the tensors to pass through the gate.
        after: the tensors that must be there first.
        barrier: whether the gate is a barrier, as for a GPU, or a loop.

    Returns:
        The tensors behind the gate, and what to read instead of `after`.
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
    """Adds a gate to the default graph; returns the tensors behind it."""
    input_map = {f"given/{i}:0": t for i, t in enumerate(tensors)}
    graph_def = tf.compat.v1.GraphDef(node=[make("gate", [*input_map], tensors)])
    (op,) = tf.graph_util.import_graph_def(graph_def, input_map, ["gate"], name="held")
    return list(op.outputs)


@functools.cache
def _loop(specs: tuple[tuple[tuple | None, tf.DType], ...]) -> tuple:
    """The condition and the body of the gate's loop for tensors of these shapes and dtypes."""
    signature = [tf.TensorSpec(shape, dtype) for shape, dtype in specs]
    with tf.init_scope():
        condition = tf.function(lambda never, *rest: never, signature, autograph=False)
        body = tf.function(
            lambda *tensors: [tf.zeros_like(t) for t in tensors], signature, autograph=False
        )
        return condition.get_concrete_function(), body.get_concrete_function()


def hold_back(op: tf.Operation, until: Callable[[], tf.Tensor], exempt: set[str]) -> None:
    """Delays the inputs of `op` that are neither in `exempt` nor compile-time constants.

    Args:
        op: an op of the default graph.
        until: returns the `never` of what to wait for; called only if an input has to wait.
        exempt: names of ops whose outputs need no delay.
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
    """Makes `op`, of the default graph, read its operands through a barrier of their own."""
    held = [(index, tensor) for index, tensor in enumerate(op.inputs) if may_wait(tensor)]
    if len(held) > 1:
        outputs = _added(barrier_node, [tensor for _, tensor in held])
        for (index, _), later in zip(held, outputs, strict=True):
            tf_private.update_input(op, index, later)


def write_out(tensor: tf.Tensor) -> None:
    """Makes XLA write `tensor` to memory instead of fusing it into its readers."""
    shape = tf.shape(tensor) if passes_as_vector(tensor) else None
    passing = tensor if shape is None else tf.reshape(tensor, [-1])
    with tensor.graph.gradient_override_map({"XlaOptimizationBarrier": HANDED_ON}):
        written = tf_private.optimization_barrier(passing)
    if shape is None:
        tf_private.reroute(tensor, written)
    else:
        tf_private.reroute(tensor, tf.reshape(written, shape), {passing.op, shape.op})


def may_wait(tensor: tf.Tensor) -> bool:
    """Whether `tensor` may be a run-time value to XLA; shapes and axes may not."""
    is_shape = tensor.dtype.is_integer and (tensor.shape.rank is None or tensor.shape.rank < 2)
    return tensor.dtype in _CARRIERS and not is_shape and tensor.op.type != "Const"


def _element(tensor: tf.Tensor) -> tf.Tensor:
    """The first element of `tensor` as a float vector; an empty vector if there is none.

    The barrier keeps XLA from computing only that element.
    """
    first = tf.reshape(tf_private.optimization_barrier(tensor), [-1])[:1]
    if first.dtype.is_complex:
        first = tf.math.real(first)
    return tf.cast(first, tf.float32)
