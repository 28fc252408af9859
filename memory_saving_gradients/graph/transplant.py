"""Copies ops of a function into another graph."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from memory_saving_gradients.graph import calls, tf_private
from memory_saving_gradients.graph.names import tensor_of

_copies = itertools.count()


def stand_in(tensor: tf.Tensor, name: str) -> tf.Tensor:
    """A placeholder like a tensor, in the default graph."""
    return tf.compat.v1.placeholder(tensor.dtype, tensor.shape, name)


class MissingInput(Exception):
    """An op to be copied needs an input of the function for which no replacement is known."""


def transplanted(
    function: tf.Graph,
    wanted: Sequence[tf.Tensor],
    known: Mapping[str, tf.Tensor],
    *,
    also: Iterable[tf.Operation] = (),
    waiting_for_others: bool = True,
    before: Mapping[str, tf.compat.v1.NodeDef] = types.MappingProxyType({}),
) -> list[tf.Tensor]:
    """Copies the ops that compute `wanted` from a function into the default graph.

    Args:
        function: the function.
        wanted: tensors of it.
        known: by name of a tensor of the function, the tensor to use instead.
        also: ops to copy as well, with all that they depend on.
        waiting_for_others: whether ops that a copied op waits for by a control edge are copied,
            too; else it waits only for those that are copied anyway.
        before: by name, the nodes of ops as they were before the function was edited.

    Returns:
        The tensors that correspond to `wanted`.

    Raises:
        MissingInput: a placeholder is needed that is not in `known`.
    """
    nodes: dict[str, tf.compat.v1.NodeDef] = {}
    controls: list[tuple[str, tf.Operation]] = []
    used: dict[str, tf.Tensor] = {}
    waiting = [*(t.op.name for t in wanted if t.name not in known), *(op.name for op in also)]
    while waiting:
        name = waiting.pop()
        if name in nodes:
            continue
        op = function.get_operation_by_name(name)
        if op.type == "Placeholder":
            raise MissingInput(name)
        node = tf.compat.v1.NodeDef()
        node.CopyFrom(before.get(name) or op.node_def)
        node.attr.pop("_class", None)
        tensors = [tensor_of(text) for text in node.input if not text.startswith("^")]
        waits_for = [
            function.get_operation_by_name(text[1:]) for text in node.input if text.startswith("^")
        ]
        used |= {t: known[t] for t in tensors if t in known}
        node.input[:] = [f"known/{t}" if t in known else t for t in tensors]
        nodes[name] = node
        waiting.extend(t.rpartition(":")[0] for t in tensors if t not in known)
        if waiting_for_others:
            waits_for = [other for other in waits_for if other.type != "Placeholder"]
            stood_for = (any(t.name in known for t in other.outputs) for other in waits_for)
            waiting.extend(
                o.name for o, known_ in zip(waits_for, stood_for, strict=True) if not known_
            )
        controls.extend((name, other) for other in waits_for)
    created = [op.name for op in function.get_operations() if op.name in nodes]
    graph_def = tf.compat.v1.GraphDef(
        node=[nodes[name] for name in created], versions=function.graph_def_versions
    )
    graph = tf.compat.v1.get_default_graph()
    tf_private.share_functions(function, graph)
    _call_copies(graph_def.node, function, graph)
    names = [t.name for t in wanted if t.name not in known]
    input_map = {f"known/{name}": tensor for name, tensor in used.items()}
    imported = tf.graph_util.import_graph_def(
        graph_def, input_map, [*names, *created], name="inlined"
    )
    tensors_made = {**known, **dict(zip(names, imported, strict=False))}
    ops = dict(zip(created, imported[len(names) :], strict=True))
    for name, op in ops.items():
        tf_private.share_gradient(function.get_operation_by_name(name), op)
    for name, other in controls:
        stands_for = [known[t.name].op for t in other.outputs if t.name in known]
        if other.name in ops and not stands_for:
            stands_for = [ops[other.name]]
        if stands_for:
            tf_private.add_control_inputs(ops[name], stands_for)
    return [tensors_made[t.name] for t in wanted]


def _call_copies(nodes: Iterable[tf.compat.v1.NodeDef], within: tf.Graph, graph: tf.Graph) -> None:
    """Makes copied loops and branches call copies of their functions.

    To differentiate a loop or branch, TensorFlow creates functions with more outputs and names them
    after the old ones. For two copies that share their functions these names would collide.
    """
    inside = functools.partial(_call_copies, within=within, graph=graph)
    for node in nodes:
        if node.op in calls.LOOPS or node.op in calls.BRANCHES:
            for value in node.attr.values():
                is_single = value.WhichOneof("value") == "func"
                for called in [value.func] if is_single else value.list.func:
                    new = f"{called.name}_copy_{next(_copies)}"
                    called.name = tf_private.copy_function(called.name, within, new, graph, inside)
