"""Which runs of a schedule may overlap or swap places without raising the peak."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import numpy as np

from memory_saving_gradients.planning.problem import Problem, Schedule
from memory_saving_gradients.planning.simulate import simulate

# The most runs that may overlap: enough for the threads of a session.
_MOST = 64


class Wave(NamedTuple):
    """Entries that may run in any order of their data, or at once.

    Attributes:
        entries: the entries.
        after: they begin when all entries before this one have ended.
    """

    entries: range
    after: int


def waves(
    problem: Problem, schedule: Schedule, first: int, alone: Container[int] = ()
) -> list[Wave]:
    """Divides a schedule into waves.

    A wave may overlap with the previous one, if both together take no more than the peak of the
    schedule in their worst order; it begins when the one before that has ended. Where memory is
    short, entries run one by one.

    Args:
        problem: the step.
        schedule: the schedule.
        first: the entry to begin with.
        alone: the ops that wait for all ops before them, by index.

    Returns:
        The waves.
    """
    runs = _Runs(problem, schedule)
    found: list[Wave] = []
    begin = after = first
    while begin < len(schedule):
        end = _end_of_overlap(runs, schedule, after, alone)
        if end <= begin:  # even the next entry has to wait for all before it
            after, end = begin, _end_of_overlap(runs, schedule, begin, alone)
        stop = min(end, begin + (end - after + 1) // 2)  # leaves half to the next wave
        found.append(Wave(range(begin, stop), after))
        after, begin = begin, stop
    return found


def _end_of_overlap(runs: _Runs, schedule: Schedule, begin: int, alone: Container[int]) -> int:
    """The end of the longest range of entries, from one on, that may all overlap."""
    overlap = _Overlap(runs, begin)
    end = begin + 1
    while (
        end < min(len(schedule), begin + _MOST)
        and schedule[end] not in alone
        and overlap.joined(end) <= runs.peak
    ):
        end += 1
    return end


class _Runs:
    """A schedule, with what the waves ask of each entry.

    Attributes:
        peak: the peak of the schedule.
        held: the bytes alive before each entry.
        makes: the bytes that each entry makes.
        scratch: the bytes of its scratch space.
        lent: the bytes that dying inputs lend to its outputs.
        reads: the copies that it reads or makes.
        dying: those of them that die with it.
        size: the bytes of each copy.
        made: the entry that makes each copy.
        readers: the entries that make or read each copy.
    """

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        simulation = simulate(problem, schedule)
        count, size = len(simulation.timeline), problem.sizes[simulation.tensor]
        scratch = problem.workspaces[np.asarray(schedule, dtype=np.int64)]
        makes = np.bincount(simulation.made, size, count)
        self.peak = simulation.peak
        self.makes: list[int] = makes.tolist()
        self.held: list[int] = (simulation.live - makes).tolist()
        self.scratch: list[int] = scratch.tolist()
        self.lent: list[int] = (scratch - (simulation.timeline - simulation.live)).tolist()
        self.size: list[int] = size.tolist()
        self.made: list[int] = simulation.made.tolist()
        begins = simulation.begins.tolist()
        ends = [*begins, len(simulation.events)][1:]
        events = simulation.events.tolist()
        self.readers = [events[i:j] for i, j in zip(begins, ends, strict=True)]
        self.reads: list[list[int]] = [[] for _ in range(count)]
        for copy, entry in zip(simulation.copies_of_events.tolist(), events, strict=True):
            self.reads[entry].append(copy)
        self.dying: list[list[int]] = [[] for _ in range(count)]
        for copy, last in enumerate(simulation.last.tolist()):
            if last < count:
                self.dying[last].append(copy)


class _Overlap:
    """Entries that overlap, and the most bytes that they can take.

    An entry runs after those whose outputs it reads, directly or not, and before those that read
    its own. As it runs, all others may have made their outputs, and be about to end: only what the
    entries before it alone have read is certain to be freed. Sets of entries are bits of a number.
    """

    def __init__(self, runs: _Runs, begin: int) -> None:
        self._runs = runs
        self._begin = begin
        self._before: list[int] = []  # by entry, those that run before it
        self._most: list[int] = []  # by entry, the most bytes alive while it runs
        self._freed: list[tuple[int, int]] = []  # bytes, and the entries that must have ended
        self._made = 0
        self.joined(begin)

    def joined(self, entry: int) -> int:
        """The most bytes with the next entry."""
        runs, before = self._runs, 0
        for copy in runs.reads[entry]:
            if self._begin <= runs.made[copy] < entry:
                maker = runs.made[copy] - self._begin
                before |= self._before[maker] | 1 << maker
        more = runs.makes[entry] + runs.scratch[entry]
        others = 0
        for other, most in enumerate(self._most):
            if not before >> other & 1:
                self._most[other] = most + more
                others += runs.scratch[self._begin + other]
        most = runs.held[self._begin] + self._made + more + others
        most -= sum(bytes_ for bytes_, ended in self._freed if not ended & ~before)
        mine = 1 << entry - self._begin
        dying = [(runs.size[copy], self._users(copy)) for copy in runs.dying[entry]]
        if not any(users & ~(before | mine) for _, users in dying):
            most -= runs.lent[entry]
        self._before.append(before)
        self._most.append(most)
        self._freed += dying
        self._made += runs.makes[entry]
        return max(self._most)

    def _users(self, copy: int) -> int:
        """Those of the entries that make or read a copy."""
        users = 0
        for entry in self._runs.readers[copy]:
            if entry >= self._begin:
                users |= 1 << entry - self._begin
        return users


def runs_ahead(problem: Problem, schedule: Schedule, first: int) -> bool:
    """Whether the forward pass would raise the peak of a schedule if nothing ordered it.

    Args:
        problem: the step.
        schedule: the schedule.
        first: the first entry of the backward pass.
    """
    begins = (index for index in problem.as_executed if index >= 0)
    place = {index: i for i, index in enumerate(begins)}
    forward = sorted(schedule[:first], key=lambda index: place.get(index, 0))
    unordered = simulate(problem, [*forward, *schedule[first:]])
    return unordered.peak > _NEGLIGIBLE * simulate(problem, schedule).peak


_NEGLIGIBLE = 1.01
