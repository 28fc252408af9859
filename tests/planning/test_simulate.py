import pytest
from hypothesis import given

from memory_saving_gradients.planning.keep import keeping
from memory_saving_gradients.planning.problem import Op, Problem, Tensor, baseline
from memory_saving_gradients.planning.simulate import plain_peak, simulate
from tests.planning.problems import chain, problems
from tests.replay import replay


def test_chain_holds_all_activations_and_two_gradients():
    step = chain(5, size=8)
    # At the second backward op: 4 activations (the fifth has died), two gradients.
    assert simulate(step, baseline(step)).peak == 6 * 8
    assert simulate(step, baseline(step)).cost == 10


def test_in_place_op_writes_over_a_dying_input_of_its_size():
    tensors = (Tensor("a:0", 8), Tensor("b:0", 8), Tensor("c:0", 4))
    ops = (
        Op("a", (), (0,)),
        Op("b", (0,), (1,), in_place=True),
        Op("c", (1,), (2,), in_place=True),
    )
    step = Problem(ops, tensors, frozenset({2}))
    assert simulate(step, [0, 1, 2]).timeline.tolist() == [8, 8, 12]


def test_an_op_that_writes_in_place_only_once_rewritten_does_not_in_the_plain_step():
    ops = (Op("a", (), (0,)), Op("b", (0,), (1,), in_place=True, in_place_rewritten=True))
    step = Problem(ops, (Tensor("a:0", 8), Tensor("b:0", 8)), frozenset({1}), (0, ~0, 1, ~1))
    assert simulate(step, [0, 1]).peak == 8
    assert plain_peak(step) == 16


def test_nothing_is_written_over_what_lies_behind_a_barrier():
    ops = (
        Op("f", (), (0,)),
        Op("b", (0,), (1,), backward=True, in_place=True),
        Op("c", (1,), (2,), backward=True, in_place=True),
    )
    tensors = tuple(Tensor(f"{name}:0", 8) for name in "fbc")
    events = (0, ~0, 1, ~1, 2, ~2)
    step = Problem(ops, tensors, frozenset({2}), events, barriers=True)
    assert simulate(step, [0, 1, 2]).timeline.tolist() == [8, 16, 8]
    assert plain_peak(step) == 8


def test_what_is_freed_first_makes_room_for_the_output_even_behind_a_barrier():
    ops = (
        Op("f", (), (0,), overwritable=False),
        Op("b", (0,), (1,), backward=True, in_place=True),
        Op("c", (0, 1), (2,), backward=True, freed_first=(0,)),
    )
    tensors = tuple(Tensor(f"{name}:0", 8) for name in "fbc")
    step = Problem(ops, tensors, frozenset({2}), barriers=True)
    assert simulate(step, [0, 1, 2]).timeline.tolist() == [8, 16, 16]


def test_output_that_nothing_reads_is_freed_at_once():
    tensors = (Tensor("a:0", 8), Tensor("a:1", 100), Tensor("b:0", 1))
    step = Problem((Op("a", (), (0, 1)), Op("b", (0,), (2,))), tensors, frozenset({2}))
    assert simulate(step, [0, 1]).timeline.tolist() == [108, 9]


def test_reading_before_making_is_an_error():
    step = chain(2)
    with pytest.raises(ValueError, match="f0:0"):
        simulate(step, [1, 0, 2, 3])


@given(problems())
def test_agrees_with_the_replay(step):
    for schedule in (range(len(step.ops)), keeping(step, ()), keeping(step, {0, 2, 4})):
        assert simulate(step, schedule).peak == replay(step, schedule)
