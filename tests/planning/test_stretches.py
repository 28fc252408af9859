"""Fewer stretches of recomputation, against an independent replay."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from memory_saving_gradients.planning.search import within
from memory_saving_gradients.planning.simulate import simulate
from memory_saving_gradients.planning.stretches import fewer_stretches, stretches
from tests.planning.problems import chain, problems
from tests.replay import replay


def test_stretches_are_where_forward_ops_run_in_the_backward_pass():
    step = chain(4)
    assert stretches(step, [0, 1, 2, 3, 4, 5, 2, 6, 0, 7]) == [(6, 7), (8, 9)]
    assert stretches(step, range(8)) == []


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
