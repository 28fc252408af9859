"""The order in which the plain step is executed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import networkx as nx
import tensorflow as tf

from memory_saving_gradients.planning.problem import Problem
from memory_saving_gradients.runtimes.runtime import Runtime


class Execution:
    """The order in which the plain step is executed.

    Args:
        runtime: the runtime.
        executed: which ops wait for which in the plain step.
        ordered: the ops in the order of schedules.
        problem: the problem.
        ops: the operation of each op of the problem.
        seconds: the time of each op, by name.
    """

    def __init__(
        self,
        runtime: Runtime,
        executed: nx.DiGraph,
        ordered: Sequence[tf.Operation],
        problem: Problem,
        ops: Sequence[tf.Operation],
        seconds: Mapping[str, float],
    ) -> None:
        place = {op: i for i, op in enumerate(ordered)}
        self._runtime, self._executed = runtime, executed
        self._problem, self._seconds = problem, seconds
        self._index_of = {op: i for i, op in enumerate(ops)}
        self._sorted = list(
            nx.lexicographical_topological_sort(executed, key=lambda op: place.get(op, 0))
        )

    def problem(self, early_last: bool = False, threads: int | None = None) -> Problem:
        """The problem with `as_executed`; by default with all threads of the runtime."""
        threads = threads or self._runtime.threads
        events = self._runtime.order(
            self._executed, self._sorted, self._seconds, early_last, threads
        )
        if events is None:
            as_executed = [event for i in range(len(self._index_of)) for event in (i, ~i)]
        else:
            numbered = ((self._index_of.get(op), begins) for op, begins in events)
            as_executed = [i if begins else ~i for i, begins in numbered if i is not None]
        return dataclasses.replace(self._problem, as_executed=tuple(as_executed))
