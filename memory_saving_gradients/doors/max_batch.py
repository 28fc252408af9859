"""`max_batch()`: the largest batch that a step can train with in a given memory."""

from __future__ import annotations

import dataclasses
import functools
import html
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.table import Table

from memory_saving_gradients.console.progress_bar import bar
from memory_saving_gradients.doors.traced_step import Step, traced_step
from memory_saving_gradients.options.budgets import OfDevice, parse_budget
from memory_saving_gradients.options.options import Options
from memory_saving_gradients.pipeline.device_budget import device_bytes
from memory_saving_gradients.pipeline.loops import alternatives, as_if
from memory_saving_gradients.pipeline.save import no_garbage_collection
from memory_saving_gradients.planning.packing import allocated
from memory_saving_gradients.planning.plan_data import LoopPlan
from memory_saving_gradients.planning.problem import Problem, Schedule
from memory_saving_gradients.planning.search import affordable
from memory_saving_gradients.planning.simulate import plain_peak, simulate
from memory_saving_gradients.planning.strategies import STRATEGIES
from memory_saving_gradients.planning.units import format_bytes
from memory_saving_gradients.proving.compiler import target
from memory_saving_gradients.report.summary import rendered

# The batch sizes that are read first; the share by which another may be off their line; the largest
# that is searched; how far the peak, relative to that of the plain step, may be from the one that
# was planned, as a share; and the factor by which a batch is at least reduced if it does not fit.
_FIRST = (32, 512)
_OFF = 0.01
_LARGEST = 2**20
_CLOSE = 0.05
_STEP = 0.99
# For a way, a step is read, and planned on one line, at most so often.
_READINGS = 8
_PLANS = 4
# With `verify`, a way is compiled until an answer fits, and then until so much of the memory is
# used, but at most so often.
_USED = 0.97
_COMPILED = 4


@dataclasses.dataclass(frozen=True)
class Largest:
    """The largest batch that fits in one way.

    Attributes:
        batch_size: how many examples; 0 if not even one fits.
        bytes: the bytes that the step needs then: the peak, variables and inputs.
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
        verified_for: with `verify=True`, the device for which the answers were compiled.
    """

    memory_bytes: int
    variables_bytes: int
    ways: dict[str, Largest]
    compiled: bool = False
    verified_for: str = ""

    def __str__(self) -> str:
        return rendered(_table(self)).rstrip()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@no_garbage_collection()
def max_batch(
    model_or_step: Any,
    memory: int | str,
    example: Any = None,
    *,
    device: str | None = None,
    verify: bool = False,
) -> MaxBatch:
    """The largest batch that fits into a given memory, plain and with recomputation.

    The step is traced and planned; nothing runs. As tensors mostly grow linearly with the batch,
    the step is read at three sizes, and only if it grows otherwise at the size of each answer.

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
        verify: ask XLA's compiler what it allocates for each answer, and correct the answer by
            that. The step must be one that XLA compiles. Each way is compiled two to four times.

    Returns:
        The largest batches: plain, with `checkpoints="speed"` and `"memory"`, and with a budget
        within 10, 20 and 33 % of extra cost. It prints as a table.

    Raises:
        TypeError: `model_or_step` is neither, or `memory` is of a wrong type.
        ValueError: `memory` is no number of bytes or does not hold the variables, or the step does
            not tell its inputs, fixes their batch, or computes no gradients; or XLA does not
            compile it, with `verify=True`.
        RuntimeError: `verify=True`, and the compiler refuses the step, or is not installed.

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
    if verify and not step.compiled:
        raise ValueError(
            "verify=True asks XLA's compiler, but XLA does not compile this step: compile it with "
            'jit_compile=True, or name the GPU that it is for, such as device="h100"'
        )
    search = _Search(step, allowed)
    with bar("looking for the largest batch", len(_WAYS)) as tick:
        ways: dict[str, Largest] = {}
        for name in _WAYS:
            cheaper = (one for one in ways.values() if one.overhead <= _MOST.get(name, math.inf))
            known = max((one.batch_size for one in cheaper), default=0)
            answer = search.largest(name, known)
            ways[name] = search.verified(name, answer) if verify else answer
            tick()
    for name, most in _MOST.items():  # a better plan of another way within the cost counts, too
        allowing = (one for one in ways.values() if one.overhead <= most)
        ways[name] = max(allowing, key=_value)
    asked = target(step.passes[0][1].device) if verify else ""
    return MaxBatch(allowed, step.variables_bytes, ways, step.compiled, asked)


# The ways to train, each with its planner; None is the plain step.
_WAYS: dict[str, Callable[[Problem], Schedule | None]] = {
    "plain": lambda problem: None,
    "speed": STRATEGIES["speed"],
    "memory": STRATEGIES["memory"],
}
_MOST = {f"{most:.0%} extra cost": most for most in (0.1, 0.2, 0.33)}
_WAYS |= {name: functools.partial(affordable, max_overhead=most) for name, most in _MOST.items()}


# The alternatives of loops that a way may choose from, if not from all.
_OF_LOOPS = {"plain": [0], "speed": [0, 1]}

#: Gives the backward passes at a batch with one of the alternatives of their loops: 0 is plain.
_ProblemsAt: TypeAlias = Callable[[int, int], list[Problem]]


class _Search:
    """Searches batch sizes."""

    def __init__(self, step: Step, allowed: int) -> None:
        self._step = step
        self._allowed = allowed
        self._read: dict[int, list[list[Problem]]] = {}  # of each backward pass its alternatives
        #: of each backward pass, how its loops may run
        self._runs: list[list[tuple[LoopPlan, ...]]] = []
        for batch in _FIRST:
            self._read_at(batch)
        self._is_line: bool | None = None  # not known yet
        passes = [*zip(*self._read_at(_FIRST[0]), strict=True)]  # by alternative
        #: the alternatives of loops that differ; only 0 where no loop can run again
        self._loops = [i for i, now in enumerate(passes) if not i or now != passes[i - 1]]

    def _read_at(self, batch: int) -> list[list[Problem]]:
        if batch not in self._read:
            readings = self._step.readings(batch)
            if any(reading.batch_size is None for reading in readings):
                raise ValueError(
                    "the step fixes the batch of its inputs: leave their first dimension None"
                )
            requests = [request for _, request in self._step.passes]
            self._runs = self._runs or [*map(alternatives, readings, requests)]
            self._read[batch] = [
                [as_if(reading, request, run) for run in runs]
                for reading, request, runs in zip(readings, requests, self._runs, strict=True)
            ]
        return self._read[batch]

    def _next(self, near: Largest, over: Largest | None) -> int:
        """The batch that takes just the memory, if bytes grow between two answers by a power.

        Args:
            near: the largest batch known to fit, or else `over`: bytes then grow linearly.
            over: the smallest batch known not to fit.
        """
        fixed = self._step.variables_bytes
        more = max(near.bytes - fixed, 1)
        power = 1.0
        if over and over is not near:
            ratio = over.batch_size / near.batch_size
            power = math.log((over.bytes - fixed) / more) / math.log(ratio)
        batch = int(near.batch_size * ((self._allowed - fixed) / more) ** (1 / power))
        return min(batch, int(_STEP * over.batch_size) if over else _LARGEST)

    def _line(self, near: int) -> _ProblemsAt:
        """Gives the step at a batch, on the line through the two batches nearest to one."""
        one, other = sorted(self._read, key=lambda known: abs(math.log(near / known)))[:2]
        pairs = [*zip(self._read[one], self._read[other], strict=True)]

        @functools.cache
        def at(batch: int, loops: int) -> list[Problem]:
            share = (batch - one) / (other - one)
            return [here[loops].toward(there[loops], share) for here, there in pairs]

        return at

    def _is_on(self, line: _ProblemsAt, batch: int) -> bool:
        """Whether a batch, as read, is on a line, nearly."""
        pairs = zip(line(batch, 0), self._read_at(batch), strict=True)
        peaks = ((plain_peak(ours), plain_peak(read)) for ours, (read, *_) in pairs)
        return all(abs(ours - read) <= _OFF * read for ours, read in peaks)

    def largest(self, name: str, known: int) -> Largest:
        """The largest batch that fits in a way.

        Reading a step takes longer than planning, so we plan on the line through two batches that
        were read. The first answer is then read. If it is not on that line, the answers of all ways
        are read, until one is on the line through the nearest two.

        Args:
            name: the way.
            known: a batch to begin with; 0 for none.
        """
        batch = known or _FIRST[0]  # in a small batch activations hardly count
        ways = [i for i in self._loops if i in _OF_LOOPS.get(name, self._loops)]
        for _ in range(_READINGS):
            line = self._line(batch)
            planned = (self._planned(line, name, batch, loops) for loops in ways)
            answer = max(filter(None, planned), key=_value, default=None)
            if answer is None or self._is_line or (batch := answer.batch_size) in self._read:
                break
            agrees = self._is_on(line, batch)
            if self._is_line is None:
                self._is_line = agrees
            if agrees:
                break
        return answer or Largest(0, self._step.variables_bytes, 0.0, 0.0)

    def verified(self, name: str, predicted: Largest) -> Largest:
        """The largest batch that fits by the report of XLA's compiler, searched from an answer on.

        Args:
            name: the way.
            predicted: the answer by prediction.
        """
        best, over = None, None
        batch, compiled = predicted.batch_size, 0
        while batch and (best is None or compiled < _COMPILED):
            found = self._as_compiled(name, batch, predicted)
            compiled += 1
            if found.bytes <= self._allowed:
                best = found
            else:
                over = found
            batch = self._next(best or found, over)
            if best and (batch <= best.batch_size or best.bytes >= _USED * self._allowed):
                break
        return best or Largest(0, self._step.variables_bytes, 0.0, 0.0)

    def _as_compiled(self, name: str, batch: int, predicted: Largest) -> Largest:
        """The memory of a batch by XLA's compiler, and its cost."""
        strategy = "overhead" if name in _MOST else name
        size, overhead = self._step.allocated(batch, strategy, _MOST.get(name))
        a_plain_one = predicted.seconds_per_example / (1 + predicted.overhead)
        return Largest(batch, self._beside(batch) + size, overhead, a_plain_one * (1 + overhead))

    def _beside(self, batch: int) -> int:
        """The bytes of variables and inputs."""
        return self._step.variables_bytes + batch * self._step.example_bytes

    def _planned(self, at: _ProblemsAt, name: str, batch: int, loops: int) -> Largest | None:
        """The largest batch that fits as planned; None for none.

        A schedule is good at another batch as long as tensors have the same shares of the memory
        there. In a small batch, the gradients of weights count for more. So we plan at the largest
        batch that the last schedule allows, until its peak is the same share of the plain one.

        Args:
            at: gives the step at a batch.
            name: the way.
            batch: where to plan first.
            loops: the alternative of its loops.
        """
        best: Largest | None = None
        for _ in range(_PLANS):
            schedules = [_WAYS[name](problem) for problem in at(batch, loops)]
            judge = functools.partial(self._judged, at, loops, schedules)
            answer = self._fitting(judge, batch)
            for each in filter(None, (answer, judge(batch))):
                if each.bytes <= self._allowed and each.overhead <= _MOST.get(name, math.inf):
                    best = max(best or each, each, key=lambda one: one.batch_size)
            if answer is None or self._is_alike(at, judge, batch, answer.batch_size):
                break
            batch = answer.batch_size
        return best

    def _is_alike(
        self, at: _ProblemsAt, judge: Callable[[int], Largest], one: int, other: int
    ) -> bool:
        """Whether schedules have nearly the same share of the plain peak at two batches."""

        def share(batch: int) -> float:
            plain = self._judged(at, 0, [None] * len(self._step.passes), batch)
            fixed = self._step.variables_bytes
            return (judge(batch).bytes - fixed) / (plain.bytes - fixed)

        return abs(share(other) / share(one) - 1) <= _CLOSE

    def _fitting(self, judge: Callable[[int], Largest], batch: int) -> Largest | None:
        """The largest batch that fits with given schedules, searched from a first one on."""
        best, over = None, None
        while batch:
            answer = judge(batch)
            if answer.bytes <= self._allowed:
                best = answer
            else:
                over = answer
            batch = self._next(best or answer, over)
            if best and batch <= best.batch_size:
                break
        return best

    def _judged(
        self, at: _ProblemsAt, loops: int, schedules: Sequence[Schedule | None], batch: int
    ) -> Largest:
        """The memory and cost of a batch with given schedules."""
        pairs = zip(at(batch, loops), schedules, strict=True)
        # A plan that is no better than the plain step is not applied; loops in segments always are.
        taken = [_judged(*pair, at_most_plain=not loops) for pair in pairs]
        seconds = sum(float(problem.costs.sum()) for problem in at(batch, 0))
        costs = sum(cost for _, cost in taken)
        overhead = costs / seconds - 1 if seconds else 0.0
        peak = max(peak for peak, _ in taken)
        return Largest(batch, self._beside(batch) + peak, overhead, costs / batch)


def _value(answer: Largest) -> tuple[int, float]:
    """What makes one answer better than another: a larger batch, then less time."""
    return answer.batch_size, -answer.overhead


def _judged(problem: Problem, schedule: Schedule | None, at_most_plain: bool) -> tuple[int, float]:
    """The peak of a schedule in bytes, and its cost in seconds."""
    plain = plain_peak(problem), float(problem.costs.sum())
    if schedule is None:
        return plain
    simulation = simulate(problem, schedule)
    found = allocated(problem, schedule, simulation), simulation.cost
    return min(plain, found) if at_most_plain else found


def _compiled(answer: MaxBatch) -> str:
    if answer.verified_for:
        return f", by XLA's compiler for {answer.verified_for}"
    return ", compiled by XLA" if answer.compiled else ""


def _table(answer: MaxBatch) -> Table:
    """The result as a table."""
    table = Table(
        title=(
            f"The largest batches in {answer.memory_bytes / 1e9:,.2f} GB "
            f"({answer.variables_bytes / 1e9:,.2f} GB of it variables)"
            f"{_compiled(answer)}"
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
