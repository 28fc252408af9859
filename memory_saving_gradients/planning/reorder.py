"""The order of a schedule, changed where less is alive then.

Ops are moved by chance, alone or a few together, a little earlier or later, each with what runs
again right before it; simulated annealing (see `anneal`) decides what stays. What runs, and how
often, does not change.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memory_saving_gradients.planning.problem import Problem, Schedule
from memory_saving_gradients.planning.runs import compiled
from memory_saving_gradients.planning.simulate import simulate

# What lies above this share of the peak is to become less.
_AIM = 0.8

# So many moves, but fewer where a schedule has more runs than so many.
_MOVES = 20_000
_MANY_RUNS = 1_000

# So many ops are moved at once, at most, and by so many places.
_BLOCK = 6
_FARTHEST = 60

# The temperature in the beginning: what a move may cost, as a share of what lies above the aim.
_HOT = 0.002


def reordered(problem: Problem, schedule: Schedule, seed: int = 0) -> Schedule:
    """The same runs in an order in which less is alive where most is.

    Args:
        problem: the step.
        schedule: a schedule of it.
        seed: of the random choices.

    Returns:
        A schedule of the same cost; the given one where its order is fixed (see `Problem.waits`).
    """
    if problem.waits is None:
        return schedule
    aim = int(_AIM * simulate(problem, schedule).peak)
    moves = min(_MOVES, _MOVES * _MANY_RUNS // max(1, len(schedule)))
    runs = np.array(schedule, dtype=np.int64)
    is_last = _is_last(problem, runs)
    parts = np.split(runs, np.flatnonzero(is_last)[:-1] + 1)
    begins = np.cumsum([0, *map(len, parts)])
    forward = int(is_last[: np.argmax(runs >= problem.forward_count)].sum())
    found = _search(_Facts.of(problem), runs, begins, forward, aim, moves, seed)
    return np.concatenate([parts[i] for i in found]).tolist()


def _is_last(problem: Problem, runs: np.ndarray) -> np.ndarray:
    """Whether a run ends what is moved as one.

    That is a backward op, or the first run of a forward op before the first one of those.
    """
    is_backward = runs >= problem.forward_count
    is_first = np.zeros(len(runs), dtype=bool)
    is_first[np.unique(runs, return_index=True)[1]] = True
    return is_backward | (is_first & ~is_backward.cumsum().astype(bool))


class _Facts(NamedTuple):
    """A problem as arrays; one more op stands for the end, which reads all results.

    Attributes:
        ops: the number of ops.
        reads_at, reads, fits: the tensors that ops read; whether an output may take their place.
        makes_at, makes: the tensors that ops make; the end makes all.
        waits_at, waits: the ops that ops wait for.
        size: bytes by tensor.
        workspace: bytes by op.
    """

    ops: int
    reads_at: np.ndarray
    reads: np.ndarray
    fits: np.ndarray
    makes_at: np.ndarray
    makes: np.ndarray
    waits_at: np.ndarray
    waits: np.ndarray
    size: np.ndarray
    workspace: np.ndarray

    @classmethod
    def of(cls, problem: Problem) -> _Facts:
        reads, makes, waits = problem.reads, problem.makes, problem.waits or ()
        results = np.flatnonzero(problem.is_result)
        return cls(
            len(problem.ops),
            np.append(reads.start, reads.start[-1] + len(results)),
            np.concatenate([reads.tensor, results]),
            np.append(reads.fits, np.zeros(len(results), dtype=bool)),
            np.append(makes.start, makes.start[-1] + len(problem.tensors)),
            np.concatenate([makes.tensor, np.arange(len(problem.tensors))]),
            np.cumsum([0, *map(len, waits), 0]),
            np.array([op for before in waits for op in before], dtype=np.int64),
            problem.sizes,
            np.append(problem.workspaces, 0),
        )


@compiled
def _search(
    facts: _Facts,
    runs: np.ndarray,
    begins: np.ndarray,
    forward: int,
    aim: int,
    moves: int,
    seed: int,
) -> np.ndarray:
    """The order of the parts of `runs` that was found to have the least above `aim`.

    The parts of the forward pass, so many, stay before the others.
    """
    np.random.seed(seed)
    count = len(begins) - 1
    order = np.arange(count)
    best = order.copy()
    now = least = _above(facts, runs, begins, order, aim)
    for move in range(moves):
        block = 1 + np.random.randint(_BLOCK) if np.random.random() < 0.5 else 1
        far = 1 + int(np.random.random() ** 3 * _FARTHEST)
        first, second = (block, far) if np.random.random() < 0.5 else (far, block)
        at = np.random.randint(count)
        end = at + first + second
        if end > count or at < forward < end:
            continue
        _swap(order, at, first, second)
        then = _above(facts, runs, begins, order, aim)
        heat = _HOT * (1 - move / moves) * now
        if then <= now or np.random.random() * heat < heat * np.exp((now - then) / (heat + 1e-9)):
            now = then
            if now < least:
                least = now
                best[:] = order
        else:
            _swap(order, at, second, first)
    return best


@compiled
def _swap(order: np.ndarray, at: int, first: int, second: int) -> None:
    """Has the `second` entries after the `first` ones from `at` come before them."""
    moved = order[at : at + first].copy()
    for i in range(second):
        order[at + i] = order[at + first + i]
    order[at + second : at + second + first] = moved


@compiled
def _above(
    facts: _Facts, runs: np.ndarray, begins: np.ndarray, order: np.ndarray, aim: int
) -> float:
    """The bytes alive above `aim`, added up over all runs; infinite if they cannot run so."""
    count, tensors = len(runs), len(facts.size)
    live, lent = np.zeros(count + 2, np.int64), np.zeros(count + 1, np.int64)
    made, last = np.full(tensors, -1, np.int64), np.full(tensors, -1, np.int64)
    lends = np.zeros(tensors, np.bool_)
    ran = np.zeros(facts.ops + 1, np.bool_)
    scratch = np.zeros(count + 1, np.int64)
    at = 0
    for part in range(len(order) + 1):
        begin, end = 0, 1
        if part < len(order):
            begin, end = begins[order[part]], begins[order[part] + 1]
        for run in range(begin, end):
            op = runs[run] if part < len(order) else facts.ops
            if not ran[op]:
                for edge in range(facts.waits_at[op], facts.waits_at[op + 1]):
                    if not ran[facts.waits[edge]]:
                        return np.inf
                ran[op] = True
            for edge in range(facts.reads_at[op], facts.reads_at[op + 1]):
                tensor = facts.reads[edge]
                if made[tensor] < 0:
                    return np.inf
                last[tensor] = at
                lends[tensor] = facts.fits[edge]
            for edge in range(facts.makes_at[op], facts.makes_at[op + 1]):
                tensor = facts.makes[edge]
                if made[tensor] >= 0:
                    live[made[tensor]] += facts.size[tensor]
                    live[last[tensor] + 1] -= facts.size[tensor]
                    if lends[tensor]:
                        lent[last[tensor]] = max(lent[last[tensor]], facts.size[tensor])
                made[tensor] = last[tensor] = at
                lends[tensor] = False
            scratch[at] = facts.workspace[op]
            at += 1
    total, alive = 0.0, 0
    for at in range(count):
        alive += live[at]
        total += max(0, alive + scratch[at] - lent[at] - aim)
    return total
