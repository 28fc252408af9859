"""What Grappler does to the plain step, so that the rewritten step rounds in the same way.

Its arithmetic optimiser merges sums, factors out common factors, and so on, which changes rounding.
It skips ops with control edges or with several readers; rewriting would add the former and remove
the latter. The rules here are those of TensorFlow's `arithmetic_optimizer.cc` and
`constant_folding.cc`; tests/runtimes/test_grappler.py compares results.
"""

from __future__ import annotations

from collections.abc import Collection, Container

import networkx as nx
import tensorflow as tf

from memory_saving_gradients.graph import kinds

#: Sums, and products.
ASSOCIATIVE = {
    **dict.fromkeys(["Add", "AddV2", "AddN", "Sub"], "sum"),
    **dict.fromkeys(["Mul", "Div", "RealDiv"], "product"),
}


def is_merged(op: tf.Operation, unused: Container[str]) -> bool:
    """Whether Grappler rewrites a sum so that it adds in another order.

    Args:
        op: an `AddN`.
        unused: names of ops that nothing needs.
    """
    if has_common_factor(op) or len({t.name for t in op.inputs}) < len(op.inputs):
        return True
    terms = [t.op for t in op.inputs[1:]]  # a sum of the first and others is added in this order
    readers = readers_left(op, unused)
    if len(readers) == 1 and readers[0].inputs[0].op is not op:
        terms.append(op)
    return any(
        ASSOCIATIVE.get(term.type) == "sum"
        and [ASSOCIATIVE.get(reader.type) for reader in readers_left(term, unused)] == ["sum"]
        for term in terms
    )


def has_common_factor(op: tf.Operation) -> bool:
    """Whether `op` is a sum of products that have a factor in common."""
    products = [t.op for t in op.inputs]
    if ASSOCIATIVE.get(op.type) != "sum" or {product.type for product in products} != {"Mul"}:
        return False
    return bool(set.intersection(*({t.name for t in product.inputs} for product in products)))


def multiplied(op: tf.Operation, late: Collection[tf.Operation]) -> list[int]:
    """The inputs of a product that Grappler may move into another product, which runs earlier.

    It turns (g * a) / c into g * (a / c). If a is kept from the forward pass, a / c would be, too.

    Args:
        op: an op of the backward pass.
        late: the ops that need no delay.
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
    """The products that Grappler runs before their first operand is there, each with its reader.

    It turns (g * a) * c, with a constant c, into g * (a * c) in all runs traced so far. So the
    plain step scales a before g is there, and g lives until the second product.

    Args:
        graph: which ops wait for which.
        late: the ops of the backward pass.
    """
    reader_of = {op: _scaled_by(op, graph) for op in graph if op.type == "Mul" and op in late}
    return {
        op: reader
        for op, reader in reader_of.items()
        if reader and [kinds.owner(t).op in late for t in op.inputs] == [True, False]
    }


def _scaled_by(op: tf.Operation, graph: nx.DiGraph) -> tf.Operation | None:
    """The only reader of `op`, if it multiplies `op` by a constant."""
    readers = list(graph.successors(op))
    if len(readers) != 1 or readers[0].type not in ("Mul", "RealDiv"):
        return None
    first, second = (t.op for t in readers[0].inputs)
    scales = second.type == "Const" or (first.type == "Const" and readers[0].type == "Mul")
    return readers[0] if scales else None


def computation(op: tf.Operation) -> tuple:
    """A key that is equal for two sums, or two products, of the same inputs."""
    if op.type not in ASSOCIATIVE:
        return (op.name,)
    return op.type, *sorted(t.name for t in op.inputs)


def readers_left(op: tf.Operation, unused: Container[str]) -> list[tf.Operation]:
    """The readers of `op` after Grappler has folded known shapes and dropped unused ops."""
    if not op.outputs:
        return []
    known = op.outputs[0].shape.is_fully_defined()
    return [
        reader
        for reader in op.outputs[0].consumers()
        if reader.name not in unused and not (known and reader.type in kinds.SHAPE_ONLY)
    ]
