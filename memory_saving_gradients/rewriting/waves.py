"""Delays ops by control edges, in TensorFlow's executor.

The backward pass is divided into waves (`planning.overlap`), and so is the forward pass if it could
exceed the peak in another order. Within a wave ops wait only for their data, so they overlap; the
first ops of a wave wait for the last ops of the previous one, on their device.

There are four exceptions. Ops that are not in the problem (shapes, views, small tensors) wait only
for their data. Ops that oneDNN merges with later ones (`merges`) are waited for only when all
inputs of the later ones are there; `BiasAddGrad`, one of them, waits only for its gradient. Ops of
v1 loops, and ops that may be folded into constants (`Reading.unordered`), get no edges. And ops
that Grappler would not optimise if they had control edges get none, so that they round as in the
plain step: instead, identities of their inputs wait, and others wait for identities of their
outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import tensorflow as tf

from memory_saving_gradients.graph import calls, kinds, order, tf_private
from memory_saving_gradients.graph.apart import apart
from memory_saving_gradients.graph.gate import Gate
from memory_saving_gradients.planning.overlap import runs_ahead, waves
from memory_saving_gradients.planning.problem import Schedule
from memory_saving_gradients.reading import step_order
from memory_saving_gradients.reading.read import Reading
from memory_saving_gradients.rewriting.as_plain import keep_unmerged, left_alone, updates
from memory_saving_gradients.rewriting.run import COPY, Holding, Run
from memory_saving_gradients.runtimes import grappler, merges


class Waves(Holding):
    """Waves: within a wave, ops wait only for their data.

    Attributes:
        as_plain: names of the ops that must have no control edges when Grappler runs.
    """

    gates: Mapping[int, Gate] = {}

    def __init__(self, reading: Reading, schedule: Schedule) -> None:
        self.as_plain = left_alone(reading) | updates(reading)
        self._reading = reading
        self._schedule = schedule

    def hold(self, runs: Sequence[Run], copies: Mapping[str, tf.Operation]) -> None:
        keep_unmerged(runs, copies, self.as_plain)
        entries = _Entries(runs, copies, self._reading, self._schedule, self.as_plain)
        ops = entries.ops
        parts = merges.Parts(ops)
        end_of = functools.cache(lambda op: _end_of(op, op in entries.edgeless))
        latest: dict[str, list[tf.Operation]] = {}  # by device: the ends of its last wave
        previous: list[tf.Operation] = []  # the ends of the last wave, on any device
        problem, schedule = self._reading.problem, self._schedule
        begin = 0 if runs_ahead(problem, schedule, entries.first) else entries.first
        for i in (i for i in range(begin) if entries.has_edges[i]):
            previous = latest[ops[i].device] = [ops[i]]
        alone = {i for i, op in enumerate(self._reading.operations) if order.depends_on_time(op)}
        for wave in waves(problem, schedule, begin, alone):
            waiting, ended = entries.begin_and_end(wave)
            due = parts.due(wave.start) if waiting else []
            for i, inputs in waiting.items():
                begins = runs[i].copy and not (i and runs[i - 1].copy)
                last = previous if begins else latest.get(ops[i].device, previous)
                ends_of_last = [*(e for op in last for e in end_of(op)), *due]
                _hold_back(ops[i], inputs, ends_of_last)
                if entries.has_edges[i]:
                    edges = dict.fromkeys(ends_of_last)
                    for tensor in ops[i].inputs:
                        for implied in (tensor.op, *tensor.op.control_inputs):
                            edges.pop(implied, None)
                    tf_private.add_control_inputs(ops[i], edges)
            ended = parts.ending(ended, wave.stop)
            for device in {op.device for op in ended}:
                latest[device] = [op for op in ended if op.device == device]
            previous = ended or previous
        self._updates_wait(ops, parts)

    def _updates_wait(self, ops: Sequence[tf.Operation], parts: merges.Parts) -> None:
        """Makes updates wait for readers of old values, else TensorFlow copies the variable."""
        place = {op: i for i, op in enumerate(ops)}
        for op in self._reading.step.after.intersection(ops):
            readers = step_order.readers_before(op, self._reading.step)
            before = [
                reader
                for reader in readers
                if reader.type in kinds.EXPENSIVE
                and place.get(reader, len(ops)) < place[op]
                and parts.may_be_waited_for(reader, place[op])
            ]
            tf_private.add_control_inputs(op, before)


class _Entries:
    """The entries of a schedule, and which of them begin and end a wave.

    Attributes:
        ops: the op, or copy, of each entry.
        first: the first entry of the backward pass.
        has_edges: for each entry, whether it may have control edges.
        edgeless: the ops and copies that must have none when Grappler runs.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        copies: Mapping[str, tf.Operation],
        reading: Reading,
        schedule: Schedule,
        as_plain: AbstractSet[str],
    ) -> None:
        self.ops = [copies[run.copy] if run.copy else run.op for run in runs]
        self.first = next((i for i, run in enumerate(runs) if run.in_backward), len(runs))
        out = {*as_plain, *reading.unordered}
        self.has_edges = [r.op.name not in out and r.op.type != "BiasAddGrad" for r in runs]
        self._merged = [run.op.name in as_plain for run in runs]
        self.edgeless = {op for op, merged in zip(self.ops, self._merged, strict=True) if merged}
        late = {*copies.values(), *self.ops[self.first :]}
        gradients = {run.op for run in runs[self.first :] if not run.copy}
        self._late = late
        self._factors = [late if run.copy else gradients for run in runs]
        self._after = reading.step.after
        self._before = _made_before(reading, schedule)

    def begin_and_end(self, wave: range) -> tuple[dict[int, list[int]], list[tf.Operation]]:
        """The entries that begin a wave, with the inputs to delay, and the ops that end it."""
        waiting: dict[int, list[int]] = {}
        ends = dict.fromkeys(i for i in wave if self.has_edges[i])
        for i in wave:
            op = self.ops[i]
            if self.has_edges[i]:
                inside = [
                    j
                    for j in self._before[i]
                    if j >= wave.start and self.ops[j].device == op.device
                ]
                for j in inside:
                    ends.pop(j, None)
                if not any(self.has_edges[j] for j in inside):
                    waiting[i] = _data(op) if calls.calls(op) else []
            elif self._merged[i] and i >= self.first:
                held = _early(op, self._late, self._factors[i])
                if not held and op in self._after and all(j < wave.start for j in self._before[i]):
                    held = self._from_others(op)
                if held:
                    waiting[i] = held
                readers = {reader for t in op.outputs for reader in t.consumers()}
                read_here = any(i in self._before[j] for j in wave)
                if not read_here and readers.isdisjoint(self.edgeless):
                    ends[i] = None
        return waiting, [self.ops[i] for i in ends]

    def _from_others(self, op: tf.Operation) -> list[int]:
        """The first input of an update that Grappler cannot merge with the op that makes it."""
        return [i for i in _data(op) if op.inputs[i].op not in self.edgeless][:1]


def _made_before(reading: Reading, schedule: Schedule) -> list[list[int]]:
    """For each entry, the entries that made its inputs."""
    newest: dict[int, int] = {}
    makers = []
    for i, index in enumerate(schedule):
        op = reading.problem.ops[index]
        makers.append([newest[t] for t in op.inputs if t in newest])
        newest.update((t, i) for t in op.outputs)
    return makers


def _data(op: tf.Operation) -> list[int]:
    """The inputs with data, as far as they can be changed."""
    return [
        i
        for i, t in enumerate(op.inputs)
        if t.dtype not in kinds.HANDLES and tf_private.may_update_input(op, i)
    ]


def _early(op: tf.Operation, late: set[tf.Operation], factors: set[tf.Operation]) -> list[int]:
    """The inputs by which an op without control edges is delayed in the backward pass.

    Grappler turns x**3 into x * x**2 and merges that square with the one of the gradient, which
    would then live from one to the other.
    """
    if op.type == "Pow" or late.isdisjoint(kinds.owner(t).op for t in op.inputs):
        return [0]
    return grappler.multiplied(op, factors)


def _hold_back(op: tf.Operation, inputs: Iterable[int], before: Iterable[tf.Operation]) -> None:
    """Makes some inputs of `op` wait for `before`, so that it needs no control edges of its own."""
    for i in inputs:
        late = _hand_on(op.inputs[i])
        tf_private.add_control_inputs(
            late, [other for other in before if other is not op.inputs[i].op]
        )
        tf_private.update_input(op, i, late.outputs[0])


def _hand_on(tensor: tf.Tensor) -> tf.Operation:
    """An identity of `tensor`, on its device."""
    with apart(tensor.graph), tensor.graph.device(tensor.op.device):
        return tf.identity(tensor, f"{tensor.op.name}{COPY}").op


def _end_of(op: tf.Operation, edgeless: bool) -> list[tf.Operation]:
    """The ops to wait for in order to wait for the end of `op`.

    If it must have no control edges, that is an identity of its output. The same holds for an op
    that calls functions, as TensorFlow lowers it to loops and branches: a control edge from it
    would only wait until the branch is chosen (and one to it would not delay what it begins with).
    """
    if not calls.calls(op):
        return [_hand_on(op.outputs[0])] if edgeless else [op]
    read = [t for t in op.outputs if t.consumers() and t.dtype not in kinds.HANDLES]
    # Residuals of a branch may have no other reader; we should not be the reason to compute them.
    read = [t for t in read if t.dtype != tf.variant] or read
    return [_hand_on(tensor) for tensor in read] or [op]
