"""Waves cost no memory, whatever order their entries run in."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from memory_saving_gradients.planning.keep import keeping
from memory_saving_gradients.planning.overlap import runs_ahead, waves
from memory_saving_gradients.planning.problem import Op, Problem, Tensor
from memory_saving_gradients.planning.simulate import plain_peak, simulate
from tests.planning.problems import chain, problems


def before(step, schedule):
    """For each entry of a schedule, the entries that have to run first."""
    newest, readers, found = {}, {}, []
    for i, index in enumerate(schedule):
        op = step.ops[index]
        # A second copy must not come before what reads the first.
        old = {j for t in op.outputs for j in readers.get(t, ())}
        found.append({newest[t] for t in (*op.inputs, *op.outputs) if t in newest} | old)
        for t in op.inputs:
            readers.setdefault(t, set()).add(i)
        newest.update((t, i) for t in op.outputs)
    return found


@given(problems(), st.data())
def test_no_order_within_waves_raises_the_peak(step, data):
    schedule = [int(i) for i in keeping(step, {0, 2, 4})]
    first = step.forward_count
    found = waves(step, schedule, first)
    assert [i for wave in found for i in wave.entries] == list(range(first, len(schedule)))
    waiting = {i: wave.after for wave in found for i in wave.entries}
    needed = before(step, schedule)
    other = schedule[:first]
    while waiting:
        ended = min(waiting)
        ready = [
            i for i, after in waiting.items() if after <= ended and not needed[i] & waiting.keys()
        ]
        one = data.draw(st.sampled_from(ready))
        other.append(schedule[one])
        del waiting[one]
    assert simulate(step, other).peak <= simulate(step, schedule).peak


def test_a_wave_overlaps_with_the_one_before():
    step = chain(80)
    found = waves(step, range(160), 80)
    assert [len(wave.entries) for wave in found] == [32, 32, 16]
    assert [wave.after for wave in found] == [80, 80, 112]


def test_where_memory_is_short_ops_run_one_by_one():
    """Nothing orders the readers of a list; at the peak each frees what the next one needs."""
    forward = [Op(f"f{i}", (), (i,)) for i in range(8)]
    backward = [Op(f"b{i}", (i,), (8 + i, 16 + i), backward=True) for i in range(8)]
    sizes = [10] * 8 + [10] * 8 + [0] * 8
    tensors = tuple(Tensor(f"{i}:0", size) for i, size in enumerate(sizes))
    step = Problem((*forward, *backward), tensors, frozenset(range(16, 24)))
    found = waves(step, range(16), 8)
    assert [len(wave.entries) for wave in found[:2]] == [1, 1]
    assert found[1].after == 9
    assert found[2].after < found[2].entries.start


def test_what_depends_on_time_waits_for_all_before():
    step = chain(40)
    assert 75 not in {wave.after for wave in waves(step, range(80), 40)}
    assert 75 in {wave.after for wave in waves(step, range(80), 40, alone={75})}


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
    step = dataclasses.replace(step, barriers=False)  # the plain step has none
    course = dataclasses.replace(step, as_executed=one_by_one)
    assert plain_peak(course) == simulate(step, range(len(step.ops))).peak


@given(problems())
def test_ops_that_overlap_take_no_less(step):
    count = len(step.ops)
    late = [i - 1 for i in range(1, count)]
    together = [0, *(event for i in range(1, count) for event in (i, ~late[i - 1])), ~(count - 1)]
    step = dataclasses.replace(step, barriers=False)
    course = dataclasses.replace(step, as_executed=tuple(together))
    assert plain_peak(course) >= simulate(step, range(count)).peak
