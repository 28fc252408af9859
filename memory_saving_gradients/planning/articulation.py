"""Checkpoints at articulation points, √n of them: Chen et al. 2016, "Training Deep Nets with
Sublinear Memory Cost"."""

from __future__ import annotations

import math

import networkx as nx
import numpy as np

from memory_saving_gradients.planning.keep import keeping
from memory_saving_gradients.planning.problem import Problem


def articulation_tensors(problem: Problem) -> list[int]:
    """The forward tensors whose removal cuts the forward graph in two, in forward order."""
    forward = problem.ops[: problem.forward_count]
    made_by = problem.made_by
    graph = nx.Graph()
    for index, op in enumerate(forward):
        graph.add_edges_from((made_by[t], index) for t in op.inputs if made_by[t] >= 0)
    points = sorted(nx.articulation_points(graph))
    return [op.outputs[0] for op in (forward[i] for i in points) if len(op.outputs) == 1]


def sqrt_spaced(problem: Problem) -> list[int]:
    """Keeps √n articulation points, evenly spaced by the bytes made between them.

    Args:
        problem: the step.

    Returns:
        The schedule; without an articulation point it recomputes everything from the inputs.
    """
    points = articulation_tensors(problem)
    made_by = problem.made_by
    made = np.cumsum([sum(problem.tensors[t].bytes for t in op.outputs) for op in problem.ops])
    wanted = math.isqrt(problem.forward_count)
    at = [int(made[made_by[t]]) for t in points]
    goals = np.linspace(0, made[: problem.forward_count].max(initial=0), wanted + 2)[1:-1]
    chosen = {points[min(np.searchsorted(at, goal), len(points) - 1)] for goal in goals if points}
    last = max((made_by[t] for t in chosen), default=-1)
    tail = {t for op in problem.ops[last + 1 : problem.forward_count] for t in op.outputs}
    return keeping(problem, chosen | tail)
