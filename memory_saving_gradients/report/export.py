"""A plan as data for other programs: JSON, a networkx graph, a trace for Perfetto."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import networkx as nx
import numpy as np

from memory_saving_gradients.planning.plan_data import PlanData
from memory_saving_gradients.planning.problem import Schedule, baseline, copied
from memory_saving_gradients.planning.simulate import plain_timeline, simulate
from memory_saving_gradients.report import facts

# The rows of a trace.
_ROWS = {"forward": 1, "recomputed": 2, "backward": 3}


def as_data(plan: PlanData) -> dict[str, Any]:
    """The report of a plan, ready for JSON; see `Plan.to_json`."""
    peak = facts.at_peak(plan)
    return {
        "strategy": plan.strategy,
        "budget_bytes": plan.budget_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "baseline_one_thread_bytes": plan.baseline_one_thread_bytes,
        "peak_bytes": plan.peak_bytes,
        "measured_peak_bytes": plan.measured_peak_bytes,
        "process_peak_bytes": plan.process_peak_bytes,
        "compiled_peak_bytes": plan.compiled_peak_bytes,
        "baseline_compiled_bytes": plan.baseline_compiled_bytes,
        "compiled_for": plan.compiled_for,
        "overhead": plan.overhead,
        "batch_size": plan.batch_size,
        "batch_assumed": plan.batch_assumed,
        "planning_seconds": plan.seconds,
        "checkpoints": [dataclasses.asdict(one) for one in facts.kept(plan)],
        "loops": [dataclasses.asdict(one) for one in plan.loops],
        "pieces": [dataclasses.asdict(one) for one in plan.pieces],
        "segments": [dataclasses.asdict(one) for one in facts.segments(plan)],
        "peak": dataclasses.asdict(peak) | {"by_kind": peak.by_kind},
        "timeline_bytes": simulate(plan.problem, plan.schedule).timeline.tolist(),
        "baseline_timeline_bytes": plain_timeline(plan.problem).tolist(),
    }


def as_graph(plan: PlanData) -> nx.DiGraph:
    """The step as a graph of ops; see `Plan.to_networkx`."""
    problem, labels = plan.problem, plan.labels
    kept = set(plan.checkpoints)
    runs = np.bincount(plan.schedule, minlength=len(problem.ops)).tolist()
    graph = nx.DiGraph()
    for i, op in enumerate(problem.ops):
        graph.add_node(
            op.name,
            type=labels.types[i] if labels.types else "",
            origin=labels.origin(problem, i),
            backward=op.backward,
            seconds=op.cost,
            bytes=sum(problem.tensors[t].bytes for t in op.outputs),
            runs=runs[i],
            kept=any(problem.tensors[t].name in kept for t in op.outputs),
        )
    for op in problem.ops:
        for t in op.inputs:
            maker = problem.made_by[t]
            if maker >= 0:
                tensor = problem.tensors[t]
                graph.add_edge(
                    problem.ops[maker].name, op.name, tensor=tensor.name, bytes=tensor.bytes
                )
    return graph


@dataclasses.dataclass(frozen=True)
class Course:
    """The course of a step, run by run.

    Attributes:
        name: the strategy, or "plain".
        schedule: the ops that run.
        rows: "forward", "recomputed" or "backward" for each run.
        begins: when each run begins, in estimated microseconds, and when the last one ends.
        alive: the bytes alive while each runs.
    """

    name: str
    schedule: Schedule
    rows: list[str]
    begins: list[float]
    alive: list[int]


def courses(plan: PlanData) -> tuple[Course, Course]:
    """The step as planned, and the plain one."""
    problem, plain = plan.problem, baseline(plan.problem)
    _, copies = copied(problem, plan.schedule)
    planned = simulate(problem, plan.schedule).timeline
    return (
        _course(plan, plan.strategy, plan.schedule, copies, planned),
        # Where ops overlap, some of the backward pass may begin before the forward pass is done.
        _course(plan, "plain", plain, [False] * len(plain), plain_timeline(problem)),
    )


def _course(
    plan: PlanData, name: str, schedule: Schedule, copies: list[bool], alive: np.ndarray
) -> Course:
    ops = plan.problem.ops
    rows = [
        "recomputed" if copy else "backward" if ops[index].backward else "forward"
        for index, copy in zip(schedule, copies, strict=True)
    ]
    micros = plan.problem.seconds_of(schedule) * 1e6
    begins = itertools.accumulate(micros.tolist(), initial=0.0)
    return Course(name, schedule, rows, list(begins), alive.tolist())


def as_trace(plan: PlanData) -> dict[str, Any]:
    """The predicted step, planned and plain, in Chrome's trace event format.

    Microseconds are estimates. See "Trace Event Format" of the Chromium project.
    """
    processes = (_process(plan, number, one) for number, one in enumerate(courses(plan), 1))
    return {"displayTimeUnit": "ms", "traceEvents": [*itertools.chain(*processes)]}


def _process(plan: PlanData, number: int, course: Course) -> Iterator[dict[str, Any]]:
    """The events of one course of the step."""
    problem = plan.problem
    yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": course.name}}
    for row, thread in _ROWS.items():
        named = {"ph": "M", "pid": number, "tid": thread, "name": "thread_name"}
        yield named | {"args": {"name": row}}
    spans = itertools.pairwise(course.begins)
    for index, row, (begin, end), alive in zip(
        course.schedule, course.rows, spans, course.alive, strict=True
    ):
        op = problem.ops[index]
        made = sum(problem.tensors[t].bytes for t in op.outputs)
        common = {"pid": number, "ts": begin}
        yield common | {
            "ph": "X",
            "tid": _ROWS[row],
            "name": op.name,
            "dur": end - begin,
            "args": {"layer": plan.labels.origin(problem, index), "bytes made": made},
        }
        yield common | {"ph": "C", "name": "bytes alive", "args": {"bytes": alive}}
