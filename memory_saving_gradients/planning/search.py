"""Local search on schedules: add runs where memory is short, drop runs where it is not.

Both moves are those of Imanishi et al. (FastSA) without the annealing: `lowered` drops a copy that
is alive at the peak and runs its op again before the next reader; `restored` takes back runs whose
earlier copy may as well stay. What decides is the simulated peak.

What is not optimal: every move is greedy, and none is taken back once it was made.
"""

from __future__ import annotations

import collections

import numpy as np

from memory_saving_gradients.planning.keep import without_unread
from memory_saving_gradients.planning.problem import Problem, Schedule
from memory_saving_gradients.planning.simulate import Simulation, simulate

# So many of the most promising moves are simulated before one is chosen.
_LOOKED_AT = 6


def restored(problem: Problem, schedule: Schedule, budget: int) -> list[int]:
    """Drops runs that a schedule within the budget does not need.

    Args:
        problem: the step.
        schedule: a schedule of at most `budget` bytes.
        budget: the peak allowed, in bytes.

    Returns:
        A schedule of at most `budget` bytes and at most the cost of the given one.
    """
    schedule = list(schedule)
    allowed = budget
    while True:
        shorter = _dropped(problem, schedule, allowed)
        if len(shorter) == len(schedule):
            return schedule
        peak = simulate(problem, shorter).peak
        if peak <= budget:
            schedule, allowed = shorter, budget
        else:  # a buffer was lent before and is not now
            allowed -= peak - budget


def _dropped(problem: Problem, schedule: list[int], budget: int) -> list[int]:
    """`restored`, once through all runs, with lent buffers taken as they were."""
    simulation = simulate(problem, schedule)
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
            again.append((-problem.ops[schedule[entry]].cost / max(extra, 1), entry))
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
    kept = [index for entry, index in enumerate(schedule) if entry not in dropped]
    return without_unread(problem, kept)


def lowered(
    problem: Problem, schedule: Schedule, budget: int, most_runs: int, tries: int
) -> list[int]:
    """Adds runs until the peak is within the budget, or no move found lowers it.

    Args:
        problem: the step.
        schedule: where to start.
        budget: the peak to reach, in bytes.
        most_runs: how often an op may run.
        tries: how many moves to make at most.

    Returns:
        The schedule, of at most `budget` bytes if that was reached.
    """
    schedule = list(schedule)
    simulation = simulate(problem, schedule)
    for _ in range(tries):
        if simulation.peak <= budget:
            break
        found = _best_move(problem, schedule, simulation, budget, most_runs)
        if found is None:
            break
        schedule, simulation = found
    return schedule


def _best_move(
    problem: Problem, schedule: list[int], simulation: Simulation, budget: int, most_runs: int
) -> tuple[list[int], Simulation] | None:
    """The move at the first highest entry that takes away most excess for its cost."""
    entry = int(simulation.timeline.argmax())
    lives = _Lives(problem, schedule, simulation, most_runs)
    moves = []
    for copy in np.flatnonzero((simulation.made < entry) & (simulation.last > entry)).tolist():
        move = lives.move(copy, entry)
        if move is not None:
            moves.append(move)
    moves.sort(reverse=True)
    excess = _excess(simulation, budget)
    best, best_score = None, 0.0
    for _, at, runs in moves[:_LOOKED_AT]:
        longer = without_unread(problem, [*schedule[:at], *runs, *schedule[at:]])
        judged = simulate(problem, longer)
        gain = excess - _excess(judged, budget)
        if judged.peak > simulation.peak or gain <= 0:
            continue
        score = gain / max(judged.cost - simulation.cost, 1e-12)
        if score > best_score:
            best, best_score = (longer, judged), score
    return best


def _excess(simulation: Simulation, budget: int) -> float:
    """How much of the timeline lies above the budget, in byte entries."""
    return float(np.maximum(simulation.timeline - budget, 0).sum())


class _Lives:
    """Where copies are read, and what it takes to make one again."""

    def __init__(
        self, problem: Problem, schedule: list[int], simulation: Simulation, most_runs: int
    ) -> None:
        self._problem = problem
        self._simulation = simulation
        self._runs = collections.Counter(schedule)
        self._most_runs = most_runs
        self._first = np.searchsorted(simulation.tensor, np.arange(len(problem.tensors) + 1))

    def move(self, copy: int, entry: int) -> tuple[float, int, list[int]] | None:
        """Drops a copy at an entry: (a guess of what it is worth, before what, which runs)."""
        made = self._simulation
        ends = [*made.begins[copy + 1 : copy + 2], len(made.events)][0]
        events = made.events[made.begins[copy] : ends]
        at = int(np.searchsorted(events, entry))
        if at == len(events) or events[at] == entry:
            return None  # it is a result, or read right here
        before, after = int(events[at - 1]), int(events[at])
        tensor = int(made.tensor[copy])
        runs = self._runs_for(tensor, entry, after)
        if runs is None:
            return None
        saved = int(self._problem.sizes[tensor])
        cost = float(self._problem.costs[runs].sum())
        return saved * (after - before) / max(cost, 1e-12), after, runs

    def _runs_for(self, tensor: int, entry: int, after: int) -> list[int] | None:
        """The runs, in order, that make `tensor` again at `after` out of what is alive then.

        What is not alive there but was made or read since `entry` stays for it.
        """
        needed: set[int] = set()
        waiting = [tensor]
        while waiting:
            index = self._problem.made_by[waiting.pop()]
            if index in needed:
                continue
            op = self._problem.ops[index]
            if index < 0 or op.pinned or op.backward or self._runs[index] >= self._most_runs:
                return None
            needed.add(index)
            waiting += [t for t in op.inputs if not self._at_hand(t, entry, after)]
        return sorted(needed)

    def _at_hand(self, tensor: int, entry: int, after: int) -> bool:
        copies = slice(self._first[tensor], self._first[tensor + 1])
        made, last = self._simulation.made[copies], self._simulation.last[copies]
        if not len(made):
            return True  # it is there from the start
        newest = int(np.searchsorted(made, after)) - 1
        return newest >= 0 and (made[newest] > entry or last[newest] > entry)
