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
        schedule = Nested(step, int(share * plain.peak)).schedule(1.0)
        replay(step, schedule)
        costs.append(simulate(step, schedule).cost)
    assert costs == sorted(costs)
    assert costs[0] == plain.cost < costs[-1] < 2 * plain.cost


def test_no_room_has_no_schedule():
    assert Nested(chain(8), 1).schedule(1.0) is None


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
    schedule = Nested(step, budget).schedule(1.0)
    assert replay(step, schedule) <= 1.05 * budget
    again = [step.ops[i].expensive for i, times in Counter(schedule).items() if times > 1]
    assert again.count(False) > again.count(True)
