"""Ops that oneDNN merges before they run, even if control edges lead from them.

oneDNN's layout pass (the rules `minfo_` in TensorFlow's `mkl_layout_pass.cc`) merges

- a `Pad` and the `Conv2D` without padding that is its only reader, or the `Pad` and the op into
  which Grappler has fused that convolution with a bias, a sum and an activation (`_FusedConv2D`);
- a `Conv2D` and the `BiasAdd` that is its only reader;
- a `Conv2DBackpropFilter` and a `BiasAddGrad` of the same gradient.

It requires both parts to have the same control inputs, but ignores their control outputs. The
merged op waits for all that its parts waited for. So an op that waits for the first part must not
lead to an input of another part: that would close a cycle, and the step could not run. "Only" is
meant among the ops that a session runs: for a loss without its gradients, say, or for our gradients
without TensorFlow's own in the same graph. So any reader may turn out to be the only one.

Grappler's remapper (`remapper.cc`) merges much more: matrix products, convolutions and batch norms
with biases, sums and activations, products with a maximum or a sigmoid, normalisations. But it
skips ops with control edges (`HasControlFaninOrFanout`, `SubGraphMatcher`), so it cannot close a
cycle. tests/runtimes/test_merges.py checks all of them with TensorFlow.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence

import networkx as nx
import tensorflow as tf

from memory_saving_gradients.graph import kinds, order

# Ops that Grappler merges into a convolution, if each is the only reader of the previous one.
_FUSED = frozenset(
    """BiasAdd Add AddV2 AddN FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 Relu Relu6 Elu
    LeakyRelu Tanh Sigmoid""".split()
)
# So many of them: a bias or normalisation, a sum, an activation.
_MOST_FUSED = 3
_CHANGE_RANK = frozenset({"ExpandDims", "Squeeze"})
_TYPES = frozenset({tf.float32, tf.bfloat16})


class Parts:
    """The ops of a schedule that may be merged with later ones, and who may wait for them.

    Entries may wait for a `BiasAddGrad` only after the last reader of its gradient has run; for
    another part only after all inputs of the later parts are there.

    Args:
        ops: the entries of a schedule.
    """

    def __init__(self, ops: Sequence[tf.Operation]) -> None:
        place = {op: i for i, op in enumerate(ops)}
        last_reader: dict[int, int] = {}
        for i, op in enumerate(ops):
            if op.type != "BiasAddGrad":
                last_reader.update((id(tensor), i) for tensor in op.inputs)
        self._last: dict[tf.Operation, int] = {}
        for i, op in enumerate(ops):
            if op.type == "BiasAddGrad":
                self._last[op] = max(i, last_reader.get(id(op.inputs[0]), i))
            elif rows := _rows(op, _readers):
                read = [t.op for later in rows for t in _other_reads(op, later)]
                self._last[op] = max(_made_at(other, place) for other in read)
        self._left = [op for op in self._last if op.type == "BiasAddGrad"]

    def may_be_waited_for(self, op: tf.Operation, entry: int) -> bool:
        """Whether the entries from `entry` on may wait for `op`."""
        return self._last.get(op, -1) < entry

    def ending(self, ops: Sequence[tf.Operation], entry: int) -> list[tf.Operation]:
        """Those of `ops` that entries from `entry` on may wait for; the others are put off."""
        self._left += [op for op in ops if not self.may_be_waited_for(op, entry)]
        return [op for op in ops if self.may_be_waited_for(op, entry)]

    def due(self, entry: int) -> list[tf.Operation]:
        """Those put off for which entries from `entry` on may wait now; returns each op once."""
        due = [op for op in self._left if self.may_be_waited_for(op, entry)]
        self._left = [op for op in self._left if not self.may_be_waited_for(op, entry)]
        return due


def must_not_wait(op: tf.Operation) -> bool:
    """Whether `op` adds a bias to a convolution that waits already.

    oneDNN ends the process (`CHECK_EQ` in `MergeConv2DWithBiasAdd`) if both have the same control
    inputs. Grappler leaves none to the bias that the convolution has, but a `BiasAddGrad` for which
    the one waits may be merged with the filter's gradient for which the other waits.
    """
    if op.type != "BiasAdd":
        return False
    convolution = kinds.owner(op.inputs[0]).op
    return convolution.type == "Conv2D" and bool(convolution.control_inputs)


def merged(fetched: Collection[tf.Operation]) -> dict[tf.Operation, tf.Operation]:
    """The ops that oneDNN merges with others, each with the representative of its group.

    Args:
        fetched: the ops that run.
    """
    together = nx.Graph()
    waited_for = {before for op in fetched for before in op.control_inputs}

    def only_reader(op: tf.Operation) -> set[tf.Operation]:
        readers = _readers(op).intersection(fetched)
        return readers if len(readers) == 1 else set()

    for op in fetched:
        for later in _rows(op, only_reader):
            if set(op.control_inputs) != set(later[0].control_inputs):
                continue
            nx.add_path(together, [op, *_views_between(op, later[0]), later[0]])
            for before, after in itertools.pairwise(later):
                if any(o in waited_for or o.control_inputs for o in (before, after)):
                    break
                nx.add_path(together, [before, *_views_between(before, after), after])
        if op.type == "BiasAddGrad" and op.inputs[0].dtype in _TYPES:
            for reader in op.inputs[0].consumers():
                if (
                    reader in fetched
                    and _is_filter_gradient(reader, op.inputs[0])
                    and (set(reader.control_inputs) == set(op.control_inputs))
                ):
                    together.add_edge(op, reader)
                    break
    groups = nx.connected_components(together)
    return {op: min(group, key=lambda op: op.name) for group in groups for op in group}


def _is_filter_gradient(op: tf.Operation, gradient: tf.Tensor) -> bool:
    return (
        op.type == "Conv2DBackpropFilter"
        and op.inputs[2] is gradient
        and op.get_attr("padding") != b"EXPLICIT"
    )


def _rows(
    op: tf.Operation, readers: Callable[[tf.Operation], Collection[tf.Operation]]
) -> list[list[tf.Operation]]:
    """The chains of later ops that may be merged with a `Pad` or `Conv2D`, in execution order.

    Args:
        op: any op.
        readers: returns the readers of an op that may be its only one.

    Returns:
        A row for each possible chain.
    """
    if op.type not in ("Pad", "Conv2D") or op.outputs[0].dtype not in _TYPES:
        return []
    if op.type == "Conv2D":
        return [[reader] for reader in readers(op) if reader.type == "BiasAdd"]
    rows = [[reader] for reader in readers(op) if _reads_padded(reader, op)]
    for _ in range(_MOST_FUSED):
        longer = [
            [*row, reader] for row in rows for reader in readers(row[-1]) if reader.type in _FUSED
        ]
        ended = [row for row in rows if not any(row == other[:-1] for other in longer)]
        rows = [*ended, *longer]
    return rows


def _reads_padded(op: tf.Operation, pad: tf.Operation) -> bool:
    """Whether `op` is a convolution into which the padding of its input can be merged."""
    is_valid = op.type == "Conv2D" and op.get_attr("padding") == b"VALID"
    return is_valid and not any(v.type in _CHANGE_RANK for v in _views_between(pad, op))


def _readers(op: tf.Operation) -> set[tf.Operation]:
    """The ops that read the first output of `op`, or a view of it, for more than its shape."""
    return {r for r in order.readers(op.outputs[0]) if r.type not in kinds.SHAPE_ONLY}


def _views_between(op: tf.Operation, reader: tf.Operation) -> list[tf.Operation]:
    """The views through which `reader` reads the output of `op`."""
    views: list[tf.Operation] = []
    for tensor in reader.inputs:
        while kinds.owner(tensor).op is op and tensor.op is not op:
            views.append(tensor.op)
            tensor = tensor.op.inputs[kinds.shown_input(tensor.op, tensor.value_index) or 0]
    return views


def _other_reads(op: tf.Operation, later: Sequence[tf.Operation]) -> Iterator[tf.Tensor]:
    """The inputs of the later parts that are not outputs of earlier parts."""
    inside = {op, *later}
    for part in later:
        yield from (t for t in part.inputs if kinds.owner(t).op not in inside)


def _made_at(op: tf.Operation, place: dict[tf.Operation, int]) -> int:
    """The entry of `op`, else the last one that it waits for through ops without one, else -1."""
    last, waiting, seen = -1, [op], {op}
    while waiting:
        op = waiting.pop()
        if op in place:
            last = max(last, place[op])
        elif op.type not in order.BACK_EDGES:
            before = order.waits_for(op) - seen
            seen |= before
            waiting.extend(before)
    return last
