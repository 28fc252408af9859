"""The order in which TensorFlow's executor runs ops that nothing else orders, event by event."""

from __future__ import annotations

import collections
import heapq
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import networkx as nx
import tensorflow as tf

#: An op begins (True) or ends (False).
Event: TypeAlias = tuple[tf.Operation, bool]


def executed(
    graph: nx.DiGraph,
    operations: Sequence[tf.Operation],
    seconds: Mapping[str, float],
    threads: int,
    early_last: bool = False,
) -> list[Event]:
    """Simulates how TensorFlow's executor runs ops that nothing else orders.

    When an op makes others ready, its thread continues with one and puts the rest on its stack;
    idle threads take the oldest op of another stack (`executor.cc`, and Eigen's pool). So a single
    thread runs depth first, and leaves (gradients of weights) wait until the chain ends; a second
    thread takes them as they become ready. The order of Grappler's sorting decides with which op a
    thread continues; in traces it is the one with the longest path to the end. Cheap ops run at
    once.

    Args:
        graph: which ops wait for which.
        operations: the ops, each after those that it waits for.
        seconds: the time of ops, by name; ops that are not in it are cheap.
        threads: the number of threads.
        early_last: whether ops that wait for nothing start in the order of their path to the end,
            the shortest first, not in the given order. Grappler's constant folding can cause that;
            the backward passes of several losses, or of terms of a loss, then run one by one, and
            early.
    """
    to_end: dict[tf.Operation, tuple[int, int]] = {}  # the place only breaks ties
    for place, op in reversed(list(enumerate(operations))):
        ways = (to_end[after][0] for after in graph.successors(op))
        to_end[op] = 1 + max(ways, default=0), place
    begins = [op for op in operations if not graph.in_degree(op)]
    if early_last:
        begins.sort(key=lambda op: to_end[op][0])
    return _in_threads(graph, begins, to_end, seconds, threads)


def _in_threads(
    graph: nx.DiGraph,
    begins: Sequence[tf.Operation],
    to_end: dict[tf.Operation, tuple[int, int]],
    seconds: Mapping[str, float],
    threads: int,
) -> list[Event]:
    """The events of all threads; `begins` are the ops that wait for nothing."""
    waiting = dict(graph.in_degree)
    own: list[collections.deque[tf.Operation]] = [collections.deque() for _ in range(threads)]
    at_once: list[collections.deque[tf.Operation]] = [collections.deque() for _ in range(threads)]
    own[0].extend(begins)
    events: list[Event] = []
    ends: list[tuple[float, int, int, tf.Operation]] = []  # when, a number, thread, op
    idle = list(range(threads))
    now = 0.0
    while True:
        for thread in [*idle]:
            mine, oldest = at_once[thread] or own[thread], max(own, key=len)
            if mine or oldest:
                op = mine.popleft() if mine else oldest.pop()
                idle.remove(thread)
                events.append((op, True))
                end = now + seconds.get(op.name, 0.0)
                heapq.heappush(ends, (end, len(events), thread, op))
        if not ends:
            return events
        now, _, thread, op = heapq.heappop(ends)
        events.append((op, False))
        idle.append(thread)
        dear: list[tf.Operation] = []
        for after in sorted(graph.successors(op), key=to_end.__getitem__):
            waiting[after] -= 1
            if not waiting[after]:
                (dear if after.name in seconds else at_once[thread]).append(after)
        if dear and not at_once[thread]:
            at_once[thread].append(dear.pop())
        own[thread].extendleft(dear)
