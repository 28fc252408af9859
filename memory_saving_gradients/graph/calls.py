"""Which ops call functions, what those are, and what may run twice.

In TensorFlow 2 a loop or branch is one op, and so is a call. What is inside is a graph of its own.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import tensorflow as tf

from memory_saving_gradients.graph import tf_private

#: In TensorFlow 2, a branch is one of these.
BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
#: In TensorFlow 2, a loop is one of these.
LOOPS = frozenset({"While", "StatelessWhile"})
_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"})
#: Registered as stateless, though only the user's Python function knows.
_STATE_IN_PYTHON = frozenset({"PyFuncStateless"})
#: Python keeps what their gradients read, under a key that is fixed when they are traced.
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

    There are none if nothing tells what is in one of them: `op` is opaque then.
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
    """Whether `op` hands its inputs to one function and returns what that does."""
    return op.type in _CALLS or not tf_private.is_registered(op.type)


def is_compiled(op: tf.Operation) -> bool:
    """Whether XLA compiles what `op` calls, as a program of its own."""
    attribute = op.node_def.attr.get("_XlaMustCompile")
    return attribute is not None and attribute.b


def may_repeat(op: tf.Operation, later: Container[tf.Operation] | None = ()) -> bool:
    """Whether a second run of `op` would give the same and do nothing else.

    What has state by its registration never runs twice, even where it only hands on its input. Of
    an op that calls functions their bodies tell, if those are known: they may read variables that
    nothing writes to in the meantime.

    Args:
        op: any op.
        later: the ops that come after all second runs; None where nobody knows.
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
    """Whether a second call of a traced function takes away what the gradient of the first reads.

    So it is with `tf.py_function`: its gradient reads what the last call kept.
    """
    return any(op.type in _KEYED_BY_TRACE for op in graph.get_operations())


def keeps_the_last_round(graph: tf.Graph) -> bool:
    """Whether a gradient of a traced function reads only what the last round of a loop kept."""
    inside = (inner for op in graph.get_operations() for inner in _inside(op))
    return any(inner.type in _KEYED_BY_TRACE for inner in inside)


def writers(op: tf.Operation) -> list[tf.Operation]:
    """The ops that may write to what `op` has handles of, created before or after it."""
    return [
        reader
        for handle in _handles(op)
        for reader in handle.consumers()
        if not _only_reads(reader)
    ]


def _handles(op: tf.Operation) -> list[tf.Tensor]:
    return [tensor for tensor in op.inputs if tensor.dtype == tf.resource]


def flattened(graph: tf.Graph) -> Iterator[tf.Operation]:
    """The ops of a function, with those of the functions that it calls in their place."""
    for op in graph.get_operations():
        called = bodies(op)
        for body in called:
            yield from flattened(body)
        if not called:
            yield op


def _inside(op: tf.Operation) -> list[tf.Operation]:
    return [inner for body in bodies(op) for inner in flattened(body)]


def _only_reads(op: tf.Operation) -> bool:
    return all(
        inner.type in _READS or not inner.op_def.is_stateful for inner in _inside(op) or [op]
    )
