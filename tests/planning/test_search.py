"""Plans within a budget: valid, within it, and close to the best that there is."""

import dataclasses
import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memory_saving_gradients.planning.bounds import one_cut
from memory_saving_gradients.planning.problem import Op, Problem, Tensor, baseline, copied
from memory_saving_gradients.planning.search import (
    UNBOUNDED,
    lowest,
    pinning,
    within,
    without_third_runs,
)
from memory_saving_gradients.planning.simulate import simulate
from tests.planning.brute_force import cheapest
from tests.planning.problems import chain, problems
from tests.replay import replay

shares = st.sampled_from([0.9, 0.7, 0.5, 0.3])


@settings(deadline=None)
@given(problems(), shares, st.sampled_from([2, 3, UNBOUNDED]))
def test_plans_replay_and_keep_what_they_promise(step, share, most_runs):
    plain = simulate(step, baseline(step))
    budget = int(share * plain.peak)
    schedule = within(step, budget, most_runs)
    planned = simulate(step, schedule)
    assert replay(step, schedule) == planned.peak
    assert max(Counter(schedule).values()) <= most_runs
    if planned.peak <= budget:
        assert planned.cost >= plain.cost * (1 + one_cut(step).solve(budget).overhead) * (1 - 1e-9)


@settings(deadline=None)
@given(problems(), shares, st.data())
def test_a_loop_whose_rounds_run_again_is_not_run_a_third_time_if_told_so(step, share, data):
    again = data.draw(st.lists(st.booleans(), min_size=step.forward_count))
    pairs = itertools.zip_longest(step.ops, again[: step.forward_count], fillvalue=False)
    step = dataclasses.replace(
        step, ops=tuple(dataclasses.replace(op, again=loop) for op, loop in pairs)
    )
    budget = int(share * simulate(step, baseline(step)).peak)
    for schedule in (within(step, budget, 2), lowest(step, 2), lowest(without_third_runs(step))):
        counts = Counter(np.asarray(schedule).tolist())
        assert all(counts[i] == 1 for i, op in enumerate(step.ops) if op.again)


def test_a_backward_op_that_waits_for_nothing_does_not_make_the_forward_pass_run_as_copies():
    """It begins first in the plain step, which keeps the budget: the gradient of a mean does."""
    sizes = {"f": 8, "seed": 1, "small": 0, "large": 20}
    ops = (
        Op("f", (), (0,)),
        Op("seed", (), (1,), backward=True),
        Op("large", (1,), (3,), backward=True),
        Op("small", (0, 1), (2,), backward=True),
    )
    begun = (1, 0, 3, 2)
    step = Problem(
        ops,
        tuple(Tensor(name, size) for name, size in sizes.items()),
        frozenset({2, 3}),
        tuple(event for i in begun for event in (i, ~i)),
    )
    schedule = within(step, simulate(step, begun).peak)
    assert simulate(step, range(4)).peak > simulate(step, begun).peak
    assert list(schedule) == [0, 1, 3, 2]
    assert not any(copied(step, schedule)[1])


@settings(max_examples=150, deadline=None)
@given(problems(most_forward=5), shares)
def test_close_to_the_best_of_all_schedules(step, share):
    budget = int(share * simulate(step, baseline(step)).peak)
    best = cheapest(step, budget)
    found = simulate(step, within(step, budget))
    bound = one_cut(step).solve(budget).overhead
    if best is None:
        assert found.peak > budget
        return
    plain = sum(op.cost for op in step.ops)
    assert plain * (1 + bound) <= best * (1 + 1e-9)
    assume(found.peak <= budget)
    assert best * (1 - 1e-9) <= found.cost <= 1.5 * best


@pytest.mark.parametrize(("length", "budget"), [(6, 40), (7, 40), (8, 48), (8, 40)])
def test_short_chains_are_planned_as_well_as_can_be(length, budget):
    step = chain(length)
    found = simulate(step, within(step, budget))
    assert found.peak <= budget
    assert found.cost == cheapest(step, budget)


@pytest.mark.parametrize(("length", "runs"), [(64, 6), (256, 9)])
def test_memory_of_a_chain_goes_down_to_its_logarithm(length, runs):
    step = chain(length, size=1)
    schedule = within(step, 2 + math.ceil(math.log2(length)))
    assert simulate(step, schedule).peak <= 2 + math.ceil(math.log2(length))
    assert max(Counter(schedule).values()) <= runs


def test_a_roomy_budget_costs_nothing():
    step = chain(20)
    peak = simulate(step, baseline(step)).peak
    assert list(within(step, peak)) == list(baseline(step))


def test_more_memory_never_costs_more_time_on_a_chain():
    step = chain(40)
    costs = [simulate(step, within(step, budget)).cost for budget in range(96, 330, 24)]
    assert costs == sorted(costs, reverse=True)


def test_pinned_tensors_are_made_once():
    step = chain(30)
    schedule = within(pinning(step, {4, 17}), 120)
    counts = Counter(schedule)
    assert simulate(step, schedule).peak <= 120
    assert counts[4] == counts[17] == 1


@pytest.mark.parametrize("forward", [0, 3])
def test_where_nothing_may_run_again_the_plain_step_is_all_there_is(forward):
    step = chain(6)
    ops = [
        dataclasses.replace(op, pinned=True, backward=i >= forward) for i, op in enumerate(step.ops)
    ]
    step = dataclasses.replace(step, ops=tuple(ops))
    plain = list(range(len(ops)))
    assert list(within(step, 24)) == list(lowest(step)) == list(lowest(step, 2, 0.5)) == plain


def test_a_budget_below_what_one_op_needs_yields_the_lowest_peak():
    step = chain(12)
    assert simulate(step, within(step, 3)).peak <= 5 * 8


def test_the_bound_says_when_a_budget_is_impossible():
    # A backward op holds its activation and its output, eight bytes each.
    assert one_cut(chain(12)).solve(15).overhead == math.inf
