"""How ops work on rows."""

import pytest
import tensorflow as tf

from memory_saving_gradients.graph.rows import PARTIAL, SUM, WHOLE, RowShapes, signatures
from memory_saving_gradients.graph.shapes import Shapes

ROWS, WIDTH, WORDS = 6, 3, 5


def placeholder(*shape):
    return tf.compat.v1.placeholder(tf.float32, shape)


def of(make, rows=ROWS):
    """The signatures of the op that `make` adds to a graph."""
    with tf.Graph().as_default() as graph:
        op = make().op
        shapes = RowShapes([Shapes(graph.get_operations())], [rows])
        return [(one.inputs, one.outputs) for one in signatures(op, shapes)]


@pytest.mark.parametrize(
    ("make", "inputs", "outputs"),
    [
        (lambda: tf.tanh(placeholder(ROWS, WIDTH)), (1,), (1,)),
        (lambda: placeholder(ROWS, WIDTH) + placeholder(WIDTH), (1, WHOLE), (1,)),
        (lambda: placeholder(2, 3, WIDTH) * placeholder(2, 3, 1), (2, 2), (2,)),
        (lambda: placeholder(ROWS, WIDTH) @ placeholder(WIDTH, WORDS), (1, WHOLE), (1,)),
        (
            lambda: tf.matmul(placeholder(ROWS, WIDTH), placeholder(ROWS, WORDS), True),
            (1, 1),
            (SUM,),
        ),
        (lambda: tf.matmul(placeholder(2, 3, 4, 7), placeholder(2, 3, 7, 4)), (2, 2), (2,)),
        (
            lambda: tf.matmul(placeholder(2, 3, 4), placeholder(2, 3, 7), adjoint_a=True),
            (2, 2),
            (PARTIAL,),
        ),
        (lambda: tf.nn.softmax(placeholder(2, 3, WIDTH)), (2,), (2,)),
        (lambda: tf.reduce_sum(placeholder(2, 3, WIDTH), -1), (2, WHOLE), (2,)),
        (lambda: tf.reduce_sum(placeholder(2, 3, WIDTH), [0, 1]), (2, WHOLE), (SUM,)),
        (lambda: tf.reshape(placeholder(2, 3, WIDTH), [ROWS, WIDTH]), (2, WHOLE), (1,)),
        (lambda: tf.transpose(placeholder(2, 3, 4, 7), [0, 1, 3, 2]), (2, WHOLE), (2,)),
        (lambda: tf.einsum("btw,wv->btv", placeholder(2, 3, 4), placeholder(4, 7)), (2, 0), (2,)),
    ],
)  # fmt: skip
def test_the_first_signature(make, inputs, outputs):
    assert of(make)[0] == (inputs, outputs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.cumsum(placeholder(ROWS, WIDTH)),
        lambda: tf.reduce_mean(placeholder(ROWS, WIDTH), 0),
        lambda: tf.transpose(placeholder(ROWS, WIDTH), [1, 0]),
        lambda: placeholder(WIDTH, ROWS) @ placeholder(ROWS, WORDS),
        lambda: tf.nn.softmax(placeholder(1, ROWS)),
        lambda: tf.reverse(placeholder(ROWS, WIDTH), [0]),
    ],
)
def test_ops_that_need_all_rows(make):
    assert not of(make)


def test_a_size_that_depends_on_the_batch_is_no_feature():
    with tf.Graph().as_default() as graph:
        x = placeholder(None, WIDTH, None)
        sizes = [[4, WIDTH, 2], [8, WIDTH, 6]]
        known = [{x.op.name: each} for each in sizes]
        every = [Shapes(graph.get_operations(), known=each) for each in known]
        shapes = RowShapes(every, [4 * WIDTH, 8 * WIDTH])
        assert shapes.features(x, 1) is None
        assert [*shapes.possible(x)] == []
