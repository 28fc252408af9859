"""`max_batch()`: the largest batch that a step can train with in a given memory."""

from __future__ import annotations

import dataclasses
import functools
import html
import math
from collections.abc import Callable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from memory_saving_gradients.console.progress_bar import bar
from memory_saving_gradients.doors.traced_step import Step, traced_step
from memory_saving_gradients.options.budgets import OfDevice, parse_budget
from memory_saving_gradients.options.options import Options
from memory_saving_gradients.pipeline.device_budget import device_bytes
from memory_saving_gradients.planning.problem import Problem, Schedule, baseline
from memory_saving_gradients.planning.search import affordable
from memory_saving_gradients.planning.simulate import plain_peak, simulate
from memory_saving_gradients.planning.strategies import STRATEGIES
from memory_saving_gradients.planning.units import format_bytes
from memory_saving_gradients.report.summary import rendered

# The batch sizes that are read first; the largest that is searched; the relative accuracy of an
# answer; and the factor by which an answer is reduced if planning at its size shows that it does
# not fit.
_FIRST = (32, 512)
_LARGEST = 2**20
_CLOSE = 0.02
_STEP = 0.99


@dataclasses.dataclass(frozen=True)
class Largest:
    """The largest batch that fits in one way.

    Attributes:
        batch_size: how many examples; 0 if not even one fits.
        bytes: the bytes that the step needs then: the predicted peak, variables and inputs.
        overhead: predicted extra cost, as a fraction of the cost of the plain step.
        seconds_per_example: TensorFlow's estimate of a step's time on one processor core, divided
            by the batch size, for comparing the ways with each other.
    """

    batch_size: int
    bytes: int
    overhead: float
    seconds_per_example: float


@dataclasses.dataclass(frozen=True)
class MaxBatch:
    """The result of `max_batch`.

    Attributes:
        memory_bytes: the memory that was given.
        variables_bytes: the bytes of it that weights, optimizer state and other variables need.
        ways: by name ("plain", "speed", "memory", "10 % extra cost" …) the largest batch.
        compiled: whether XLA compiles the step.
    """

    memory_bytes: int
    variables_bytes: int
    ways: dict[str, Largest]
    compiled: bool = False

    def __str__(self) -> str:
        return rendered(_table(self)).rstrip()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def max_batch(
    model_or_step: Any, memory: int | str, example: Any = None, *, device: str = "cpu"
) -> MaxBatch:
    """The largest batch that fits into a given memory, plain and with recomputation.

    The step is traced and planned; nothing runs. The peak grows nearly linearly with the batch,
    which guides the search; each answer is then planned at exactly that size.

    We count the predicted peak of the step, all its variables (weights, the state of the optimizer
    and the metrics) and the inputs. Other memory of a device (the framework itself, workspaces of a
    GPU's kernels, temporaries of the optimizer) is not counted: leave room for it.

    Args:
        model_or_step: a Keras model, or a `tf.function` that computes gradients. A model that is
            not compiled is analysed without an optimizer, with the mean square of its outputs as
            the loss.
        memory: bytes (int), or a string such as `"11GB"` or `"10GiB"`; `"device"` is nine tenths
            of the GPU that `device` names, of this machine's first GPU, or, without one, of what
            the system has free.
        example: one batch, as `fit` or the function takes it, arrays or tensors or their
            `tf.TensorSpec`: of a model `(x, y)` or `x`, of a function the tuple of its arguments.
            Needed if the step does not define its inputs: a subclassed model, a function without
            `input_signature`.
        device: what to estimate costs for, as in `gradients`, and whose memory `"device"` is. On a
            GPU, Keras compiles models with XLA, so they are planned for XLA then.

    Returns:
        The largest batches: plain, with `checkpoints="speed"` and `"memory"`, and with a budget
        within 10, 20 and 33 % of extra cost. It prints as a table.

    Raises:
        TypeError: `model_or_step` is neither, or `memory` is of a wrong type.
        ValueError: `memory` is no number of bytes or does not hold the variables, or the step does
            not tell its inputs, fixes their batch, or computes no gradients.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((64,)), *[keras.layers.Dense(64)] * 8])
        >>> answer = max_batch(model, "32MB")
        >>> answer.ways["memory"].batch_size > answer.ways["plain"].batch_size > 0
        True
    """
    allowed = parse_budget(memory, "memory")
    if isinstance(allowed, OfDevice):
        allowed = int(allowed.share * device_bytes(device)[0])
    if isinstance(allowed, float):
        raise ValueError(f'memory must be bytes, such as "11GB", got the share {memory!r}')
    step = traced_step(model_or_step, example, Options("memory", device=device))
    if allowed <= step.variables_bytes:
        raise ValueError(
            f"memory of {format_bytes(allowed)} does not hold the variables alone: they take "
            f"{format_bytes(step.variables_bytes)}"
        )
    search = _Search(step, allowed)
    with bar("looking for the largest batch", len(_WAYS)) as tick:
        ways: dict[str, Largest] = {}
        for name in _WAYS:
            ways[name] = search.largest(name, ways["plain"].batch_size if ways else 0)
            tick()
    for name, most in _MOST.items():  # a better plan of another way within the cost counts, too
        allowing = (one for one in ways.values() if one.overhead <= most)
        ways[name] = max(allowing, key=lambda one: (one.batch_size, -one.overhead))
    return MaxBatch(allowed, step.variables_bytes, ways, step.compiled)


# The ways to train, each with its planner.
_WAYS: dict[str, Callable[[Problem], Schedule]] = {
    "plain": baseline,
    "speed": STRATEGIES["speed"],
    "memory": STRATEGIES["memory"],
}
_MOST = {f"{most:.0%} extra cost": most for most in (0.1, 0.2, 0.33)}
_WAYS |= {name: functools.partial(affordable, max_overhead=most) for name, most in _MOST.items()}


class _Search:
    """Searches batch sizes by a schedule for one of them, and plans again at each answer."""

    def __init__(self, step: Step, allowed: int) -> None:
        self._step = step
        self._allowed = allowed
        self._read: dict[int, list[Problem]] = {}
        for batch in _FIRST:
            self._read_at(batch)
        self._planned = functools.cache(self._planned_anew)
        self._drafted = functools.cache(functools.partial(self._planned_anew, on_line=True))
        self._predicted = functools.cache(self._predicted_by_schedule)
        self._schedules: dict[str, tuple[tuple[int, int], list[Schedule]]] = {}

    def _read_at(self, batch: int) -> list[Problem]:
        if batch not in self._read:
            readings = self._step.readings(batch)
            if any(reading.batch_size is None for reading in readings):
                raise ValueError(
                    "the step fixes the batch of its inputs: leave their first dimension None"
                )
            self._read[batch] = [reading.problem for reading in readings]
        return self._read[batch]

    def _line(self, batch: int) -> tuple[int, int]:
        """The two batches nearest to a batch that were read."""
        near, far = sorted(self._read, key=lambda known: abs(math.log(batch / known)))[:2]
        return near, far

    def _problems(self, batch: int, line: tuple[int, int]) -> list[Problem]:
        """The step at a batch, on the line through two batches that were read."""
        near, far = line
        share = (batch - near) / (far - near)
        pairs = zip(self._read[near], self._read[far], strict=True)
        return [one.toward(other, share) for one, other in pairs]

    def largest(self, name: str, known: int) -> Largest:
        """The largest batch that fits in a way: predicted, then planned at exactly that size.

        Reading a step takes longer than planning, so we plan on the line through batches that were
        read until an answer fits, and only then at that batch as read.

        Args:
            name: the way.
            known: a batch that fits; 0 for none.
        """
        draft = self._adjusted(self._drafted, name, self._search(name, known))
        answer = self._adjusted(self._planned, name, draft.batch_size if draft else 0)
        return answer or Largest(0, self._step.variables_bytes, 0.0, 0.0)

    def _adjusted(
        self, plan: Callable[[str, int], Largest], name: str, batch: int
    ) -> Largest | None:
        """The largest batch that fits as planned, near one that is predicted to; None for none."""
        answer = plan(name, batch) if batch else None
        while answer and not self._fits(answer):
            batch = int(batch * min(_STEP, self._allowed / answer.bytes))
            answer = plan(name, batch) if batch else None
        if answer is None:
            return None
        fixed = self._step.variables_bytes
        larger = int(answer.batch_size * (self._allowed - fixed) / max(answer.bytes - fixed, 1))
        while (1 + _CLOSE) * answer.batch_size < larger <= _LARGEST:
            if self._fits(self._drafted(name, larger)) and self._fits(more := plan(name, larger)):
                return more
            larger = (answer.batch_size + larger) // 2
        return answer

    def _search(self, name: str, known: int) -> int:
        """Nearly the largest batch that is predicted to fit; 0 if none is."""
        # Plan for a larger batch than fits plain: in a small one activations hardly count.
        first = max(1, 2 * known)
        line = self._line(first)
        self._schedules[name] = line, [*map(_WAYS[name], self._problems(first, line))]
        low, high = known, max(1, 2 * known)
        while high <= _LARGEST and self._fits(self._predicted(name, high)):
            low, high = high, 2 * high
        while high - low > max(1, _CLOSE * low) and low < _LARGEST:
            middle = (low + high) // 2
            if self._fits(self._predicted(name, middle)):
                low = middle
            else:
                high = middle
        return min(low, _LARGEST)

    def _fits(self, answer: Largest) -> bool:
        return answer.bytes <= self._allowed

    def _planned_anew(self, name: str, batch: int, on_line: bool = False) -> Largest:
        """The memory and cost of a batch, planned as read or as it is on the line."""
        problems = self._problems(batch, self._line(batch)) if on_line else self._read_at(batch)
        return self._taken(batch, problems, [*map(_WAYS[name], problems)])

    def _predicted_by_schedule(self, name: str, batch: int) -> Largest:
        """The memory and cost of a batch, by the schedules of another one."""
        line, schedules = self._schedules[name]
        return self._taken(batch, self._problems(batch, line), schedules)

    def _taken(self, batch: int, problems: list[Problem], schedules: list[Schedule]) -> Largest:
        taken = [
            min((plain_peak(problem), float(problem.costs.sum())), _judged(problem, schedule))
            for problem, schedule in zip(problems, schedules, strict=True)
        ]
        fixed = self._step.variables_bytes + batch * self._step.example_bytes
        seconds = sum(float(problem.costs.sum()) for problem in problems)
        costs = sum(cost for _, cost in taken)
        overhead = costs / seconds - 1 if seconds else 0.0
        return Largest(batch, fixed + max(peak for peak, _ in taken), overhead, costs / batch)


def _judged(problem: Problem, schedule: Schedule) -> tuple[int, float]:
    """The peak of a schedule in bytes, and its cost in seconds."""
    simulation = simulate(problem, schedule)
    return simulation.peak, simulation.cost


def _table(answer: MaxBatch) -> Table:
    """The result as a table."""
    table = Table(
        title=(
            f"The largest batches in {answer.memory_bytes / 1e9:,.2f} GB "
            f"({answer.variables_bytes / 1e9:,.2f} GB of it variables)"
            f"{', compiled by XLA' if answer.compiled else ''}"
        ),
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("how")
    for heading in ("batch", "GB", "extra cost", "estimated ms an example"):
        table.add_column(heading, justify="right")
    for name, way in answer.ways.items():
        more = " or more" if way.batch_size >= _LARGEST else ""
        batch = f"{way.batch_size:,}{more}" if way.batch_size else "not even 1"
        rest = (f"{way.bytes / 1e9:,.2f}", f"{way.overhead:z.1%}")
        seconds = f"{1000 * way.seconds_per_example:,.3f}"
        table.add_row(name, batch, *((*rest, seconds) if way.batch_size else ("", "", "")))
    return table
