"""What a plan keeps, recomputes, and holds at its peak: the data behind every report."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import networkx as nx
import numpy as np

from memory_saving_gradients.planning.labels import Labels
from memory_saving_gradients.planning.liveness import alive
from memory_saving_gradients.planning.plan_data import PlanData
from memory_saving_gradients.planning.problem import Schedule, baseline, copied
from memory_saving_gradients.planning.simulate import simulate

#: The kinds of bytes at a peak.
ACTIVATION = "activation"
KEPT = "kept activation"
RECOMPUTED = "recomputed activation"
GRADIENT = "gradient"
OF_WEIGHTS = "gradient of weights"
SUM = "sum of gradients"
UPDATE = "update of variables"
SCRATCH = "scratch space"

#: Why a tensor is kept that the backward pass reads before anything is recomputed.
SOON = "read right after the loss"


@dataclasses.dataclass(frozen=True)
class Kept:
    """A checkpoint.

    Attributes:
        tensor: its name.
        origin: the layer or the line of code that made it.
        shape: its shape in the graph; empty if the tensor is too small to be part of the problem.
        dtype: its dtype; empty in that case.
        bytes: its size; 0 in that case.
        why: why it is kept, in a few words.
    """

    tensor: str
    origin: str
    shape: str
    dtype: str
    bytes: int
    why: str


@dataclasses.dataclass(frozen=True)
class Segment:
    """Ops that are recomputed together, as they read one another's copies.

    Attributes:
        ops: their names, in execution order.
        first: the layer of the first one; its name, if it is in no layer.
        last: the layer of the last one.
        bytes: the bytes of their outputs, which are free until they run again.
        overhead: the cost of their second runs, as a fraction of the cost of the plain step.
        entries: their places in the schedule.
    """

    ops: tuple[str, ...]
    first: str
    last: str
    bytes: int
    overhead: float
    entries: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Held:
    """The bytes of one kind that a layer holds at a moment."""

    origin: str
    kind: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Moment:
    """A moment of a schedule.

    Attributes:
        entry: the place in the schedule.
        op: the op that runs.
        origin: the layer or line that it comes from.
        bytes: the bytes alive.
        held: the bytes by layer and kind, the largest first.
    """

    entry: int
    op: str
    origin: str
    bytes: int
    held: tuple[Held, ...]

    @property
    def by_kind(self) -> dict[str, int]:
        """The bytes of each kind, the largest first."""
        totals: collections.Counter[str] = collections.Counter()
        for part in self.held:
            totals[part.kind] += part.bytes
        return dict(totals.most_common())


def kept(plan: PlanData) -> list[Kept]:
    """The checkpoints, in the order of the forward pass."""
    problem, labels = plan.problem, plan.labels
    index_of = {tensor.name: t for t, tensor in enumerate(problem.tensors)}
    reasons = _reasons(plan)
    checkpoints = []
    for name in plan.checkpoints:
        t = index_of.get(name, -1)
        maker = problem.made_by[t] if t >= 0 else -1
        if maker < 0:
            checkpoint = Kept(name, "", "", "", 0, _GIVEN if name in plan.given else "always there")
        else:
            origin, shape = labels.origin(problem, maker), labels.shape(t)
            dtype = labels.dtypes[t] if labels.dtypes else ""
            why = _GIVEN if name in plan.given else reasons(t)
            checkpoint = Kept(name, origin, shape, dtype, problem.tensors[t].bytes, why)
        checkpoints.append((maker, checkpoint))
    return [checkpoint for _, checkpoint in sorted(checkpoints, key=lambda pair: pair[0])]


def _reasons(plan: PlanData) -> Callable[[int], str]:
    """A function that tells why a tensor is kept, if the user did not give it."""
    problem, labels = plan.problem, plan.labels
    starts, early = _starts(plan), _read_before_copies(plan)

    def why(t: int) -> str:
        maker = problem.made_by[t]
        if problem.ops[maker].pinned:
            return f"{_ONCE} ({labels.types[maker]})" if labels.types else _ONCE
        if t in starts:
            numbers = ", ".join(map(str, starts[t][:_NUMBERS]))
            more = ", …" if len(starts[t]) > _NUMBERS else ""
            return f"start of segment{'s' if len(starts[t]) > 1 else ''} {numbers}{more}"
        if t in early:
            return SOON
        return "expensive to recompute" if problem.ops[maker].expensive else "cheaper to keep"

    return why


_GIVEN = "you gave it"
_ONCE = "must not run twice"
_NUMBERS = 3  # the most segments that are named


def segments(plan: PlanData) -> list[Segment]:
    """The segments that are recomputed, in execution order."""
    problem = plan.problem
    total = float(problem.costs.sum()) or 1.0
    first_runs = _first_runs(plan)
    parts = []
    for entries in _components(plan):
        ops = [plan.schedule[entry] for entry in entries]
        again = [plan.schedule[entry] for entry in entries if entry not in first_runs]
        parts.append(
            Segment(
                ops=tuple(problem.ops[i].name for i in ops),
                first=layer(plan, min(ops)),
                last=layer(plan, max(ops)),
                bytes=sum(problem.tensors[t].bytes for i in ops for t in problem.ops[i].outputs),
                overhead=float(problem.costs_again[again].sum()) / total,
                entries=tuple(entries),
            )
        )
    return parts


def at_peak(plan: PlanData) -> Moment:
    """The moment of the plan's peak."""
    return moment(plan, plan.schedule)


def at_plain_peak(plan: PlanData) -> Moment:
    """The moment of the peak of the step without recomputation, its ops run one by one."""
    return moment(plan, baseline(plan.problem))


def moment(plan: PlanData, schedule: Schedule) -> Moment:
    """The moment of the peak of a schedule of a plan's problem."""
    problem, labels = plan.problem, plan.labels
    simulation = simulate(problem, schedule)
    entry = int(simulation.timeline.argmax())
    alive = (simulation.made <= entry) & (entry <= simulation.last)
    in_backward = problem.ops[schedule[entry]].backward
    sums: collections.Counter[tuple[str, str]] = collections.Counter()
    for copy in np.flatnonzero(alive).tolist():
        t = int(simulation.tensor[copy])
        maker = problem.made_by[t]
        if problem.ops[maker].backward:
            kind = _kind_of_gradient(labels, t)
        elif not simulation.is_first_copy[copy]:
            kind = RECOMPUTED
        else:
            kind = KEPT if in_backward else ACTIVATION
        sums[labels.origin(problem, maker), kind] += problem.tensors[t].bytes
    running = schedule[entry]
    origin = labels.origin(problem, running)
    if problem.ops[running].workspace:
        sums[origin, SCRATCH] += problem.ops[running].workspace
    return Moment(
        entry=entry,
        op=problem.ops[running].name,
        origin=origin,
        bytes=simulation.peak,
        held=tuple(Held(*key, size) for key, size in sums.most_common()),
    )


def _kind_of_gradient(labels: Labels, tensor: int) -> str:
    if tensor in labels.updates:
        return UPDATE
    if tensor in labels.of_weights:
        return OF_WEIGHTS
    return SUM if tensor in labels.sums else GRADIENT


def most_of_weights(plan: PlanData) -> int:
    """The most bytes of gradients of weights that are alive at once."""
    simulation = simulate(plan.problem, plan.schedule)
    ours = np.isin(simulation.tensor, [*plan.labels.of_weights])
    sizes = plan.problem.sizes[simulation.tensor[ours]]
    live = alive(simulation.made[ours], simulation.last[ours], sizes, len(plan.schedule))
    return int(live.max(initial=0))


def layer(plan: PlanData, op: int) -> str:
    """The scope of an op; its name, if only a line of code is known."""
    name, origin = plan.problem.ops[op].name, plan.labels.origin(plan.problem, op)
    name = name.removeprefix(plan.labels.common)
    return origin if name.startswith(origin) else name


def shortened(label: str, width: int) -> str:
    """A label, cut to at most `width` characters."""
    return label if len(label) <= width else f"{label[: width - 1]}…"


def _first_runs(plan: PlanData) -> set[int]:
    """The places in the schedule of the first run of each op."""
    return set(np.unique(np.asarray(plan.schedule), return_index=True)[1].tolist())


def _components(plan: PlanData) -> list[list[int]]:
    """The connected groups of copies, which read one another, as places in the schedule.

    Groups of ops that only run late, for the first time, are left out.
    """
    problem = plan.problem
    _, copies = copied(problem, plan.schedule)
    reads = nx.Graph()
    made: dict[int, int] = {}  # the newest copy of each tensor, by the place that made it
    for place, index in enumerate(plan.schedule):
        op = problem.ops[index]
        if copies[place]:
            reads.add_node(place)
            before = (made.get(t, -1) for t in op.inputs)
            reads.add_edges_from((place, other) for other in before if other >= 0)
        made |= dict.fromkeys(op.outputs, place if copies[place] else -1)
    first_runs = _first_runs(plan)
    parts = (part for part in nx.connected_components(reads) if not part <= first_runs)
    return sorted(map(sorted, parts))


def _starts(plan: PlanData) -> dict[int, list[int]]:
    """For each kept tensor, the numbers, from 1, of the segments that read it."""
    ops = plan.problem.ops
    starts: dict[int, list[int]] = {}
    for number, entries in enumerate(_components(plan), 1):
        again = [plan.schedule[entry] for entry in entries]
        made = {t for i in again for t in ops[i].outputs}
        for tensor in dict.fromkeys(t for i in again for t in ops[i].inputs if t not in made):
            starts.setdefault(tensor, []).append(number)
    return starts


def _read_before_copies(plan: PlanData) -> set[int]:
    """The tensors whose first copy is dead when the first op is recomputed."""
    _, copies = copied(plan.problem, plan.schedule)
    begin = copies.index(True) if any(copies) else len(copies)
    simulation = simulate(plan.problem, plan.schedule)
    done = simulation.last < begin
    return set(simulation.tensor[done & simulation.is_first_copy].tolist())
