import itertools
from collections import Counter

import pytest
from hypothesis import given, settings

from memory_saving_gradients.planning.articulation import articulation_tensors, sqrt_spaced
from memory_saving_gradients.planning.cuts import kept_at
from memory_saving_gradients.planning.keep import keeping
from memory_saving_gradients.planning.problem import Op, Problem, Tensor, baseline
from memory_saving_gradients.planning.search import lowest
from memory_saving_gradients.planning.simulate import simulate
from memory_saving_gradients.planning.strategies import STRATEGIES, keep_given
from tests.planning.problems import chain, problems
from tests.replay import replay


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@settings(deadline=None)
@given(step=problems())
def test_schedules_replay_and_run_no_op_more_than_twice_if_told_so(name, step):
    schedule = STRATEGIES[name](step, 2)
    assert replay(step, schedule) == simulate(step, schedule).peak
    assert max(Counter(schedule).values()) <= 2


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_a_step_without_ops_has_an_empty_schedule(name):
    assert not list(STRATEGIES[name](Problem((), (), frozenset())))


@settings(deadline=None)
@given(problems())
def test_speed_never_repeats_an_expensive_op(step):
    counts = Counter(STRATEGIES["speed"](step))
    assert all(counts[i] <= 1 for i, op in enumerate(step.ops) if op.expensive)


def test_a_long_chain_needs_about_the_square_root():
    step = chain(400, size=1)
    plain = simulate(step, baseline(step)).peak
    # Segments that grow towards the start: about √(2n), better than Chen's 2√n.
    assert plain == 401
    assert simulate(step, lowest(step, 2)).peak <= 32
    assert simulate(step, sqrt_spaced(step)).peak <= 2 * 20 + 5


def best_cuts(step: Problem) -> int:
    """The lowest peak of all sets of cuts, by brute force."""
    positions = range(1, step.forward_count)
    every = (
        cuts for n in range(len(positions) + 1) for cuts in itertools.combinations(positions, n)
    )
    return min(simulate(step, keeping(step, kept_at(step, cuts))).peak for cuts in every)


@settings(max_examples=60, deadline=None)
@given(problems(most_forward=8))
def test_cuts_are_close_to_the_best_of_all_cuts(step):
    found = simulate(step, lowest(step, 2)).peak
    best = best_cuts(step)
    largest = max(tensor.bytes for tensor in step.tensors)
    assert found <= best + largest  # not only cuts are tried


@pytest.mark.parametrize("length", [2, 5, 8, 11])
def test_cuts_of_a_short_chain_are_the_best_ones(length):
    step = chain(length)
    assert simulate(step, lowest(step, 2)).peak == best_cuts(step)


def test_two_parallel_chains_have_no_articulation_point_but_have_cuts():
    # Two towers of 12 ops from nothing, joined by one op; their ops alternate.
    tensors, ops = [], []
    for i in range(12):
        for tower in range(2):
            ops.append(Op(f"t{tower}_{i}", (len(tensors) - 2,) if i else (), (len(tensors),)))
            tensors.append(Tensor(f"t{tower}_{i}:0", 8))
    last = len(tensors)
    gradients = [last, last]
    for i in reversed(range(12)):
        for tower in range(2):
            activation = 2 * i + tower
            inputs = (activation, gradients[tower]) if i < 11 else (activation,)
            gradients[tower] = len(tensors)
            ops.append(Op(f"g{tower}_{i}", inputs, (len(tensors),), backward=True))
            tensors.append(Tensor(f"g{tower}_{i}:0", 8))
    step = Problem(tuple(ops), tuple(tensors), frozenset(gradients))
    assert simulate(step, lowest(step, 2)).peak <= 0.6 * simulate(step, baseline(step)).peak


def test_articulation_points_of_a_chain_are_its_inner_ops():
    assert articulation_tensors(chain(5)) == [1, 2, 3]


def test_where_nothing_is_given_the_plain_step_stays_if_it_is_as_low():
    step = chain(2)
    assert list(keep_given(step, ())) == list(range(4))


def test_given_checkpoints_are_kept():
    step = chain(9)
    schedule = keep_given(step, {2, 5})
    assert Counter(schedule)[2] == Counter(schedule)[5] == 1
    assert Counter(schedule)[1] == Counter(schedule)[4] == 2
    # The tail is at hand when the backward pass begins.
    assert Counter(schedule)[8] == 1
