"""Runs regions of a step in pieces: on one slice of their rows after the other.

What a region holds of all rows at once, such as the logits of a language model, is then never
whole: each piece computes its rows, and what is left of them are results by row, which are put
together, and its part of the sums over all rows, which is added to a running sum. If the gradients
that enter the region are known beforehand, each piece runs forward and backward at once, and
nothing is computed twice. Else the forward pass runs in pieces, and each piece of the backward pass
first runs its forward pass again.

In TensorFlow's executor a piece waits for the one before by control edges, under XLA by gates: see
`graph.gate`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients.graph import gate, order, tf_private
from memory_saving_gradients.graph.apart import apart
from memory_saving_gradients.graph.rows import WHOLE, Remade
from memory_saving_gradients.graph.transplant import transplanted
from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.reading.regions import Region, Size
from memory_saving_gradients.rewriting.rewrite import note_behind
from memory_saving_gradients.runtimes.xla import Xla


def in_pieces(step: BackwardPass, regions: Mapping[Region, int]) -> BackwardPass:
    """Makes regions of a step run in pieces.

    Args:
        step: the step.
        regions: its regions, each with the number of pieces.

    Returns:
        The changed step.
    """
    known = len(step.graph.get_operations())
    in_backward: set[tf.Operation] = set()
    gone: set[tf.Operation] = set()
    moved: dict[str, tf.Tensor] = {}
    every = [_Pieces(step, region, count) for region, count in regions.items()]
    for pieces in every:
        moved |= pieces.add()
        in_backward |= pieces.in_backward
        gone.update(pieces.region.signatures)
    for pieces in every:  # only now, as a region may read another one
        pieces.reroute()
    order.check_acyclic(step.graph)
    made = step.graph.get_operations()[known:]
    results = tuple(moved.get(t.name, t) for t in step.results)
    for before_, after in zip(step.results, results, strict=True):
        if before_ is not after:
            note_behind(before_, after.name)
    needed = frozenset(order.needed(t.op for t in results))
    sums = {t.name for region in regions for t in region.sums}
    live_out = step.live_out and tuple(moved.get(t.name, t) for t in step.live_out)
    return dataclasses.replace(
        step,
        results=results,
        new=step.new.union(made),
        needed=needed,
        beside=step.beside - gone - needed,
        live_out=live_out,
        pieces=step.pieces | in_backward,
        reordered=(*step.reordered, *sorted(name.removesuffix(":0") for name in sums)),
    )


class _Pieces:
    """A region that is made to run in pieces."""

    def __init__(self, step: BackwardPass, region: Region, count: int) -> None:
        self.step, self.region, self.count = step, region, count
        self.graph = step.graph
        self.moved: dict[str, tf.Tensor] = {}
        #: What ops outside the region will read, each with what they will read instead.
        self.later: list[tuple[tf.Tensor, tf.Tensor]] = []
        #: The new ops that run in the backward pass.
        self.in_backward: set[tf.Operation] = set()

    def add(self) -> dict[str, tf.Tensor]:
        """Adds the pieces; returns what each tensor that leaves the region is replaced with."""
        region = self.region
        with (
            apart(self.graph, f"{region.name}/pieces"),
            self.graph.device(region.largest.op.device),
        ):
            self._count_rows()
            backward, known = region.backward, len(self.graph.get_operations())
            forward = [op for op in region.signatures if op not in backward]
            if region.at_once:
                self._stage([*region.signatures], ())
            else:
                self._stage(forward, ())
                known = len(self.graph.get_operations())
                own = [op for op in region.signatures if op in backward]
                again = {*order.leading_to(own, self._before)}
                late = [t for t in region.inputs if t.op in self.step.new]
                self._stage([op for op in region.signatures if op in again], late, backward)
            self.in_backward.update(self.graph.get_operations()[known:])
            for op in region.sizes:
                self._read_sizes(op)
            for op in region.constants:
                (now,) = transplanted(self.graph, op.outputs, {}, waiting_for_others=False)
                self.later.append((op.outputs[0], now))
        self.later += [(t, self.moved[t.name]) for t in (*region.outputs, *region.sums)]
        return self.moved

    def reroute(self) -> None:
        """Makes the ops outside the region read the pieces."""
        for tensor, other in self.later:
            tf_private.reroute(tensor, other, self.region.signatures)

    def _count_rows(self) -> None:
        """Sets the rows of the region and of each piece: ints, or int32 scalars of the graph."""
        self.rows = _row_count(self.region)
        starts = [self.rows * i // self.count for i in range(self.count + 1)]
        self.sizes = [end - begin for begin, end in itertools.pairwise(starts)]

    def _split(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """The slices of an input of the region."""
        rows = self.region.rows[tensor.name]
        if rows > 1:
            features = self.region.shapes.features(tensor, rows) or []
            tensor = tf.reshape(tensor, [1] * (rows - 1) + [-1] + features)
        return tf.split(tensor, self.sizes, rows - 1)

    def _before(self, op: tf.Operation) -> Iterable[tf.Operation]:
        return (t.op for t in op.inputs if t.op in self.region.signatures)

    def _stage(
        self,
        ops: Sequence[tf.Operation],
        first: Sequence[tf.Tensor],
        only: Collection[tf.Operation] | None = None,
    ) -> None:
        """Adds the pieces of some ops, each of which runs after the one before.

        Args:
            ops: the ops, each after those that it reads.
            first: the inputs that the first piece waits for.
            only: the ops whose results are wanted, all of them by default.
        """
        region = self.region
        wanted = {t.name for op in (ops if only is None else only) for t in op.outputs}
        outputs = [t for t in region.outputs if t.name in wanted]
        sums = [t for t in region.sums if t.name in wanted]
        inputs = [t for t in region.inputs if any(t is read for op in ops for read in op.inputs)]
        slices: dict[str, list[tf.Tensor]] = {t.name: [] for t in outputs}
        totals: dict[str, tf.Tensor] = {}
        barrier = isinstance(self.step.runtime, Xla) and self.step.runtime.on_gpu
        step = self.step.needed | self.step.beside | self.step.after
        # All slices are made at once, so that nothing has to be kept or run again for the next one.
        parts = {t.name: self._split(t) for t in first}
        known_ops = len(self.graph.get_operations())
        parts |= {t.name: self._split(t) for t in inputs if t.name not in parts}
        after = [parts[t.name][0] for t in first]
        if self.step.runtime.obeys_control_edges:
            self._wait(self.graph.get_operations()[known_ops:], [t.op for t in after])
        for i, size in enumerate(self.sizes):
            known_ops = len(self.graph.get_operations())
            read = [parts[t.name][i] for t in inputs]
            if after and not self.step.runtime.obeys_control_edges:
                read, passed = gate.passed(read, after, barrier)
                behind = dict(zip((t.name for t in after), passed, strict=True))
                totals = {name: behind.get(t.name, t) for name, t in totals.items()}
                slices = {n: [behind.get(t.name, t) for t in ts] for n, ts in slices.items()}
            known = dict(zip((t.name for t in inputs), read, strict=True))
            made = self._copies(ops, [*outputs, *sums], known, size)
            for tensor in outputs:
                slices[tensor.name].append(made[tensor.name])
            for name in (t.name for t in sums):
                totals[name] = _sum(totals[name], made[name]) if name in totals else made[name]
            if self.step.runtime.obeys_control_edges:
                self._wait(self.graph.get_operations()[known_ops:], [t.op for t in after])
            ends = [slices[t.name][-1] for t in outputs if t.op in step]
            after = [*ends, *totals.values()]
        for tensor in outputs:
            self.moved[tensor.name] = self._together(tensor, slices[tensor.name])
        for tensor in sums:
            totals[tensor.name].set_shape(tensor.shape)
            self.moved[tensor.name] = totals[tensor.name]

    def _wait(self, made: Sequence[tf.Operation], before: Sequence[tf.Operation]) -> None:
        """Makes the first ops of a piece wait for the last ones of the piece before."""
        ours = {*made}
        for op in made:
            if op.type != "Const" and not any(
                t.op in ours and t.op.type != "Const" for t in op.inputs
            ):
                tf_private.add_control_inputs(op, before)

    def _copies(
        self,
        ops: Sequence[tf.Operation],
        wanted: Sequence[tf.Tensor],
        known: dict[str, tf.Tensor],
        size: Any,
    ) -> dict[str, tf.Tensor]:
        """Adds the ops of a piece; returns what is wanted of it, by name."""
        region = self.region
        known = {**known}
        nodes: dict[str, tf.compat.v1.NodeDef] = {}
        for op in ops:
            signature = region.signatures[op]
            node = op.node_def
            for tensor, n in zip(op.inputs, signature.inputs, strict=True):
                if n == WHOLE and tensor.op not in region.constants:
                    known[tensor.name] = tensor
            for i, values in signature.remade.items():
                dtype = op.inputs[i].dtype if i < len(op.inputs) else tf.int32
                name = f"{op.name}/remade_{i}:0"
                known[name] = _vector(values, size, dtype)
                if signature.reshapes:
                    reads = [node.input[0], name]
                    node = gate.reshape_node(op.name, reads, op.inputs[0].dtype, dtype)
                    node.device = op.device
                else:
                    node.input[i] = name
            nodes[op.name] = node
        copied = transplanted(self.graph, wanted, known, waiting_for_others=False, before=nodes)
        return dict(zip((t.name for t in wanted), copied, strict=True))

    def _together(self, tensor: tf.Tensor, slices: Sequence[tf.Tensor]) -> tf.Tensor:
        """A tensor by row as the ops outside read it, from those of all pieces."""
        rows = self.region.rows[tensor.name]
        whole = slices[0] if len(slices) == 1 else tf.concat([*slices], rows - 1)
        if rows > 1:
            whole = tf.reshape(whole, self._shape(tensor))
        whole.set_shape(tensor.shape)
        return whole

    def _shape(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """The shape of a tensor that needs the region, from others; None if they do not tell it."""
        sizes = [*map(self.region.size, self.region.shapes.dims(tensor))]
        known = [self._size(size) for size in sizes if size is not None]
        if len(known) < len(sizes):
            return None
        return tf.stack(known) if known else tf.zeros([0], tf.int32)

    def _size(self, size: Size) -> Any:
        if size.tensor is not None:
            return tf.shape(size.tensor)[size.axis]
        return size.value if size.value >= 0 else self.rows // -size.value

    def _read_sizes(self, op: tf.Operation) -> None:
        """Makes an op that reads the shapes of tensors that need the region not need them."""
        for tensor, output in zip(op.inputs, op.outputs, strict=True):
            shape = self._shape(tensor)
            if shape is not None:
                if op.type == "Size":
                    shape = tf.reduce_prod(shape)
                elif op.type == "Rank":
                    shape = tf.size(shape)
                self.later.append((output, tf.cast(shape, output.dtype)))


def _row_count(region: Region) -> Any:
    """The number of rows of a region: an int, or an int32 scalar."""
    if len({*region.shapes.rows}) == 1:
        return region.count
    like = min(region.sources, key=lambda t: region.rows[t.name])
    return tf.reduce_prod(tf.shape(like)[: region.rows[like.name]])


def _sum(total: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
    """A running sum, in the buffer of the sum so far."""
    both = tf.raw_ops.AddV2(x=total, y=part, name="running")
    tf_private.set_unmerged(both.op)
    return both


def _vector(values: Remade, size: Any, dtype: tf.DType) -> tf.Tensor:
    """Sizes or axes of a piece with so many rows."""
    return tf.cast(tf.stack([size if v is None else v for v in values]), dtype)
