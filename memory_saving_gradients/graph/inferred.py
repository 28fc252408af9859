"""A copy of a graph with known input sizes, on which TensorFlow infers the other shapes.

TensorFlow infers shapes as far as they are constants. While we build the copy we add what it leaves
open: which branch is taken, where a condition on sizes has become a constant, and likely sizes for
ops whose output shapes depend on data.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from memory_saving_gradients.graph import calls, order, tf_private
from memory_saving_gradients.graph.names import node_of

#: A shape as far as it is known.
Sizes: TypeAlias = Sequence[int | None]


# Replaces "/" in names: the importer considers the name "a" used where there is "a/b".
_SLASH = ">"


class Inferred:
    """The shapes of a graph as TensorFlow infers them on a copy.

    Nodes are collected, and imported in batches when a shape is needed, so each is imported once.

    Args:
        graph: the graph.
        known: the shapes of inputs, by the name of the op.
        asked: the ops whose output shapes will be asked for; the copy contains these and the ops
            that they depend on. All ops of the graph by default.
        guess: whether sizes that depend on data are guessed; else they stay unknown.

    Raises:
        ValueError: the given or guessed shapes contradict the graph.
    """

    def __init__(
        self,
        graph: tf.Graph,
        known: Mapping[str, Sizes],
        asked: Iterable[tf.Operation] | None = None,
        guess: bool = True,
    ) -> None:
        self._guess = guess
        self._copy = tf.Graph()
        self._waiting = tf.compat.v1.GraphDef()
        self._names: set[str] = set()  # of all nodes so far
        self._missing: set[str] = set()  # inputs of nodes so far that are still to be added
        self._stand_for: dict[str, str] = {}
        used = graph.get_operations() if asked is None else order.leading_to(asked)
        self._add(graph, "", self._stand_for, known, {*used})
        self._import()

    def __contains__(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor of the graph has been copied."""
        return node_of(_copied(tensor, "", self._stand_for)) in self._names

    def __call__(self, tensor: tf.Tensor) -> Sizes | None:
        """The shape of a tensor of the graph; None for an unknown rank."""
        return told(self._of(tensor))

    def constant(self, tensor: tf.Tensor) -> Any:
        """The value of a tensor of the graph if sizes and constants determine it, else None."""
        return tf_private.constant(self._of(tensor))

    def _of(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor of the copy for a tensor of the graph."""
        return self._read(_copied(tensor, "", self._stand_for))

    def _read(self, name: str) -> tf.Tensor:
        return self._copy.get_tensor_by_name(name if ":" in name else f"{name}:0")

    def _add(
        self,
        graph: tf.Graph,
        prefix: str,
        stand_for: dict[str, str],
        known: Mapping[str, Sizes],
        used: Collection[tf.Operation],
    ) -> None:
        """Adds the nodes of a graph.

        Args:
            graph: the graph, or a function that is inlined in place of a call.
            prefix: the prefix of the names of its nodes in the copy.
            stand_for: by name of a tensor of the graph, the tensor of the copy that replaces it:
                inputs of a function. Results of inlined functions are added.
            known: shapes, by the name of the op.
            used: the ops to add.
        """
        definition = graph.as_graph_def(add_shapes=True)
        if not self._names:
            if any(map(calls.calls, used)):  # Keras's step has hundreds that no op calls
                self._waiting.library.CopyFrom(definition.library)
            self._waiting.versions.CopyFrom(definition.versions)
        for op, node in zip(graph.get_operations(), definition.node, strict=True):
            if op not in used or (op.outputs and op.outputs[0].name in stand_for):
                continue
            shapes = node.attr["_output_shapes"].list.shape  # the importer merges them with its own
            if node.name in known:
                _set(shapes[0], merged(known[node.name], _sizes(shapes[0])))
            node.name = prefix + node.name.replace("/", _SLASH)
            node.attr.pop("_class", None)  # where it is to be placed
            del node.input[:]
            node.input.extend(_copied(t, prefix, stand_for) for t in op.inputs)
            there = self._names.issuperset(map(node_of, node.input))  # a copy may be made later
            if not tells_more(op) or self._missing or not there:
                self._append(node)
            elif calls.calls(op):
                self._call(op, node, stand_for)
            elif op.type in _OF_VARIABLES:
                self._append_told(node, functools.partial(_rows_of_variable, op), node.input)
            else:
                self._append_guessed(node, functools.partial(_by_data, op), node.input)

    def _append(self, node: tf.compat.v1.NodeDef) -> None:
        self._waiting.node.append(node)
        self._names.add(node.name)
        self._missing.discard(node.name)
        self._missing |= {node_of(read) for read in node.input} - self._names

    def _append_guessed(
        self,
        node: tf.compat.v1.NodeDef,
        guess: Callable[[list[Sizes | None]], list],
        reads: Iterable[str],
    ) -> None:
        """Appends a node like `_append_told`, if sizes are guessed; else as it is."""
        if self._guess:
            self._append_told(node, guess, reads)
        else:
            self._append(node)

    def _append_told(
        self,
        node: tf.compat.v1.NodeDef,
        tell: Callable[[list[Sizes | None]], list],
        reads: Iterable[str],
    ) -> None:
        """Appends a node with output shapes that `tell` computes from the shapes of its inputs."""
        self._import()
        made = node.attr["_output_shapes"].list.shape
        known = tell([told(self._read(read)) for read in reads])
        for proto, sizes in zip(made, known, strict=False):
            _set(proto, merged(_sizes(proto), sizes))
        self._append(node)

    def _call(
        self, op: tf.Operation, node: tf.compat.v1.NodeDef, stand_for: dict[str, str]
    ) -> None:
        """Adds, in place of a call, the called function; of branches the one taken, if known."""
        bodies, passed = calls.bodies(op), [*node.input]  # of an `If`, that for `True` comes last
        if op.type in calls.BRANCHES:
            self._import()
            which, *passed = passed
            bodies = taken(bodies, tf_private.constant(self._read(which)))
        if len(bodies) != 1:
            self._append_guessed(node, functools.partial(_largest, bodies), passed)
            return
        (body,) = bodies
        inside = f"{node.name}{_SLASH}inlined{_SLASH}"
        arguments = {t.name: read for t, read in zip(body.inputs, passed, strict=True)}
        self._add(body, inside, arguments, {}, {*body.get_operations()})
        shapes = node.attr["_output_shapes"].list.shape
        for output, inner, shape in zip(op.outputs, body.outputs, shapes, strict=True):
            name = f"{node.name}{_SLASH}{output.value_index}"
            identity = tf.compat.v1.NodeDef(
                name=name, op="Identity", input=[_copied(inner, inside, arguments)]
            )
            identity.attr["T"].type = output.dtype.base_dtype.as_datatype_enum
            identity.attr["_output_shapes"].list.shape.append(shape)
            self._append(identity)
            stand_for[output.name] = name

    def _import(self) -> None:
        """Adds the waiting nodes to the copy; TensorFlow infers their shapes."""
        ours = {node.name for node in self._waiting.node}
        reads = {read for node in self._waiting.node for read in node.input}
        stand_for = {read: self._read(read) for read in reads if node_of(read) not in ours}
        try:
            with self._copy.as_default():
                tf.graph_util.import_graph_def(self._waiting, stand_for, name="")
        except ValueError as error:
            raise ValueError(str(error).replace(_SLASH, "/")) from None
        del self._waiting.node[:]
        self._waiting.library.Clear()


def _copied(tensor: tf.Tensor, prefix: str, stand_for: Mapping[str, str]) -> str:
    """The name that a tensor of a graph has in the copy, where its nodes have a prefix."""
    return stand_for.get(tensor.name) or prefix + tensor.name.replace("/", _SLASH)


def told(tensor: tf.Tensor) -> Sizes | None:
    """The static shape of a tensor; None for an unknown rank."""
    return None if tensor.shape.rank is None else tensor.shape.as_list()


def _sizes(proto: Any) -> Sizes | None:
    shape = tf.TensorShape(proto)
    return None if shape.rank is None else shape.as_list()


def _set(proto: Any, sizes: Sizes | None) -> None:
    proto.CopyFrom(tf.TensorShape(sizes).as_proto())


def filled(sizes: Sizes, size: int) -> list[int]:
    """A shape with all unknown sizes replaced by `size`."""
    return [size if known is None else known for known in sizes]


def merged(first: Sizes | None, second: Sizes | None) -> Sizes | None:
    """The first shape, with its unknown sizes taken from the second one."""
    if first is None or second is None or len(first) != len(second):
        return second if first is None else first
    return [there if here is None else here for here, there in zip(first, second, strict=True)]


_BY_DATA = frozenset(
    """DynamicPartition DynamicStitch ParallelDynamicStitch RaggedTensorToTensor Where Unique
    UniqueV2""".split()
)

#: Ops that read rows of a variable: a copy of a graph does not know the shape behind a handle.
_OF_VARIABLES = frozenset({"ResourceGather", "ResourceGatherNd"})


def tells_more(op: tf.Operation) -> bool:
    """Whether we may know more about the output shapes of `op` than TensorFlow infers."""
    if op.type in _BY_DATA or op.type in _OF_VARIABLES:
        return any(not t.shape.is_fully_defined() for t in op.outputs)
    if calls.calls(op) and (op.type in calls.BRANCHES or calls.is_plain_call(op)):
        # An integer result may be a size.
        plain = [t for t in op.outputs if t.dtype not in (tf.resource, tf.variant)]
        return any(
            not t.shape.is_fully_defined() or t.dtype.is_integer or t.dtype.is_bool for t in plain
        )
    return False


def _by_data(op: tf.Operation, inputs: Sequence[Sizes | None]) -> list[Sizes]:
    """The likely output shapes of an op whose output shapes depend on data.

    We assume that the parts of a partition, and ragged rows, are of equal size; that a mask is true
    everywhere; and that indices to stitch, and values to make unique, are all different.
    """
    if any(sizes is None or None in sizes for sizes in inputs):
        return []
    shapes = [filled(sizes or (), 0) for sizes in inputs]
    if op.type == "Where":
        return [[math.prod(shapes[0]), len(shapes[0])]]
    if op.type == "DynamicPartition":
        rows, by = shapes
        return [[math.prod(by) // len(op.outputs), *rows[len(by) :]] for _ in op.outputs]
    if op.type == "RaggedTensorToTensor":
        values, splits = shapes[1], shapes[-1]
        if op.get_attr("row_partition_types") != [b"ROW_SPLITS"]:
            return []
        lines = max(splits[0] - 1, 1)
        return [[lines, -(-values[0] // lines), *values[1:]]]
    if op.type in ("Unique", "UniqueV2"):
        return [shapes[0]]
    count = len(shapes) // 2
    places, rows = shapes[:count], shapes[count]
    return [[sum(map(math.prod, places)), *rows[len(places[0]) :]]]


def _rows_of_variable(op: tf.Operation, inputs: Sequence[Sizes | None]) -> list[Sizes]:
    """The shape of what an op reads of a variable; the graph knows that of the variable's rows."""
    _, places = inputs
    own = told(op.outputs[0])
    if places is None or own is None:
        return []
    places = places if op.type == "ResourceGather" else places[:-1]
    return [[*places, *own[len(places) :]]]


def taken(bodies: list[tf.Graph], which: Any) -> list[tf.Graph]:
    """The branch that is taken, if the index is known; else all. An invalid index means the last.

    Args:
        bodies: the branches; of an `If`, that for `True` comes last.
        which: the value of the index or condition; None if unknown.
    """
    if which is None or not bodies:
        return bodies
    return [bodies[int(which) if 0 <= int(which) < len(bodies) else -1]]


def _largest(bodies: Sequence[tf.Graph], inputs: Sequence[Sizes | None]) -> list[Sizes | None]:
    """For each output, its shape in the branch in which it is largest."""
    by_branch: list[list[Sizes | None]] = []
    for body in bodies:
        passed = zip(body.inputs, inputs, strict=True)
        known = {t.op.name: sizes for t, sizes in passed if sizes is not None}
        with contextlib.suppress(ValueError):  # these sizes do not take this branch
            by_branch.append([*map(Inferred(body, known), body.outputs)])
    return [max(shapes, key=_elements) for shapes in zip(*by_branch, strict=True)]


def _elements(sizes: Sizes | None) -> int:
    return 0 if sizes is None else math.prod(filled(sizes, 0))
