"""Delays ops by control edges, in TensorFlow's executor.

The backward pass is divided into waves (`planning.overlap`), and so is the forward pass if it could
exceed the peak in another order. Within a wave ops wait only for their data, so they overlap; the
first ops of a wave wait for the last ops of an earlier one, on their device.

There are five exceptions. Ops that are not in the problem (shapes, views, small tensors) wait only
for their data. Ops that oneDNN merges with later ones (`merges`) are waited for only when all
inputs of the later ones are there; `BiasAddGrad`, one of them, waits only for its gradient. Instead
of the bias of a convolution that waits, its readers wait (`merges.must_not_wait`). Ops of v1 loops,
and ops that may be folded into constants (`Reading.unordered`), get no edges. And ops that Grappler
would not optimise if they had control edges get none, so that they round as in the plain step:
instead, identities of their inputs wait, and others wait for identities of their outputs.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

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
        problem, schedule = self._reading.problem, self._schedule
        begin = 0 if runs_ahead(problem, schedule, entries.first) else entries.first
        last = earlier = _Ends([], {})  # of the last wave, and of the one before it
        for i in (i for i in range(begin) if entries.has_edges[i]):
            last = last.then([ops[i]])
        put_off: list[tf.Operation] = []
        alone = {i for i, op in enumerate(self._reading.operations) if order.depends_on_time(op)}
        for wave, after in waves(problem, schedule, begin, alone):
            before = earlier if after < wave.start else last
            waiting = entries.begins(wave)
            due = parts.due(wave.start) if waiting else []
            for i, inputs in waiting.items():
                begins = runs[i].copy and not (i and runs[i - 1].copy)
                ended = before.latest if begins else before.on(ops[i].device)
                ends = [*(e for op in ended for e in end_of(op)), *put_off, *due]
                _hold_back(ops[i], inputs, ends)
                if entries.has_edges[i]:
                    _wait(ops[i], ends)
            put_off = due
            ended = parts.ending(entries.ends(range(after, wave.stop)), wave.stop)
            earlier, last = last, last.then(ended)
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


class _Ends(NamedTuple):
    """The ops that end a wave, and with it all waves before.

    Attributes:
        latest: on any device.
        by_device: of the last wave with ops on a device, on that device.
    """

    latest: list[tf.Operation]
    by_device: dict[str, list[tf.Operation]]

    def on(self, device: str) -> list[tf.Operation]:
        """Those on a device, or on any if none ran there."""
        return self.by_device.get(device, self.latest)

    def then(self, ops: list[tf.Operation]) -> _Ends:
        """Those of the next wave, which ends with `ops`."""
        by_device = collections.defaultdict(list)
        for op in ops:
            by_device[op.device].append(op)
        return _Ends(ops or self.latest, {**self.by_device, **by_device})


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

    def begins(self, wave: range) -> dict[int, list[int]]:
        """The entries of a wave that wait for none of the others, with the inputs to delay."""
        waiting: dict[int, list[int]] = {}
        free: set[int] = set()  # their readers wait instead
        for i in wave:
            op = self.ops[i]
            if self.has_edges[i]:
                if any(self.has_edges[j] and j not in free for j in self._inside(i, wave)):
                    continue
                if merges.must_not_wait(op):
                    free.add(i)
                else:
                    waiting[i] = _data(op) if calls.calls(op) else []
            elif self._merged[i] and i >= self.first:
                held = _early(op, self._late, self._factors[i])
                if not held and op in self._after and all(j < wave.start for j in self._before[i]):
                    held = self._from_others(op)
                if held:
                    waiting[i] = held
        return waiting

    def ends(self, entries: range) -> list[tf.Operation]:
        """The ops of a range of entries for which none of the others waits."""
        ends = dict.fromkeys(i for i in entries if self.has_edges[i])
        for i in entries:
            if self.has_edges[i]:
                for j in self._inside(i, entries):
                    ends.pop(j, None)
            elif self._merged[i] and i >= self.first:
                readers = {reader for t in self.ops[i].outputs for reader in t.consumers()}
                read_here = any(i in self._before[j] for j in entries)
                if not read_here and readers.isdisjoint(self.edgeless):
                    ends[i] = None
        return [self.ops[i] for i in ends]

    def _inside(self, i: int, entries: range) -> list[int]:
        """Those of some entries that made inputs of entry `i`, on its device."""
        device = self.ops[i].device
        made = self._before[i]
        return [j for j in made if j >= entries.start and self.ops[j].device == device]

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


def _wait(op: tf.Operation, before: Iterable[tf.Operation]) -> None:
    """Makes `op` wait for `before`, without edges that others imply."""
    edges = dict.fromkeys(before)
    for tensor in op.inputs:
        for implied in (tensor.op, *tensor.op.control_inputs):
            edges.pop(implied, None)
    tf_private.add_control_inputs(op, edges)


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
