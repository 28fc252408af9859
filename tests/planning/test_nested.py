"""Nested segments: what they cost for a budget, and that they can run."""

import pytest

from memory_saving_gradients.planning.nested import Nested
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
