"""Ops that call functions, the graphs of those functions, and which ops may run twice.

In TensorFlow 2 a loop, a branch or a call is a single op; the inside is a graph of its own.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import tensorflow as tf

from memory_saving_gradients.graph import tf_private

#: The types of branches in TensorFlow 2.
BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
#: The types of loops in TensorFlow 2.
LOOPS = frozenset({"While", "StatelessWhile"})
_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"})
#: Registered as stateless, but the user's Python function may have state.
_STATE_IN_PYTHON = frozenset({"PyFuncStateless"})
#: Ops whose gradients read values that Python keeps under a key fixed when the op is traced.
_KEYED_BY_TRACE = frozenset({"EagerPyFunc"})

_calling: dict[str, bool] = {}  # by type of op
_stateful: dict[str, bool] = {}


def calls(op: tf.Operation) -> bool:
    """Whether `op` calls functions, named by attributes or (a `Defun`) by its type."""
    if op.type not in _calling:
        by_attribute = any(a.type in ("func", "list(func)") for a in op.op_def.attr)
        _calling[op.type] = by_attribute or not tf_private.is_registered(op.type)
    return _calling[op.type]


def bodies(op: tf.Operation) -> list[tf.Graph]:
    """The functions that `op` calls: branches, the body of a loop (not its condition), a callee.

    If one of them is unknown the list is empty: `op` is opaque.
    """
    if not calls(op):
        return []
    names = [] if tf_private.is_registered(op.type) else [op.type]
    for attribute, value in sorted(op.node_def.attr.items()):
        if attribute != "cond":
            functions = [value.func] if value.WhichOneof("value") == "func" else value.list.func
            names.extend(function.name for function in functions)
    graphs = [tf_private.function_graph(op.graph, name) for name in names]
    return [] if None in graphs else graphs


def is_plain_call(op: tf.Operation) -> bool:
    """Whether `op` passes its inputs to a function and returns the function's results."""
    return op.type in _CALLS or not tf_private.is_registered(op.type)


def is_compiled(op: tf.Operation) -> bool:
    """Whether XLA compiles the function that `op` calls as a separate program."""
    attribute = op.node_def.attr.get("_XlaMustCompile")
    return attribute is not None and attribute.b


def may_repeat(op: tf.Operation, later: Container[tf.Operation] | None = ()) -> bool:
    """Whether a second run of `op` would give the same results and have no effects.

    Ops that are registered as stateful never run twice. For an op that calls functions we look at
    all ops inside: they may read variables that nothing writes to before the second run.

    Args:
        op: any op.
        later: the ops that run after all second runs; None if unknown.
    """
    if not calls(op):
        if op.type not in _stateful:
            _stateful[op.type] = op.op_def.is_stateful or op.type in _STATE_IN_PYTHON
        return not _stateful[op.type]
    inside = _inside(op)
    if not inside or not all(inner.type in _READS or may_repeat(inner) for inner in inside):
        return False
    if not _handles(op):
        return True
    return later is not None and all(writer in later for writer in writers(op))


def serves_one_call(graph: tf.Graph) -> bool:
    """Whether a second call of a traced function overwrites what the gradient of the first reads.

    `tf.py_function` does: its gradient reads the values that the last call kept.
    """
    return any(op.type in _KEYED_BY_TRACE for op in graph.get_operations())


def keeps_the_last_round(graph: tf.Graph) -> bool:
    """Whether a gradient of a traced function reads only what the last round of a loop kept."""
    inside = (inner for op in graph.get_operations() for inner in _inside(op))
    return any(inner.type in _KEYED_BY_TRACE for inner in inside)


def writers(op: tf.Operation) -> list[tf.Operation]:
    """The ops that may write to the resources that `op` reads, created before or after it."""
    return [
        reader for handle in _handles(op) for reader in handle.consumers() if not only_reads(reader)
    ]


def _handles(op: tf.Operation) -> list[tf.Tensor]:
    return [tensor for tensor in op.inputs if tensor.dtype == tf.resource]


def flattened(graph: tf.Graph) -> Iterator[tf.Operation]:
    """The ops of a function, with calls replaced by the ops of the called functions."""
    for op in graph.get_operations():
        called = bodies(op)
        for body in called:
            yield from flattened(body)
        if not called:
            yield op


def _inside(op: tf.Operation) -> list[tf.Operation]:
    return [inner for body in bodies(op) for inner in flattened(body)]


def only_reads(op: tf.Operation) -> bool:
    return all(
        inner.type in _READS or not inner.op_def.is_stateful for inner in _inside(op) or [op]
    )
