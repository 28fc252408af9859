"""How ops are made to wait in a graph that XLA compiles: by data.

XLA drops control edges and orders the rest as it likes: only data holds an op back. See
`graph.gate`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import tensorflow as tf

from memory_saving_gradients.graph import gate, kinds
from memory_saving_gradients.graph.apart import apart
from memory_saving_gradients.graph.gate import Gate
from memory_saving_gradients.planning.problem import Schedule, copied
from memory_saving_gradients.reading.read import Reading
from memory_saving_gradients.rewriting.run import Holding, Run
from memory_saving_gradients.runtimes.xla import TRANSPOSES, Xla


class Gates(Holding):
    def __init__(self, reading: Reading, schedule: Schedule) -> None:
        assert isinstance(reading.step.runtime, Xla)
        self.gates = _gates(reading, schedule)
        self.backward = reading.new
        self.on_gpu = reading.step.runtime.on_gpu

    def hold(self, runs: Sequence[Run], copies: Mapping[str, tf.Operation]) -> None:
        """Holds back what does not read through a gate.

        A copy that reads weights alone waits for the run before it. And of a convolution's
        gradient, the operands that are no gradients wait for that which is: XLA transposes them,
        and would do so in the forward pass and keep both. On a GPU it transposes filters, all
        before anything else, so a filter waits for the image. The slices of a concatenation's
        gradient are written out: they are less than what they are computed from.
        """
        graph = runs[0].op.graph
        backward = self.backward
        gated = {*backward, *(op.name for op in copies.values())}
        previous: Sequence[tf.Tensor] = ()
        known: dict[tuple[str, ...], tf.Tensor] = {}

        def until(after: Sequence[tf.Tensor]) -> tf.Tensor:
            """The `never` of these; one for all that wait for the same."""
            names = tuple(t.name for t in after)
            if names not in known:
                known[names] = gate.never(after)
            return known[names]

        with apart(graph, "gate"):
            for run in runs:
                op = copies[run.copy] if run.copy else run.op
                if run.copy and not any(t.op.name in gated for t in op.inputs):
                    gate.hold_back(op, functools.partial(until, previous), gated)
                elif not run.copy and op.type in TRANSPOSES:
                    grads = [t for t in op.inputs if t.op.name in backward]
                    gate.hold_back(op, functools.partial(until, grads), gated)
                elif self.on_gpu and op.type in ("Conv2D", "Conv3D"):
                    image = op.inputs[0]
                    waiting = {*gated, kinds.owner(image).op.name}
                    gate.hold_back(op, functools.partial(until, [image]), waiting)
                elif op.type == "Slice" and op.name in backward:
                    gate.write_out(op)
                previous = op.outputs


def _gates(reading: Reading, schedule: Schedule) -> dict[int, Gate]:
    """The gates of a schedule, by the place in it that each comes before.

    There is one before each stretch of recomputed ops. It waits for what the backward ops since
    the last gate made and did not use, so for all of them; and all that its stretch, and the
    backward ops up to the next one, read of the forward pass goes through it.
    """
    problem, graph = reading.problem, reading.operations[0].graph
    returned = {t.name for t in reading.step.results}
    _, again = copied(problem, schedule)
    starts = [place for place in range(1, len(again)) if again[place] and not again[place - 1]]
    found = {}
    for before, start, end in zip([0, *starts], starts, [*starts[1:], len(schedule)], strict=False):
        made: set[int] = set()
        passes: dict[int, None] = {}
        for index in schedule[start:end]:
            op = problem.ops[index]
            passes.update(
                (t, None)
                for t in op.inputs
                if t not in made
                and problem.made_by[t] >= 0
                and not problem.ops[problem.made_by[t]].backward
                and gate.may_wait(graph.get_tensor_by_name(problem.tensors[t].name))
            )
            made.update(op.outputs)
        ops = [reading.operations[i] for i in schedule[before:start]]
        ops = [op for op in ops if op.name in reading.new] or ops[-1:]
        read = {t.name for op in ops for t in op.inputs}
        made_here = (t for op in ops for t in op.outputs if t.name not in read)
        after = [t for t in made_here if t.consumers() or t.name in returned]
        found[start] = Gate(after, list(passes))
    return found
