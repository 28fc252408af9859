"""The cheapest schedule within a budget, by search over everything a step can do."""

import heapq

from memory_saving_gradients.planning.problem import Problem


def cheapest(problem: Problem, budget: int) -> float | None:
    """The least cost of any schedule of at most `budget` bytes; None if there is none.

    Dijkstra's algorithm over (tensors in memory, ops that have run). Ops may run in any order that
    their inputs allow and again as often as it takes; what is in memory may be dropped at any time.
    """
    ops = problem.ops
    here = problem.made_here
    made_by = {t: index for index, op in enumerate(ops) for t in op.outputs}
    size = [t.bytes for t in problem.tensors]
    every = frozenset(range(len(ops)))
    start = (frozenset(), frozenset())
    queue: list[tuple[float, int, tuple]] = [(0.0, 0, start)]
    best = {start: 0.0}
    pushed = 0

    def reach(state, cost):
        nonlocal pushed
        if cost < best.get(state, float("inf")):
            best[state] = cost
            pushed += 1
            heapq.heappush(queue, (cost, pushed, state))

    while queue:
        cost, _, (live, ran) = heapq.heappop(queue)
        if cost > best[live, ran]:
            continue
        if ran == every and problem.results & here <= live:
            return cost
        held = sum(size[t] for t in live)
        for tensor in live:
            reach((live - {tensor}, ran), cost)
        for index, op in enumerate(ops):
            inputs = set(op.inputs) & here
            if not inputs <= live or (index in ran and (op.pinned or op.backward)):
                continue
            if live & set(op.outputs):
                continue  # a second copy of what is there helps nobody
            need = held + sum(size[t] for t in op.outputs) + op.workspace
            after = live | set(op.outputs)
            seconds = op.cost * (1 - op.reused * (index in ran))
            if need <= budget:
                reach((after, ran | {index}), cost + seconds)
            for tensor in inputs:
                maker = ops[made_by[tensor]]
                behind = problem.barriers and op.backward and not maker.backward
                over = op.in_place and not behind and maker.overwritable
                over |= tensor in op.freed_first
                fits = over and any(size[made] == size[tensor] for made in op.outputs)
                if fits and need - size[tensor] <= budget:
                    reach((after - {tensor}, ran | {index}), cost + seconds)
    return None
