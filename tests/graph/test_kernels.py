"""The tables of what kernels do with memory, against traced runs."""

import pytest
import tensorflow as tf

from memory_saving_gradients import measure
from memory_saving_gradients.graph import kernels

v1 = tf.compat.v1
SIDE = 256
BYTES = SIDE * SIDE * 4


def allocated(tensor):
    """The bytes that the op of `tensor` allocates in a run without graph optimisation."""
    config = v1.ConfigProto(inter_op_parallelism_threads=1)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = v1.OptimizerOptions.L0
    with v1.Session(config=config) as session:
        events = measure.session_events(session, tf.reduce_sum(tensor))
    return sum(e.bytes for e in events if e.node == tensor.op.name and e.bytes > 0)


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
    assert kind in kernels.IN_PLACE
    assert allocated(y) < BYTES / 10


@pytest.mark.parametrize("make", [tf.transpose, lambda x: tf.matmul(x, x), tf.cumsum])
def test_other_ops_take_a_buffer(graph, make):
    y = make(fresh())
    assert y.op.type not in kernels.IN_PLACE
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
    assert kernels.shown_input(y.op, 0) == 0
    assert allocated(y) == 0


CONVOLUTIONS = [
    ((8, 32, 32, 16), (3, 3, 16, 16), 1),
    ((8, 32, 32, 16), (3, 3, 16, 32), 2),
    ((4, 64, 64, 32), (3, 3, 32, 32), 1),
    ((16, 24, 24, 64), (1, 1, 64, 64), 1),
]


@pytest.mark.parametrize(("image", "kernel", "stride"), CONVOLUTIONS)
def test_scratch_space_of_convolution_gradients(graph, image, kernel, stride):
    x, w = tf.random.uniform(image), tf.random.uniform(kernel)
    y = tf.nn.conv2d(x, w, stride, "SAME")
    for grad in tf.gradients(y, [x, w], grad_ys=tf.random.uniform(y.shape)):
        scratch = kernels.workspace(grad.op, lambda t: t.shape.as_list())
        output = grad.shape.num_elements() * 4
        assert allocated(grad) - output == pytest.approx(scratch, abs=4096)


EINSUMS = [  # those of attention, forward and backward, and of a dense layer
    ("BTNH,BSNH->BNTS", (8, 32, 4, 16), (8, 48, 4, 16)),
    ("BNTS,BSNH->BTNH", (8, 4, 32, 48), (8, 48, 4, 16)),
    ("BTNH,BNTS->BSNH", (8, 32, 4, 16), (8, 4, 32, 48)),
    ("abc,cde->abde", (8, 32, 64), (64, 4, 16)),
    ("abde,cde->abc", (8, 32, 4, 16), (64, 4, 16)),
    ("abc,abde->cde", (8, 32, 64), (8, 32, 4, 16)),
    ("ab,bc->ac", (128, 64), (64, 96)),
    ("ab,cb->ca", (128, 64), (96, 64)),
]


@pytest.mark.parametrize(("equation", "left", "right"), EINSUMS)
def test_scratch_space_of_einsum(graph, equation, left, right):
    y = tf.einsum(equation, tf.random.uniform(left), tf.random.uniform(right))
    assert y.op.type == "Einsum"
    scratch = kernels.workspace(y.op, lambda t: t.shape.as_list())
    assert allocated(y) - y.shape.num_elements() * 4 == pytest.approx(scratch, abs=4096)
