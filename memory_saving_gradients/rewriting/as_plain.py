"""What Grappler must find in a rewritten step as in the plain one, so that both round alike."""

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
    """The ops that must wait, and be waited for, by their data alone; by name.

    Sums of which each has a single reader become one, and so do products, and equal ones; a sum of
    products loses a common factor. What nothing reads yet (a gradient that an optimizer will read)
    may be merged with what comes. Of a power that has a control edge Grappler makes a wrong graph,
    sees that it is wrong, and optimises nothing.
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
    """The ops that compute what variables are updated by, by name: Grappler rewrites them freely.

    They wait for a gradient, so that they need no control edges of their own.
    """
    after = (op for op in reading.operations if op in reading.step.after)
    return {op.name for op in after if op.outputs and not op.op_def.is_stateful}


def keep_unmerged(
    runs: Sequence[Run], copies: Mapping[str, tf.Operation], as_plain: Container[str]
) -> None:
    """Has sums and products that are copied stay unmerged; both have fewer readers than one had."""
    for run in runs:
        if run.copy and run.op.type in ASSOCIATIVE and run.op.name not in as_plain:
            tf_private.set_unmerged(run.op)
            tf_private.set_unmerged(copies[run.copy])


def may_be_reordered(reading: Reading) -> bool:
    """Whether Grappler may multiply factors of the backward pass in another order."""
    alone = left_alone(reading)
    return any(op.name in alone and op.type in _FACTORS for op in reading.operations)


# What Grappler takes for a product.
_FACTORS = frozenset({"Mul", "RealDiv", "Pow"})
