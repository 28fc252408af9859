"""A schedule to which runs can be added and removed, with incremental liveness. Compiled.

The first run of an op is at its place in the order of the problem. A second run of a forward op is
in the slot of a backward op, right before it, and a slot holds its runs in the order of the
problem. So a run is one number, its key, and keys ascend in time. The schedule stays valid whatever
runs are added, as an op reads the newest copy of each input.

Adding or removing a run changes the live ranges of only the few tensors that it reads and makes,
while `simulate` goes through the whole schedule. The two agree (tests/planning/test_runs.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memory_saving_gradients.planning.native import compiled, part
from memory_saving_gradients.planning.problem import Problem, Schedule
from memory_saving_gradients.planning.simulate import simulate

# Room for events: this many times the events that a tensor has initially, plus `_MORE`.
_ROOM = 3
_MORE = 8

# A peak above the budget counts as higher by the budget / 2**_STEP, so that removing the last bytes
# of excess is worth the effort.
_STEP = 6


class Step(NamedTuple):
    """A problem as arrays: the reads of op i are those from `reads_at[i]` up to `reads_at[i + 1]`.

    Attributes:
        ops: the number of ops; the factor of keys is one more.
        first: the first op of the backward pass.
        reads_at, reads, fits: the tensors that ops read; whether an output may reuse their buffer.
        makes_at, makes: the tensors that ops make.
        size: bytes by tensor.
        workspace, may_repeat: by op.
        cost: the seconds of a second run, by op.
        made_by: the op that makes each tensor, or -1.
        is_result: by tensor, whether it lives to the end.
        waits_at, waits: the ops that each op waits for; empty where the order is fixed.
    """

    ops: int
    first: int
    reads_at: np.ndarray
    reads: np.ndarray
    fits: np.ndarray
    makes_at: np.ndarray
    makes: np.ndarray
    size: np.ndarray
    workspace: np.ndarray
    cost: np.ndarray
    may_repeat: np.ndarray
    made_by: np.ndarray
    is_result: np.ndarray
    waits_at: np.ndarray
    waits: np.ndarray

    @classmethod
    def of(cls, problem: Problem) -> Step:
        reads, makes = problem.reads, problem.makes
        waits = problem.waits or ((),) * len(problem.ops)
        return cls(
            len(problem.ops),
            problem.forward_count,
            reads.start,
            reads.tensor,
            reads.fits,
            makes.start,
            makes.tensor,
            problem.sizes,
            problem.workspaces,
            problem.costs_again,
            problem.may_repeat,
            problem.makers,
            problem.is_result,
            np.cumsum([0, *map(len, waits)]),
            np.array([op for before in waits for op in before], dtype=np.int64),
        )


class Runs(NamedTuple):
    """A schedule and its liveness.

    Attributes:
        length: the number of runs, an array of one element.
        keys: the runs, ascending.
        live: the bytes of all tensors alive during each run.
        scratch: its workspace, less the buffer that an input lends to an output.
        times: how often each op runs, alone and within others.
        events: by tensor, the runs that make it (2 * key) and that read it (2 * key + 1),
            ascending. A tensor that lives to the end has one more read, after all runs.
        events_at: where the events of each tensor begin.
        events_of: how many events each tensor has.
    """

    length: np.ndarray
    keys: np.ndarray
    live: np.ndarray
    scratch: np.ndarray
    times: np.ndarray
    events: np.ndarray
    events_at: np.ndarray
    events_of: np.ndarray

    @classmethod
    def of(cls, problem: Problem, schedule: Schedule) -> Runs:
        """The schedule, with the second runs of each slot in the order of the problem."""
        keys = _keys(problem, schedule)
        count, tensors = len(problem.ops), len(problem.tensors)
        simulation = simulate(problem, ops_of(keys, count))
        whose = simulation.tensor[simulation.copies_of_events]
        events_of = np.bincount(whose, minlength=tensors)
        events_at = np.concatenate([[0], (_ROOM * events_of + _MORE).cumsum()])
        events = np.zeros(events_at[-1], dtype=np.int64)
        is_read = np.ones(len(simulation.events), dtype=np.int64)
        is_read[simulation.begins] = 0
        among = np.arange(len(whose)) - np.searchsorted(whose, whose)
        events[events_at[whose] + among] = 2 * keys[simulation.events] + is_read
        lasting = np.flatnonzero(problem.is_result & (events_of > 0))
        events[events_at[lasting] + events_of[lasting]] = 2 * (count * (count + 1) + count) + 1
        events_of[lasting] += 1

        def roomy(array: np.ndarray) -> np.ndarray:
            return np.concatenate([array, np.zeros(_ROOM * len(keys) + 1000, dtype=np.int64)])

        return cls(
            np.array([len(keys)]),
            roomy(keys),
            roomy(simulation.live),
            roomy(simulation.timeline - simulation.live),
            np.bincount(ops_of(keys, count), minlength=count) + problem.runs_within,
            events,
            events_at,
            events_of,
        )


def _keys(problem: Problem, schedule: Schedule) -> np.ndarray:
    """The keys of a schedule's runs; a second run belongs to the slot of the next backward op."""
    count, first = len(problem.ops), problem.forward_count
    keys: set[int] = set()
    waiting: list[int] = []
    begun, latest = False, -1
    for index in np.asarray(schedule).tolist():
        begun = begun or index >= first or index <= latest
        latest = index
        if not begun or index >= first:
            keys.update(index * (count + 1) + op for op in (*waiting, count))
            waiting = []
        else:
            waiting.append(index)
    return np.array(sorted(keys), dtype=np.int64)


def ops_of(keys: np.ndarray, count: int) -> np.ndarray:
    """The ops that the keys run, in a problem of `count` ops."""
    op = keys % (count + 1)
    return np.where(op < count, op, keys // (count + 1))


@part
def op_of(key: int, count: int) -> int:
    """The op that a key runs."""
    op = key % (count + 1)
    return op if op < count else key // (count + 1)


@part
def bisect_left(array: np.ndarray, begin: int, end: int, value: int) -> int:
    """The first place from `begin` up to `end` where an ascending array is at least `value`."""
    while begin < end:
        middle = (begin + end) >> 1
        if array[middle] < value:
            begin = middle + 1
        else:
            end = middle
    return begin


@part
def above(bytes_: int, budget: int) -> int:
    """By how much `bytes_` exceed the budget, counted as in `_STEP`."""
    return bytes_ - budget + (budget >> _STEP) if bytes_ > budget else 0


@part
def total_above(runs: Runs, budget: int) -> int:
    """By how much all runs together exceed the budget."""
    excess = 0
    for i in range(runs.length[0]):
        excess += above(runs.live[i] + runs.scratch[i], budget)
    return excess


@compiled
def peak_of(runs: Runs) -> int:
    """The most bytes alive at once."""
    peak = 0
    for i in range(runs.length[0]):
        peak = max(peak, runs.live[i] + runs.scratch[i])
    return peak


@part
def _change(runs: Runs, begin: int, end: int, bytes_: int, budget: int) -> int:
    """Adds bytes to the live bytes of some runs; returns the change in excess."""
    excess = 0
    live, scratch = runs.live[begin:end], runs.scratch[begin:end]
    for i in range(len(live)):
        before = live[i] + scratch[i]
        live[i] += bytes_
        excess += above(before + bytes_, budget) - above(before, budget)
    return excess


@part
def _lend(step: Step, runs: Runs, key: int, budget: int) -> int:
    """Recomputes how much buffer an output of a run reuses; returns the change in excess."""
    op = op_of(key, step.ops)
    most = 0
    for edge in range(step.reads_at[op], step.reads_at[op + 1]):
        if step.fits[edge]:
            tensor = step.reads[edge]
            begin = runs.events_at[tensor]
            end = begin + runs.events_of[tensor]
            after = bisect_left(runs.events, begin, end, 2 * key + 1) + 1
            if (after == end or runs.events[after] % 2 == 0) and step.size[tensor] > most:
                most = step.size[tensor]
    scratch = step.workspace[op] - most
    i = bisect_left(runs.keys, 0, runs.length[0], key)
    before = runs.live[i] + runs.scratch[i]
    change = above(runs.live[i] + scratch, budget) - above(before, budget)
    runs.scratch[i] = scratch
    return change


@part
def has(runs: Runs, key: int) -> bool:
    """Whether a schedule has a run."""
    i = bisect_left(runs.keys, 0, runs.length[0], key)
    return i < runs.length[0] and runs.keys[i] == key


@part
def may_add(step: Step, runs: Runs, key: int) -> bool:
    """Whether there is room for a run in the arrays, and its inputs are made before it."""
    op = op_of(key, step.ops)
    for edge in range(step.reads_at[op], step.reads_at[op + 1]):
        tensor = step.reads[edge]
        begin = runs.events_at[tensor]
        is_full = begin + runs.events_of[tensor] == runs.events_at[tensor + 1]
        if is_full or runs.events[begin] > 2 * key:
            return False
    for edge in range(step.makes_at[op], step.makes_at[op + 1]):
        tensor = step.makes[edge]
        if runs.events_at[tensor] + runs.events_of[tensor] == runs.events_at[tensor + 1]:
            return False
    return runs.length[0] < len(runs.keys)


@part
def _open(array: np.ndarray) -> None:
    """Moves all but the last element up, so that the first may be written."""
    for i in range(len(array) - 1, 0, -1):
        array[i] = array[i - 1]


@part
def _close(array: np.ndarray) -> None:
    """Moves all but the first element down, over the first."""
    for i in range(1, len(array)):
        array[i - 1] = array[i]


@part
def add(step: Step, runs: Runs, key: int, budget: int) -> int:
    """Adds a run; returns the change in excess."""
    op = op_of(key, step.ops)
    length = runs.length[0]
    at = bisect_left(runs.keys, 0, length, key)
    # The bytes alive both before and after it: those during the next run, without its outputs.
    alive = runs.live[at]
    next_op = op_of(runs.keys[at], step.ops)
    for edge in range(step.makes_at[next_op], step.makes_at[next_op + 1]):
        alive -= step.size[step.makes[edge]]
    _open(runs.keys[at : length + 1])
    _open(runs.live[at : length + 1])
    _open(runs.scratch[at : length + 1])
    runs.keys[at] = key
    runs.live[at] = alive
    runs.scratch[at] = step.workspace[op]
    runs.length[0] = length + 1
    runs.times[op] += 1
    excess = above(alive + step.workspace[op], budget)
    for edge in range(step.reads_at[op], step.reads_at[op + 1]):
        tensor = step.reads[edge]
        place, end = _insert(runs, tensor, 2 * key + 1)
        if place + 1 == end or runs.events[place + 1] % 2 == 0:  # it is the last reader
            excess += _lengthen(step, runs, tensor, place, at + 1, budget)
    for edge in range(step.makes_at[op], step.makes_at[op + 1]):
        tensor = step.makes[edge]
        place, end = _insert(runs, tensor, 2 * key)
        is_read = place + 1 < end and runs.events[place + 1] % 2 == 1
        if is_read and place > runs.events_at[tensor]:
            excess += _shorten(step, runs, tensor, place, at, budget)
        else:
            excess += _change(runs, at, at + 1, step.size[tensor], budget)
    return excess + _lend(step, runs, key, budget)


@part
def remove(step: Step, runs: Runs, key: int, budget: int) -> int:
    """Removes a run, but no first run of a tensor that is read; returns the change in excess."""
    op = op_of(key, step.ops)
    length = runs.length[0]
    at = bisect_left(runs.keys, 0, length, key)
    excess = 0
    for edge in range(step.makes_at[op], step.makes_at[op + 1]):
        tensor = step.makes[edge]
        place, end = _delete(runs, tensor, 2 * key)
        is_read = place < end and runs.events[place] % 2 == 1
        if is_read and place > runs.events_at[tensor]:
            excess += _lengthen(step, runs, tensor, place, at, budget)
    for edge in range(step.reads_at[op], step.reads_at[op + 1]):
        tensor = step.reads[edge]
        place, end = _delete(runs, tensor, 2 * key + 1)
        if place == end or runs.events[place] % 2 == 0:
            excess += _shorten(step, runs, tensor, place, at, budget)
    excess -= above(runs.live[at] + runs.scratch[at], budget)
    _close(runs.keys[at:length])
    _close(runs.live[at:length])
    _close(runs.scratch[at:length])
    runs.length[0] = length - 1
    runs.times[op] -= 1
    return excess


@part
def _insert(runs: Runs, tensor: int, event: int) -> tuple[int, int]:
    """Adds an event of a tensor; returns its place, and where the tensor's events end."""
    begin = runs.events_at[tensor]
    end = begin + runs.events_of[tensor]
    place = bisect_left(runs.events, begin, end, event)
    for i in range(end, place, -1):
        runs.events[i] = runs.events[i - 1]
    runs.events[place] = event
    runs.events_of[tensor] += 1
    return place, end + 1


@part
def _delete(runs: Runs, tensor: int, event: int) -> tuple[int, int]:
    """Removes an event of a tensor; returns its place, and where the tensor's events end."""
    begin = runs.events_at[tensor]
    end = begin + runs.events_of[tensor]
    place = bisect_left(runs.events, begin, end, event)
    for i in range(place, end - 1):
        runs.events[i] = runs.events[i + 1]
    runs.events_of[tensor] -= 1
    return place, end - 1


@part
def _lengthen(step: Step, runs: Runs, tensor: int, place: int, until: int, budget: int) -> int:
    """Extends a live range, which ended at the event before `place`, to the run `until`."""
    before = runs.events[place - 1]
    last = bisect_left(runs.keys, 0, runs.length[0], before >> 1)
    excess = _change(runs, last + 1, until, step.size[tensor], budget)
    return excess + (_lend(step, runs, before >> 1, budget) if before % 2 else 0)


@part
def _shorten(step: Step, runs: Runs, tensor: int, place: int, until: int, budget: int) -> int:
    """Ends a live range, which lasted to the run `until`, at the event before `place`."""
    before = runs.events[place - 1]
    last = bisect_left(runs.keys, 0, runs.length[0], before >> 1)
    excess = _change(runs, last + 1, until, -step.size[tensor], budget)
    return excess + (_lend(step, runs, before >> 1, budget) if before % 2 else 0)


@part
def is_idle(step: Step, runs: Runs, key: int) -> bool:
    """Whether a run may be removed: nothing reads its outputs, and it is not their only run."""
    op = op_of(key, step.ops)
    begin, end = step.makes_at[op], step.makes_at[op + 1]
    for edge in range(begin, end):
        tensor = step.makes[edge]
        at = runs.events_at[tensor]
        last = at + runs.events_of[tensor]
        after = bisect_left(runs.events, at, last, 2 * key) + 1
        is_read = after < last and runs.events[after] % 2 == 1
        is_only = after == last and runs.events[at] == 2 * key
        if is_read or is_only:
            return False
    return step.may_repeat[op] and end > begin
