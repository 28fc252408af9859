"""Splits a function and its gradient in two by a minimum cut: the cut is kept, the rest runs again.

The backward function starts from the inputs and the residuals. A minimum cut separates the ops that
must not run twice (random draws, reads of variables that may have changed), or that a policy keeps,
from the tensors that the gradient needs; the tensors of the cut are the residuals. For a dropout
that is its mask, a byte per element, not the random numbers. PyTorch's `torch.compile` partitions
graphs by the same cut (H. He and others, "Min-cut optimal recomputation", 2022).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import networkx as nx
import tensorflow as tf

from memory_saving_gradients.graph import calls, gate, order, tf_private, variants
from memory_saving_gradients.graph.shapes import Shapes
from memory_saving_gradients.graph.transplant import stand_in, transplanted

#: Tells whether the outputs of an op are to be kept.
Policy = Callable[[tf.Operation], bool]


@dataclasses.dataclass(frozen=True)
class Split:
    """The two functions.

    Attributes:
        forward: from the inputs computes the results, then the residuals.
        backward: from the inputs, the residuals, and gradients of the differentiable results (then
            of `seen`) computes the gradients of the inputs, None for those not asked for.
        seen: the differentiable residuals, by index, if the backward function may itself be
            differentiated.
        held: the inputs, then the residuals, that the backward function must wait for by data if
            control edges are not obeyed: all but variables. By index.
        saves: whether clearly fewer bytes are kept than the function's own gradient would keep.
    """

    forward: Callable[..., list]
    backward: Callable[..., list]
    seen: tuple[int, ...]
    held: tuple[int, ...]
    saves: bool


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced function, before and after it is differentiated.

    Attributes:
        graph: its `FuncGraph`, to which each `split` adds ops.
        effects: the original ops that run whether their outputs are needed or not.
        calls: by name, the original nodes of ops that call functions, and their numbers of outputs:
            differentiation adds outputs to loops and branches.
    """

    graph: Any
    effects: Sequence[tf.Operation]
    calls: Mapping[str, tuple[tf.compat.v1.NodeDef, int]]

    @classmethod
    def of(cls, graph: Any) -> Traced:
        """A function that has not been differentiated yet."""
        ops = graph.get_operations()
        called = {op.name: (op.node_def, len(op.outputs)) for op in ops if calls.calls(op)}
        return cls(graph, [op for op in ops if not _is_free(op)], called)

    def as_before(self, wanted: Iterable[tf.Tensor]) -> dict[str, tf.compat.v1.NodeDef]:
        """The original nodes of the calls whose added outputs `wanted` does not need, by name."""
        leading = [t.op for t in wanted], self.effects
        read = {t.name for op in order.leading_to(itertools.chain(*leading)) for t in op.inputs}
        read.update(t.name for t in wanted)
        return {
            name: node
            for name, (node, count) in self.calls.items()
            if not any(
                t.name in read for t in self.graph.get_operation_by_name(name).outputs[count:]
            )
        }


def split(
    traced: Traced,
    examples: Sequence[tf.Tensor],
    by: Collection[int],
    keep: Policy,
    again: bool,
) -> Split:
    """Splits a traced function.

    Args:
        traced: the function.
        examples: its arguments, one for each of its inputs.
        by: the inputs to differentiate by, by index.
        keep: tells whether an op must not run again.
        again: whether the gradients may be differentiated.
    """
    body = traced.graph
    results = [*body.outputs]
    with body.as_default():
        ys = [t for t in results if is_differentiable(t)]
        grad_ys = [stand_in(y, f"grad_ys_{i}") for i, y in enumerate(ys)]
        xs = [body.inputs[i] for i in by]
        grads = tf_private.GRADIENTS(ys, xs, grad_ys)
        needed = _needed(body, grads, grad_ys)
        kept = _kept(body, needed, keep)
        seen = [t for t in kept if is_differentiable(t)] if again else []
        if seen:
            grad_seen = [stand_in(t, f"grad_ys_{len(ys) + i}") for i, t in enumerate(seen)]
            grad_ys = [*grad_ys, *grad_seen]
            grads = tf_private.GRADIENTS([*ys, *seen], xs, grad_ys)
            known = _Named(kept)
            needed = _needed(body, grads, grad_ys)
            kept += [t for t in _kept(body, needed, keep) if t not in known]

    def forward(*inputs: tf.Tensor) -> list[tf.Tensor]:
        wanted, known = [*results, *kept], _known(body.inputs, inputs)
        before = traced.as_before(wanted)
        return transplanted(body, wanted, known, also=traced.effects, before=before)

    def backward(*inputs: tf.Tensor) -> list:
        known = _known([*body.inputs, *kept, *grad_ys], inputs)
        flat = tf.nest.flatten(grads, expand_composites=True)
        wanted = [t for t in flat if t is not None]
        made = iter(transplanted(body, wanted, known, waiting_for_others=False))
        flat = [None if t is None else next(made) for t in flat]
        found = iter(tf.nest.pack_sequence_as(grads, flat, expand_composites=True))
        return [next(found) if i in by else None for i in range(len(body.inputs))]

    given, shown = [tf.TensorSpec(t.shape, t.dtype) for t in [*kept, *grad_ys]], _Named(seen)
    return Split(
        _function(forward, examples),
        # As a single op it is not merged with the forward pass, which computes the same.
        _function(backward, [*examples, *given], _noinline=True),
        tuple(i for i, t in enumerate(kept) if t in shown),
        tuple(
            i
            for i, t in enumerate([*body.inputs, *kept])
            if gate.may_wait(t) and t.op.type != "ReadVariableOp"
        ),
        _total_bytes(kept, body) < _WORTH_IT * _total_bytes(needed.values(), body),
    )


def is_differentiable(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex


class _Named:
    """Membership of tensors by name: they compare element by element."""

    def __init__(self, tensors: Iterable[tf.Tensor]) -> None:
        self._names = {t.name for t in tensors}

    def __contains__(self, tensor: tf.Tensor) -> bool:
        return tensor.name in self._names


def _known(tensors: Iterable[tf.Tensor], given: Iterable[tf.Tensor]) -> dict[str, tf.Tensor]:
    return {t.name: g for t, g in zip(tensors, given, strict=True)}


def _function(run: Callable, examples: Sequence, **attributes: Any) -> Callable[..., list]:
    traced = tf.function(run, autograph=False, experimental_attributes=attributes or None)
    return traced.get_concrete_function(*examples)


def _is_free(op: tf.Operation) -> bool:
    """Whether `op` has no effect, so that it need not run."""
    return op.type == "Placeholder" or op.type.startswith("ReadVariable") or calls.may_repeat(op)


def _needed(body: Any, grads: Sequence[Any], grad_ys: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
    """The tensors of the function that the gradients read, without its inputs, by name."""
    given = _Named(body.inputs)
    backward = {t.op for t in grad_ys}
    for op in body.get_operations():
        if not backward.isdisjoint(order.waits_for(op)):
            backward.add(op)
    needed: dict[str, tf.Tensor] = {}
    reached: set[tf.Operation] = set()
    waiting = [t.op for t in tf.nest.flatten(grads, expand_composites=True) if t is not None]
    while waiting:
        op = waiting.pop()
        if op not in reached:
            reached.add(op)
            waiting.extend(t.op for t in op.inputs if t.op in backward)
            needed |= {t.name: t for t in op.inputs if t.op not in backward and t not in given}
    return needed


def _kept(body: Any, needed: Mapping[str, tf.Tensor], keep: Policy) -> list[tf.Tensor]:
    """The residuals: with them, all else that the gradients need can be recomputed."""
    given = _Named(body.inputs)
    once: dict[str, tf.Tensor] = {}
    seen: dict[str, tf.Tensor] = {}
    waiting = [*needed.values()]
    while waiting:
        tensor = waiting.pop()
        if tensor.name not in seen and tensor not in given:
            seen[tensor.name] = tensor
            shape_alone = tensor.op.type == "VariableShape"
            if (calls.may_repeat(tensor.op) or shape_alone) and not keep(tensor.op):
                waiting.extend(tensor.op.inputs)
            else:
                once[tensor.name] = tensor
    shapes = Shapes(body.get_operations())
    network = nx.DiGraph()
    network.add_nodes_from(["once", "needed"])
    for name, tensor in seen.items():
        network.add_edge((name, "in"), (name, "out"), capacity=_bytes(tensor, shapes))
        if name in once:
            network.add_edge("once", (name, "in"))
        else:
            network.add_edges_from(
                ((t.name, "out"), (name, "in")) for t in tensor.op.inputs if t.name in seen
            )
        if name in needed:
            network.add_edge((name, "out"), "needed")
    _, (before, after) = nx.minimum_cut(network, "once", "needed")
    before &= nx.descendants(network, "once")
    return [t for name, t in seen.items() if (name, "in") in before and (name, "out") in after]


# A split saves memory if it keeps less than this share of the bytes that a plain gradient keeps.
_WORTH_IT = 0.95


def _total_bytes(tensors: Iterable[tf.Tensor], body: Any) -> int:
    shapes = Shapes(body.get_operations())
    return sum(_bytes(t, shapes) for t in tensors)


def _bytes(tensor: tf.Tensor, shapes: Shapes) -> int:
    """The bytes that keeping a tensor adds; constants and values of variables are there anyway."""
    if tensor.op.type in ("ReadVariableOp", "Const"):
        return 0
    held = tensor.dtype == tf.variant
    return variants.held_bytes(tensor, shapes) if held else shapes.bytes(tensor)
