"""A readable summary of the forward pass: a row for each layer, or for a few layers."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence

from memory_saving_gradients.planning.keep import kept_tensors
from memory_saving_gradients.planning.plan_data import PlanData
from memory_saving_gradients.report import facts

#: No more rows than this.
ROWS = 40


@dataclasses.dataclass(frozen=True)
class Row:
    """Consecutive ops of the forward pass.

    Attributes:
        label: what their names have in common.
        kept: bytes of their outputs that are kept for the backward pass.
        again: bytes of their outputs that are recomputed.
        plain: bytes of their outputs that nothing needs after the forward pass.
        segment: the segment that recomputes most of `again`, from 1; 0 for none.
        overhead: the cost of recomputing them, as a share of the cost of the plain step.
    """

    label: str
    kept: int
    again: int
    plain: int
    segment: int
    overhead: float


@dataclasses.dataclass(frozen=True)
class Arc:
    """Tensors that skip rows: from the row that makes them to the last one that reads them."""

    begin: int
    end: int
    bytes: int


def coarse(plan: PlanData) -> tuple[list[Row], list[Arc]]:
    """The rows of a plan's forward pass in execution order, and the tensors that skip rows."""
    problem = plan.problem
    paths = [facts.layer(plan, i).split("/") for i in range(problem.forward_count)]
    sizes = [sum(problem.tensors[t].bytes for t in op.outputs) for op in problem.ops]
    groups = _merged(_by_path(paths), sizes)
    kept = set(kept_tensors(problem, plan.schedule))
    in_segment = {
        plan.schedule[entry]: number
        for number, part in enumerate(facts.segments(plan), 1)
        for entry in part.entries
    }
    costs, times = problem.costs_again, collections.Counter(plan.schedule)
    rows = []
    for group in groups:
        outputs = [(t, i) for i in group for t in problem.ops[i].outputs]
        sums: collections.Counter[str] = collections.Counter()
        again: collections.Counter[int] = collections.Counter()
        for t, i in outputs:
            kind = "kept" if t in kept else "again" if i in in_segment else "plain"
            sums[kind] += problem.tensors[t].bytes
            if kind == "again":
                again[in_segment[i]] += problem.tensors[t].bytes
        segment = again.most_common(1)[0][0] if again else 0
        label = _label([paths[i] for i in group])
        more = sum(costs[i] * (times[i] - 1) for i in group) / max(problem.costs.sum(), 1e-300)
        rows.append(Row(label, sums["kept"], sums["again"], sums["plain"], segment, more))
    return rows, _arcs(plan, groups)


def _by_path(paths: Sequence[list[str]]) -> list[list[int]]:
    """Consecutive ops with a common prefix of their paths, as long as gives few enough groups."""
    deepest = max(map(len, paths), default=1)
    for depth in range(deepest, 0, -1):
        places = itertools.groupby(range(len(paths)), key=lambda i: paths[i][:depth])
        groups = [list(group) for _, group in places]
        if len(groups) <= ROWS:
            break
    return groups if paths else []


def _merged(groups: list[list[int]], sizes: Sequence[int]) -> list[list[int]]:
    """The groups, with the smallest neighbours merged until there are few enough."""
    groups = list(groups)
    held = [sum(sizes[i] for i in group) for group in groups]
    while len(groups) > ROWS:
        place = min(range(len(groups) - 1), key=lambda n: held[n] + held[n + 1])
        groups[place : place + 2] = [groups[place] + groups[place + 1]]
        held[place : place + 2] = [held[place] + held[place + 1]]
    return groups


def _label(paths: Sequence[list[str]]) -> str:
    """The common part of paths; the first and the last path if there is none."""
    common = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
    first, last = "/".join(paths[0]), "/".join(paths[-1])
    return "/".join(common) or (first if first == last else f"{first} … {last}")


def _arcs(plan: PlanData, groups: Sequence[Sequence[int]]) -> list[Arc]:
    problem = plan.problem
    row_of = {i: row for row, group in enumerate(groups) for i in group}
    sums: collections.Counter[tuple[int, int]] = collections.Counter()
    for i, op in enumerate(problem.ops[: problem.forward_count]):
        for t in op.outputs:
            end = max((row_of[reader] for reader in problem.forward_readers[t]), default=0)
            if end > row_of[i] + 1:
                sums[row_of[i], end] += problem.tensors[t].bytes
    return [Arc(*key, size) for key, size in sums.items()]
