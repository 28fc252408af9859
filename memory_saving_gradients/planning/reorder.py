"""Another order of a schedule, in which fewer bytes are alive.

Random moves shift one or a few ops a little earlier or later, each with the recomputations right
before it; simulated annealing (see `anneal`) accepts or rejects them. What runs, and how often,
does not change.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memory_saving_gradients.planning.native import compiled, part
from memory_saving_gradients.planning.problem import Problem, Schedule
from memory_saving_gradients.planning.runs import Step
from memory_saving_gradients.planning.simulate import simulate

# The search reduces the bytes above this share of the peak.
_AIM = 0.8

# The number of moves: fewer for a schedule of more than `_MANY_RUNS` runs.
_MOVES = 8_000
_MANY_RUNS = 1_000

# The most ops that are moved at once, and the most places by which they are moved.
_BLOCK = 6
_FARTHEST = 60

# The initial temperature: what a move may cost, as a share of the bytes above the aim.
_HOT = 0.002


def reordered(problem: Problem, schedule: Schedule, seed: int = 0) -> Schedule:
    """The same runs in an order that lowers the highest parts of the timeline.

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
    best = np.arange(len(parts))
    order, room = best.copy(), Room.new(problem, len(runs))
    _search(Step.of(problem), runs, begins, forward, aim, moves, seed, room, order, best)
    return np.concatenate([parts[i] for i in best]).tolist()


def _is_last(problem: Problem, runs: np.ndarray) -> np.ndarray:
    """Whether each run ends a part that is moved as one.

    It does if it is a backward op, or the first run of a forward op before any backward op.
    """
    is_backward = runs >= problem.forward_count
    is_first = np.zeros(len(runs), dtype=bool)
    is_first[np.unique(runs, return_index=True)[1]] = True
    return is_backward | (is_first & ~is_backward.cumsum().astype(bool))


class Room(NamedTuple):
    """Arrays that an evaluation writes to.

    Attributes:
        live: by moment, the change in bytes alive; moment 0 stands for never.
        lent: by moment, the bytes of the buffer that an input lends to an output.
        workspace: by moment, the scratch space.
        made, last, lends: by tensor, when its newest copy is made and last read, and whether that
            reader's output may reuse its buffer.
        ran: by op, whether it ran.
    """

    live: np.ndarray
    lent: np.ndarray
    workspace: np.ndarray
    made: np.ndarray
    last: np.ndarray
    lends: np.ndarray
    ran: np.ndarray

    @classmethod
    def new(cls, problem: Problem, runs: int) -> Room:
        count = len(problem.tensors)
        return cls(
            live=np.zeros(runs + 2, np.int64),
            lent=np.zeros(runs + 1, np.int64),
            workspace=np.zeros(runs + 1, np.int64),
            made=np.zeros(count, np.int64),
            last=np.zeros(count, np.int64),
            lends=np.zeros(count, np.bool_),
            ran=np.zeros(len(problem.ops), np.bool_),
        )


@compiled
def _search(
    step: Step,
    runs: np.ndarray,
    begins: np.ndarray,
    forward: int,
    aim: int,
    moves: int,
    seed: int,
    room: Room,
    order: np.ndarray,
    best: np.ndarray,
) -> None:
    """Searches orders of the parts of `runs`; writes that with the fewest bytes above `aim`.

    The `forward` parts of the forward pass stay before the others.
    """
    np.random.seed(seed)
    count = len(begins) - 1
    now = least = _above(step, runs, begins, order, aim, room)
    for move in range(moves):
        block = 1 + np.random.randint(_BLOCK) if np.random.random() < 0.5 else 1
        far = 1 + int(np.random.random() ** 3 * _FARTHEST)
        first, second = (block, far) if np.random.random() < 0.5 else (far, block)
        at = np.random.randint(count)
        end = at + first + second
        if end > count or at < forward < end:
            continue
        _swap(order, at, first, second)
        then = _above(step, runs, begins, order, aim, room)
        heat = _HOT * (1 - move / moves) * now
        if then <= now or np.random.random() * heat < heat * np.exp((now - then) / (heat + 1e-9)):
            now = then
            if now < least:
                least = now
                for i in range(count):
                    best[i] = order[i]
        else:
            _swap(order, at, second, first)


@part
def _swap(order: np.ndarray, at: int, first: int, second: int) -> None:
    """Swaps two neighbouring blocks: the `first` entries from `at`, and the `second` after them."""
    _turn(order, at, at + first)
    _turn(order, at + first, at + first + second)
    _turn(order, at, at + first + second)


@part
def _turn(order: np.ndarray, begin: int, end: int) -> None:
    """Reverses the entries from `begin` up to `end`."""
    for i in range((end - begin) // 2):
        order[begin + i], order[end - 1 - i] = order[end - 1 - i], order[begin + i]


@part
def _above(
    step: Step, runs: np.ndarray, begins: np.ndarray, order: np.ndarray, aim: int, room: Room
) -> float:
    """The bytes alive above `aim`, summed over all runs; infinite if the order is invalid."""
    live, lent, made, last = room.live, room.lent, room.made, room.last
    live[:], lent[:], made[:], room.ran[:] = 0, 0, 0, False
    count, at = len(runs), 0
    for i in range(len(order)):
        for run in range(begins[order[i]], begins[order[i] + 1]):
            op = runs[run]
            at += 1  # so that 0 stands for never
            if not room.ran[op]:
                for edge in range(step.waits_at[op], step.waits_at[op + 1]):
                    if not room.ran[step.waits[edge]]:
                        return np.inf
                room.ran[op] = True
            for edge in range(step.reads_at[op], step.reads_at[op + 1]):
                tensor = step.reads[edge]
                if not made[tensor]:
                    return np.inf
                last[tensor] = at
                room.lends[tensor] = step.fits[edge]
            for edge in range(step.makes_at[op], step.makes_at[op + 1]):
                tensor = step.makes[edge]
                if made[tensor]:
                    _live(
                        live,
                        lent,
                        step.size[tensor],
                        made[tensor],
                        last[tensor],
                        room.lends[tensor],
                    )
                made[tensor] = last[tensor] = at
                room.lends[tensor] = False
            room.workspace[at] = step.workspace[op]
    for tensor in range(len(made)):
        if made[tensor]:
            is_result = step.is_result[tensor]
            end = count if is_result else last[tensor]
            lending = room.lends[tensor] and not is_result
            _live(live, lent, step.size[tensor], made[tensor], end, lending)
    total, alive = 0.0, 0
    for at in range(1, count + 1):
        alive += live[at]
        total += max(0, alive + room.workspace[at] - lent[at] - aim)
    return total


@part
def _live(live: np.ndarray, lent: np.ndarray, size: int, made: int, last: int, lends: bool) -> None:
    """Adds a live range from `made` to `last`, whose output may reuse the buffer."""
    live[made] += size
    live[last + 1] -= size
    if lends:
        lent[last] = max(lent[last], size)
