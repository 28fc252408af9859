"""The order of the backward pass: what belongs together comes together."""

from hypothesis import given, settings
from hypothesis import strategies as st

from memory_saving_gradients.planning.backward_order import backward_order
from memory_saving_gradients.planning.problem import Op, Problem, Tensor
from memory_saving_gradients.planning.simulate import simulate


def problem_of(*ops, sizes, results=()):
    tensors = tuple(Tensor(f"t{i}", size) for i, size in enumerate(sizes))
    return Problem(tuple(ops), tensors, frozenset(results))


def backward(name, inputs, outputs, **options):
    return Op(name, inputs, outputs, backward=True, **options)


def data_waits(problem):
    """What each op waits for by data."""
    made_by, forward = problem.made_by, problem.forward_count
    return [
        {made_by[t] for t in op.inputs if made_by[t] >= forward} if i >= forward else set()
        for i, op in enumerate(problem.ops)
    ]


def names(problem, order):
    return [problem.ops[i].name for i in order]


def test_slices_of_one_gradient_come_together():
    problem = problem_of(
        backward("gradient", (), (0,)),
        backward("near", (0,), (1,)),
        backward("long way", (1,), (2,)),
        backward("end", (2,), (4,)),
        backward("far", (0,), (3,)),
        backward("result", (3, 4), (5,)),
        sizes=(100, 50, 50, 50, 50, 10),
        results=(5,),
    )
    order, late = backward_order(problem, data_waits(problem))
    assert names(problem, order)[:3] == ["gradient", "near", "far"]
    assert not late


def test_a_term_is_added_as_soon_as_it_is_made():
    problem = problem_of(
        backward("a", (), (0,)),
        backward("b", (), (1,)),
        backward("c", (), (2,)),
        backward("a + b", (0, 1), (3,), in_place=True),
        backward("a + b + c", (3, 2), (4,), in_place=True),
        sizes=(10,) * 5,
        results=(4,),
    )
    order, _ = backward_order(problem, data_waits(problem))
    assert names(problem, order)[2:] == ["a + b", "c", "a + b + c"]


def test_an_update_comes_as_soon_as_its_gradient():
    problem = problem_of(
        backward("gradient 1", (), (0,)),
        backward("gradient 2", (), (1,)),
        backward("update 1", (0,), ()),
        backward("update 2", (1,), ()),
        sizes=(10, 10),
    )
    order, _ = backward_order(problem, data_waits(problem))
    assert names(problem, order) == ["gradient 1", "update 1", "gradient 2", "update 2"]


@st.composite
def backward_passes(draw):
    count = draw(st.integers(1, 12))
    ops, sizes = [], []
    for i in range(count):
        before = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set()
        ops.append(backward(f"op{i}", tuple(sorted(before)), (i,), in_place=draw(st.booleans())))
        sizes.append(draw(st.integers(1, 5)))
    results = draw(st.sets(st.integers(0, count - 1), max_size=3))
    more = [draw(st.sets(st.integers(0, i - 1), max_size=2)) if i else set() for i in range(count)]
    return problem_of(*ops, sizes=sizes, results=results), more


@settings(max_examples=300, deadline=None)
@given(backward_passes())
def test_every_op_runs_once_and_after_what_it_waits_for(case):
    problem, more = case
    waits = [a | b for a, b in zip(data_waits(problem), more, strict=True)]
    order, late = backward_order(problem, waits)
    place = {op: i for i, op in enumerate(order)}
    assert sorted(order) == list(range(len(problem.ops)))
    assert late <= set(order)
    assert all(place[before] < place[op] for op in order for before in waits[op])
    changed = problem.reordered(order, late)
    assert simulate(changed, range(len(order))).peak == simulate(problem, order).peak
