"""The course of ops that nothing orders: TensorFlow's executor, event by event."""

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
    """How TensorFlow's executor may run ops that nothing else orders.

    Of the ops that an op made ready, its thread goes on with one and puts the others on its stack;
    idle threads take the oldest of other stacks (`executor.cc`, and Eigen's pool). So one thread
    runs depth first, and leaves (the gradients of weights) wait until the chain ends; a second one
    takes them as they come. Which op a thread goes on with, Grappler's sorting decides; the longest
    way to the end is what traces show. Cheap ops are run at once.

    Args:
        graph: who waits for whom.
        operations: the ops, each after those that it waits for.
        seconds: what ops take, by name; ops that are not there are cheap.
        threads: how many take ops.

        early_last: whether, of the ops that wait for nothing, those run first whose way to the end
            is the shortest. Grappler's folding of constants can bring that about; the backward
            passes of several losses then run one by one, and early. Else they run as given.
    """
    to_end: dict[tf.Operation, tuple[int, int]] = {}  # the place only makes the order definite
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
    """When threads begin and end ops, of which those that wait for nothing are `begins`."""
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
