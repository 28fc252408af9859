"""oneDNN makes one op of several: what TensorFlow merges, and steps that run all the same.

In processes of their own: oneDNN is chosen when TensorFlow is loaded.
"""

import functools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import memory_saving_gradients as msg
from memory_saving_gradients.graph import order, tf_private
from memory_saving_gradients.pipeline.save import STRICT
from memory_saving_gradients.planning import overlap
from memory_saving_gradients.rewriting import waves
from memory_saving_gradients.runtimes import merges
from test_models import WGANGP, build_v1

v1 = tf.compat.v1
CHANNELS, BATCH, SIZE = 8, 2, 8
SHAPE = (BATCH, SIZE, SIZE, CHANNELS)


# What TensorFlow merges.


def merging(first, *shapes):
    """Ops of the default graph, of which `first` is waited for by what the last one reads."""
    values = [v1.get_variable(f"v{i}", shape) for i, shape in enumerate(shapes)]

    def later(shape):
        with tf.control_dependencies([made.op]):
            return tf.tanh(2.0 * v1.get_variable("later", shape))

    made = first(*values)
    return made, later


CUBE = (BATCH, 4, 4, 4, CHANNELS)
FILTER, FILTER_3D = (3, 3, CHANNELS, CHANNELS), (3, 3, 3, CHANNELS, CHANNELS)


def conv(x, kernel, padding="SAME"):
    return tf.nn.conv2d(x, kernel, 1, padding)


def conv3d(x, kernel, padding="SAME"):
    return tf.nn.conv3d(x, kernel, [1] * 5, padding)


def padded(x):
    return tf.pad(x, [[0, 0], *[[1, 1]] * (len(x.shape) - 2), [0, 0]])


def depthwise(x, kernel):
    return tf.nn.depthwise_conv2d(x, kernel, [1] * 4, "SAME")


def pad_conv():
    x, later = merging(padded, SHAPE)
    return conv(x, later(FILTER), "VALID")


def pad_that_others_read_unfetched():
    x, later = merging(padded, SHAPE)
    tf.tanh(x)
    return conv(x, later(FILTER), "VALID")


def pad_identity_conv():
    x, later = merging(padded, SHAPE)
    return conv(tf.identity(x), later(FILTER), "VALID")


def pad_conv1d():
    x, later = merging(padded, (BATCH, SIZE, CHANNELS))
    return tf.nn.conv1d(x, later((3, CHANNELS, CHANNELS)), 1, "VALID")


def pad_conv_bias():
    x, later = merging(padded, SHAPE)
    y = conv(x, v1.get_variable("kernel", FILTER), "VALID")
    return tf.nn.relu(tf.nn.bias_add(y, later(CHANNELS)))


def pad_conv_bias_sum():
    x, later = merging(padded, SHAPE)
    y = conv(x, v1.get_variable("kernel", FILTER), "VALID")
    return tf.nn.relu(tf.nn.bias_add(y, v1.get_variable("bias", CHANNELS)) + later(SHAPE))


def conv_bias():
    y, later = merging(conv, SHAPE, FILTER)
    return tf.nn.bias_add(y, later(CHANNELS))


def bias_gradient_and_filter_gradient():
    g = tf.tanh(v1.get_variable("g", SHAPE))
    of_bias, later = merging(lambda: tf.raw_ops.BiasAddGrad(out_backprop=g))
    of_kernel = tf.raw_ops.Conv2DBackpropFilter(
        input=later(SHAPE), filter_sizes=FILTER, out_backprop=g, strides=[1] * 4, padding="SAME"
    )
    return of_bias, of_kernel


def pad_conv3d():
    x, later = merging(padded, CUBE)
    return conv3d(x, later(FILTER_3D), "VALID")


def with_bias(first, activation, *shapes):
    y, later = merging(first, *shapes)
    return activation(tf.nn.bias_add(y, later(CHANNELS)))


def conv_leaky_relu():
    y, later = merging(conv, SHAPE, FILTER)
    return tf.nn.leaky_relu(y) + later(SHAPE)


def conv_batch_norm():
    y, later = merging(conv, SHAPE, FILTER)
    zeros, ones = tf.zeros(CHANNELS), tf.ones(CHANNELS)
    scale = later(CHANNELS)
    y, _, _ = v1.nn.fused_batch_norm(y, scale, zeros, mean=zeros, variance=ones, is_training=False)
    return tf.nn.relu(y)


def scaled_and_shifted_product():
    matrices = (BATCH, 2, 8, 8)
    y, later = merging(tf.matmul, matrices, matrices)
    return 0.5 * y + later((BATCH, 1, 8, 8))


def transposed_conv():
    x, later = merging(lambda x: tf.transpose(x, [0, 2, 3, 1]), (BATCH, CHANNELS, SIZE, SIZE))
    return tf.transpose(conv(x, later(FILTER)), [0, 3, 1, 2])


#: Whether a graph cannot run in which a control edge leads from a part to what a later one reads.
CLOSES_A_CYCLE = {
    pad_conv: True,
    pad_that_others_read_unfetched: True,
    pad_identity_conv: True,
    pad_conv1d: False,
    pad_conv_bias: True,
    pad_conv_bias_sum: True,
    conv_bias: True,
    bias_gradient_and_filter_gradient: True,
    pad_conv3d: False,
    conv_leaky_relu: False,
    conv_batch_norm: False,
    scaled_and_shifted_product: False,
    transposed_conv: False,
    functools.partial(with_bias, tf.matmul, tf.nn.relu, (8, 8), (8, CHANNELS)): False,
    functools.partial(with_bias, tf.matmul, tf.nn.gelu, (8, 8), (8, CHANNELS)): False,
    functools.partial(with_bias, conv3d, tf.nn.relu, CUBE, FILTER_3D): False,
    functools.partial(with_bias, depthwise, tf.nn.relu6, SHAPE, (3, 3, CHANNELS, 1)): False,
}


def runs(build):
    with tf.Graph().as_default(), v1.Session() as session:
        fetched = build()
        session.run(v1.global_variables_initializer())
        try:
            session.run(fetched)
        except tf.errors.InvalidArgumentError:
            return False
    return True


def in_a_process(*arguments):
    """What this module prints, run with oneDNN."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtimes.test_merges", *arguments],
        env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": "1", STRICT: "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.measured
def test_tensorflow_merges_what_is_said_here():
    assert in_a_process("facts") == [not cycle for cycle in CLOSES_A_CYCLE.values()]


@pytest.mark.parametrize("number", range(len(CLOSES_A_CYCLE)))
def test_a_cycle_through_a_merged_op_is_found(graph, number):
    build, cycle = [*CLOSES_A_CYCLE.items()][number]
    fetched = order.leading_to([t.op for t in tf.nest.flatten(build())], order.waits_for)
    order.check_acyclic(graph)
    if cycle:
        with pytest.raises(order.CycleError):
            order.check_acyclic(graph, merges.merged(fetched))
    else:
        order.check_acyclic(graph, merges.merged(fetched))


@pytest.mark.parametrize(
    "build",
    [
        lambda x: conv(tf.identity(x), tf.zeros(FILTER), "VALID"),
        lambda x: tf.nn.conv1d(x[:, 0], tf.zeros(FILTER[1:]), 1, "VALID"),
        lambda x: tf.nn.conv1d(padded(x[:, 0]), tf.zeros(FILTER[1:]), 1, "VALID"),
        lambda x: tf.nn.relu(tf.squeeze(conv(x[:, :, :3], tf.zeros(FILTER), "VALID"), 2) + 1.0),
    ],
)
def test_views_between_parts_close_no_cycle(graph, build):
    build(padded(tf.zeros(SHAPE)))
    order.check_acyclic(graph, merges.merged(graph.get_operations()))


# Steps with computed filters and biases, as they are rewritten.


class Layers:
    """Variables of layers, made once; `computed` makes a weight of one, between two other ops."""

    def __init__(self):
        self.variables = []
        self._next = iter(())
        self._random = np.random.default_rng(0)

    def again(self):
        self._next = iter(self.variables)
        return self

    def variable(self, *shape):
        found = next(self._next, None)
        if found is None:
            value = self._random.standard_normal(shape) / np.sqrt(max(np.prod(shape[:-1]), 1))
            found = tf.Variable(value.astype(np.float32))
            self.variables.append(found)
        return found

    def computed(self, *shape):
        return 4 * tf.reduce_mean(tf.tanh(self.variable(32, *shape)), 0)

    def normalised(self, *shape):
        return tf.nn.l2_normalize(self.variable(*shape), [0, 1, 2]) * self.variable(shape[-1])


def conv_with_computed_bias(layers, h, activation):
    y = conv(h, layers.variable(*FILTER))
    return activation(tf.nn.bias_add(y, layers.computed(CHANNELS)))


def pad_conv_with_normalised_filter(layers, h):
    h = padded(tf.nn.elu(h))
    y = conv(h, layers.normalised(*FILTER), "VALID")
    return tf.nn.elu(tf.nn.bias_add(y, layers.variable(CHANNELS)))


def pad_conv_with_computed_bias(layers, h):
    y = conv(padded(h), layers.variable(*FILTER), "VALID")
    return tf.nn.relu(tf.nn.bias_add(y, layers.computed(CHANNELS)))


def pad_conv_with_computed_sum(layers, h):
    y = conv(padded(h), layers.variable(*FILTER), "VALID")
    y = tf.nn.bias_add(y, layers.variable(CHANNELS))
    return tf.nn.relu(y + layers.computed(*SHAPE))


def conv_with_bias_of_input(layers, h):
    h = tf.tanh(1.5 * h)
    y = conv(h, layers.variable(*FILTER))
    return tf.nn.relu(tf.nn.bias_add(y, mean(layers, h)))


def pad_conv_with_late_bias_of_input(layers, h):
    y = conv(padded(tf.tanh(h)), layers.variable(*FILTER), "VALID")
    return tf.nn.relu(tf.nn.bias_add(y, mean(layers, 1.3 * h)))


def mean(layers, h):
    return tf.reduce_mean(tf.sin(h) * layers.variable(*SHAPE) * 20, [0, 1, 2])


def two_streams(layers, h):
    streams = [padded(h), padded(2 * h)]
    y = [conv(x, layers.computed(*FILTER), "VALID") for x in streams]
    return tf.nn.relu(sum(tf.nn.bias_add(one, layers.computed(CHANNELS)) for one in y))


def swish(h):
    return h * tf.sigmoid(h)


def mish(h):
    return h * tf.tanh(tf.nn.softplus(h))


def hard_swish(h):
    return h * tf.nn.relu6(h + 3.0) * 0.16666666


LAYERS = {
    "pad, convolution": pad_conv_with_normalised_filter,
    "pad, convolution, bias": pad_conv_with_computed_bias,
    "pad, convolution, bias, sum": pad_conv_with_computed_sum,
    "bias of the input": conv_with_bias_of_input,
    "late bias of the input": pad_conv_with_late_bias_of_input,
    "two streams": two_streams,
    **{
        f"convolution, bias, {name}": functools.partial(conv_with_computed_bias, activation=f)
        for name, f in {
            "nothing": tf.identity,
            "relu": tf.nn.relu,
            "leaky relu": tf.nn.leaky_relu,
            "swish": swish,
            "mish": mish,
            "hard swish": hard_swish,
        }.items()
    },
}


def forward(layers, x, kinds):
    for kind in kinds:
        x = x + LAYERS[kind](layers, x)
    return tf.reduce_mean(x * x)


def in_session(differentiate, kinds):
    layers = Layers()
    with tf.Graph().as_default() as graph, v1.Session() as session:
        x = tf.Variable(np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32))
        loss = forward(layers, x, kinds)
        tf.gradients(loss, layers.variables)  # reads what ours does, and is not fetched
        fetches = [loss, *differentiate(loss, [x, *layers.variables])]
        session.run(v1.global_variables_initializer())
        session.run(loss)
        return session.run(fetches), len(msg.get_plans(graph))


def in_function(make_tape, kinds):
    layers = Layers()
    x = tf.constant(np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32))
    forward(layers, x, kinds)

    @tf.function(autograph=False)
    def step(x):
        with make_tape() as tape:
            tape.watch(x)
            loss = forward(layers.again(), x, kinds)
        return [loss, *tape.gradient(loss, [x, *layers.variables])]

    values = [value.numpy() for value in step(x)]
    return values, len(msg.get_plans(step.get_concrete_function(x).graph))


def compared(kinds):
    """For a session and a function: how many plans, and how far off the values are."""
    found = []
    for run, plain, ours in (
        (in_session, tf.gradients, msg.gradients_memory),
        (in_function, tf.GradientTape, msg.GradientTape),
    ):
        expected, _ = run(plain, kinds)
        values, plans = run(ours, kinds)
        pairs = zip(values, expected, strict=True)
        found.append((plans, max(float(abs(a - b).max() / abs(b).max()) for a, b in pairs)))
    return found


def check(*arguments):
    for kind, found in in_a_process(*arguments).items():
        for plans, error in found:
            assert plans == 1, kind
            assert error < 3e-6, kind  # what waits, another kernel may compute


@pytest.mark.parametrize(
    ("how", "kind"),
    [("freely", "convolution, bias, hard swish"), ("one by one", "pad, convolution")],
)
@pytest.mark.measured
def test_steps_whose_ops_are_merged_run(how, kind):
    check(how, kind)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["freely", "one by one"])
def test_steps_of_each_kind_run(how):
    check(how, *LAYERS)


def test_a_plan_that_closes_such_a_cycle_is_refused(graph, monkeypatch):
    monkeypatch.setattr(tf_private, "onednn_enabled", lambda: True)
    monkeypatch.setattr(merges.Parts, "may_be_waited_for", lambda self, op, entry: True)
    layers = Layers()
    loss = forward(layers, tf.Variable(tf.ones(SHAPE)), ["convolution, bias, relu"] * 4)
    with pytest.raises(order.CycleError):
        msg.gradients(loss, layers.variables, checkpoints="memory")
    order.check_acyclic(graph)


@pytest.mark.measured
def test_a_convolution_and_its_bias_do_not_both_wait():
    """For ops that it merges; else a `CHECK` of oneDNN may end the process, as it did here."""
    assert in_a_process("critic")


def a_step_of_a_critic():
    with tf.Graph().as_default() as graph, v1.Session() as session:
        model = WGANGP()
        step = build_v1(model, 32)
        gradients = msg.gradients_memory(step.loss, step.variables)
        session.run(v1.global_variables_initializer())
        session.run(gradients, step.feed(model.example(32)))
        return len(msg.get_plans(graph))


def main(how, *kinds):
    assert tf_private.onednn_enabled()
    if how == "facts":
        found = [runs(build) for build in CLOSES_A_CYCLE]
    elif how == "critic":
        found = a_step_of_a_critic()
    else:
        if how == "one by one":  # the forward pass, too
            overlap._MOST = 1
            waves.runs_ahead = lambda *arguments: True
        found = {kind: compared([kind] * 4) for kind in kinds}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
