"""Search among schedules by simulated annealing.

After FastSA (Imanishi et al., "A Fast Heuristic to Optimize Time-Space Tradeoff for Large Models",
NeurIPS 2023). A move adds a run, and perhaps runs that recompute its inputs; removes one, with the
runs that only it needed; or puts one into another slot. Moves that make the schedule cheaper, or
bring it closer to the budget, are accepted; others with a probability that falls over time. The
price of a byte above the budget adapts: it rises while schedules exceed the budget and falls while
they do not, so that the search stays close to the budget, where the best schedules are. The search
for the lowest peak is the same, with a budget that is lowered whenever it is met.

To keep another tensor than before may take one move, not a series of moves each of which is worse:
where the removal of a run exceeds the budget, other tensors are recomputed instead. A move that
cannot pay for itself is rejected before it is made, as making and undoing moves is what takes time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from memory_saving_gradients.planning.moves import (
    Room,
    Terms,
    changed,
    is_first,
    take_away,
    tidy,
    undo,
)
from memory_saving_gradients.planning.native import (
    compiled,
    inlined,
    is_compiled_here,
    is_stored_here,
)
from memory_saving_gradients.planning.problem import Problem, Schedule
from memory_saving_gradients.planning.runs import (
    Runs,
    Step,
    add,
    has,
    may_add,
    op_of,
    ops_of,
    peak_of,
    remove,
    total_above,
)
from memory_saving_gradients.planning.simulate import simulate

#: The initial and the final temperature: what a move may cost, as a share of the plain cost.
HOT = 1e-3
_COLD = 1e-4

# The price of bytes above the budget: its initial value, how often it is updated, and the factor.
_FIRST_PRICE = 100.0
_PRICES = 400
_PRICE = 1.25

# The share of removed runs in whose place a search for the cheapest schedule recomputes others; a
# search for the lowest peak gains nothing by it.
_INSTEAD = 0.5

# A search for the lowest peak lowers its budget to this share of the peak.
_LOWER = 0.99


class Search(NamedTuple):
    """The goal of a search, and how long it may take.

    Attributes:
        budget: the initial budget, in bytes.
        lower: 1 to search for the cheapest schedule. Below 1 to search for the lowest peak: the
            budget becomes this share of the peak whenever it is met.
        most_cost: what a schedule may cost, in seconds, with all runs at the cost of a second one.
        most_runs: how often an op may run.
        moves: how many moves to try.
        hot: the initial temperature.
        seed: of the random choices.
        instead: as in `Terms`.
    """

    budget: int
    lower: float
    most_cost: float
    most_runs: int
    moves: int
    hot: float
    seed: int
    instead: float


def is_compiled() -> bool:
    """Whether the compiled search is cached on this machine; else its first call compiles it."""
    return is_compiled_here(_search)


def is_stored() -> bool:
    """Whether the compiled search is cached for the next process."""
    return is_stored_here(_search)


def annealed(
    problem: Problem,
    start: Schedule,
    budget: int,
    most_runs: int,
    moves: int,
    hot: float = HOT,
    seed: int = 0,
) -> Schedule | None:
    """The cheapest schedule within a budget that a search from `start` finds, or None.

    The first runs of the ops keep the order that they have in `start`.

    Args:
        problem: the step.
        start: a schedule, of any peak.
        budget: the peak allowed, in bytes.
        most_runs: how often an op may run.
        moves: how many moves to try.
        hot: what a move may cost in the beginning, as a share of the cost of the step.
        seed: of the random choices; equal seeds find equal schedules.
    """
    search = Search(budget, 1.0, math.inf, most_runs, moves, hot, seed, _INSTEAD)
    return _searched(problem, start, search)


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
    # The search counts all runs at the cost of a second one.
    most_cost -= float((problem.costs - problem.costs_again).sum())
    search = Search(budget, _LOWER, most_cost, most_runs, moves, hot, seed, 0.0)
    schedule = _searched(problem, start, search)
    return start if schedule is None else schedule


def _searched(problem: Problem, start: Schedule, search: Search) -> Schedule | None:
    """The result of `_search`, without the runs that it does not need."""
    problem, start, order = problem.in_order_of(start)
    step = Step.of(problem)
    runs = Runs.of(problem, start)
    again = problem.may_repeat & (np.arange(len(problem.ops)) < problem.forward_count)
    makers = problem.makers
    candidates = np.flatnonzero((makers >= 0) & again[makers])
    if not len(candidates):
        return None
    best = np.zeros(len(runs.keys), dtype=np.int64)
    room = Room.new()
    length = _search(step, runs, candidates, search, room, best)
    if not length:
        return None
    runs = Runs.of(problem, ops_of(best[:length], len(problem.ops)))
    budget = search.budget if search.lower == 1.0 else peak_of(runs)
    _settle(step, runs, budget, search.moves, room)
    return order[ops_of(runs.keys[: runs.length[0]], len(problem.ops))].tolist()


@compiled
def _search(
    step: Step, runs: Runs, candidates: np.ndarray, search: Search, room: Room, best: np.ndarray
) -> int:
    """Anneals `runs`; writes the keys of the best schedule to `best` and returns their number."""
    budget, moves = search.budget, search.moves
    np.random.seed(search.seed)
    plain, cost = 1e-300, 0.0
    for op in range(step.ops):
        plain += step.cost[op]
    for i in range(runs.length[0]):
        cost += step.cost[op_of(runs.keys[i], step.ops)]
    unit = plain / (float(max(budget, 1)) * step.ops)
    excess = total_above(runs, budget)
    least, length = search.most_cost, 0
    price, lowest = _FIRST_PRICE, excess
    for move in range(moves + 1):
        if excess == 0 and cost < least * (1 - 1e-12):
            length = runs.length[0]
            for i in range(length):
                best[i] = runs.keys[i]
            if search.lower < 1.0:
                budget = int(search.lower * peak_of(runs))
                excess = lowest = total_above(runs, budget)
            else:
                least = cost
        if move % max(1, moves // _PRICES) == 0:
            price = price * _PRICE if lowest > 0 else price / _PRICE
            lowest = excess
        lowest = min(lowest, excess)
        heat = plain * search.hot * (_COLD / search.hot) ** (move / moves)
        allowed = -heat * math.log(1.0 - np.random.random())
        terms = Terms(budget, search.most_runs, allowed, price * unit, search.instead)
        more, dearer = changed(step, runs, candidates, excess, terms, room)
        if dearer + terms.price * more <= allowed:
            excess += more
            cost += dearer
        else:
            undo(step, runs, budget, room)
    return length


@compiled
def _settle(step: Step, runs: Runs, budget: int, tries: int, room: Room) -> None:
    """Removes runs that a schedule within the budget does not need, with at most so many tries.

    These are second runs whose removal keeps the budget, and first runs in the backward pass that
    could be in the forward pass, where they need no copy.
    """
    factor = step.ops + 1
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
        if key % factor < step.ops and not is_first(step, runs, key):
            tries -= 1
            more, dearer = take_away(step, runs, key, budget, room)
            more, _ = tidy(step, runs, more, dearer, budget, room)
            if more > 0:
                undo(step, runs, budget, room)
            else:
                at -= 1


@inlined
def _first_of(step: Step, runs: Runs, op: int) -> int:
    """The first run of an op."""
    for i in range(runs.length[0]):
        if op_of(runs.keys[i], step.ops) == op:
            return runs.keys[i]
    return -1
