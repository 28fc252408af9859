"""A plan as data: the schedule that was chosen, and its predicted cost."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Self

import numpy as np

from memory_saving_gradients.planning.bounds import lower_bound
from memory_saving_gradients.planning.keep import kept_tensors
from memory_saving_gradients.planning.labels import Labels
from memory_saving_gradients.planning.packing import allocated
from memory_saving_gradients.planning.problem import Problem, Schedule, baseline
from memory_saving_gradients.planning.simulate import plain_peak, simulate
from memory_saving_gradients.planning.units import format_bytes


@dataclasses.dataclass(frozen=True)
class LoopPlan:
    """A loop, and whether its gradient computes its rounds again.

    Attributes:
        name: the loop.
        rounds: how many rounds are expected.
        every: the rounds of a segment: the loop keeps the state at the start of each segment, and
            the gradient runs the segment again; 0 where the loop keeps the values of each round.
        within: the rounds of the shorter segments that a segment runs again in; 0 where it runs
            again as a whole.
        plain_bytes: the bytes that TensorFlow's own loop holds for its gradient.
        held_bytes: the bytes that it holds now.
        kept: the tensors of its body that are kept for every round besides, by name.
        why: why its rounds cannot run again; empty where they can.
    """

    name: str
    rounds: int = 0
    every: int = 0
    within: int = 0
    plain_bytes: int = 0
    held_bytes: int = 0
    kept: tuple[str, ...] = ()
    why: str = ""


@dataclasses.dataclass(frozen=True)
class PiecesPlan:
    """A region around a large tensor, and in how many pieces it runs.

    Attributes:
        name: the op that makes the tensor.
        rows: how many rows are expected.
        pieces: in how many pieces they are computed; 1 where all are computed at once.
        bytes: the bytes of all rows of the tensor.
        at_once: whether a piece runs forward and backward at once, so that nothing runs twice.
        why: why it cannot run in pieces; empty where it can.
    """

    name: str
    rows: int = 0
    pieces: int = 1
    bytes: int = 0
    at_once: bool = False
    why: str = ""


@dataclasses.dataclass(frozen=True)
class PlanData:
    """A schedule for a step, and its predictions; `plans.plan.Plan` documents the fields."""

    strategy: str
    budget_bytes: int | None
    baseline_peak_bytes: int
    peak_bytes: int
    overhead: float
    checkpoints: tuple[str, ...] = dataclasses.field(repr=False)
    given: tuple[str, ...] = dataclasses.field(repr=False)
    recomputed: tuple[str, ...] = dataclasses.field(repr=False)
    seconds: float
    problem: Problem = dataclasses.field(repr=False)
    schedule: tuple[int, ...] = dataclasses.field(repr=False)
    batch_size: int | None = None
    batch_assumed: bool = False
    growing: Callable[[], Mapping[str, float]] = dataclasses.field(
        default=dict, repr=False, compare=False
    )
    measured_peak_bytes: int | None = None
    process_peak_bytes: int | None = None
    compiled_peak_bytes: int | None = None
    baseline_compiled_bytes: int | None = None
    compiled_for: str = ""
    baseline_one_thread_bytes: int | None = None
    labels: Labels = dataclasses.field(default=Labels(), repr=False)
    certified_overhead: float = 0.0
    loops: tuple[LoopPlan, ...] = ()
    pieces: tuple[PiecesPlan, ...] = ()

    @functools.cached_property
    def lower_bound(self) -> float | None:
        """The certified lower bound on the overhead of any plan at this one's budget (its peak, if
        it has none); None where nothing is proven.

        It holds for all plans whose backward pass runs in the order of this one. It is the best
        bound of linear programs for single moments (see `planning.bounds`), or that of `certify`.
        It is computed when it is first read.
        """
        bound = max(lower_bound(self.problem, self.allowed_bytes), self.certified_overhead)
        return bound if bound > 0 or self.overhead <= 0 else None

    @property
    def allowed_bytes(self) -> int:
        """The budget, in bytes; the peak, if there is none.

        If tensors are laid out in the memory of results, more bytes may be alive: see `packing`.
        """
        allowed = self.peak_bytes if self.budget_bytes is None else self.budget_bytes
        if self.problem.packed:
            allowed = max(allowed, simulate(self.problem, self.schedule).peak)
        return allowed

    @property
    def gap(self) -> float | None:
        """How far the overhead lies above `lower_bound`; None where that is unproven."""
        return None if self.lower_bound is None else max(0.0, self.overhead - self.lower_bound)

    @classmethod
    def of(
        cls,
        strategy: str,
        problem: Problem,
        schedule: Schedule,
        given: Iterable[str] = (),
        budget_bytes: int | None = None,
    ) -> Self:
        """Judges a schedule by simulation.

        Args:
            strategy: the name of what made the schedule.
            problem: the step.
            schedule: the schedule to judge.
            given: names of checkpoints that the user gave.
            budget_bytes: the budget, if there was one.
        """
        plain = simulate(problem, baseline(problem))
        planned = simulate(problem, schedule)
        given = tuple(given)
        kept = [problem.tensors[t].name for t in kept_tensors(problem, schedule)]
        ran: set[int] = set()
        twice = [i for i in schedule if i in ran or ran.add(i)]  # type: ignore[func-returns-value]
        return cls(
            strategy=strategy,
            budget_bytes=budget_bytes,
            baseline_peak_bytes=plain_peak(problem),
            peak_bytes=allocated(problem, schedule, planned),
            overhead=planned.cost / plain.cost - 1.0 if plain.cost else 0.0,
            checkpoints=tuple(dict.fromkeys([*given, *kept])),
            given=given,
            recomputed=tuple(problem.ops[i].name for i in twice),
            seconds=0.0,
            problem=problem,
            schedule=tuple(np.asarray(schedule).tolist()),
        )

    def __str__(self) -> str:
        measured = ""
        if self.measured_peak_bytes is not None:
            measured = f", measured {format_bytes(self.measured_peak_bytes)}"
        if self.process_peak_bytes is not None:
            measured += f" ({format_bytes(self.process_peak_bytes)} of the process)"
        if self.compiled_peak_bytes is not None:
            measured = f", {self.compiled} by XLA's compiler for {self.compiled_for}"
        ratio = self.baseline_peak_bytes / self.peak_bytes if self.peak_bytes else 1.0
        alone = self.baseline_one_thread_bytes or self.baseline_peak_bytes
        if abs(alone - self.baseline_peak_bytes) > _APART * self.baseline_peak_bytes:
            measured += f", plain {format_bytes(alone)} in a session of one inter-op thread"
        budget = "" if self.budget_bytes is None else f" of {format_bytes(self.budget_bytes)}"
        if budget and self.given:
            budget += f", with {len(self.given)} given tensors kept"
        return (
            f"{self.strategy}{budget}: predicted peak {format_bytes(self.baseline_peak_bytes)} -> "
            f"{format_bytes(self.peak_bytes)} ({ratio:.2f}x){measured}, "
            f"overhead {self.overhead:z.1%}, "
            f"{len(self.recomputed)} ops recomputed{self._of_loops()}{self._in_pieces()}"
            f"{self._for_batch()}, {self.seconds:.2f} s"
        )

    @property
    def compiled(self) -> str:
        """What XLA allocates, in words."""
        ours, plain = self.compiled_peak_bytes or 0, self.baseline_compiled_bytes
        if plain is None:
            return format_bytes(ours)
        return f"{format_bytes(plain)} -> {format_bytes(ours)} ({plain / max(ours, 1):.2f}x)"

    def _of_loops(self) -> str:
        again = sum(loop.every > 0 for loop in self.loops)
        return f", {again} loop{'s' * (again > 1)} in segments" if again else ""

    def _in_pieces(self) -> str:
        regions = sum(one.pieces > 1 for one in self.pieces)
        return f", {regions} region{'s' * (regions > 1)} in pieces" if regions else ""

    def _for_batch(self) -> str:
        if self.batch_size is None:
            return ""
        assumed = " (assumed; say batch_size=)" if self.batch_assumed else ""
        return f", for a batch of {self.batch_size}{assumed}"


# Both plain peaks, with one and with several threads, are shown if they differ by this share.
_APART = 0.1
