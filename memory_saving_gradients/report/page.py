"""A plan as a page for a browser: memory over the step, and what holds it under the pointer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memory_saving_gradients.planning.plan_data import PlanData
from memory_saving_gradients.planning.simulate import simulate
from memory_saving_gradients.report.export import Course, courses
from memory_saving_gradients.report.figures import COLOURS

# The placeholder for the data in the page.
_MARK = "DATA"


def timeline(plan: PlanData) -> str:
    """The page, HTML; see `Plan.save_timeline`."""
    data = json.dumps(timeline_data(plan), separators=(",", ":"))
    template = Path(__file__).with_name("timeline.html").read_text(encoding="utf-8")
    return template.replace(_MARK, data.replace("<", "\\u003c"))  # no name ends the script


def timeline_data(plan: PlanData) -> dict[str, Any]:
    """The data of the page; ops and tensors are given by index, as many occur more than once."""
    problem, labels = plan.problem, plan.labels
    return {
        "said": str(plan),
        "colours": COLOURS,
        "budget": plan.budget_bytes,
        "ops": [
            {
                "name": op.name,
                "type": labels.types[i] if labels.types else "",
                "layer": labels.origin(problem, i),
                "bytes": sum(problem.tensors[t].bytes for t in op.outputs),
                "scratch": op.workspace,
            }
            for i, op in enumerate(problem.ops)
        ],
        "tensors": [tensor.bytes for tensor in problem.tensors],
        "courses": [_lives(plan, course) for course in courses(plan)],
    }


def _lives(plan: PlanData, course: Course) -> dict[str, Any]:
    """A course of the step, and the live range of each copy of a tensor in it."""
    simulation = simulate(plan.problem, course.schedule)
    return {
        "name": course.name,
        "peak": max(course.alive),
        "runs": [*course.schedule],
        "rows": course.rows,
        "begins": [round(begin, 3) for begin in course.begins],
        "alive": course.alive,
        "copies": {
            "tensor": simulation.tensor.tolist(),
            "made": simulation.made.tolist(),
            "last": simulation.last.tolist(),
        },
    }
