"""The moves of a search: each changes a schedule a little, and can be undone.

A move returns the change in excess over the budget and that in cost: `more` and `dearer`. Parts of
it that get these add to them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memory_saving_gradients.planning.native import inlined, part
from memory_saving_gradients.planning.runs import (
    Runs,
    Step,
    above,
    add,
    bisect_left,
    has,
    is_idle,
    may_add,
    op_of,
    remove,
)

# The most slots by which a run is moved; mostly it is far fewer.
_FARTHEST = 40

# The most runs that a move adds and removes.
_LONGEST = 500

# How many tensors are tried to find one that is alive, but not read, during a given run.
_TRIES = 20

# The share of moves that free memory where the budget is exceeded; of those that add a run anywhere
# where it is not; and, of the other moves, the share that removes a run.
_RELIEVING, _ADDING, _REMOVING = 0.45, 0.4, 0.7

# In the place of a run that a move removes, it recomputes at most so many other tensors.
_INSTEAD = 3


class Terms(NamedTuple):
    """The terms on which a move is accepted.

    Attributes:
        budget: the peak allowed, in bytes.
        most_runs: how often an op may run.
        allowed: how much worse the schedule may become, in seconds.
        price: the price of a byte of excess, in seconds.
        instead: the share of removed runs in whose place other tensors may be recomputed.
    """

    budget: int
    most_runs: int
    allowed: float
    price: float
    instead: float


class Room(NamedTuple):
    """Buffers that moves write to.

    Attributes:
        trail: the runs that a move has added (key) or removed (~key).
        done: how many they are.
        ahead: a stack of ops that the move is to run again.
        idle: a stack of runs that it may remove.
    """

    trail: np.ndarray
    done: np.ndarray
    ahead: np.ndarray
    idle: np.ndarray

    @classmethod
    def new(cls) -> Room:
        return cls(*(np.zeros(size, dtype=np.int64) for size in (_LONGEST, 1, 64, 256)))


@part
def undo(step: Step, runs: Runs, budget: int, room: Room) -> None:
    """Undoes a move."""
    trail = room.trail
    for i in range(room.done[0] - 1, -1, -1):
        if trail[i] >= 0:
            remove(step, runs, trail[i], budget)
        else:
            add(step, runs, ~trail[i], budget)


@inlined
def changed(
    step: Step, runs: Runs, candidates: np.ndarray, excess: int, terms: Terms, room: Room
) -> tuple[int, float]:
    """Makes a random move, which may recompute the `candidates`."""
    room.done[0] = 0
    more, dearer = 0, 0.0
    kind = np.random.random()
    relieving = excess > 0 and kind < _RELIEVING
    adding = not relieving and kind < _ADDING
    removing = not (relieving or adding) and kind < _ADDING + _REMOVING * (1 - _ADDING)
    instead = removing and terms.instead > 0 and np.random.random() < terms.instead
    for time in range(1 + _INSTEAD):
        tensor, place = -1, 0
        if relieving or time > 0:
            tensor, place = in_the_way(runs, candidates, terms.budget)
        elif adding:
            tensor, place = anything(runs, candidates)
        elif removing:
            more, dearer = run_less(step, runs, terms.budget, room)
        else:
            more, dearer = run_elsewhere(step, runs, terms, room)
        if tensor >= 0:
            more, dearer = run_again(step, runs, tensor, place, more, dearer, terms, room)
        more, dearer = tidy(step, runs, more, dearer, terms.budget, room)
        if not instead or more <= 0 or excess + more <= 0:
            break
    return more, dearer


@inlined
def in_the_way(runs: Runs, candidates: np.ndarray, budget: int) -> tuple[int, int]:
    """A tensor that is alive, but not read, during a run that exceeds the budget; -1 for none.

    It comes with the place of its next event.
    """
    key = runs.keys[_exceeding(runs, budget)]
    for _ in range(_TRIES):
        tensor = candidates[np.random.randint(len(candidates))]
        begin = runs.events_at[tensor]
        end = begin + runs.events_of[tensor]
        place = bisect_left(runs.events, begin, end, 2 * key)
        is_alive = begin < place < end and runs.events[place] % 2 == 1
        if is_alive and runs.events[place] >> 1 != key:
            return tensor, place
    return -1, 0


@inlined
def _exceeding(runs: Runs, budget: int) -> int:
    """The first run that exceeds the budget, from a random one on; there is one."""
    length = runs.length[0]
    at = np.random.randint(length)
    for _ in range(length):
        if runs.live[at] + runs.scratch[at] > budget:
            break
        at = at + 1 if at + 1 < length else 0
    return at


@inlined
def anything(runs: Runs, candidates: np.ndarray) -> tuple[int, int]:
    """A tensor and the place of an event of it; -1 for none."""
    tensor = candidates[np.random.randint(len(candidates))]
    count = runs.events_of[tensor]
    if count < 2:
        return -1, 0
    return tensor, runs.events_at[tensor] + 1 + np.random.randint(count - 1)


@inlined
def run_again(
    step: Step,
    runs: Runs,
    tensor: int,
    place: int,
    more: int,
    dearer: float,
    terms: Terms,
    room: Room,
) -> tuple[int, float]:
    """Recomputes a tensor before the backward op of one of its events; perhaps its inputs, too."""
    factor = step.ops + 1
    before, event = runs.events[place - 1], runs.events[place]
    slot = (event >> 1) // factor
    if event % 2 == 0 or slot < step.first or slot >= step.ops:
        return more, dearer
    if (before >> 1) // factor == slot:  # it is there for this slot already
        return more, dearer
    if before % 2 == 1 or place - 1 == runs.events_at[tensor]:  # no run becomes needless
        dear = dearer + step.cost[step.made_by[tensor]] + terms.price * more - terms.allowed
        if dear > 0 and dear > terms.price * _relief(step, runs, tensor, place, terms.budget):
            return more, dearer
    chance = np.random.random()
    ahead, trail = room.ahead, room.trail
    ahead[0] = step.made_by[tensor]
    left, done = 1, room.done[0]
    while left:
        left -= 1
        op = ahead[left]
        key = slot * factor + op
        full = not step.may_repeat[op] or runs.times[op] >= terms.most_runs
        if full or done >= _LONGEST // 2 or has(runs, key) or not may_add(step, runs, key):
            continue
        more += add(step, runs, key, terms.budget)
        dearer += step.cost[op]
        trail[done] = key
        done += 1
        for edge in range(step.reads_at[op], step.reads_at[op + 1]):
            read = step.reads[edge]
            at = runs.events_at[read]
            end = at + runs.events_of[read]
            at = bisect_left(runs.events, at, end, 2 * key + 1)
            is_last = at + 1 == end or runs.events[at + 1] % 2 == 0
            is_far = (runs.events[at - 1] >> 1) // factor != slot
            # The input now lives on to this slot, unless it is recomputed as well.
            if is_last and is_far and left < len(ahead) and np.random.random() < chance:
                ahead[left] = step.made_by[read]
                left += 1
    room.done[0] = done
    return more, dearer


@inlined
def _relief(step: Step, runs: Runs, tensor: int, place: int, budget: int) -> int:
    """By how much the excess falls if a tensor is not alive between two successive events."""
    length, size = runs.length[0], step.size[tensor]
    begin = bisect_left(runs.keys, 0, length, runs.events[place - 1] >> 1) + 1
    end = bisect_left(runs.keys, begin, length, runs.events[place] >> 1)
    relief = 0
    for i in range(begin, end):
        taken = runs.live[i] + runs.scratch[i]
        relief += above(taken, budget) - above(taken - size, budget)
    return relief


@inlined
def run_less(step: Step, runs: Runs, budget: int, room: Room) -> tuple[int, float]:
    """Removes a random second run."""
    key = runs.keys[np.random.randint(runs.length[0])]
    op = key % (step.ops + 1)
    if op == step.ops or is_first(step, runs, key):
        return 0, 0.0
    return take_away(step, runs, key, budget, room)


@part
def take_away(step: Step, runs: Runs, key: int, budget: int, room: Room) -> tuple[int, float]:
    """Removes a run."""
    room.trail[0], room.done[0] = ~key, 1
    return remove(step, runs, key, budget), -step.cost[op_of(key, step.ops)]


@inlined
def run_elsewhere(step: Step, runs: Runs, terms: Terms, room: Room) -> tuple[int, float]:
    """Moves a second run to another slot, or an op that first runs late to the forward pass."""
    factor = step.ops + 1
    key = runs.keys[np.random.randint(runs.length[0])]
    op = key % factor
    if op == step.ops:
        op = np.random.randint(step.first)
        other, late = op * factor + step.ops, False
    else:
        far = 1 + int(np.random.random() ** 3 * _FARTHEST)
        slot = key // factor + (far if np.random.random() < 0.5 else -far)
        other, late = slot * factor + op, not is_first(step, runs, key)
        if slot < step.first or slot >= step.ops:
            return 0, 0.0
    full = not late and (not step.may_repeat[op] or runs.times[op] >= terms.most_runs)
    if full or has(runs, other) or not may_add(step, runs, other):
        return 0, 0.0
    more, dearer = add(step, runs, other, terms.budget), step.cost[op]
    room.trail[0], room.done[0] = other, 1
    if late:
        more += remove(step, runs, key, terms.budget)
        dearer -= step.cost[op]
        room.trail[1], room.done[0] = ~key, 2
    return more, dearer


@part
def is_first(step: Step, runs: Runs, key: int) -> bool:
    """Whether a run is the first to make one of its outputs."""
    op = op_of(key, step.ops)
    for edge in range(step.makes_at[op], step.makes_at[op + 1]):
        if runs.events[runs.events_at[step.makes[edge]]] == 2 * key:
            return True
    return False


@part
def tidy(
    step: Step, runs: Runs, more: int, dearer: float, budget: int, room: Room
) -> tuple[int, float]:
    """Removes the runs that a move made unnecessary.

    Candidates are the runs that made the inputs of runs of the trail, or earlier copies of their
    outputs, and in turn the runs that made the inputs of removed ones.
    """
    waiting, trail, done = room.idle, room.trail, room.done[0]
    left = 0
    for i in range(done):
        key = trail[i] if trail[i] >= 0 else ~trail[i]
        left = _made_for(step, runs, key, waiting, left)
        op = op_of(key, step.ops)
        for edge in range(step.makes_at[op], step.makes_at[op + 1]):
            left = _made_before(runs, step.makes[edge], key, waiting, left)
    while left and done < len(trail):
        left -= 1
        idle = waiting[left]
        if has(runs, idle) and is_idle(step, runs, idle):
            more += remove(step, runs, idle, budget)
            dearer -= step.cost[op_of(idle, step.ops)]
            trail[done] = ~idle
            done += 1
            left = _made_for(step, runs, idle, waiting, left)
    room.done[0] = done
    return more, dearer


@part
def _made_for(step: Step, runs: Runs, key: int, waiting: np.ndarray, left: int) -> int:
    """Adds the runs that made the inputs of a run to `waiting`, if nothing else reads these."""
    op = op_of(key, step.ops)
    for edge in range(step.reads_at[op], step.reads_at[op + 1]):
        left = _made_before(runs, step.reads[edge], key, waiting, left)
    return left


@part
def _made_before(runs: Runs, tensor: int, key: int, waiting: np.ndarray, left: int) -> int:
    """Adds the run that made a tensor before `key` to `waiting`, if nothing reads it between."""
    begin = runs.events_at[tensor]
    place = bisect_left(runs.events, begin, begin + runs.events_of[tensor], 2 * key)
    if place > begin and runs.events[place - 1] % 2 == 0 and left < len(waiting):
        waiting[left] = runs.events[place - 1] >> 1
        return left + 1
    return left
