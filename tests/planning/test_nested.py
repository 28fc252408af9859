"""Nested segments: what they cost for a budget, and that they can run."""

from collections import Counter

import pytest

from memory_saving_gradients.planning.nested import Nested
from memory_saving_gradients.planning.problem import Op, Problem, Tensor
from memory_saving_gradients.planning.simulate import simulate
from tests.planning.problems import chain
from tests.replay import replay


@pytest.mark.parametrize("length", [16, 32])
def test_less_room_costs_more(length):
    step = chain(length)
    plain = simulate(step, range(len(step.ops)))
    costs = []
    for share in (1.0, 0.8, 0.6, 0.4):
        budget = int(share * plain.peak)
        [schedule] = Nested(step, budget).within(budget)
        replay(step, schedule)
        costs.append(simulate(step, schedule).cost)
    assert costs == sorted(costs)
    assert costs[0] == plain.cost < costs[-1] < 2 * plain.cost


def test_no_room_has_no_schedule():
    assert Nested(chain(8), 1).within(1) == []


def test_the_smallest_budget_for_a_cost_is_the_other_side_of_a_budget():
    step = chain(32)
    plain = simulate(step, range(len(step.ops)))
    nested = Nested(step, plain.peak)
    peaks = []
    for share in (0.1, 0.25, 0.5):
        [schedule] = nested.lowest(share * plain.cost)
        assert simulate(step, schedule).cost <= (1 + share) * plain.cost
        peaks.append(replay(step, schedule))
    assert plain.peak > peaks[0] > peaks[1] > peaks[2]
    assert nested.lowest(-1.0) == []


def blocks(count: int) -> Problem:
    """A chain in which each expensive op is followed by two cheap ones, of different sizes."""
    sizes = [8, 8, 4] * count
    length = len(sizes)
    ops = [
        Op(
            f"f{i}",
            (i - 1,) if i else (),
            (i,),
            cost=10.0 if i % 3 == 0 else 1.0,
            expensive=i % 3 == 0,
        )
        for i in range(length)
    ]
    gradient = length
    for i in reversed(range(length)):
        reads = (i,) if i == length - 1 else (i, gradient - 1)
        ops.append(Op(f"b{i}", reads, (gradient,), backward=True))
        sizes.append(sizes[i])
        gradient += 1
    tensors = tuple(Tensor(f"{i}:0", size) for i, size in enumerate(sizes))
    return Problem(tuple(ops), tensors, frozenset({gradient - 1}))


@pytest.mark.parametrize("share", [0.8, 0.6, 0.5])
def test_what_crosses_a_cut_is_counted(share):
    step = blocks(12)
    budget = int(share * simulate(step, range(len(step.ops))).peak)
    [schedule] = Nested(step, budget).within(budget)
    assert replay(step, schedule) <= 1.05 * budget
    again = [step.ops[i].expensive for i, times in Counter(schedule).items() if times > 1]
    assert again.count(False) > again.count(True)
