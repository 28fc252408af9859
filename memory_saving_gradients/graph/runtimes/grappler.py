"""What Grappler does with the plain step, so that the rewritten one is rounded alike.

Its arithmetic optimiser makes one sum of several, pulls out common factors, and so on: that changes
rounding. It leaves alone what has control edges or several readers, and the rewriting would add
the former and take away the latter. The rules here are those of TensorFlow's
`arithmetic_optimizer.cc` and `constant_folding.cc`; tests/graph/runtimes/test_grappler.py compares
results.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import TYPE_CHECKING

import networkx as nx
import tensorflow as tf

from memory_saving_gradients.graph import kinds, tf_private
from memory_saving_gradients.graph.runtimes.runtime import Run

if TYPE_CHECKING:
    from memory_saving_gradients.graph.read import Reading

#: Sums, and products.
ASSOCIATIVE = {
    **dict.fromkeys(["Add", "AddV2", "AddN", "Sub"], "sum"),
    **dict.fromkeys(["Mul", "Div", "RealDiv"], "product"),
}


def left_alone(reading: Reading) -> set[str]:
    """The ops that must wait, and be waited for, by their data alone; by name.

    Sums of which each has a single reader become one, and so do products, and equal ones; a sum of
    products loses a common factor. What nothing reads yet (a gradient that an optimizer will read)
    may be merged with what comes. Of a power that has a control edge Grappler makes a wrong graph,
    sees that it is wrong, and optimises nothing.
    """
    found = {op.name for op in reading.operations if op.type == "Pow"}
    running = {op for _, sums in reading.step.sums for op in sums}
    for op in reading.operations:
        readers = _readers(op, reading.unused)
        if op in running or not running.isdisjoint(readers):
            continue
        if op.type in ASSOCIATIVE:
            alike = {_computation(reader) for reader in readers}
            kinds = {ASSOCIATIVE.get(reader.type) for reader in readers}
            if len(alike) <= 1 and kinds <= {ASSOCIATIVE[op.type]}:
                found |= {op.name, *(reader.name for reader in readers)}
            if len(alike) < len(readers):  # equal ones become one, and their sum a product
                found.update(reader.name for reader in readers)
                found.update(
                    sum_.name for reader in readers for sum_ in _readers(reader, reading.unused)
                )
        if _has_common_factor(op):
            found |= {op.name, *(t.op.name for t in op.inputs)}
    return found - {op.name for op in reading.operations if not op.outputs}


def updates(reading: Reading) -> set[str]:
    """The ops that compute what variables are updated by, by name: Grappler rewrites them freely.

    They wait for a gradient, so that they need no control edges of their own.
    """
    after = (op for op in reading.operations if op in reading.step.after)
    return {op.name for op in after if op.outputs and not op.op_def.is_stateful}


def is_merged(op: tf.Operation, unused: Container[str]) -> bool:
    """Whether Grappler makes something else of a sum, that adds in another order.

    Args:
        op: an `AddN`.
        unused: names of ops that nothing needs.
    """
    if _has_common_factor(op) or len({t.name for t in op.inputs}) < len(op.inputs):
        return True
    terms = [t.op for t in op.inputs[1:]]  # a sum of the first and others is added in this order
    readers = _readers(op, unused)
    if len(readers) == 1 and readers[0].inputs[0].op is not op:
        terms.append(op)
    return any(
        ASSOCIATIVE.get(term.type) == "sum"
        and [ASSOCIATIVE.get(reader.type) for reader in _readers(term, unused)] == ["sum"]
        for term in terms
    )


def _has_common_factor(op: tf.Operation) -> bool:
    """Whether `op` is a sum of products that have a factor in common."""
    products = [t.op for t in op.inputs]
    if ASSOCIATIVE.get(op.type) != "sum" or {product.type for product in products} != {"Mul"}:
        return False
    return bool(set.intersection(*({t.name for t in product.inputs} for product in products)))


def keep_unmerged(
    runs: Sequence[Run], copies: Mapping[str, tf.Operation], as_plain: Container[str]
) -> None:
    """Has sums and products that are copied stay unmerged; both have fewer readers than one had."""
    for run in runs:
        if run.copy and run.op.type in ASSOCIATIVE and run.op.name not in as_plain:
            tf_private.set_unmerged(run.op)
            tf_private.set_unmerged(copies[run.copy])


def multiplied(op: tf.Operation, late: Collection[tf.Operation]) -> list[int]:
    """The inputs of a product that Grappler may take out of it, to where they are known earlier.

    Of (g * a) / c it makes g * (a / c). If a is kept from the forward pass, so would be a / c.

    Args:
        op: an op of the backward pass.
        late: the ops that need no holding back.
    """
    if ASSOCIATIVE.get(op.type) != "product":
        return []
    readers = [reader for reader in op.outputs[0].consumers() if reader.type in ASSOCIATIVE]
    others = [kinds.owner(t).op for reader in readers for t in reader.inputs if t.op is not op]
    if all(other in late for other in others):
        return []
    known = (*kinds.SOURCES, *kinds.SHAPE_ONLY)
    sources = [kinds.owner(t).op for t in op.inputs]
    return [i for i, s in enumerate(sources) if s not in late and s.type not in known]


def multiplied_early(
    graph: nx.DiGraph, late: Container[tf.Operation]
) -> dict[tf.Operation, tf.Operation]:
    """The products that Grappler has not wait for their first operand, each with its reader.

    Of (g * a) * c, with a constant c, it makes g * (a * c) in all runs traced so far. So the plain
    step multiplies a before g is there, and g lives until the second product.

    Args:
        graph: who waits for whom.
        late: the ops of the backward pass.
    """
    found = {op: _scaled_by(op, graph) for op in graph if op.type == "Mul" and op in late}
    return {
        op: reader
        for op, reader in found.items()
        if reader and [kinds.owner(t).op in late for t in op.inputs] == [True, False]
    }


def node_of(read: str) -> str:
    """The node that an input of a node names."""
    return read.removeprefix("^").partition(":")[0]


def _scaled_by(op: tf.Operation, graph: nx.DiGraph) -> tf.Operation | None:
    """The only reader of `op`, if it multiplies that by a constant."""
    readers = list(graph.successors(op))
    if len(readers) != 1 or readers[0].type not in ("Mul", "RealDiv"):
        return None
    first, second = (t.op for t in readers[0].inputs)
    scales = second.type == "Const" or (first.type == "Const" and readers[0].type == "Mul")
    return readers[0] if scales else None


def _computation(op: tf.Operation) -> tuple:
    """Equal for two sums or products of the same."""
    if op.type not in ASSOCIATIVE:
        return (op.name,)
    return op.type, *sorted(t.name for t in op.inputs)


def _readers(op: tf.Operation, unused: Container[str]) -> list[tf.Operation]:
    """The ops that read `op` once Grappler has folded known shapes and dropped unused ops."""
    if not op.outputs:
        return []
    known = op.outputs[0].shape.is_fully_defined()
    return [
        reader
        for reader in op.outputs[0].consumers()
        if reader.name not in unused and not (known and reader.type in kinds.SHAPE_ONLY)
    ]
