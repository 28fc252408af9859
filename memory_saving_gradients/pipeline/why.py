"""Messages to the user: why a budget cannot be met, or nothing is saved, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from memory_saving_gradients.graph.origin import origin
from memory_saving_gradients.options.budgets import LEAST_BYTES, BudgetError
from memory_saving_gradients.planning.packing import allocated
from memory_saving_gradients.planning.problem import Schedule
from memory_saving_gradients.planning.simulate import simulate
from memory_saving_gradients.planning.units import format_bytes
from memory_saving_gradients.plans.plan import Plan
from memory_saving_gradients.reading.read import Reading
from memory_saving_gradients.report.obstacles import in_the_way

# The most tensors alive at a peak that are named.
_HOLDERS = 5


def unreachable(
    reading: Reading, schedule: Schedule, budget: int, bounded: bool, given: Sequence[str] = ()
) -> BudgetError:
    """The error for a budget that no plan meets: the lowest peak, what is alive then, what to do.

    Args:
        reading: the step.
        schedule: the schedule of the lowest peak found.
        budget: the budget that it misses, in bytes.
        bounded: whether `max_recompute` is set.
        given: the names of the given checkpoints, which are kept.
    """
    problem = reading.problem
    simulation = simulate(problem, schedule)
    lowest = allocated(problem, schedule, simulation)
    entry = int(simulation.timeline.argmax())
    op = reading.operations[schedule[entry]]
    alive = (simulation.made <= entry) & (entry <= simulation.last)
    held = sorted(simulation.tensor[alive].tolist(), key=lambda t: -problem.tensors[t].bytes)
    graph = reading.step.graph
    names = [problem.tensors[t].name for t in held]
    tensors = [graph.get_tensor_by_name(name) for name in names[:_HOLDERS]]
    largest = "; ".join(
        f"{_named(t.name, t.op)}, {format_bytes(problem.tensors[i].bytes)}"
        for t, i in zip(tensors, held, strict=False)
    )
    workspace = problem.ops[schedule[entry]].workspace
    scratch = f" It needs {format_bytes(workspace)} of scratch space." if workspace else ""
    all_bytes = sum(problem.tensors[t].bytes for t in held) + workspace
    weights = sum(problem.tensors[t].bytes for t in held if t in reading.roles.of_weights)
    target = reading.step.target
    ways = [f"allow at least {_said(lowest)}"]
    if bounded:
        ways.append("raise max_recompute")
    if given:
        kept = f"the {len(given)} that were given are kept as well"
        ways.append(f'say checkpoints="memory": {kept}')
    if 2 * weights < all_bytes:
        fits = _fitting_batch(reading, schedule, budget)
        ways.append(
            f"make the batch smaller, to about {fits}" if fits else "make the batch smaller"
        )
    ways[0] = ways[0][0].upper() + ways[0][1:]
    advice = f"{', or '.join(ways)}."
    if 2 * weights >= all_bytes:
        advice += (
            f" {weights / all_bytes:.0%} of it are gradients of weights, which no smaller batch "
            "makes smaller."
        )
    return BudgetError(
        f"memory_budget of {format_bytes(budget)} cannot be met for the gradients of "
        f"{_named(target.name, target.op)}: the lowest peak found is "
        f"{format_bytes(lowest)}, while {_named(op.name, op)} runs.{scratch} The largest "
        f"of the {len(held)} tensors that are alive then: {largest}. {advice}",
        budget,
        lowest,
    )


def _fitting_batch(reading: Reading, schedule: Schedule, budget: int) -> int:
    """The largest batch with which the schedule keeps the budget; 0 if unknown."""
    known, growing = reading.batch_size, reading.growing()
    low, high = 0, known or 1
    while known and high - low > 1:
        middle = (low + high) // 2
        smaller = reading.problem.grown(growing, middle - known)
        if allocated(smaller, schedule) <= budget:
            low = middle
        else:
            high = middle
    return low


def missed(reading: Reading, budget: int, lowest: int, plan: Plan) -> BudgetError:
    """The error for a budget that plans meet as predicted, but not as measured.

    Args:
        reading: the step.
        budget: the budget, in bytes.
        lowest: the lowest measured peak, in bytes.
        plan: the plan with that peak.
    """
    target = reading.step.target
    both = ""
    if plan.process_peak_bytes is not None:
        both = (
            f" That is the growth of the process; TensorFlow's allocator was asked for "
            f"{format_bytes(plan.measured_peak_bytes or 0)}."
        )
    return BudgetError(
        f"memory_budget of {format_bytes(budget)} was kept by no run for the gradients of "
        f"{_named(target.name, target.op)}: the lowest measured peak is {format_bytes(lowest)}."
        f"{both} Allow at least {_said(lowest)}, or make the batch smaller.",
        budget,
        lowest,
    )


def _named(name: str, op: tf.Operation) -> str:
    """The name, and its layer or line of code."""
    where = origin(op)
    return f'"{name}" ({where})' if where else f'"{name}"'


def _said(count: int) -> str:
    """Bytes in a form that `memory_budget` accepts."""
    return f"{count} bytes" if count >= LEAST_BYTES else f'"{count}B"'


def why_nothing_is_saved(plan: Plan, by_memory: Plan | None) -> str:
    """The warning for a plan that is not applied, with what to try.

    Args:
        plan: the plan.
        by_memory: the plan of "memory", if checkpoints were given.
    """
    problem = plan.problem
    intro = (
        f'memory_saving_gradients: checkpoints="{plan.strategy}" saves nothing here, so the graph '
        "stays as tf.gradients leaves it. "
    )
    if not any(not op.pinned and not op.backward and op.outputs for op in problem.ops):
        return intro + (
            "The backward pass reads no activation that could be recomputed: all of them come from "
            "inputs, variables, or ops with state."
        )
    return intro + (
        f"The predicted peak is {format_bytes(plan.baseline_peak_bytes)}, and would be "
        f"{format_bytes(plan.peak_bytes)} with {len(plan.recomputed)} ops recomputed. "
        f"{in_the_way(plan)}{_instead(by_memory)}"
    )


def saves_little(plan: Plan) -> bool:
    """Whether a plan without a budget saves only a small part of the peak."""
    plain = plan.baseline_peak_bytes
    return plan.budget_bytes is None and plan.peak_bytes > _LITTLE * plain and plain > _SMALL


def why_little_is_saved(plan: Plan, by_memory: Plan | None) -> str:
    """The warning for a plan that saves little, with what to try; see `why_nothing_is_saved`."""
    return (
        f'memory_saving_gradients: checkpoints="{plan.strategy}" saves little here: '
        f"{format_bytes(plan.baseline_peak_bytes)} -> {format_bytes(plan.peak_bytes)} at an "
        f"overhead of {plan.overhead:z.1%}, as predicted. {in_the_way(plan)}{_instead(by_memory)}"
    )


def _instead(plan: Plan | None) -> str:
    """The sentence on what another plan would give."""
    if plan is None:
        return ""
    return (
        f' checkpoints="{plan.strategy}" would give {format_bytes(plan.peak_bytes)} at an '
        f"overhead of {plan.overhead:z.1%}."
    )


# A plan saves little if its peak is more than this share of the plain one.
_LITTLE = 0.8
# For a step with a smaller peak, in bytes, there is no warning.
_SMALL = 2**20
