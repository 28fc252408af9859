"""Fewer stretches of recomputation, against an independent replay."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from memory_saving_gradients.planning.problem import Op, Problem, Tensor
from memory_saving_gradients.planning.search import within
from memory_saving_gradients.planning.simulate import simulate
from memory_saving_gradients.planning.stretches import fewer_stretches, parts, stretches
from tests.planning.problems import chain, problems
from tests.replay import replay


def test_stretches_are_where_forward_ops_run_in_the_backward_pass():
    step = chain(4)
    assert stretches(step, [0, 1, 2, 3, 4, 5, 2, 6, 0, 7]) == [(6, 7), (8, 9)]
    assert stretches(step, range(8)) == []


def test_a_stretch_is_cut_where_an_independent_product_begins():
    """Two products of kept tensors, each with what is made of it."""
    ops = [
        Op("kept", (), (0, 1)),
        Op("product", (0,), (2,), expensive=True),
        Op("of it", (2,), (3,)),
        Op("other product", (1,), (4,), expensive=True),
        Op("of both", (3, 4), (5,)),
        Op("product of both", (5,), (6,), expensive=True),
        Op("first gradient", (), (8,), backward=True),
        Op("gradient", (6, 8), (7,), backward=True),
    ]
    step = Problem(tuple(ops), tuple(Tensor(f"{i}:0", 8) for i in range(9)), frozenset({7}))
    schedule = [*range(7), 1, 2, 3, 4, 5, 7]
    assert stretches(step, schedule) == [(7, 12)]
    assert parts(step, schedule) == [(7, 9), (9, 12)]
    assert parts(step, [*range(7), 1, 3, 2, 4, 5, 7]) == [(7, 12)]


def test_stretches_follow_one_another_where_the_peak_allows_it():
    step = chain(4)
    schedule = [0, 1, 2, 3, 4, 5, 2, 6, 0, 7]
    assert fewer_stretches(step, schedule, 10**6) == [0, 1, 2, 3, 4, 5, 2, 0, 6, 7]
    assert fewer_stretches(step, schedule, 0) == schedule


def test_what_two_stretches_recompute_is_recomputed_once():
    step = chain(4)
    schedule = [0, 1, 2, 3, 4, 5, 1, 2, 6, 0, 1, 7]
    assert fewer_stretches(step, schedule, 10**6) == [0, 1, 2, 3, 4, 5, 1, 2, 0, 6, 7]


@settings(deadline=None, max_examples=100)
@given(problems(), st.sampled_from([0.8, 0.5]), st.sampled_from([0.7, 1.0]))
def test_fewer_stretches_are_as_good(step, share, room):
    before = within(step, int(share * simulate(step, range(len(step.ops))).peak))
    peak = simulate(step, before).peak
    after = fewer_stretches(step, before, int(room * peak))
    assert replay(step, after) <= peak
    assert Counter(after) <= Counter(before)
    assert len(stretches(step, after)) <= len(stretches(step, before))
