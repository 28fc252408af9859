"""Search among schedules by simulated annealing.

After FastSA (Imanishi et al., "A Fast Heuristic to Optimize Time-Space Tradeoff for Large Models",
NeurIPS 2023): a move adds a run, and perhaps runs of what it reads; takes one away, with those that
only it needed; or puts one into another slot. Moves that make the schedule cheaper, or bring it
closer to the budget, are taken; others now and then, ever more rarely. What a byte above the budget
costs follows the search: more while schedules exceed the budget, less while they do not, so that it
goes along the border, where the best ones lie. A search for the lowest peak is the same one, with a
budget that goes down whenever it is met.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from memory_saving_gradients.planning.problem import Problem, Schedule
from memory_saving_gradients.planning.runs import (
    Runs,
    Step,
    add,
    compiled,
    found,
    has,
    is_idle,
    may_add,
    op_of,
    ops_of,
    peak_of,
    remove,
    total_above,
)
from memory_saving_gradients.planning.simulate import simulate

#: The temperature in the beginning and in the end: what a move may cost, as a share of all runs.
HOT = 1e-3
_COLD = 1e-5

# The price of what exceeds the budget is looked at so many times, and changed by this factor.
_FIRST_PRICE = 100.0
_PRICES = 400
_PRICE = 1.25

# The shares of the moves that add a run and of those that take one away.
_ADDING, _REMOVING = 0.5, 0.3

# A run is moved by no more slots than this, most often by far fewer.
_FARTHEST = 40

# No move adds and removes more runs than this.
_LONGEST = 500

# A search for the lowest peak goes down in such steps.
_LOWER = 0.99


class Search(NamedTuple):
    """What a search is to find, and how long it may take.

    Attributes:
        budget: the peak to begin with, in bytes.
        lower: below one, the budget becomes this share of the peak whenever it is met: then the
            best schedule is the lowest one; else it is the cheapest.
        most_cost: what a schedule may cost, in seconds.
        most_runs: how often an op may run.
        moves: how many moves to try.
        hot: the temperature in the beginning.
        seed: of the random choices.
    """

    budget: int
    lower: float
    most_cost: float
    most_runs: int
    moves: int
    hot: float
    seed: int


def annealed(
    problem: Problem,
    start: Schedule,
    budget: int,
    most_runs: int,
    moves: int,
    hot: float = HOT,
    seed: int = 0,
) -> Schedule | None:
    """The cheapest schedule within a budget that a search from `start` finds; None for none.

    It runs the ops for the first time in the order in which `start` does.

    Args:
        problem: the step.
        start: a schedule, of any peak.
        budget: the peak allowed, in bytes.
        most_runs: how often an op may run.
        moves: how many moves to try.
        hot: what a move may cost in the beginning, as a share of the cost of the step.
        seed: of the random choices; equal seeds find equal schedules.
    """
    return _found(problem, start, Search(budget, 1.0, math.inf, most_runs, moves, hot, seed))


def lowered(
    problem: Problem,
    start: Schedule,
    most_runs: int,
    moves: int,
    hot: float = HOT,
    seed: int = 0,
    most_cost: float = math.inf,
) -> Schedule:
    """The schedule of the lowest peak that a search from `start` finds; at worst `start`.

    Args:
        problem: the step.
        start: a schedule of it.
        most_runs: how often an op may run.
        moves: how many moves to try.
        hot: what a move may cost in the beginning, as a share of the cost of the step.
        seed: of the random choices; equal seeds find equal schedules.
        most_cost: what the schedule may cost, in seconds.
    """
    budget = int(_LOWER * simulate(problem, start).peak)
    search = Search(budget, _LOWER, most_cost, most_runs, moves, hot, seed)
    found = _found(problem, start, search)
    return start if found is None else found


def _found(problem: Problem, start: Schedule, search: Search) -> Schedule | None:
    """What `_search` finds, without what it does not need."""
    problem, start, order = problem.in_order_of(start)
    step = Step.of(problem)
    runs = Runs.of(problem, start)
    again = problem.may_repeat & (np.arange(len(problem.ops)) < problem.forward_count)
    makers = problem.makers
    candidates = np.flatnonzero((makers >= 0) & again[makers])
    if not len(candidates):
        return None
    best = np.zeros(len(runs.keys), dtype=np.int64)
    length = _search(step, runs, candidates, search, best)
    if not length:
        return None
    runs = Runs.of(problem, ops_of(best[:length], len(problem.ops)))
    _settle(step, runs, search.budget if search.lower == 1.0 else peak_of(runs), search.moves)
    return order[ops_of(runs.keys[: runs.length[0]], len(problem.ops))].tolist()


@compiled
def _search(
    step: Step, runs: Runs, candidates: np.ndarray, search: Search, best: np.ndarray
) -> int:
    """Anneals `runs`; writes the keys of the best to `best` and returns how many they are."""
    budget, most_runs, moves = search.budget, search.most_runs, search.moves
    np.random.seed(search.seed)
    plain = 1e-300 + step.cost.sum()
    unit = 1.0 / (float(max(budget, 1)) * step.ops)
    cost = 0.0
    for i in range(runs.length[0]):
        cost += step.cost[op_of(runs.keys[i], step.ops)]
    excess = total_above(runs, budget)
    least, length = search.most_cost, 0
    price, lowest = _FIRST_PRICE, excess
    trail = np.empty(_LONGEST, np.int64)
    for move in range(moves):
        if excess == 0 and cost < least * (1 - 1e-12):
            length = runs.length[0]
            best[:length] = runs.keys[:length]
            if search.lower < 1.0:
                budget = int(search.lower * peak_of(runs))
                excess = lowest = total_above(runs, budget)
            else:
                least = cost
        if move % max(1, moves // _PRICES) == 0:
            price = price * _PRICE if lowest > 0 else price / _PRICE
            lowest = excess
        lowest = min(lowest, excess)
        heat = search.hot * (_COLD / search.hot) ** (move / moves)
        kind = np.random.random()
        if kind < _ADDING:
            more, dearer, done = _run_again(step, runs, candidates, budget, most_runs, trail)
        elif kind < _ADDING + _REMOVING:
            more, dearer, done = _run_less(step, runs, budget, trail)
        else:
            more, dearer, done = _run_elsewhere(step, runs, budget, most_runs, trail)
        worse = dearer / plain + price * unit * more
        if worse <= 0 or np.random.random() < np.exp(-worse / heat):
            excess += more
            cost += dearer
        else:
            for i in range(done - 1, -1, -1):
                if trail[i] >= 0:
                    remove(step, runs, trail[i], budget)
                else:
                    add(step, runs, ~trail[i], budget)
    if excess == 0 and cost < least * (1 - 1e-12):
        length = runs.length[0]
        best[:length] = runs.keys[:length]
    return length


@compiled
def _settle(step: Step, runs: Runs, budget: int, tries: int) -> None:
    """Takes away what a schedule within the budget does not need, as far as so many tries go.

    Those are second runs that there is room to spare, and first runs that come late though they
    could come in the forward pass: what runs there is no copy.
    """
    factor = step.ops + 1
    trail = np.empty(_LONGEST, np.int64)
    for op in range(step.first):
        home = op * factor + step.ops
        if tries > 0 and not has(runs, home) and may_add(step, runs, home):
            tries -= 1
            late = _first_of(step, runs, op)
            more = add(step, runs, home, budget)
            more += remove(step, runs, late, budget)
            if more > 0:
                add(step, runs, late, budget)
                remove(step, runs, home, budget)
    at = 0
    while at < runs.length[0] and tries > 0:
        key = runs.keys[at]
        at += 1
        if key % factor < step.ops and not _is_first(step, runs, key):
            tries -= 1
            more = remove(step, runs, key, budget)
            trail[0] = ~key
            less, _, done = _tidy(step, runs, key, budget, trail, 1)
            if more + less > 0:
                for i in range(done - 1, -1, -1):
                    add(step, runs, ~trail[i], budget)
            else:
                at -= 1


@compiled
def _first_of(step: Step, runs: Runs, op: int) -> int:
    """The first run of an op."""
    for i in range(runs.length[0]):
        if op_of(runs.keys[i], step.ops) == op:
            return runs.keys[i]
    return -1


@compiled
def _run_again(
    step: Step, runs: Runs, candidates: np.ndarray, budget: int, most_runs: int, trail: np.ndarray
) -> tuple[int, float, int]:
    """Makes a tensor again before a backward op that reads it; perhaps what that takes, too.

    Returns, as all moves do, the change in excess and in cost, and how many runs of `trail` were
    added (key) or removed (~key).
    """
    factor = step.ops + 1
    tensor = candidates[np.random.randint(len(candidates))]
    begin, count = runs.events_at[tensor], runs.events_of[tensor]
    if count < 2:
        return 0, 0.0, 0
    place = begin + 1 + np.random.randint(count - 1)
    slot = (runs.events[place] >> 1) // factor
    is_read = runs.events[place] % 2 == 1
    if not is_read or slot < step.first or slot >= step.ops:
        return 0, 0.0, 0
    if (runs.events[place - 1] >> 1) // factor == slot:  # it is there for this slot already
        return 0, 0.0, 0
    chance = np.random.random()
    waiting = np.empty(64, np.int64)
    waiting[0] = step.made_by[tensor]
    left, done, more, dearer = 1, 0, 0, 0.0
    while left:
        left -= 1
        op = waiting[left]
        key = slot * factor + op
        full = not step.may_repeat[op] or runs.times[op] >= most_runs or done >= _LONGEST // 2
        if full or has(runs, key) or not may_add(step, runs, key):
            continue
        more += add(step, runs, key, budget)
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
            if is_last and is_far and left < len(waiting) and np.random.random() < chance:
                waiting[left] = step.made_by[read]
                left += 1
    for i in range(done):
        less, cheaper, done = _tidy(step, runs, trail[i], budget, trail, done)
        more += less
        dearer += cheaper
    return more, dearer, done


@compiled
def _run_less(step: Step, runs: Runs, budget: int, trail: np.ndarray) -> tuple[int, float, int]:
    """Takes a second run away, with those that only it needed."""
    key = runs.keys[np.random.randint(runs.length[0])]
    op = key % (step.ops + 1)
    if op == step.ops or _is_first(step, runs, key):
        return 0, 0.0, 0
    more = remove(step, runs, key, budget)
    trail[0] = ~key
    less, cheaper, done = _tidy(step, runs, key, budget, trail, 1)
    return more + less, cheaper - step.cost[op], done


@compiled
def _run_elsewhere(
    step: Step, runs: Runs, budget: int, most_runs: int, trail: np.ndarray
) -> tuple[int, float, int]:
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
        other, late = slot * factor + op, not _is_first(step, runs, key)
        if slot < step.first or slot >= step.ops:
            return 0, 0.0, 0
    full = not late and (not step.may_repeat[op] or runs.times[op] >= most_runs)
    if full or has(runs, other) or not may_add(step, runs, other):
        return 0, 0.0, 0
    more, dearer, done = add(step, runs, other, budget), step.cost[op], 1
    trail[0] = other
    if late:
        more += remove(step, runs, key, budget)
        dearer -= step.cost[op]
        trail[1] = ~key
        less, cheaper, done = _tidy(step, runs, key, budget, trail, 2)
        more += less
        dearer += cheaper
    less, cheaper, done = _tidy(step, runs, other, budget, trail, done)
    return more + less, dearer + cheaper, done


@compiled
def _is_first(step: Step, runs: Runs, key: int) -> bool:
    """Whether a run is the first to make something."""
    op = op_of(key, step.ops)
    for edge in range(step.makes_at[op], step.makes_at[op + 1]):
        if runs.events[runs.events_at[step.makes[edge]]] == 2 * key:
            return True
    return False


@compiled
def _tidy(
    step: Step, runs: Runs, key: int, budget: int, trail: np.ndarray, done: int
) -> tuple[int, float, int]:
    """Removes the runs that nothing needs since one was added or removed; returns as a move does.

    Those are runs that made what `key` reads, or what it makes anew, and runs that led to them.
    """
    waiting = np.empty(256, np.int64)
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
