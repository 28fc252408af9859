"""Delays ops by data dependencies, in a graph that XLA compiles.

XLA drops control edges and schedules the rest freely: only data delays an op. See `graph.gate`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from memory_saving_gradients.graph import gate, kinds, normalisation, order, tf_private
from memory_saving_gradients.graph.apart import apart
from memory_saving_gradients.graph.gate import Gate
from memory_saving_gradients.planning.problem import Op, Problem, Schedule, copied
from memory_saving_gradients.planning.stretches import parts
from memory_saving_gradients.reading.read import Reading
from memory_saving_gradients.rewriting import kernels
from memory_saving_gradients.rewriting.run import COPY, Holding, Run
from memory_saving_gradients.runtimes.xla import (
    CONVOLUTIONS,
    GRADIENTS_OF_MAX_POOLING,
    TRANSPOSES,
    Xla,
)


class Gates(Holding):
    def __init__(self, reading: Reading, schedule: Schedule) -> None:
        runtime = reading.step.runtime
        assert isinstance(runtime, Xla)
        self.on_gpu = runtime.on_gpu
        self.gates = _gates(reading, schedule, self.on_gpu)
        self.backward = reading.new
        losses = (op for op in reading.step.needed if op.type in kinds.CROSS_ENTROPIES)
        self.losses = sorted(losses, key=lambda op: op.name)
        self.over_logits = [
            op
            for op, known in zip(reading.operations, reading.problem.ops, strict=True)
            if known.in_place_rewritten
        ]
        fused = order.leading_to(
            self.over_logits, lambda op: (t.op for t in op.inputs if t.name in reading.made_of)
        )
        self.over = {op.name for op in fused if op.type in kinds.CROSS_ENTROPIES}

    def hold(self, runs: Sequence[Run], copies: Mapping[str, tf.Operation]) -> None:
        """Delays the ops that do not read through a gate.

        A copy that reads only weights waits for the run before it. XLA transposes the operands of a
        convolution's gradient, and would do so in the forward pass and keep both; so the other
        operands wait for the incoming gradient. On a GPU it also transposes the filters of
        convolutions, all of them at the start, so there operands wait for one another. There the
        cross entropy of each example is written to memory: XLA would merge the sum over classes
        with the mean over examples, and write out all its terms instead.
        """
        graph = runs[0].op.graph
        backward = self.backward
        gated = {*backward, *(op.name for op in copies.values())}
        previous: Sequence[tf.Tensor] = ()
        known: dict[tuple[str, ...], tf.Tensor] = {}

        def until(after: Sequence[tf.Tensor]) -> tf.Tensor:
            """The `never` of these tensors, shared by all that wait for the same ones."""
            names = tuple(t.name for t in after)
            if names not in known:
                known[names] = gate.never(after)
            return known[names]

        with apart(graph, "gate"):
            for run in runs:
                op = copies[run.copy] if run.copy else run.op
                outputs: Sequence[tf.Tensor] = op.outputs
                if run.copy and not any(t.op.name in gated for t in op.inputs):
                    gate.hold_back(op, functools.partial(until, previous), gated)
                elif self.on_gpu and op.type in CONVOLUTIONS | TRANSPOSES:
                    gate.hold_together(op)
                elif not run.copy and op.type in TRANSPOSES:
                    gate.hold_back(op, functools.partial(until, op.inputs[2:]), gated)
                elif op.type in GRADIENTS_OF_MAX_POOLING:
                    outputs = [
                        (kernels.add_to_late_zeros if self.on_gpu else kernels.run_in_branch)(op)
                    ]
                previous = outputs
            for op in copies.values():
                if normalisation.takes_statistics(op):
                    tf_private.reroute(op.outputs[0], normalisation.computed_alike(op))
            gates = [op for op in copies.values() if kinds.is_gate(op)]
            if self.on_gpu:
                self._write_losses(copies)
                kernels.write_operands(gates)
                kernels.pass_sums(gates, backward)
            else:
                for loop in gates:  # XLA must not know that the loop runs no round
                    unknown = gate.never(loop.inputs[1:2])
                    tf_private.update_input(loop, 0, loop.inputs[0] | unknown)
                kernels.write_kept(gates, gated)

    def _write_losses(self, copies: Mapping[str, tf.Operation]) -> None:
        """Makes XLA:GPU write each loss to memory, and gradients of logits over these."""
        for op in self.losses:
            gate.write_out(op.outputs[0])
        for op in (*self.losses, *copies.values()):
            if op.name.split(COPY)[0] in self.over and op.outputs[1].consumers():
                kernels.write_over_logits(op)
        for op in self.over_logits:  # else XLA may write what it is computed from
            gate.write_out(op.outputs[0])


def _with_neighbours(
    places: Sequence[tuple[int, int]], length: int
) -> Iterator[tuple[int, tuple[int, int], int]]:
    """Stretches of a schedule, each with the starts of the previous and of the next one."""
    starts = [start for start, _ in places]
    return zip([0, *starts], places, [*starts[1:], length], strict=False)


def _gates(reading: Reading, schedule: Schedule, barriers: bool) -> dict[int, Gate]:
    """The gates of a schedule, each by the place that it comes before.

    There is one before each stretch, and one behind the forward pass and each stretch. Through the
    former pass all tensors that are read up to the next one, of the backward pass as well. Through
    the latter passes what later ops read: otherwise XLA may also keep what it computes from these
    tensors, or what they are computed from. What they read of the backward pass passes as well:
    otherwise XLA may run them before the stretch. What the stretch has read passes anew: otherwise
    XLA may keep parts of what the stretch computes from it.

    Finished results pass a barrier, and a loop waits for them. Weights and inputs also pass a
    barrier: otherwise XLA would merge what kernels compute only from them with the original. A loop
    would copy them: see `gate.hold_back`.
    """
    results = {kinds.owner(t).name for t in reading.step.results}
    places = parts(reading.problem, schedule)
    passing = _handed_on(reading, schedule, places)
    waited_for: dict[int, list[tf.Tensor]] = {}
    for before, (start, end), after in _with_neighbours(places, len(schedule)):
        outputs = [t for op in _since(reading, schedule[before:start]) for t in op.outputs]
        finished = [t for t in outputs if t.name in results and gate.may_wait(t)]
        entries = schedule[start:after]
        passing[start] = [
            *_read(reading, entries, of_backward=True),
            *(_sources(reading, entries) if barriers else []),
            *(finished if barriers else _read_later(outputs)),
            *passing.get(start, []),
        ]
        waited_for[start] = finished
        read = _read(reading, schedule[end:after], of_backward=True)
        there = {t.name for t in _read(reading, schedule[start:end])}
        passing[end] += [t for t in read if t.op.name in reading.new or t.name in there]
    gates = {}
    for place, tensors in passing.items():
        named = {t.name: t for t in tensors if barriers or t.name not in results}
        if named:
            gates[place] = Gate([*named.values()], None if barriers else waited_for.get(place, []))
    return gates


def _read_later(outputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Outputs of some ops that others read."""
    makers = {t.op for t in outputs}
    return [t for t in outputs if gate.may_wait(t) and not makers.issuperset(t.consumers())]


def _handed_on(
    reading: Reading, schedule: Schedule, places: Sequence[tuple[int, int]]
) -> dict[int, list[tf.Tensor]]:
    """What the forward pass, and each stretch, makes and later ops read, by the place behind it."""
    problem, graph = reading.problem, reading.step.graph
    first, _ = copied(problem, schedule)
    start_of = {end: start for start, end in [(0, first), *places]}
    handed_on: dict[int, list[tf.Tensor]] = {}
    read: dict[int, tuple[int, int]] = {}  # by later entries, before it is made again: the next one
    for place in range(len(schedule), 0, -1):
        if place in start_of:
            ops = [problem.ops[i] for i in schedule[start_of[place] : place]]
            made = {t for op in ops if not op.backward for t in op.outputs}
            # In the order of reading: XLA breaks ties by the order of a barrier's operands.
            numbers = sorted(made & read.keys(), key=read.__getitem__)
            names = [problem.tensors[t].name for t in numbers]
            tensors = map(graph.get_tensor_by_name, names)
            handed_on[place] = [t for t in tensors if gate.may_wait(t)]
        op = problem.ops[schedule[place - 1]]
        for t in op.outputs:
            read.pop(t, None)
        read.update((t, (place, i)) for i, t in enumerate(op.inputs) if _may_pass(problem, op, t))
    return handed_on


def _may_pass(problem: Problem, op: Op, tensor: int) -> bool:
    """Whether `op` may read a tensor through a barrier: XLA writes over nothing behind one."""
    sizes = problem.sizes
    return not op.in_place_rewritten or all(sizes[tensor] != sizes[t] for t in op.outputs)


def _since(reading: Reading, entries: Schedule) -> list[tf.Operation]:
    """The backward ops among some runs, or the last op."""
    ops = [reading.operations[i] for i in entries]
    return [op for op in ops if op.name in reading.new] or ops[-1:]


def _read(reading: Reading, entries: Schedule, of_backward: bool = False) -> list[tf.Tensor]:
    """The tensors of the forward pass, or of both, that some runs read and do not make."""
    problem, graph = reading.problem, reading.step.graph
    made: set[int] = set()
    read: dict[int, tf.Tensor] = {}
    for index in entries:
        op = problem.ops[index]
        for t in op.inputs:
            maker = problem.made_by[t]
            there = t not in made and maker >= 0 and _may_pass(problem, op, t)
            if there and (of_backward or not problem.ops[maker].backward):
                read[t] = graph.get_tensor_by_name(problem.tensors[t].name)
        made.update(op.outputs)
    return [t for t in read.values() if gate.may_wait(t)]


def _sources(reading: Reading, entries: Schedule) -> list[tf.Tensor]:
    """The weights and inputs that some runs read."""
    sources: dict[str, tf.Tensor] = {}
    waiting = [t for i in entries for t in reading.operations[i].inputs]
    seen: set[str] = set()
    while waiting:
        tensor = kinds.owner(waiting.pop())
        if tensor.name not in seen:
            seen.add(tensor.name)
            if tensor.name in reading.made_of:
                waiting.extend(tensor.op.inputs)
            elif tensor.op.type in _SOURCES and tensor.name not in reading.tensor_of:
                sources[tensor.name] = tensor
    return [t for t in sources.values() if gate.may_wait(t)]


_SOURCES = ("ReadVariableOp", "Placeholder")
