"""Runs added and removed one by one take what a simulation of the whole schedule says."""

import numba
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_saving_gradients.planning import runs as compiled
from memory_saving_gradients.planning.anneal import annealed
from memory_saving_gradients.planning.runs import Runs, Step, ops_of
from memory_saving_gradients.planning.simulate import simulate
from tests.planning.problems import problems
from tests.replay import replay


def for_python(part):
    return numba.njit(lambda *arguments: part(*arguments))


add, remove, has = map(for_python, (compiled.add, compiled.remove, compiled.has))
may_add, total_above = map(for_python, (compiled.may_add, compiled.total_above))


def check(step, runs, budget):
    """What is alive, and what exceeds the budget, is as the referee says."""
    length = runs.length[0]
    schedule = ops_of(runs.keys[:length], len(step.ops))
    found = simulate(step, schedule)
    timeline = (runs.live + runs.scratch)[:length]
    np.testing.assert_array_equal(timeline, found.timeline)
    times = np.bincount(schedule, minlength=len(step.ops)) + step.runs_within
    np.testing.assert_array_equal(runs.times, times)
    assert replay(step, schedule.tolist()) == found.peak
    return total_above(runs, budget)


@settings(max_examples=200, deadline=None)
@given(problems(), st.data())
def test_additions_and_removals_are_simulated(problem, data):
    count, first = len(problem.ops), problem.forward_count
    step, runs = Step.of(problem), Runs.of(problem, range(count))
    budget = data.draw(st.integers(0, 200))
    excess = check(problem, runs, budget)
    added: set[int] = set()
    changes = st.tuples(st.integers(first, count - 1), st.integers(0, first - 1), st.booleans())
    for slot, op, takes_away in data.draw(st.lists(changes, max_size=12)):
        key = slot * (count + 1) + op
        if added and takes_away:
            key = data.draw(st.sampled_from(sorted(added)))
            added.remove(key)
            excess += remove(step, runs, key, budget)
        elif problem.may_repeat[op] and key not in added and may_add(step, runs, key):
            added.add(key)
            excess += add(step, runs, key, budget)
        assert has(runs, key) == (key in added)
        assert excess == check(problem, runs, budget)


@settings(max_examples=200, deadline=None)
@given(problems(), st.sampled_from([0.9, 0.7, 0.5, 0.3]), st.sampled_from([2, 3, 99]))
def test_what_the_search_finds_keeps_its_promises(problem, share, most_runs):
    plain = simulate(problem, range(len(problem.ops)))
    budget = int(share * plain.peak)
    schedule = annealed(problem, range(len(problem.ops)), budget, most_runs, 2_000)
    if schedule is not None:
        assert replay(problem, schedule) == simulate(problem, schedule).peak <= budget
        counts = np.bincount(schedule, minlength=len(problem.ops))
        assert counts.max() <= most_runs
        assert (counts[~problem.may_repeat] == 1).all()
    assert schedule == annealed(problem, range(len(problem.ops)), budget, most_runs, 2_000)
