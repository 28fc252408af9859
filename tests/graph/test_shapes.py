"""Shapes, as TensorFlow itself says of known graphs."""

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients.graph import calls
from memory_saving_gradients.graph.shapes import (
    NOMINAL_SIZES,
    InputSizes,
    Shapes,
    WrongSize,
    bytes_of,
)
from tests.cases import MODELS

v1 = tf.compat.v1


def test_known_shapes_are_the_graphs_own(graph):
    x = tf.zeros((3, 5), tf.float64)
    shapes = Shapes(graph.get_operations())
    assert shapes(x) == [3, 5]
    assert shapes.bytes(x) == 3 * 5 * 8


def test_an_unknown_batch_is_nominal_and_what_derives_from_it_is_inferred(graph):
    x = v1.placeholder(tf.float32, (None, 6))
    steps = tf.reshape(x, (-1, 3))
    bias = tf.reduce_sum(steps + tf.zeros((1, 3)), 0)
    gradient = tf.gradients(tf.reduce_sum(steps * tf.tile(steps[:1], (1, 1))), steps)[0]
    shapes = Shapes(graph.get_operations())
    assert shapes(x) == [128, 6]
    assert shapes(steps) == [256, 3]
    assert shapes(bias) == [3]
    # Broadcast gradients reduce over axes that are known only by computing with the shapes.
    assert shapes(gradient) == [256, 3]


def test_a_batch_that_a_reshape_cannot_divide_takes_the_next_nominal_size(graph):
    x = v1.placeholder(tf.float32, (None, 2))
    y = tf.reshape(x, (-1, 7))
    shapes = Shapes(graph.get_operations())
    assert shapes(x) == [NOMINAL_SIZES[1], 2]
    assert shapes(y) == [NOMINAL_SIZES[1] * 2 // 7, 7]


def test_a_reshape_that_no_nominal_size_suits_keeps_the_count_of_elements(graph):
    x = v1.placeholder(tf.float32, (None, 1))
    y = tf.reshape(x, (-1, 11))
    shapes = Shapes(graph.get_operations())
    assert shapes(x) == [128, 1]
    assert shapes(y) == [12, 11]


def labels_of_unknown_shape():
    """Labels as `compile()` of tf_keras makes them, which no size but 10 suits."""
    x, labels = (v1.placeholder(tf.float32, (None, size)) for size in (10, None))
    softened = tf.identity(0.9 * labels, name="softened")
    return x, softened, tf.nn.softmax_cross_entropy_with_logits(softened, 2 * x)


@pytest.mark.parametrize("given", [InputSizes(assumed=True), InputSizes(32)])
def test_a_nominal_size_that_contradicts_the_graph_is_nobodys_error(graph, given):
    x, softened, loss = labels_of_unknown_shape()
    shapes = Shapes(graph.get_operations(), given)
    batch = given.batch or 128
    assert shapes.batch_size == batch
    assert shapes(x) == [batch, 10]
    assert shapes(softened)[0] == batch
    assert shapes(loss) == [batch]


def test_only_a_size_that_somebody_gave_is_wrong(graph):
    x = v1.placeholder(tf.float32, (None, 6))
    y = tf.tanh(x) + tf.zeros((7, 6))
    wrong = InputSizes(5)
    with pytest.raises(WrongSize, match="batch_size=5 contradicts the graph: Dimensions must be"):
        Shapes(graph.get_operations(), wrong)
    with pytest.raises(WrongSize, match="contradicts the graph: Node 'Placeholder'"):
        Shapes(graph.get_operations(), InputSizes(shapes=(("Placeholder", (7, 5)),)))
    for nobodys in (wrong.times(1, 5), wrong.inside(), InputSizes(assumed=True)):
        assert Shapes(graph.get_operations(), nobodys)(y) == [7, 6]


def test_what_the_user_says_of_a_shape_goes_on_to_what_is_made_of_it(graph):
    (x,) = tf.numpy_function(lambda: np.zeros((4, 6), np.float32), [], [tf.float32])
    x.set_shape((None, 6))
    y = tf.tanh(tf.concat([x, x], 1))
    assert Shapes(graph.get_operations())(y) == [128, 12]


@pytest.mark.parametrize(("shape", "size"), [((None, 3), 12), ((0, 3), 0), ((), 4)])
def test_bytes_count_an_unknown_size_as_one_and_an_empty_one_as_nothing(shape, size):
    assert bytes_of(shape, "float32") == size


def test_an_unknown_rank_counts_as_a_scalar(graph):
    x = v1.placeholder(tf.float32)
    assert Shapes(graph.get_operations()).bytes(x) == 4


def test_unknown_shapes_that_follow_from_no_size_need_no_copy_of_the_graph(graph, monkeypatch):
    """Such as the reserve space of a batch normalisation, but not the places of what is not 0."""
    x, channels = tf.ones((2, 4, 4, 3)), tf.ones(3)
    normal = v1.nn.fused_batch_norm(x, channels, channels)[0]
    reserve = normal.op.outputs[5]
    assert not reserve.shape.is_fully_defined()
    with monkeypatch.context() as patch:
        patch.delattr("memory_saving_gradients.graph.shapes.Inferred")
        assert Shapes(graph.get_operations())(reserve) == []
    places = tf.where(x)
    assert Shapes(graph.get_operations())(places) == [2 * 4 * 4 * 3, 4]


def test_a_sum_over_axes_that_only_a_run_knows_is_as_large_as_its_operand(graph):
    """As in the gradient of a loop, which pops its operand, and what the axes follow from."""
    popped = tf.raw_ops.TensorListPopBack(
        input_handle=v1.placeholder(tf.variant, ()), element_shape=-1, element_dtype=tf.float32
    ).tensor
    popped.set_shape((None, 6))
    total = tf.reduce_sum(tf.tanh(popped), v1.placeholder(tf.int32, (None,)))
    total.set_shape((None, None))
    again = tf.reshape(total, v1.placeholder(tf.int32, (2,)))
    again.set_shape((None, 6))
    shapes = Shapes(graph.get_operations(), InputSizes(50))
    assert shapes(popped) == shapes(total) == shapes(again) == [50, 6]


def test_sizes_that_depend_on_data(graph):
    """The parts of a partition are equal, a mask leaves all in; what is made of them follows."""
    rows = v1.placeholder(tf.float32, (64, 8))
    kind = v1.placeholder(tf.int32, (64,))
    parts = tf.dynamic_partition(rows, kind, 4)
    again = tf.dynamic_partition(parts[1], tf.cast(parts[1][:, 0], tf.int32), 2)
    kept = tf.tanh(tf.boolean_mask(rows, kind > 0))
    shapes = Shapes(graph.get_operations())
    assert [shapes(part) for part in parts] == [[16, 8]] * 4
    assert [shapes(part) for part in again] == [[8, 8]] * 2
    assert shapes(kept) == [64, 8]


def test_sizes_that_depend_on_data_and_an_unknown_batch(graph):
    rows = v1.placeholder(tf.float32, (None, 8))
    part = tf.tanh(tf.dynamic_partition(rows, v1.placeholder(tf.int32, (None,)), 4)[3])
    assert Shapes(graph.get_operations())(part) == [32, 8]


def test_rows_of_a_variable_for_an_unknown_batch(graph):
    """A copy of a graph does not know the shapes of variables behind handles."""
    table = tf.compat.v1.get_variable("table", (50, 7), use_resource=True)
    rows = tf.gather(table, tf.compat.v1.placeholder(tf.int32, (None, 5)))
    places = tf.gather_nd(table, tf.compat.v1.placeholder(tf.int32, (None, 3, 1)))
    shapes = Shapes(graph.get_operations(), InputSizes(batch=6))
    assert (shapes(rows), shapes(places)) == ([6, 5, 7], [6, 3, 7])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sweep(4)
def test_the_largest_tensor_is_as_large_for_a_batch_that_is_only_given(name):
    make, batch = MODELS[name]

    def largest(size):
        model = make()
        specs = [tf.TensorSpec((size, *a.shape[1:]), a.dtype) for a in model.example(batch)]

        @tf.function(autograph=False)
        def step(*inputs):
            return tf.gradients(model.loss(*inputs), model.variables)

        operations = step.get_concrete_function(*specs).graph.get_operations()
        shapes = Shapes(operations, InputSizes(batch))
        return max(shapes.bytes(t) for op in operations for t in op.outputs)

    assert largest(None) == largest(batch)


def test_what_is_known_of_a_size_that_depends_on_data_stays(graph):
    rows = v1.placeholder(tf.float32, (64, 8))
    kind = v1.placeholder(tf.int32, (64,))
    for _ in range(6):  # each can be told only once those before it are
        parts = tf.dynamic_partition(tf.tanh(rows), kind, 4)
        places = tf.dynamic_partition(tf.range(64), kind, 4)
        hidden = [tf.tanh(part @ tf.ones((8, 24))) for part in parts]
        rows = tf.dynamic_stitch(places, [h @ tf.ones((24, 8)) for h in hidden])
    shapes = Shapes(graph.get_operations())
    assert [shapes(h) for h in hidden] == [[16, 24]] * 4
    assert shapes(rows) == [64, 8]
    values = tf.exp(tf.cast(tf.unique(kind).y, tf.float32))
    assert Shapes(graph.get_operations())(values) == [64]


def windows(x, most):
    """The windows of images, as Swin cuts them: their size depends on that of the images."""
    batch, height, width, channels = tf.unstack(tf.shape(x))
    size = tf.cond(height <= most, lambda: height, lambda: tf.constant(most))
    over = (-height % size, -width % size)
    padded = tf.pad(x, [(0, 0), (0, over[0]), (0, over[1]), (0, 0)])
    turned = tf.cond(size < height, lambda: tf.roll(padded, (-1, -1), (1, 2)), lambda: padded)
    down, right = (height + over[0]) // size, (width + over[1]) // size
    cut = tf.reshape(turned, (batch, down, size, right, size, channels))
    return tf.reshape(tf.transpose(cut, (0, 1, 3, 2, 4, 5)), (-1, size * size, channels))


@pytest.mark.parametrize(("batch", "given"), [(4, InputSizes()), (None, InputSizes(4))])
def test_sizes_that_are_computed_from_sizes(graph, batch, given):
    x = v1.placeholder(tf.float32, (batch, 30, 30, 8))
    cut = windows(x, 7)
    whole = tf.tanh(windows(tf.nn.relu(x), 50))
    again = tf.exp(windows(tf.reshape(cut, (-1, 35, 35, 8)), 7))
    gradient = tf.gradients(tf.exp(cut), x)[0]
    assert all(None in t.shape.as_list() for t in (cut, whole, again))
    shapes = Shapes(graph.get_operations(), given)
    assert shapes(cut) == [4 * 25, 49, 8]
    assert shapes(whole) == [4, 900, 8]
    assert shapes(again) == [4 * 25, 49, 8]
    assert shapes(gradient) == [4, 30, 30, 8]


def test_of_two_branches_of_which_either_may_be_taken_the_larger_counts(graph):
    x = v1.placeholder(tf.float32, (None, 8))
    small = v1.placeholder(tf.bool, ())
    y = tf.cond(small, lambda: x[:2], lambda: tf.concat([x, x], 0))
    assert y.shape.as_list() == [None, 8]
    z = tf.tanh(y)
    assert Shapes(graph.get_operations(), InputSizes(16))(z) == [32, 8]


def test_the_shapes_of_a_call_are_those_of_the_function_for_its_inputs(graph):
    @tf.function
    def halves(x, size):
        return tf.reshape(tf.tanh(x), (-1, size)), size // 2

    y, size = halves(v1.placeholder(tf.float32, (6, 8)), tf.constant(4))
    z = tf.exp(tf.reshape(y, (-1, size)))
    shapes = Shapes(graph.get_operations())
    assert shapes(y) == [12, 4]
    assert shapes(z) == [24, 2]


def test_sizes_that_nobody_knows_make_no_more_of_what_there_is(graph):
    x = tf.zeros((6, 30, 16))
    sizes = v1.placeholder(tf.int32, (4,))
    y = tf.reshape(tf.tanh(x), sizes)
    for _ in range(3):
        y = tf.exp(tf.transpose(y, (2, 0, 3, 1)))
        y = tf.reshape(y * tf.nn.relu(y), sizes)
    (back,) = tf.gradients(y, x)
    rows = tf.matmul(tf.reshape(y, (sizes[0], sizes[1])), tf.zeros((16, 5)))
    shapes = Shapes(graph.get_operations())
    assert shapes(y)[0] > 0
    assert np.prod(shapes(y)) == 6 * 30 * 16
    assert shapes(back) == [6, 30, 16]
    assert np.prod(shapes(rows)) <= 6 * 30 * 16 * 5


def test_a_loop_of_an_unknown_batch(graph):
    """Its gradient is placed beside it; what it collects loses the batch."""
    x = v1.placeholder(tf.float32, (None, 8))
    (_, y) = tf.while_loop(
        lambda i, _: i < 4, lambda i, y: (i + 1, tf.tanh(y)), (0, x), maximum_iterations=4
    )
    (back,) = tf.gradients(tf.exp(y), x)
    shapes = Shapes(graph.get_operations(), InputSizes(16))
    assert shapes(y) == [16, 8]
    assert shapes(back) == [16, 8]
    loop = next(op for op in graph.get_operations() if op.type == "StatelessWhile")
    for body in calls.bodies(loop):
        inside = shapes.within(loop, body, body.get_operations())
        tanh = next(op for op in body.get_operations() if op.type == "Tanh")
        assert inside(tanh.outputs[0]) == [16, 8]
