"""Searches by chance, against an independent replay of what they find."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memory_saving_gradients.planning.anneal import annealed, lowered
from memory_saving_gradients.planning.problem import Op, Problem, Tensor
from memory_saving_gradients.planning.search import UNBOUNDED, times_run
from memory_saving_gradients.planning.simulate import simulate
from tests.planning.problems import chain, problems
from tests.replay import replay

MOVES = 3_000


@settings(deadline=None, max_examples=150)
@given(problems(), st.data())
def test_any_start_leads_to_schedules_that_replay(step, data):
    again = data.draw(st.sampled_from(np.flatnonzero(step.may_repeat).tolist() or [None]))
    assume(again is not None)
    # A second run in the midst of the forward pass: what runs after it for the first time is late.
    place = data.draw(st.integers(again + 1, step.forward_count))
    start = [*range(place), again, *range(place, len(step.ops))]
    budget = int(0.8 * simulate(step, start).peak)
    found = annealed(step, start, budget, UNBOUNDED, MOVES)
    if found is not None:
        assert replay(step, found) <= budget
    assert replay(step, lowered(step, start, UNBOUNDED, MOVES)) <= simulate(step, start).peak


@settings(deadline=None, max_examples=60)
@given(problems(), st.sampled_from([1, 2, 3]), st.sampled_from([0.0, 0.1, 0.5]))
def test_the_lowest_peak_keeps_what_is_allowed(step, most_runs, extra):
    plain = range(len(step.ops))
    allowed = (1 + extra) * step.costs.sum()
    found = lowered(step, plain, most_runs, MOVES, most_cost=allowed)
    assert replay(step, found) <= simulate(step, plain).peak
    assert simulate(step, found).cost <= allowed * (1 + 1e-9)
    assert times_run(step, found) <= max(1, most_runs)


def with_update(step: Problem) -> Problem:
    """The step with one op more behind its last gradient, so with an odd number of ops."""
    last = len(step.tensors)
    ops = (*step.ops, Op("update", (last - 1,), (last,), backward=True))
    return Problem(ops, (*step.tensors, Tensor("update:0", 1)), frozenset({last}))


@pytest.mark.parametrize("step", [chain(20), with_update(chain(20))], ids=["even", "odd"])
def test_the_lowest_peak_of_a_chain_is_found_from_the_plain_step(step):
    plain = range(len(step.ops))
    lowest = lowered(step, plain, 2, 50_000)
    assert simulate(step, lowest).peak == 8 * 8  # about √(2n), and what is being made
    half = lowered(step, plain, 2, 50_000, most_cost=step.costs.sum() + 5)
    peaks = [simulate(step, one).peak for one in (lowest, half, plain)]
    assert sorted(set(peaks)) == peaks
