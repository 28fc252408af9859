from hypothesis import given

from memory_saving_gradients.planning.packing import allocated
from memory_saving_gradients.planning.problem import Op, Problem, Tensor, baseline
from memory_saving_gradients.planning.simulate import simulate
from tests.planning.problems import problems


def line(*sizes: int, apart: dict[int, int] | None = None, in_place: bool = False) -> Problem:
    """Each op reads the tensor of the one before."""
    tensors = [Tensor(f"{i}:0", size) for i, size in enumerate(sizes)]
    for i, size in (apart or {}).items():
        tensors[i] = Tensor(f"{i}:0", 0, apart=size)
    ops = (Op(str(i), (i - 1,) if i else (), (i,), in_place=in_place) for i in range(len(sizes)))
    return Problem(tuple(ops), tuple(tensors), frozenset(apart or ()), packed=True)


def test_gaps_count():
    ops = (Op("a", (), (0,)), Op("b", (0,), (1,)), Op("c", (0,), (2,)), Op("d", (2,), (3,)))
    tensors = (Tensor("a:0", 2), Tensor("b:0", 5), Tensor("c:0", 1), Tensor("d:0", 5))
    step = Problem(ops, tensors, packed=True)
    assert simulate(step, range(4)).peak == 2 + 5
    # b and d lie at 0. By size, a comes next, at 5, and c beside it; by life, a and c lie below.
    assert allocated(step, range(4)) == 5 + 2 + 1


def test_tensors_lie_in_the_memory_of_results_that_are_made_later():
    assert allocated(line(4, 4, 0), range(3)) == 8
    assert allocated(line(4, 4, 0, apart={2: 4}), range(3)) == 4
    assert allocated(line(4, 4, 0, apart={2: 3}), range(3)) == 8  # too small


def test_the_reader_that_makes_a_result_cannot_have_its_input_there():
    assert allocated(line(4, 0, apart={1: 4}), range(2)) == 4


def test_what_is_written_over_shares_a_place():
    assert allocated(line(4, 4, 4, in_place=True), range(3)) == 4


def test_each_copy_has_a_place_of_its_own():
    step = line(4, 4, 4)
    assert allocated(step, [0, 1, 0, 1, 2]) == 8


@given(problems())
def test_a_block_holds_all_that_is_alive_and_no_more_than_everything(step):
    laid_out = Problem(step.ops, step.tensors, step.results, packed=True)
    alive = simulate(laid_out, baseline(step)).peak
    total = int(laid_out.sizes.sum() + laid_out.workspaces.sum())
    assert alive <= allocated(laid_out, baseline(step)) <= total
