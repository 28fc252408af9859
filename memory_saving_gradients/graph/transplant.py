"""Ops of a function, copied into another graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from memory_saving_gradients.graph import tf_private


def stand_in(tensor: tf.Tensor, name: str) -> tf.Tensor:
    """A placeholder like a tensor, in the default graph."""
    return tf.compat.v1.placeholder(tensor.dtype, tensor.shape, name)


class MissingInput(Exception):
    """What shall be copied needs an input of the function that nothing stands for."""


def transplanted(
    function: tf.Graph,
    wanted: Sequence[tf.Tensor],
    known: Mapping[str, tf.Tensor],
    *,
    also: Iterable[tf.Operation] = (),
    waiting_for_others: bool = True,
) -> list[tf.Tensor]:
    """Copies what makes `wanted` from a function into the default graph.

    Args:
        function: the function.
        wanted: tensors of it.
        known: name of a tensor of the function to what stands for it.
        also: ops to copy as well, with what they need.
        waiting_for_others: whether what a copied op waits for by a control edge is copied, too;
            else it waits for that only if it is copied anyway.

    Returns:
        What stands for the tensors wanted.

    Raises:
        MissingInput: a placeholder is needed that nothing stands for.
    """
    found: dict[str, tf.compat.v1.NodeDef] = {}
    controls: list[tuple[str, tf.Operation]] = []
    used: dict[str, tf.Tensor] = {}
    waiting = [*(t.op.name for t in wanted if t.name not in known), *(op.name for op in also)]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        op = function.get_operation_by_name(name)
        if op.type == "Placeholder":
            raise MissingInput(name)
        node = op.node_def
        node.attr.pop("_class", None)
        tensors = [_tensor(text) for text in node.input if not text.startswith("^")]
        before = [
            function.get_operation_by_name(text[1:]) for text in node.input if text.startswith("^")
        ]
        used |= {t: known[t] for t in tensors if t in known}
        node.input[:] = [f"known/{t}" if t in known else t for t in tensors]
        found[name] = node
        waiting.extend(t.rpartition(":")[0] for t in tensors if t not in known)
        if waiting_for_others:
            before = [other for other in before if other.type != "Placeholder"]
            stood_for = (any(t.name in known for t in other.outputs) for other in before)
            waiting.extend(
                o.name for o, known_ in zip(before, stood_for, strict=True) if not known_
            )
        controls.extend((name, other) for other in before)
    created = [op.name for op in function.get_operations() if op.name in found]
    graph_def = tf.compat.v1.GraphDef(
        node=[found[name] for name in created], versions=function.graph_def_versions
    )
    tf_private.share_functions(function, tf.compat.v1.get_default_graph())
    names = [t.name for t in wanted if t.name not in known]
    given = {f"known/{name}": tensor for name, tensor in used.items()}
    made = tf.graph_util.import_graph_def(graph_def, given, [*names, *created], name="inlined")
    tensors_made = {**known, **dict(zip(names, made, strict=False))}
    ops = dict(zip(created, made[len(names) :], strict=True))
    for name, other in controls:
        stands_for = [known[t.name].op for t in other.outputs if t.name in known]
        if other.name in ops and not stands_for:
            stands_for = [ops[other.name]]
        if stands_for:
            tf_private.add_control_inputs(ops[name], stands_for)
    return [tensors_made[t.name] for t in wanted]


def _tensor(text: str) -> str:
    return text if ":" in text else f"{text}:0"
