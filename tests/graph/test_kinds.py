"""The kinds of op, against traced runs."""

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import measure
from memory_saving_gradients.graph import kinds
from tests.graph.tracing import allocated

v1 = tf.compat.v1

SIDE = 256
BYTES = SIDE * SIDE * 4


def fresh():
    return tf.random.uniform((SIDE, SIDE), 0.1, 0.9)


IN_PLACE = {
    "Relu": tf.nn.relu,
    "Tanh": tf.tanh,
    "Sigmoid": tf.sigmoid,
    "AddV2": lambda x: x + tf.ones((SIDE,)),
    "Mul": lambda x: x * 2.0,
    "BiasAdd": lambda x: tf.nn.bias_add(x, tf.ones((SIDE,))),
    "Softmax": tf.nn.softmax,
    "SelectV2": lambda x: tf.where(tf.ones((SIDE, SIDE), tf.bool), x, 0.0),
    "Square": tf.square,
    "Rsqrt": tf.math.rsqrt,
    "SparseSoftmaxCrossEntropyWithLogits": lambda x: (
        tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(
            features=x, labels=tf.zeros((SIDE,), tf.int32)
        ).backprop
    ),
}


@pytest.mark.parametrize("kind", IN_PLACE)
def test_in_place_ops_take_no_new_buffer(graph, kind):
    y = IN_PLACE[kind](fresh())
    assert y.op.type == kind
    assert kind in kinds.IN_PLACE
    assert allocated(y) < BYTES / 10


@pytest.mark.parametrize("make", [tf.transpose, lambda x: tf.matmul(x, x), tf.cumsum])
def test_other_ops_take_a_buffer(graph, make):
    y = make(fresh())
    assert y.op.type not in kinds.IN_PLACE
    assert allocated(y) >= BYTES


VIEWS = {
    "Reshape": lambda x: tf.reshape(x, (-1,)),
    "Identity": tf.identity,
    "ExpandDims": lambda x: tf.expand_dims(x, 0),
    "Unpack": lambda x: tf.unstack(tf.reshape(x, (2, SIDE // 2, SIDE)))[1],
}


@pytest.mark.parametrize("kind", VIEWS)
def test_views_share_their_input(graph, kind):
    y = VIEWS[kind](fresh())
    assert y.op.type == kind
    assert kinds.shown_input(y.op, 0) == 0
    assert allocated(y) == 0


NEUTRAL = {
    "x * 1": lambda x: tf.multiply(x, 1.0),
    "1 * x": lambda x: tf.multiply(1.0, x),
    "x / 1": lambda x: tf.divide(x, 1.0),
    "x + 0": lambda x: tf.add(x, tf.zeros((SIDE,))),
    "0 + x": lambda x: tf.add(0.0, x),
    "x - 0": lambda x: tf.subtract(x, 0.0),
    "x times ones": lambda x: tf.multiply(x, tf.fill((1, SIDE), 1.0)),
}
OTHERS = {
    "1 / x": lambda x: tf.divide(1.0, x),
    "x * 2": lambda x: tf.multiply(x, 2.0),
    "a row * ones": lambda x: tf.multiply(x[:1], tf.ones((SIDE, SIDE))),
    "x * a vector": lambda x: tf.multiply(x, np.linspace(1, 2, SIDE, dtype=np.float32)),
}


@pytest.mark.parametrize("rows", [SIDE, None])
@pytest.mark.parametrize("kind", {**NEUTRAL, **OTHERS})
def test_neutral_sums_and_products_share_their_input(graph, kind, rows):
    x = v1.placeholder(tf.float32, (rows, SIDE))
    h = tf.matmul(x, fresh())
    y = {**NEUTRAL, **OTHERS}[kind](h)
    assert (kinds.owner(y) is h) == (kind in NEUTRAL)
    assert own_bytes(y, h, {x: np.ones((SIDE, SIDE))}) == (0 if kind in NEUTRAL else BYTES)


def test_neutral_products_are_copies_where_reference_variables_are_updated(graph):
    update = v1.Variable(1.0, use_resource=False).assign(2.0)
    x = v1.placeholder(tf.float32, (SIDE, SIDE))
    h = tf.matmul(x, fresh())
    y = tf.multiply(h, 1.0)
    assert kinds.owner(y) is y
    assert own_bytes(y, h, {x: np.ones((SIDE, SIDE))}, update) == BYTES


def own_bytes(y, h, feed, *others):
    """The bytes that `y` takes beside `h`, which is read later, as Grappler has it run."""
    with tf.control_dependencies([y]):
        later = tf.cos(h)
    with v1.Session(config=v1.ConfigProto(inter_op_parallelism_threads=1)) as session:
        fetches = [tf.reduce_sum(tf.sin(y) * y * later), *others]
        session.run(fetches, feed)
        events = measure.session_events(session, fetches, feed)
    return sum(e.bytes for e in events if e.node == y.op.name and e.bytes > 0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_variable_that_is_gathered_from_is_copied_when_it_is_read(graph, tied):
    table = tf.Variable(tf.ones((SIDE, SIDE)))
    rows = tf.gather(table, tf.range(3)) if tied else tf.ones((3, SIDE))
    y = tf.matmul(rows, table)
    read = y.op.inputs[1]
    assert kinds.is_gathered(read.op.inputs[0]) == tied
    assert allocated(read, also=y) == (BYTES if tied else 0)
