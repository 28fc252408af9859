"""Keeps ops of a rewritten step as Grappler expects them, so that it rounds like the plain step."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import tensorflow as tf

from memory_saving_gradients.graph import tf_private
from memory_saving_gradients.reading.read import Reading
from memory_saving_gradients.rewriting.run import Run
from memory_saving_gradients.runtimes.grappler import (
    ASSOCIATIVE,
    computation,
    has_common_factor,
    readers_left,
)


def left_alone(reading: Reading) -> set[str]:
    """The ops that must not have control edges, by name.

    Grappler merges sums of which each has a single reader, and products likewise; it merges equal
    ops; and it factors a common factor out of a sum of products. An op that nothing reads yet, such
    as a gradient that an optimizer will read, may be merged with later ops. For a power with a
    control edge Grappler builds an invalid graph, notices it, and optimises nothing.
    """
    alone = {op.name for op in reading.operations if op.type == "Pow"}
    running = {op for _, sums in reading.step.sums for op in sums}
    for op in reading.operations:
        readers = readers_left(op, reading.unused)
        if op in running or not running.isdisjoint(readers):
            continue
        if op.type in ASSOCIATIVE:
            alike = {computation(reader) for reader in readers}
            kinds = {ASSOCIATIVE.get(reader.type) for reader in readers}
            if len(alike) <= 1 and kinds <= {ASSOCIATIVE[op.type]}:
                alone |= {op.name, *(reader.name for reader in readers)}
            if len(alike) < len(readers):  # equal ones become one, and their sum a product
                alone.update(reader.name for reader in readers)
                alone.update(
                    sum_.name for reader in readers for sum_ in readers_left(reader, reading.unused)
                )
        if has_common_factor(op):
            alone |= {op.name, *(t.op.name for t in op.inputs)}
    return alone - {op.name for op in reading.operations if not op.outputs}


def updates(reading: Reading) -> set[str]:
    """The ops that compute updates of variables, by name: Grappler may rewrite them freely.

    They wait for a gradient, so they need no control edges of their own.
    """
    after = (op for op in reading.operations if op in reading.step.after)
    return {op.name for op in after if op.outputs and not op.op_def.is_stateful}


def keep_unmerged(
    runs: Sequence[Run], copies: Mapping[str, tf.Operation], as_plain: Container[str]
) -> None:
    """Keeps copied sums and products unmerged; original and copy have fewer readers than before."""
    for run in runs:
        if run.copy and run.op.type in ASSOCIATIVE and run.op.name not in as_plain:
            tf_private.set_unmerged(run.op)
            tf_private.set_unmerged(copies[run.copy])
