"""Time and scratch space of each op, from a traced run of the plain step."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from memory_saving_gradients.graph import calls, tf_private
from memory_saving_gradients.graph.shapes import Shapes
from memory_saving_gradients.graph.tf_private import Refusal
from memory_saving_gradients.graph.traced import traced
from memory_saving_gradients.reading.backward import BackwardPass

# The number of traced runs, of which the fastest counts, after one run to warm up.
_RUNS = 3

v1 = tf.compat.v1


class CannotMeasure(Refusal, RuntimeError):
    """The plain step cannot be run with stand-ins for its inputs and variables."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements of one run of an op: seconds, and bytes of scratch space."""

    seconds: float
    workspace: int


def measure_ops(
    step: BackwardPass, operations: Sequence[tf.Operation], shapes: Shapes
) -> dict[str, Measured]:
    """Runs a copy of the step in a session of its own, and measures each op.

    Inputs and variables are stand-ins: small random numbers, zeros for integers. The run needs as
    much memory as the plain step.

    Args:
        step: the step.
        operations: its ops.
        shapes: the shapes of their tensors.

    Returns:
        Op name to its measurements, without ops that only read inputs or variables.

    Raises:
        CannotMeasure: the step cannot be run with stand-ins.
    """
    config = v1.ConfigProto(inter_op_parallelism_threads=1)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = v1.OptimizerOptions.L0
    times: dict[str, float] = {}
    workspaces: collections.Counter[str] = collections.Counter()
    with stand_ins(step, operations, shapes, config) as (session, ends, fed):
        fetches = [end.op if isinstance(end, tf.Tensor) else end for end in ends]
        session.run(fetches, fed)
        for _ in range(_RUNS):
            trace = traced(session, fetches, fed)
            for node in trace.nodes:
                name = node.node_name
                on_cpu = (node.op_end_rel_nanos - node.op_start_rel_nanos) * 1e-9
                seconds = trace.kernel_seconds.get(name, on_cpu)
                times[name] = min(seconds, times.get(name, seconds))
                workspaces[name] = max(workspaces[name], _scratch(node))
    return {name: Measured(seconds, workspaces[name]) for name, seconds in times.items()}


@contextlib.contextmanager
def stand_ins(
    step: BackwardPass,
    operations: Iterable[tf.Operation],
    shapes: Shapes,
    config: tf.compat.v1.ConfigProto | None = None,
) -> Iterator[tuple[tf.compat.v1.Session, list[Any], dict[str, np.ndarray]]]:
    """A session for a copy of the step, the fetches, and the feeds.

    Inputs and variables are stand-ins: small random numbers, zeros for integers. Variables are not
    updated; gradients that would update them are not kept.

    Args:
        step: the step.
        operations: its ops.
        shapes: the shapes of their tensors.
        config: the options of the session.

    Raises:
        CannotMeasure: the step cannot be run with stand-ins.
    """
    graph_def = step.graph.as_graph_def()
    fed: dict[str, np.ndarray] = {}
    random = np.random.default_rng(0)
    effects = set()
    handles: dict[str, tf.Tensor] = {}  # of variables that are not only read as a whole
    for op in operations:
        of_variables = [t for t in op.inputs if t.dtype == tf.resource]
        if calls.bodies(op) or op.type == "VariableShape":
            handles |= {t.name: t for t in of_variables}
        elif op.type == "Placeholder" or of_variables:
            outputs = [t for t in op.outputs if t.dtype != tf.resource]
            fed |= {t.name: _value(t.dtype, shapes(t), random) for t in outputs}
        elif op.type in ("VariableV2", "Variable"):
            value = op.outputs[0]
            fed[value.name] = _value(value.dtype, shapes(value), random)
        if not op.outputs:
            effects.add(op.name)
    for node in graph_def.node:
        if node.name in effects:  # only their order matters
            node.op = "NoOp"
            del node.input[:]
            node.attr.clear()
        elif node.op == "ReadVariableOp" and f"{node.name}:0" in fed:
            # Of a placeholder alone a feed takes over what waits for it, too.
            dtype = node.attr["dtype"].type
            node.op = "Placeholder"
            del node.input[:]
            node.attr.clear()
            node.attr["dtype"].type = dtype
            sizes = tf.TensorShape(fed[f"{node.name}:0"].shape)
            node.attr["shape"].shape.CopyFrom(sizes.as_proto())
    with tf.Graph().as_default() as graph:
        variables = {name: _variable(handle) for name, handle in handles.items()}
        initial_values = [
            (variable, variable.initializer.inputs[1]) for variable in variables.values()
        ]
        tf.graph_util.import_graph_def(
            graph_def, {name: variable.handle for name, variable in variables.items()}, name=""
        )
        fetches: list[Any] = [graph.get_tensor_by_name(t.name) for t in step.results]
        if step.live_out is not None:  # each is consumed by an update as soon as it is there
            fetches = [tensor.op for tensor in fetches]
        with v1.Session(graph=graph, config=config) as session:
            for variable, initial in initial_values:
                value = _value(variable.dtype, variable.shape.as_list(), random)
                session.run(variable.initializer, {initial: value})
            try:
                yield session, fetches, fed
            except tf.errors.OpError as error:
                raise CannotMeasure(
                    "the step could not be run with stand-ins for its inputs and variables: "
                    f'{error.message} Use cost_model="analytical", and leave out verify=True.'
                ) from error


def _variable(handle: tf.Tensor) -> Any:
    """A stand-in for a variable, in the default graph; it has no value yet."""
    known = tf_private.shape_and_dtype_of_variable(handle)
    if known is None:
        raise CannotMeasure(
            f'a function of the step reads the resource "{handle.name}", which is no variable'
        )
    shape, dtype = known
    return v1.get_variable(
        f"stand_in/{handle.op.name}/{handle.value_index}",
        shape,
        dtype,
        initializer=v1.zeros_initializer(),
        use_resource=True,
        trainable=False,
    )


def _scratch(node: Any) -> int:
    """The most bytes of scratch space that a node had allocated at once."""
    records = sorted(
        (record.alloc_micros, -record.alloc_bytes)  # of one microsecond, allocations first
        for memory in node.memory
        for record in memory.allocation_records
    )
    held = itertools.accumulate((-size for _, size in records), initial=0)
    allocated = collections.Counter(-size for _, size in records)
    outputs = collections.Counter(
        out.tensor_description.allocation_description.allocated_bytes for out in node.output
    )
    # An output that reuses the buffer of an input was not allocated here.
    return max(held) - sum((allocated & outputs).elements())


def _value(dtype: tf.DType, shape: Sequence[int], random: np.random.Generator) -> np.ndarray:
    """A stand-in value, aligned so that TensorFlow reads it without a copy."""
    dtype = dtype.base_dtype
    kind = np.dtype(dtype.as_numpy_dtype)
    if kind.hasobject:
        return np.zeros(shape, kind)
    room = np.zeros(math.prod(shape) * kind.itemsize + _ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % _ALIGNMENT
    value = room[begin : len(room) - _ALIGNMENT + begin].view(kind).reshape(shape)
    if dtype.is_floating or dtype.is_complex:
        value[...] = 0.05 * random.standard_normal(shape)
    return value


_ALIGNMENT = 64  # that Eigen needs; other arrays are copied
