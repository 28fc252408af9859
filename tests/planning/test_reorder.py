"""The order of a schedule, against an independent simulation."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_saving_gradients.planning.problem import Op, Problem, Tensor
from memory_saving_gradients.planning.reorder import reordered
from memory_saving_gradients.planning.search import lowest, within
from memory_saving_gradients.planning.simulate import simulate
from tests.planning.problems import chain, problems
from tests.replay import replay


def free(problem: Problem) -> Problem:
    """The problem with no order but that of its data."""
    return dataclasses.replace(problem, waits=tuple(() for _ in problem.ops))


@settings(deadline=None, max_examples=60)
@given(problems(), st.integers(0, 3), st.sampled_from([1.0, 0.7, 0.4]))
def test_the_same_runs_in_an_order_that_is_no_worse(problem, seed, share):
    problem = free(problem)
    before = within(problem, int(share * simulate(problem, range(len(problem.ops))).peak))
    after = reordered(problem, before, seed)
    replay(problem, after)
    assert sorted(after) == sorted(before)
    aim = int(0.8 * simulate(problem, before).peak)
    timelines = (simulate(problem, one).timeline for one in (before, after))
    excess = [np.maximum(timeline - aim, 0).sum() for timeline in timelines]
    assert excess[1] <= excess[0]


@settings(deadline=None, max_examples=60)
@given(problems(), st.data())
def test_ops_wait_for_those_that_they_shall_wait_for(problem, data):
    waits: list[tuple[int, ...]] = []
    for i in range(len(problem.ops)):
        waits.append(tuple(data.draw(st.sets(st.integers(0, i - 1), max_size=2)) if i else ()))
    problem = dataclasses.replace(problem, waits=tuple(waits))
    ran: set[int] = set()
    for op in reordered(problem, range(len(problem.ops))):
        assert ran.issuperset(waits[op])
        ran.add(op)


def test_an_order_that_is_fixed_stays():
    step = chain(12)
    assert list(reordered(step, range(24))) == list(range(24))


def forked() -> Problem:
    """Two wide gradients that both wait: each could be used up before the next is made."""
    sizes = (1, 100, 100, 1, 1)
    ops = (
        Op("f", (), (0,)),
        Op("wide", (0,), (1,), backward=True),
        Op("wide too", (0,), (2,), backward=True),
        Op("narrow", (1,), (3,), backward=True),
        Op("narrow too", (2,), (4,), backward=True),
    )
    tensors = tuple(Tensor(f"{i}:0", size) for i, size in enumerate(sizes))
    return free(Problem(ops, tensors, frozenset({3, 4})))


def test_another_order_lowers_the_peak():
    step = forked()
    assert simulate(step, range(5)).peak == 201
    assert simulate(step, reordered(step, range(5))).peak == 102


def test_searches_find_it():
    step = forked()
    assert simulate(step, lowest(step)).peak == simulate(step, within(step, 102)).peak == 102
