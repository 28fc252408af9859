"""Waves cost no memory, whatever order their entries run in."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from memory_saving_gradients.planning.keep import keeping
from memory_saving_gradients.planning.overlap import runs_ahead, waves
from memory_saving_gradients.planning.problem import Op, Problem, Tensor
from memory_saving_gradients.planning.simulate import plain_peak, simulate
from tests.planning.problems import chain, problems


def before(step, schedule, wave):
    """For each entry of a wave, the entries of it that have to run first."""
    newest, found = {}, {}
    for i in wave:
        op = step.ops[schedule[i]]
        read = {newest[t] for t in op.inputs if t in newest}
        # A second copy must not come before what reads the first.
        readers = {j for j in found if set(step.ops[schedule[j]].inputs) & set(op.outputs)}
        found[i] = read | readers | {newest[t] for t in op.outputs if t in newest}
        newest.update((t, i) for t in op.outputs)
    return found


@given(problems(), st.data())
def test_no_order_within_waves_raises_the_peak(step, data):
    schedule = [int(i) for i in keeping(step, {0, 2, 4})]
    found = waves(step, schedule, step.forward_count)
    assert [i for wave in found for i in wave] == list(range(step.forward_count, len(schedule)))
    other = schedule[: step.forward_count]
    for wave in found:
        waiting = before(step, schedule, wave)
        while waiting:
            ready = [i for i, first in waiting.items() if not first & waiting.keys()]
            one = data.draw(st.sampled_from(ready))
            other.append(schedule[one])
            del waiting[one]
    assert simulate(step, other).peak <= simulate(step, schedule).peak


def test_ops_that_their_data_order_share_waves():
    step = chain(40)
    assert [len(wave) for wave in waves(step, range(80), 40)] == [8, 8, 8, 8, 8]


def test_where_memory_is_short_ops_run_one_by_one():
    """Nothing orders the readers of a list; at the peak each frees what the next one needs."""
    forward = [Op(f"f{i}", (), (i,)) for i in range(8)]
    backward = [Op(f"b{i}", (i,), (8 + i, 16 + i), backward=True) for i in range(8)]
    sizes = [10] * 8 + [10] * 8 + [0] * 8
    tensors = tuple(Tensor(f"{i}:0", size) for i, size in enumerate(sizes))
    step = Problem((*forward, *backward), tensors, frozenset(range(16, 24)))
    found = waves(step, range(16), 8)
    assert len(found[0]) == 1
    assert len(found[1]) > 1


def test_what_depends_on_time_begins_a_wave():
    step = chain(40)
    assert 75 not in {wave.start for wave in waves(step, range(80), 40)}
    assert 75 in {wave.start for wave in waves(step, range(80), 40, alone={75})}


def test_towers_run_ahead_of_one_another_where_nothing_orders_them():
    """Each makes a large tensor and a small one of it; the backward pass reads the small ones."""
    ops = [op for i in range(0, 8, 2) for op in (Op("", (), (i,)), Op("", (i,), (i + 1,)))]
    last = Op("", (1, 3, 5, 7), (8,), backward=True)
    tensors = tuple(Tensor(f"{i}:0", 1 if i % 2 else 100) for i in range(9))
    one_by_one = Problem((*ops, last), tensors, frozenset({8}), as_executed=tuple(range(9)))
    assert not runs_ahead(one_by_one, range(9), 8)
    abreast = dataclasses.replace(one_by_one, as_executed=(0, 2, 4, 6, 1, 3, 5, 7, 8))
    assert runs_ahead(abreast, range(9), 8)
    assert not runs_ahead(dataclasses.replace(abreast, as_executed=()), range(9), 8)


@given(problems())
def test_ops_that_do_not_overlap_take_what_the_simulator_says(step):
    one_by_one = tuple(event for i in range(len(step.ops)) for event in (i, ~i))
    course = dataclasses.replace(step, as_executed=one_by_one)
    assert plain_peak(course) == simulate(step, range(len(step.ops))).peak


@given(problems())
def test_ops_that_overlap_take_no_less(step):
    count = len(step.ops)
    late = [i - 1 for i in range(1, count)]
    together = [0, *(event for i in range(1, count) for event in (i, ~late[i - 1])), ~(count - 1)]
    course = dataclasses.replace(step, as_executed=tuple(together))
    assert plain_peak(course) >= simulate(step, range(count)).peak
