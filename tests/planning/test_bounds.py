"""No bound is above the optimum, and many are so close that one inflated by 1 % would be."""

import dataclasses

import numpy as np
import pytest

from memory_saving_gradients.planning.bounds import certified, least_peak, lower_bound, one_cut
from memory_saving_gradients.planning.problem import Problem
from memory_saving_gradients.planning.search import within
from memory_saving_gradients.planning.simulate import simulate
from tests.planning.brute_force import cheapest
from tests.planning.integer_program import least_cost
from tests.planning.problems import chain, layered

# Shares of the way from what one op takes to the plain peak: tight ones among them.
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)


def budgets(step: Problem):
    low, plain = least_peak(step), simulate(step, range(len(step.ops))).peak
    return sorted({int(low + share * (plain - low)) for share in SHARES})


def overhead(step: Problem, cost: float) -> float:
    return cost / float(step.costs.sum()) - 1


def uneven(length: int, seed: int) -> Problem:
    """A chain of random sizes and costs."""
    rng = np.random.default_rng(seed)
    step = chain(length)
    sizes, costs = rng.integers(1, 9, len(step.tensors)), rng.integers(1, 9, len(step.ops))
    tensors = zip(step.tensors, sizes.tolist(), strict=True)
    ops = zip(step.ops, costs.tolist(), strict=True)
    return dataclasses.replace(
        step,
        tensors=tuple(dataclasses.replace(tensor, bytes=size) for tensor, size in tensors),
        ops=tuple(dataclasses.replace(op, cost=float(cost)) for op, cost in ops),
    )


STEPS = [
    *(chain(n, size=1) for n in (3, 4, 5, 6)),
    *(uneven(n, seed) for n in (3, 4, 5) for seed in range(25)),
    *(layered(n, seed) for n in (3, 4) for seed in range(15)),
]


def check(bounds, optima):
    """The bounds are right, and so sharp that an error of 1 % of the cost would be found."""
    bounds, optima = np.array(bounds), np.array(optima)
    assert len(bounds) >= 100
    assert (bounds <= optima + 1e-6).all()
    costly = optima > 0.01
    assert (1.01 * (1 + bounds[costly]) > 1 + optima[costly]).sum() >= 20
    return (bounds[costly] > 0.999 * optima[costly]).mean()


def test_the_fewest_bytes_for_an_overhead_are_the_other_side_of_a_budget():
    compared = 0
    for step in STEPS:
        program = one_cut(step)
        for budget in budgets(step):
            bound = program.solve(budget)
            if 0 < bound.overhead < np.inf:
                most = bound.overhead + 1e-5
                within_it, half = (program.kept_for(share * most) for share in (1, 0.5))
                assert step.sizes @ within_it <= step.sizes @ bound.kept + 1e-3
                assert step.sizes @ half > step.sizes @ within_it
                compared += 1
    assert compared >= 100


def test_a_step_without_a_backward_pass_has_nothing_to_keep():
    step = chain(3)
    forward = dataclasses.replace(step, ops=step.ops[: step.forward_count], results=frozenset())
    program = one_cut(forward)
    assert program.solve(1).overhead == 0
    assert not program.kept_for(0.1).any()


def test_the_one_cut_bound_holds_for_any_order():
    bounds, optima = [], []
    for step in STEPS:
        program = one_cut(step)
        for budget in budgets(step):
            bound, best = program.solve(budget).overhead, cheapest(step, budget)
            assert best is not None or bound >= 0
            if best is not None:
                bounds.append(bound)
                optima.append(overhead(step, best))
    check(bounds, optima)


@pytest.fixture(scope="module")
def exact():
    """Steps, budgets, and the optimum with the ops in their order."""
    found = []
    for step in STEPS:
        for budget in budgets(step):
            best, proven = least_cost(step, budget, 20)
            # What runs for the first time late is outside that program.
            ours = simulate(step, within(step, budget))
            best = min(best, ours.cost if ours.peak <= budget else np.inf)
            if proven and np.isfinite(best):
                found.append((step, budget, overhead(step, best)))
    return found


def test_bounds_of_all_moments_hold_for_the_order_of_the_step(exact):
    bounds = [lower_bound(step, budget) for step, budget, _ in exact]
    check(bounds, [best for *_, best in exact])
    single = [one_cut(step).solve(budget).overhead for step, budget, _ in exact]
    assert (np.array(bounds) >= np.array(single) - 1e-9).all()
    assert sum(bounds) > sum(single)


def test_integer_programs_of_several_moments_are_tighter_still(exact):
    found = [certified(step, budget, seconds=20) for step, budget, _ in exact]
    assert all(bound.is_exact for bound in found)
    bounds = [bound.overhead for bound in found]
    reached = check(bounds, [best for *_, best in exact])
    assert reached > 0.9
    assert sum(bounds) > sum(lower_bound(step, budget) for step, budget, _ in exact)


def test_a_budget_that_nothing_meets_has_no_finite_bound():
    assert one_cut(chain(12)).solve(15).overhead == np.inf
    assert lower_bound(chain(12), 15) == np.inf
    assert certified(chain(12), 15, seconds=10).overhead == np.inf


def test_a_solver_out_of_time_proves_what_it_has():
    step = layered(120, seed=0)
    budget = int(0.6 * simulate(step, range(len(step.ops))).peak)
    bound = certified(step, budget, seconds=0.5)
    assert 0 <= bound.overhead <= overhead(step, simulate(step, within(step, budget)).cost)
