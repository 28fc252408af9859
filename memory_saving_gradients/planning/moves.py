"""The moves of a search: each changes a schedule a little, and can be undone.

A move returns the change in excess over the budget, the change in cost, and how many runs of the
trail it has added or removed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memory_saving_gradients.planning.runs import (
    Runs,
    Step,
    above,
    add,
    compiled,
    found,
    has,
    is_idle,
    may_add,
    op_of,
    remove,
)

# A run is moved by no more slots than this, most often by far fewer.
_FARTHEST = 40

# No move adds and removes more runs than this.
_LONGEST = 500

# So many tensors are tried to find one that is alive, and not read, during a given run.
_TRIES = 20


class Terms(NamedTuple):
    """What a move is judged by.

    Attributes:
        budget: the peak allowed, in bytes.
        most_runs: how often an op may run.
        allowed: how much worse the schedule may become, in seconds.
        price: what a byte of excess counts for, in seconds.
    """

    budget: int
    most_runs: int
    allowed: float
    price: float


class Room(NamedTuple):
    """Where moves write.

    Attributes:
        trail: the runs that a move has added (key) or removed (~key).
        ahead: the ops that it will run again.
        idle: the runs that it may take away.
    """

    trail: np.ndarray
    ahead: np.ndarray
    idle: np.ndarray

    @classmethod
    def new(cls) -> Room:
        return cls(*(np.zeros(size, dtype=np.int64) for size in (_LONGEST, 64, 256)))


@compiled
def undo(step: Step, runs: Runs, budget: int, trail: np.ndarray, done: int) -> None:
    """Takes back the moves of a trail, so many of them."""
    for i in range(done - 1, -1, -1):
        if trail[i] >= 0:
            remove(step, runs, trail[i], budget)
        else:
            add(step, runs, ~trail[i], budget)


@compiled
def relieve(
    step: Step, runs: Runs, candidates: np.ndarray, terms: Terms, room: Room
) -> tuple[int, float, int]:
    """Makes something again that is alive, and not read, during a run that exceeds the budget."""
    key = runs.keys[_exceeding(runs, terms.budget)]
    for _ in range(_TRIES):
        tensor = candidates[np.random.randint(len(candidates))]
        begin = runs.events_at[tensor]
        end = begin + runs.events_of[tensor]
        place = found(runs.events, begin, end, 2 * key)
        is_alive = begin < place < end and runs.events[place] % 2 == 1
        if is_alive and runs.events[place] >> 1 != key:
            return _make_again(step, runs, tensor, place, terms, room)
    return 0, 0.0, 0


@compiled
def _exceeding(runs: Runs, budget: int) -> int:
    """The first run that exceeds the budget, from a random one on; there is one."""
    length = runs.length[0]
    at = np.random.randint(length)
    for _ in range(length):
        if runs.live[at] + runs.beside[at] > budget:
            break
        at = at + 1 if at + 1 < length else 0
    return at


@compiled
def run_again(
    step: Step, runs: Runs, candidates: np.ndarray, terms: Terms, room: Room
) -> tuple[int, float, int]:
    """Makes something again before an op that reads it."""
    tensor = candidates[np.random.randint(len(candidates))]
    count = runs.events_of[tensor]
    if count < 2:
        return 0, 0.0, 0
    place = runs.events_at[tensor] + 1 + np.random.randint(count - 1)
    return _make_again(step, runs, tensor, place, terms, room)


@compiled
def _make_again(
    step: Step, runs: Runs, tensor: int, place: int, terms: Terms, room: Room
) -> tuple[int, float, int]:
    """Makes a tensor again before the backward op that is one of its events; perhaps what that
    takes, too."""
    factor = step.ops + 1
    before, event = runs.events[place - 1], runs.events[place]
    slot = (event >> 1) // factor
    if event % 2 == 0 or slot < step.first or slot >= step.ops:
        return 0, 0.0, 0
    if (before >> 1) // factor == slot:  # it is there for this slot already
        return 0, 0.0, 0
    if before % 2 == 1 or place - 1 == runs.events_at[tensor]:  # no run becomes needless
        dear = step.cost[step.made_by[tensor]] - terms.allowed
        if dear > 0 and dear > terms.price * _relief(step, runs, tensor, place, terms.budget):
            return 0, 0.0, 0
    chance = np.random.random()
    ahead, trail = room.ahead, room.trail
    ahead[0] = step.made_by[tensor]
    left, done, more, dearer = 1, 0, 0, 0.0
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
            at = found(runs.events, at, end, 2 * key + 1)
            is_last = at + 1 == end or runs.events[at + 1] % 2 == 0
            is_far = (runs.events[at - 1] >> 1) // factor != slot
            # Now it lives on to this slot: or else it is made again as well.
            if is_last and is_far and left < len(ahead) and np.random.random() < chance:
                ahead[left] = step.made_by[read]
                left += 1
    for i in range(done):
        less, cheaper, done = tidy(step, runs, trail[i], terms.budget, room, done)
        more += less
        dearer += cheaper
    return more, dearer, done


@compiled
def _relief(step: Step, runs: Runs, tensor: int, place: int, budget: int) -> int:
    """By how much the excess falls if a tensor is not alive between an event and the one before."""
    length, size = runs.length[0], step.size[tensor]
    begin = found(runs.keys, 0, length, runs.events[place - 1] >> 1) + 1
    end = found(runs.keys, begin, length, runs.events[place] >> 1)
    relief = 0
    for i in range(begin, end):
        taken = runs.live[i] + runs.beside[i]
        relief += above(taken, budget) - above(taken - size, budget)
    return relief


@compiled
def run_less(step: Step, runs: Runs, terms: Terms, room: Room) -> tuple[int, float, int]:
    """Takes a second run away, with those that only it needed."""
    key = runs.keys[np.random.randint(runs.length[0])]
    op = key % (step.ops + 1)
    if op == step.ops or is_first(step, runs, key):
        return 0, 0.0, 0
    more = remove(step, runs, key, terms.budget)
    room.trail[0] = ~key
    less, cheaper, done = tidy(step, runs, key, terms.budget, room, 1)
    return more + less, cheaper - step.cost[op], done


@compiled
def run_elsewhere(step: Step, runs: Runs, terms: Terms, room: Room) -> tuple[int, float, int]:
    """Puts a second run into another slot, or an op that runs late back into the forward pass."""
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
            return 0, 0.0, 0
    full = not late and (not step.may_repeat[op] or runs.times[op] >= terms.most_runs)
    if full or has(runs, other) or not may_add(step, runs, other):
        return 0, 0.0, 0
    more, dearer, done = add(step, runs, other, terms.budget), step.cost[op], 1
    room.trail[0] = other
    if late:
        more += remove(step, runs, key, terms.budget)
        dearer -= step.cost[op]
        room.trail[1] = ~key
        less, cheaper, done = tidy(step, runs, key, terms.budget, room, 2)
        more += less
        dearer += cheaper
    less, cheaper, done = tidy(step, runs, other, terms.budget, room, done)
    return more + less, dearer + cheaper, done


@compiled
def is_first(step: Step, runs: Runs, key: int) -> bool:
    """Whether a run is the first to make something."""
    op = op_of(key, step.ops)
    for edge in range(step.makes_at[op], step.makes_at[op + 1]):
        if runs.events[runs.events_at[step.makes[edge]]] == 2 * key:
            return True
    return False


@compiled
def tidy(
    step: Step, runs: Runs, key: int, budget: int, room: Room, done: int
) -> tuple[int, float, int]:
    """Removes the runs that nothing needs since one was added or removed; returns as a move does.

    Those are runs that made what `key` reads, or what it makes anew, and runs that led to them.
    """
    waiting, trail = room.idle, room.trail
    left, more, dearer = 0, 0, 0.0
    op = op_of(key, step.ops)
    for edge in range(step.makes_at[op], step.makes_at[op + 1]):
        left = _made_before(runs, step.makes[edge], key, waiting, left)
    for edge in range(step.reads_at[op], step.reads_at[op + 1]):
        left = _made_before(runs, step.reads[edge], key, waiting, left)
    while left and done < len(trail):
        left -= 1
        idle = waiting[left]
        if not has(runs, idle) or not is_idle(step, runs, idle):
            continue
        more += remove(step, runs, idle, budget)
        op = op_of(idle, step.ops)
        dearer -= step.cost[op]
        trail[done] = ~idle
        done += 1
        for edge in range(step.reads_at[op], step.reads_at[op + 1]):
            left = _made_before(runs, step.reads[edge], idle, waiting, left)
    return more, dearer, done


@compiled
def _made_before(runs: Runs, tensor: int, key: int, waiting: np.ndarray, left: int) -> int:
    """Adds the run that made a tensor before `key` to `waiting`, if nothing reads it between."""
    begin = runs.events_at[tensor]
    place = found(runs.events, begin, begin + runs.events_of[tensor], 2 * key)
    if place > begin and runs.events[place - 1] % 2 == 0 and left < len(waiting):
        waiting[left] = runs.events[place - 1] >> 1
        return left + 1
    return left
