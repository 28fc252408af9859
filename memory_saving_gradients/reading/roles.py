"""The roles of tensors in a backward pass: gradients of weights, sums, updates of variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence

import tensorflow as tf

from memory_saving_gradients.graph import order
from memory_saving_gradients.graph.shapes import Shapes
from memory_saving_gradients.reading.backward import BackwardPass

_READS = frozenset({"ReadVariableOp", "VariableV2", "Variable"})

# An op that needs more than this share of all gradients makes them wait for one another.
_MOST = 0.5


@dataclasses.dataclass(frozen=True)
class Roles:
    """Tensors of a problem, by index; see `planning.labels.Labels`."""

    of_weights: frozenset[int]
    sums: frozenset[int]
    updates: frozenset[int]
    waited_for: str


def roles_of(
    step: BackwardPass,
    operations: Sequence[tf.Operation],
    backward: Container[tf.Operation],
    tensor_of: Mapping[str, int],
    shapes: Shapes,
) -> Roles:
    """The roles of the tensors of a step.

    Args:
        step: the step.
        operations: its ops, each after those that it waits for.
        backward: those of the backward pass.
        tensor_of: the number of each tensor that matters, by name.
        shapes: the shapes of all tensors.
    """
    reads = [t for op in operations if op.type in _READS for t in op.outputs]
    of_variables = {tuple(shapes(t)) for t in reads}
    outputs = [t for op in operations if op in backward for t in op.outputs if t.name in tensor_of]
    updates = frozenset(tensor_of[t.name] for t in outputs if t.op in step.after)
    # A view of a gradient is that gradient, wherever it is read.
    gradients = frozenset(tensor_of[t.name] for t in outputs if t.op not in step.after)
    sums = frozenset(tensor_of[t.name] for t in outputs if t.op.type == "AddN")
    weights = frozenset(tensor_of[t.name] for t in outputs if tuple(shapes(t)) in of_variables)
    return Roles(weights & gradients, sums & gradients, updates - gradients, _waited_for(step))


def _waited_for(step: BackwardPass) -> str:
    """An op that needs most gradients and that updates of variables wait for; "" for none."""
    gradients = {t.op: 1 << i for i, t in enumerate(step.results)}
    needs: dict[tf.Operation, int] = {}
    behind: dict[tf.Operation, tf.Operation] = {}  # the first such op that each op waits for
    for op in step.graph.get_operations():
        if op not in step.after:
            continue
        needs[op] = 0
        for before in order.waits_for(op):
            needs[op] |= needs.get(before, 0) | gradients.get(before, 0)
            if before in behind:
                behind.setdefault(op, behind[before])
        if needs[op].bit_count() > max(1, _MOST * len(gradients)):
            behind.setdefault(op, op)
    updates = [op for op in needs if op.op_def.is_stateful and not op.outputs]
    waiting = [behind[op] for op in updates if op in behind]
    return waiting[0].name if 2 * len(waiting) > len(updates) > 1 else ""
