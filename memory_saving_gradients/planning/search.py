"""Local search on schedules: add runs where memory is short, drop runs where it is not.

The moves are those of Imanishi et al. (FastSA), without the annealing: `lowered` drops a copy that
is alive at the peak and runs its op again before the next reader; `restored` takes back runs whose
earlier copy may as well stay; `improved` goes down and up again. The simulated peak decides.

What is not optimal: every move is greedy.
"""

from __future__ import annotations

import numpy as np

from memory_saving_gradients.planning.problem import Problem, Schedule
from memory_saving_gradients.planning.simulate import Simulation, simulate

# Of so many promising moves the cost is worked out, and the best of them are simulated.
_CONSIDERED = 64
_SIMULATED = 6

# How far below the budget a swing goes.
_SWINGS = (0.98, 0.95, 0.9, 0.85, 0.8)


def restored(problem: Problem, schedule: Schedule, budget: int) -> Schedule:
    """Drops runs that a schedule within the budget does not need.

    Args:
        problem: the step.
        schedule: a schedule of at most `budget` bytes.
        budget: the peak allowed, in bytes.

    Returns:
        A schedule of at most `budget` bytes and at most the cost of the given one.
    """
    runs, simulation = tidied(problem, np.asarray(schedule))
    allowed = budget
    while True:
        fewer, judged = tidied(problem, _dropped(problem, runs, simulation, allowed))
        if len(fewer) == len(runs):
            return runs.tolist()
        if judged.peak <= budget:
            runs, simulation, allowed = fewer, judged, budget
        else:  # a buffer was lent before and is not now
            allowed -= judged.peak - budget


def improved(
    problem: Problem, schedule: Schedule, budget: int, most_runs: int, tries: int
) -> Schedule:
    """Swings below the budget and back while that makes a schedule cheaper.

    What `lowered` adds on the way down, `restored` need not take back on the way up: it drops the
    runs that save most time for the bytes, which may be others.

    Args:
        problem: the step.
        schedule: a schedule of at most `budget` bytes.
        budget: the peak allowed, in bytes.
        most_runs: how often an op may run.
        tries: how many moves a swing makes at most.

    Returns:
        A schedule of at most `budget` bytes and at most the cost of the given one.
    """
    best, cost = schedule, simulate(problem, schedule).cost
    for swing in _SWINGS:
        below = lowered(problem, best, int(budget * swing), most_runs, tries)
        back = restored(problem, below, budget)
        if simulate(problem, back).cost < cost:
            best, cost = back, simulate(problem, back).cost
    return best


def tidied(problem: Problem, runs: np.ndarray) -> tuple[np.ndarray, Simulation]:
    """A schedule without the runs that nothing reads before they are run again, simulated."""
    while True:
        simulation = simulate(problem, runs)
        last_run = np.zeros(len(problem.ops), dtype=np.int64)
        last_run[runs] = np.arange(len(runs))  # the last of several writes stays
        useful = last_run[runs] == np.arange(len(runs))
        useful[simulation.made[simulation.last > simulation.made]] = True
        if useful.all():
            return runs, simulation
        runs = runs[useful]


def _dropped(problem: Problem, runs: np.ndarray, simulation: Simulation, budget: int) -> np.ndarray:
    """`restored`, once through all runs, with lent buffers taken as they were."""
    timeline, last = simulation.timeline.copy(), simulation.last.copy()
    copies: dict[int, list[int]] = {}  # by the entry that makes them
    for copy, entry in enumerate(simulation.made.tolist()):
        copies.setdefault(entry, []).append(copy)
    tensor = simulation.tensor
    before = np.arange(len(last)) - 1  # the copy before, of the same tensor; -1 for none
    before[np.diff(tensor, prepend=-1) > 0] = -1
    after = np.append(before[1:] >= 0, False) * (np.arange(len(last)) + 1)  # 0 for none
    size = problem.sizes
    again = []
    for entry, made in copies.items():
        if all(before[copy] >= 0 for copy in made):
            extra = int(sum(size[tensor[copy]] for copy in made))
            again.append((-problem.ops[runs[entry]].cost / max(extra, 1), entry))
    dropped = set()
    for _, entry in sorted(again):
        stays = [copy for copy in copies[entry] if last[copy] > entry]
        gaps = [slice(last[before[copy]] + 1, entry) for copy in stays]
        more = [size[tensor[copy]] for copy in stays]
        if any(timeline[gap].max(initial=0) + sum(more) > budget for gap in gaps):
            continue
        dropped.add(entry)
        for gap, bytes_ in zip(gaps, more, strict=True):
            timeline[gap] += bytes_
        for copy in copies[entry]:
            old = before[copy]
            if last[copy] > entry:
                last[old] = last[copy]
            if after[copy]:
                before[after[copy]], after[old] = old, after[copy]
            else:
                after[old] = 0
    return np.delete(runs, sorted(dropped))


def lowered(
    problem: Problem,
    schedule: Schedule,
    budget: int,
    most_runs: int,
    tries: int,
    step: float = 0.0,
) -> Schedule:
    """Adds runs until the peak is within the budget, or no move found lowers it.

    Args:
        problem: the step.
        schedule: where to start.
        budget: the peak to reach, in bytes.
        most_runs: how often an op may run.
        tries: how many moves to make at most.
        step: the share of the peak to aim at first, then the same share of that, and so on: moves
            that suit the highest places come before those that suit all. 0 aims at the budget.

    Returns:
        The schedule, of at most `budget` bytes if that was reached.
    """
    runs, simulation = tidied(problem, np.asarray(schedule))
    aim = simulation.peak
    for _ in range(tries):
        if simulation.peak <= budget:
            break
        if simulation.peak <= aim:
            aim = max(budget, int(step * simulation.peak))
        found = _best_move(problem, runs, simulation, aim, most_runs)
        if found is None:
            break
        runs, simulation = found
    return runs.tolist()


def _best_move(
    problem: Problem, runs: np.ndarray, simulation: Simulation, budget: int, most_runs: int
) -> tuple[np.ndarray, Simulation] | None:
    """The move at the first highest entry that takes away most excess for its cost."""
    excess = _excess(simulation, budget)
    best, best_score = None, 0.0
    for after, again in _moves(problem, runs, simulation, most_runs):
        moved = _with_runs(problem, runs, after, again, most_runs)
        changed, judged = tidied(problem, moved)
        gain = excess - _excess(judged, budget)
        if judged.peak > simulation.peak or gain <= 0:
            continue
        score = gain / max(judged.cost - simulation.cost, 1e-12)
        if score > best_score:
            best, best_score = (changed, judged), score
    return best


def _with_runs(
    problem: Problem, runs: np.ndarray, entry: int, again: list[int], most_runs: int
) -> np.ndarray:
    """Runs `again` before `entry`; of an op at its limit the next run is dropped for it."""
    counts = np.bincount(runs, minlength=len(problem.ops))
    given_up = []
    for index in again:
        if counts[index] >= most_runs:
            given_up.append(entry + int(np.argmax(runs[entry:] == index)))
    return np.insert(np.delete(runs, given_up), entry, again)


def _excess(simulation: Simulation, budget: int) -> float:
    """How much of the timeline lies above the budget, in byte entries."""
    return float(np.maximum(simulation.timeline - budget, 0).sum())


def _moves(
    problem: Problem, runs: np.ndarray, simulation: Simulation, most_runs: int
) -> list[tuple[int, list[int]]]:
    """The most promising moves at the first highest entry: before which entry to run which ops.

    A copy that is alive there, but was last read before and is next read later, is dropped and
    made again before that reader.
    """
    entry = int(simulation.timeline.argmax())
    counts = np.bincount(runs, minlength=len(problem.ops))
    # Up to which entry each op may run once more: any, or one from which on it runs anyway.
    may_until = np.zeros(len(problem.ops), dtype=np.int64)
    may_until[runs] = np.arange(len(runs))
    may_until[counts < most_runs] = len(runs)
    may_until[~problem.may_repeat] = -1
    copies = np.flatnonzero((simulation.made < entry) & (simulation.last > entry))
    copies = copies[may_until[problem.makers[simulation.tensor[copies]]] > entry]
    # The events of all copies as one ascending sequence, in which each copy's place is found.
    width = len(runs) + 1
    sequence = simulation.copies_of_events * width + simulation.events
    at = np.searchsorted(sequence, copies * width + entry)
    read_later = at < np.append(simulation.begins[1:], len(simulation.events))[copies]
    copies, at = copies[read_later], at[read_later]
    before, after = simulation.events[at - 1], simulation.events[at]
    unread_here = after > entry
    copies, before, after = copies[unread_here], before[unread_here], after[unread_here]
    saved = problem.sizes[simulation.tensor[copies]] * (after - before)
    cost = problem.costs[problem.makers[simulation.tensor[copies]]]
    promising = np.argsort(-saved / np.maximum(cost, 1e-12), kind="stable")
    moves = []
    first = np.searchsorted(simulation.tensor, np.arange(len(problem.tensors) + 1))
    for i in promising[:_CONSIDERED].tolist():
        tensor, until = int(simulation.tensor[copies[i]]), int(after[i])
        again = _runs_for(problem, simulation, may_until, first, tensor, entry, until)
        if again is not None:
            worth = saved[i] / max(float(problem.costs[again].sum()), 1e-12)
            moves.append((worth, until, again))
    moves.sort(reverse=True)
    return [(until, again) for _, until, again in moves[:_SIMULATED]]


def _runs_for(
    problem: Problem,
    simulation: Simulation,
    may_until: np.ndarray,
    first: np.ndarray,
    tensor: int,
    entry: int,
    until: int,
) -> list[int] | None:
    """The runs, in order, that make `tensor` again before the entry `until`; None if none may.

    They start from what is alive there, and from what was made or read since `entry`, which stays
    for them.
    """
    needed: set[int] = set()
    waiting = [tensor]
    while waiting:
        index = problem.made_by[waiting.pop()]
        if index in needed:
            continue
        if may_until[index] < until:
            return None
        needed.add(index)
        for read in problem.ops[index].inputs:
            begin, end = first[read], first[read + 1]
            newest = begin + int(np.searchsorted(simulation.made[begin:end], until)) - 1
            if begin < end and simulation.last[newest] <= entry:
                waiting.append(read)
    return sorted(needed)
