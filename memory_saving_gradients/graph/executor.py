"""How ops are made to wait where TensorFlow's executor runs them: by control edges.

The backward pass is a sequence of waves (`planning.overlap`). Within a wave ops wait for their data
alone, so they overlap; what begins a wave waits for what ended the one before, on its device.

Four kinds of op have no part in that. Ops that are not in the problem (shapes, views, small
tensors) wait for their data alone. `BiasAddGrad` waits for nothing but its gradient, and is waited
for once the last reader of that gradient has run: oneDNN merges it with such a reader into one op,
and any other edge could close a cycle through the merged op. Ops of v1 loops and constants in the
making (`Reading.unordered`) stay out. And what Grappler rewrites unless it has control edges is
left without them, so that it rounds as in the plain step: it is held back, and waited for, by
identities of its inputs and outputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import tensorflow as tf

from memory_saving_gradients.graph import calls, grappler, kernels, tf_private
from memory_saving_gradients.graph.read import Reading
from memory_saving_gradients.planning.overlap import waves
from memory_saving_gradients.planning.problem import Schedule

#: What the names of copies end in, before a number.
COPY = "/recomputed"


@dataclasses.dataclass(frozen=True)
class Run:
    """One entry of a schedule: an op, or a copy of it."""

    op: tf.Operation
    copy: str | None
    in_backward: bool


@contextlib.contextmanager
def apart(graph: tf.Graph, scope: str | None = None) -> Iterator[None]:
    """Within it, new ops of `graph` are out of the user's scopes and wait for nothing."""
    with (
        graph.as_default(),
        graph.name_scope(scope),
        graph.device(None),
        graph.control_dependencies(None),
    ):
        yield


def hold(
    runs: Sequence[Run],
    copies: dict[str, tf.Operation],
    reading: Reading,
    schedule: Schedule,
    as_plain: AbstractSet[str],
) -> None:
    """Makes the runs of the backward pass follow a schedule.

    Args:
        runs: the entries of the schedule.
        copies: the copies that they name.
        reading: the step as it was read.
        schedule: what runs, in which order.
        as_plain: names of the ops that Grappler shall find without control edges.
    """
    ops = [copies[run.copy] if run.copy else run.op for run in runs]
    first = next((i for i, run in enumerate(runs) if run.in_backward), len(runs))
    late = {*copies.values(), *ops[first:]}
    gradients = {run.op for run in runs[first:] if not run.copy}
    before = _made_before(reading, schedule)
    out = {*as_plain, *reading.unordered}
    takes_part = [run.op.name not in out and run.op.type != "BiasAddGrad" for run in runs]
    biases = _Biases(ops)
    merged = {op for run, op in zip(runs, ops, strict=True) if run.op.name in as_plain}
    end_of = functools.cache(lambda op: _end_of(op, op in merged))
    latest: dict[str, list[tf.Operation]] = {}  # by device: how its last wave ended
    previous: list[tf.Operation] = []  # how the last wave ended, on any device
    for i in (i for i in range(first) if takes_part[i]):
        previous = latest[ops[i].device] = [ops[i]]
    alone = {i for i, op in enumerate(reading.operations) if _depends_on_time(op)}
    for wave in waves(reading.problem, schedule, first, alone):
        waiting: dict[int, list[int]] = {}  # entries that begin the wave: the inputs to hold back
        ends = dict.fromkeys(i for i in wave if takes_part[i])
        for i in wave:
            inside = [j for j in before[i] if j >= wave.start and ops[j].device == ops[i].device]
            if takes_part[i]:
                for j in inside:
                    ends.pop(j, None)
                if not any(takes_part[j] for j in inside):
                    waiting[i] = _data(ops[i]) if calls.calls(ops[i]) else []
            elif runs[i].op.name in as_plain:
                held = _early(ops[i], late, late if runs[i].copy else gradients)
                if held:
                    waiting[i] = held
                readers = {reader for t in ops[i].outputs for reader in t.consumers()}
                read_here = any(i in before[j] for j in wave)
                if not read_here and readers.isdisjoint(merged):
                    ends[i] = None
        due = biases.due(wave.start) if waiting else []
        for i, inputs in waiting.items():
            begins = runs[i].copy and not (i and runs[i - 1].copy)
            last = previous if begins else latest.get(ops[i].device, previous)
            ends_of_last = [*(e for op in last for e in end_of(op)), *due]
            _hold_back(ops[i], inputs, ends_of_last)
            if takes_part[i]:
                edges = dict.fromkeys(ends_of_last)
                for tensor in ops[i].inputs:
                    edges.pop(tensor.op, None)
                tf_private.add_control_inputs(ops[i], edges)
        ended = [ops[i] for i in ends]
        for device in {op.device for op in ended}:
            latest[device] = [op for op in ended if op.device == device]
        previous = ended or previous


def _depends_on_time(op: tf.Operation) -> bool:
    """Whether `op` rounds in another way if other readers of its inputs have not run yet.

    The kernel of an `AddN` begins with the first term that nobody else will read.
    """
    return op.type == "AddN" and len(op.inputs) > 2


def _made_before(reading: Reading, schedule: Schedule) -> list[list[int]]:
    """For each entry, the entries that made what it reads."""
    newest: dict[int, int] = {}
    found = []
    for i, index in enumerate(schedule):
        op = reading.problem.ops[index]
        found.append([newest[t] for t in op.inputs if t in newest])
        newest.update((t, i) for t in op.outputs)
    return found


class _Biases:
    """The `BiasAddGrad`s, and from where on they may be waited for.

    Args:
        ops: the entries of a schedule.
    """

    def __init__(self, ops: Sequence[tf.Operation]) -> None:
        last_reader: dict[int, int] = {}
        for i, op in enumerate(ops):
            if op.type != "BiasAddGrad":
                last_reader.update((id(tensor), i) for tensor in op.inputs)
        self._left = [
            (max(i, last_reader.get(id(op.inputs[0]), i)), op)
            for i, op in enumerate(ops)
            if op.type == "BiasAddGrad"
        ]

    def due(self, entry: int) -> list[tf.Operation]:
        """Those that what comes from `entry` on waits for, each once."""
        found = [op for at, op in self._left if at < entry]
        self._left = [(at, op) for at, op in self._left if at >= entry]
        return found


def _data(op: tf.Operation) -> list[int]:
    return [i for i, t in enumerate(op.inputs) if t.dtype not in kernels.HANDLES]


def _early(op: tf.Operation, late: set[tf.Operation], factors: set[tf.Operation]) -> list[int]:
    """The inputs by which an op without edges is held back in the backward pass.

    Of x**3 Grappler makes x * x**2, and merges that square with the one of the gradient; then it
    would live from the one to the other.
    """
    if op.type == "Pow" or late.isdisjoint(t.op for t in op.inputs):
        return [0]
    return grappler.multiplied(op, factors)


def _hold_back(op: tf.Operation, inputs: Iterable[int], before: Iterable[tf.Operation]) -> None:
    """Makes `op` wait for `before` by some of its inputs, not by control edges of its own."""
    for i in inputs:
        late = _hand_on(op.inputs[i])
        tf_private.add_control_inputs(
            late, [other for other in before if other is not op.inputs[i].op]
        )
        tf_private.update_input(op, i, late.outputs[0])


def _hand_on(tensor: tf.Tensor) -> tf.Operation:
    """An identity of `tensor`, where that is made."""
    with apart(tensor.graph), tensor.graph.device(tensor.op.device):
        return tf.identity(tensor, f"{tensor.op.name}{COPY}").op


def _end_of(op: tf.Operation, edgeless: bool) -> list[tf.Operation]:
    """What to wait for, to wait for the end of `op`; a reader of it, if it shall have no edges.

    TensorFlow puts loops and branches in the place of an op that calls functions. Then what waits
    for the op waits until it is known which branch to take; what it begins with waits for nothing
    but data.
    """
    if not calls.calls(op):
        return [_hand_on(op.outputs[0])] if edgeless else [op]
    read = [t for t in op.outputs if t.consumers() and t.dtype not in kernels.HANDLES]
    # What a branch kept may be read by nothing in the end, and should not be made for us.
    read = [t for t in read if t.dtype != tf.variant] or read
    return [_hand_on(tensor) for tensor in read] or [op]
