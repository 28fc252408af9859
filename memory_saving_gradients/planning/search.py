"""The cheapest schedule within a budget, and the schedule of the lowest peak.

Searches (`anneal`) start from several promising schedules: the tensors that the one-cut program
keeps, nested segments, cuts, cheap recomputation. The better half of their results is searched on,
until one is left.

The search is randomised, so its result need not be optimal. `bounds` bounds the distance from the
optimum.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np

from memory_saving_gradients.planning.anneal import HOT, annealed, lowered
from memory_saving_gradients.planning.bounds import least_peak, one_cut
from memory_saving_gradients.planning.cuts import Segments, kept_at
from memory_saving_gradients.planning.keep import keeping
from memory_saving_gradients.planning.nested import Nested
from memory_saving_gradients.planning.problem import Problem, Schedule, baseline
from memory_saving_gradients.planning.progress import reported
from memory_saving_gradients.planning.reorder import reordered
from memory_saving_gradients.planning.simulate import simulate

# The budgets of the one-cut program, as shares of the real one, as it ignores transient bytes; only
# the first two for problems of more than `_MANY_OPS` ops, where each start takes long.
_KEPT = (1.0, 0.7, 0.5, 0.4)

# The share of an allowed overhead that the one-cut program may use, as it undercounts costs.
_PROMISED = 0.9

# For problems of more ops than this, the solver would take most of the planning time.
_LARGEST_PROGRAM = 30_000

# The number of moves of a search: fewer for problems of more than `_MANY_OPS` ops, whose moves take
# longer, and never more than `_MOVES_PER_OP` for each op.
_MOVES = 100_000
_MANY_OPS = 2_000
_MOVES_PER_OP = 1_000

# The parts of these moves that a search has from a start, and from the better half of the results.
_FIRST, _AMONG = 32, 8

# The search continues from the best schedule at a lower temperature, then from the same runs in
# another order: for at most `_ROUNDS` rounds, as long as each makes it cheaper by the share
# `_GIVE_UP`; not at all if its cost is within `_CLOSE` of the lower bound already.
_LATER_HOT = 3e-4
_ROUNDS = 6
_GIVE_UP = 0.001
_CLOSE = 0.002

# Another order must save this share of the cost, as the runtime's behaviour is predicted better for
# the order of the graph.
_WORTH_IT = 0.005

# The search for the lowest peak starts from the plain step, and from the best of the cuts for these
# multiples of the lowest peak that their model finds feasible. It continues from the best result
# for at most `_LOWER_ROUNDS` rounds, as long as each lowers the peak by the share `_LOWER`.
_CUTS = (1.0, 1.01, 1.02, 1.035, 1.05, 1.1, 1.2, 1.3)
_LOWER_ROUNDS = 4
_LOWER = 0.01

# The peak is then lowered by a share of it, by half of that share where it cannot be, and so on:
# the first share, the least one, and how often. First by short searches, then by whole ones.
_STEPS = (0.1, 0.01, 16)
_LAST_STEPS = (0.05, 0.05, 2)

# The temperature of the search that runs no expensive op twice: it has fewer schedules to explore.
_HOTTER = 1e-2

#: `most_runs` where nothing bounds how often an op may run.
UNBOUNDED = 2**31


def within(
    problem: Problem,
    budget: int,
    most_runs: int = UNBOUNDED,
    known: Schedule | None = None,
) -> Schedule:
    """The cheapest schedule found within a budget.

    Args:
        problem: the step.
        budget: the peak allowed, in bytes.
        most_runs: how often an op may run.
        known: one more schedule to start from, which is within the budget. Without it, if no start
            leads to a schedule within the budget, we search for the lowest peak, which takes time.

    Returns:
        The schedule. If none was found within the budget, the one of the lowest peak found.
    """
    # A forward op that first runs after a backward op is copied, so the forward pass comes first.
    begun = sorted(baseline(problem), key=lambda op: op >= problem.forward_count)
    for plain in (range(len(problem.ops)), begun):
        if simulate(problem, plain).peak <= budget or not problem.may_repeat.any():
            return plain
    kept_sets, bound = _one_cut(problem, budget)
    if bound == math.inf or budget < least_peak(problem):
        return known or lowest(problem, most_runs)
    starts = [*_starts(problem, budget, kept_sets), lowest_of_cheap(problem, most_runs)]
    starts += [known] if known else []
    starts = [start for start in starts if times_run(problem, start) <= most_runs]
    moves = most_moves(problem) // _FIRST
    found = (annealed(problem, start, budget, most_runs, moves) for start in reported(starts))
    fitting: list[Schedule] = [schedule for schedule in found if schedule]
    if not fitting:
        floor = known or lowest(problem, most_runs)
        if simulate(problem, floor).peak > budget:
            return floor
        fitting.append(floor)
    enough = (1 + bound) * problem.costs.sum() * (1 + _CLOSE)
    best = _winner(problem, fitting, budget, most_runs, enough)
    if _cost(problem, best) < enough:
        return best
    best = _improved(problem, best, budget, most_runs, _LATER_HOT, lambda best, seed: best)
    if problem.waits is None:
        return best
    other_order = functools.partial(reordered, problem)
    other = _improved(problem, best, budget, most_runs, HOT, other_order)
    worth_it = _cost(problem, other) < (1 - _WORTH_IT) * _cost(problem, best)
    return other if worth_it else best


def _winner(
    problem: Problem, schedules: list[Schedule], budget: int, most_runs: int, enough: float
) -> Schedule:
    """The best schedule after rounds of searches from the better half of those of the last round.

    Args:
        problem: the step.
        schedules: schedules within the budget.
        budget: the peak allowed, in bytes.
        most_runs: how often an op may run.
        enough: the cost, in seconds, below which no better one is looked for.
    """
    moves = most_moves(problem) // _AMONG
    best, round_ = cheapest(problem, schedules), 0
    while len(schedules) > 3 and _cost(problem, best) >= enough:
        round_ += 1
        better = sorted(schedules, key=functools.partial(_cost, problem))[: len(schedules) // 2]
        found = (
            annealed(problem, start, budget, most_runs, moves, _LATER_HOT, seed=round_) or start
            for start in reported(better)
        )
        schedules = [cheapest(problem, pair) for pair in zip(better, found, strict=True)]
        best = cheapest(problem, schedules)
    return best


def _improved(
    problem: Problem,
    best: Schedule,
    budget: int,
    most_runs: int,
    hot: float,
    start: Callable[[Schedule, int], Schedule],
) -> Schedule:
    """The best schedule after rounds of searches, each from `start(best, round)`."""
    for round_ in reported(range(1, _ROUNDS + 1)):
        moves = most_moves(problem) // 4
        candidate = annealed(
            problem, start(best, round_), budget, most_runs, moves, hot, seed=round_
        )
        before, best = best, cheapest(problem, [best, candidate] if candidate else [best])
        if _cost(problem, before) <= (1 + _GIVE_UP) * _cost(problem, best):
            break
    return best


def lowest(
    problem: Problem, most_runs: int = UNBOUNDED, max_overhead: float = math.inf
) -> Schedule:
    """The schedule of the lowest peak found; `within` meets any budget down to it.

    Searches that lower the peak as they cool down spend all that is allowed early. So we then look
    for cheap schedules of ever lower peaks.

    Args:
        problem: the step.
        most_runs: how often an op may run.
        max_overhead: the extra cost allowed, as a share of the cost of the plain step.
    """
    plain: Schedule = range(len(problem.ops))
    if not problem.may_repeat.any():
        return plain
    most_cost = (1 + max_overhead) * problem.costs.sum()
    moves = most_moves(problem) // 8

    def lower(start: Schedule, seed: int = 0) -> Schedule:
        candidate = lowered(problem, start, most_runs, moves, HOT, seed, most_cost)
        return candidate if _cost(problem, candidate) <= most_cost else plain

    starts = [plain, *_low(problem, max_overhead)]
    starts = [start for start in starts if times_run(problem, start) <= most_runs]
    best = lowest_of(problem, map(lower, reported(starts)))
    best = lowest_of(problem, [best, reordered(problem, best)])
    for round_ in reported(range(1, _LOWER_ROUNDS + 1)):
        before, best = best, lower(best, round_)
        if _peak(problem, best) > (1 - _LOWER) * _peak(problem, before):
            break

    def cheap(best: Schedule, budget: int, round_: int) -> Schedule | None:
        return annealed(problem, best, budget, most_runs, moves, seed=round_)

    return _stepped_down(problem, best, most_cost, _STEPS, cheap)


def affordable(problem: Problem, max_overhead: float, most_runs: int = UNBOUNDED) -> Schedule:
    """The schedule of the lowest peak found within an overhead.

    Args:
        problem: the step.
        max_overhead: the extra cost allowed, as a share of the cost of the plain step.
        most_runs: how often an op may run.
    """
    most_cost = (1 + max_overhead) * problem.costs.sum()

    def cheapest_within(best: Schedule, budget: int, round_: int) -> Schedule:
        return within(problem, budget, most_runs, best)

    best = lowest(problem, most_runs, max_overhead)
    return _stepped_down(problem, best, most_cost, _LAST_STEPS, cheapest_within)


def _stepped_down(
    problem: Problem,
    best: Schedule,
    most_cost: float,
    steps: tuple[float, float, int],
    search: Callable[[Schedule, int, int], Schedule | None],
) -> Schedule:
    """The last schedule within the cost of searches for ever lower peaks.

    Args:
        problem: the step.
        best: a schedule to start from.
        most_cost: the cost allowed, in seconds.
        steps: the share by which the peak is lowered first, the least such share, and how often. It
            is halved where a step cannot be made.
        search: called with a schedule, a budget in bytes and the number of the step.
    """
    step, least, times = steps
    for round_ in reported(range(times)):
        budget = int((1 - step) * _peak(problem, best))
        found = search(best, budget, round_)
        simulation = simulate(problem, found or best)
        if simulation.peak <= budget and simulation.cost <= most_cost:
            best = found or best
        elif (step := step / 2) < least:
            break
    return best


def _low(problem: Problem, max_overhead: float) -> Iterator[Schedule]:
    """Schedules of a low peak to start from, if there are any within the overhead."""
    cut = best_cut(problem)
    if _cost(problem, cut) <= (1 + max_overhead) * problem.costs.sum():
        yield cut
        return
    if len(problem.ops) <= _LARGEST_PROGRAM:
        yield keeping(problem, _mostly(one_cut(problem).kept_for(_PROMISED * max_overhead)))
    nested = Nested(problem, _peak(problem, range(len(problem.ops))))
    yield from nested.lowest(max_overhead * problem.costs.sum())


def lowest_of_cheap(problem: Problem, most_runs: int) -> Schedule:
    """The schedule of a low peak in which no expensive op runs twice.

    Where recomputing such ops saves little, a search among all schedules seldom finds the schedules
    that avoid it.
    """
    cheap = without_expensive(problem)
    return lowered(cheap, best_cut(cheap), most_runs, most_moves(cheap) // 16, _HOTTER)


def best_cut(problem: Problem) -> Schedule:
    """The schedule of the lowest peak that keeps only the tensors that cross some cuts."""
    segments = Segments(problem)
    aim = segments.lowest_aim()
    tried = dict.fromkeys(segments.cuts_for(aim * factor) for factor in _CUTS)
    schedules = (keeping(problem, kept_at(problem, cuts)) for cuts in tried if cuts)
    return lowest_of(problem, [*schedules, range(len(problem.ops))])


def most_moves(problem: Problem) -> int:
    """How many moves a search of a problem may try."""
    count = max(1, len(problem.ops))
    return min(_MOVES_PER_OP * count, _MOVES * _MANY_OPS // max(count, _MANY_OPS))


def times_run(problem: Problem, schedule: Schedule) -> int:
    """The most runs of an op that a schedule runs again; 1 if it runs none again."""
    times = np.bincount(schedule, minlength=len(problem.ops))
    return int((times + problem.runs_within)[times > 1].max(initial=1))


def cheapest(problem: Problem, schedules: Iterable[Schedule]) -> Schedule:
    """The schedule of the least cost, the first of equal ones."""
    return min(schedules, key=lambda schedule: _cost(problem, schedule))


def _cost(problem: Problem, schedule: Schedule) -> float:
    return simulate(problem, schedule).cost


def _peak(problem: Problem, schedule: Schedule) -> int:
    return simulate(problem, schedule).peak


def lowest_of(problem: Problem, schedules: Iterable[Schedule]) -> Schedule:
    """The schedule of the lowest peak, the first of equal ones."""
    return min(schedules, key=lambda schedule: _peak(problem, schedule))


def without_expensive(problem: Problem) -> Problem:
    """The problem in which no expensive op may run twice."""
    return _pinning_ops(problem, [op.expensive for op in problem.ops])


def without_third_runs(problem: Problem) -> Problem:
    """The problem in which loops that run again in their gradients may not run twice themselves."""
    return _pinning_ops(problem, [op.again for op in problem.ops])


def pinning(problem: Problem, tensors: Collection[int]) -> Problem:
    """The problem in which the ops that make `tensors` run once, so that these are kept."""
    makers = {problem.made_by[t] for t in tensors}
    return _pinning_ops(problem, [index in makers for index in range(len(problem.ops))])


def _pinning_ops(problem: Problem, pinned: Sequence[bool]) -> Problem:
    if not any(pinned):
        return problem
    ops = zip(problem.ops, pinned, strict=True)
    also = tuple(dataclasses.replace(op, pinned=op.pinned or pin) for op, pin in ops)
    return dataclasses.replace(problem, ops=also)


def _starts(
    problem: Problem, budget: int, kept_sets: Iterable[Collection[int]]
) -> Iterator[Schedule]:
    """The schedules to start a search from."""
    for tensors in kept_sets:
        yield keeping(problem, tensors)
    yield from Nested(problem, budget).within(budget)
    cuts = Segments(problem).cuts_for(budget)
    if cuts:
        yield keeping(problem, kept_at(problem, cuts))


def _one_cut(problem: Problem, budget: int) -> tuple[list[set[int]], float]:
    """The sets of tensors that the one-cut program keeps, and its bound on the overhead."""
    if len(problem.ops) > _LARGEST_PROGRAM:
        return [], 0.0
    program = one_cut(problem)
    factors = _KEPT if len(problem.ops) <= _MANY_OPS else _KEPT[:2]
    cuts = [program.solve(int(budget * factor)) for factor in factors]
    sets = [_mostly(cut.kept) for cut in cuts]
    return [kept for kept in sets if kept], cuts[0].overhead


def _mostly(kept: np.ndarray) -> set[int]:
    """The tensors of which a program keeps more than half."""
    return set(np.flatnonzero(kept > 0.5).tolist())
