from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from memory_saving_gradients.planning.keep import keeping, kept_tensors, without_unread
from tests.planning.problems import chain, problems
from tests.replay import replay


def test_keeping_one_tensor_of_a_chain_recomputes_each_half():
    step = chain(4)
    # f3 was not read since it was made, so its first run moves to where the second would be.
    assert keeping(step, {1}) == [0, 1, 2, 3, 4, 5, 6, 0, 7]


def test_kept_tensors_are_those_read_in_the_backward_pass():
    step = chain(4)
    assert 1 in kept_tensors(step, keeping(step, {1, 3}))
    assert 0 not in kept_tensors(step, keeping(step, {1, 3}))


def test_a_run_that_nothing_reads_before_it_is_repeated_is_dropped():
    step = chain(3)
    assert without_unread(step, [0, 1, 2, 2, 3, 4, 5]) == [0, 1, 2, 3, 4, 5]


@given(problems(), st.sets(st.integers(0, 30)))
def test_every_choice_gives_a_valid_schedule_with_at_most_two_runs(step, kept):
    kept = {t for t in kept if t < len(step.tensors)}
    schedule = keeping(step, kept)
    replay(step, schedule)
    assert max(Counter(schedule).values()) <= 2
    for index, count in Counter(schedule).items():
        assert count == 1 or not kept.issuperset(step.ops[index].outputs)
