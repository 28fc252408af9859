"""A normalisation with the statistics of its first run computes the same bits in less time."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import gradients
from memory_saving_gradients.graph.devices import DEVICES
from memory_saving_gradients.graph.normalisation import (
    computed_alike,
    keeps_statistics,
    stay_on_cpu,
)
from memory_saving_gradients.rewriting.run import COPY
from memory_saving_gradients.runtimes.executor import Executor
from memory_saving_gradients.runtimes.xla import Xla
from test_models import CifarResNet, build_v1

v1 = tf.compat.v1

NOTHING = np.zeros(0, np.float32)


def normalised(x, channels, training=True, mean=NOTHING, variance=NOTHING, op="V3", **attributes):
    """All outputs of a normalisation with a scale and an offset that are not trivial."""
    scale = np.linspace(0.5, 2.0, channels, dtype=np.float32)
    normalise = getattr(tf.raw_ops, f"FusedBatchNorm{op}")
    return normalise(
        x=x,
        scale=scale,
        offset=scale[::-1],
        mean=mean,
        variance=variance,
        epsilon=1e-3,
        is_training=training,
        **attributes,
    )


def inputs(shape, dtype=tf.float32):
    return tf.cast(3 + np.random.default_rng(0).normal(size=shape), dtype)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.float16], ids=lambda d: d.name)
@pytest.mark.parametrize("shape", [(16, 8, 8, 16), (3, 5, 5, 7), (2, 1, 1, 8)], ids=str)
def test_bits_are_the_same(graph, shape, dtype):
    x = inputs(shape, dtype)
    first = normalised(x, shape[-1])
    statistics = first.reserve_space_1, first.reserve_space_2
    again = normalised(x, shape[-1], False, *statistics)
    with v1.Session() as session:
        one, other = session.run([tf.cast(first.y, tf.float32), tf.cast(again.y, tf.float32)])
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("keeps", "arguments"),
    [
        (True, {}),
        (True, {"data_format": "NCHW"}),
        (True, {"exponential_avg_factor": 1.0}),
        (False, {"exponential_avg_factor": 0.9, "mean": np.ones(8), "variance": np.ones(8)}),
        (False, {"training": False, "mean": np.ones(8), "variance": np.ones(8)}),
    ],
    ids=str,
)
def test_what_keeps_statistics(graph, keeps, arguments):
    arguments = {k: np.float32(v) if k in ("mean", "variance") else v for k, v in arguments.items()}
    assert keeps_statistics(normalised(inputs((2, 8, 4, 8)), 8, **arguments).y.op) is keeps


def test_older_normalisations_keep_them_too(graph):
    for op in ("", "V2"):
        assert keeps_statistics(normalised(inputs((2, 4, 4, 8)), 8, op=op).y.op)
    assert not keeps_statistics(tf.nn.relu(inputs((2, 4))).op)


@pytest.mark.parametrize(
    ("given", "placed"), [("", "/device:CPU:0"), ("/job:ps", "/job:ps/device:CPU:0")]
)
def test_it_stays_on_a_cpu(graph, given, placed):
    with tf.device(given):
        y = normalised(inputs((2, 4, 4, 8)), 8).y
    stay_on_cpu(y.op)
    assert y.op.device == placed


def copies(graph):
    return [
        op for op in graph.get_operations() if COPY in op.name and op.type == "FusedBatchNormV3"
    ]


def test_copies_read_the_statistics_of_the_first_run(graph):
    step = build_v1(CifarResNet(20), 32)  # so large that the statistics hardly count
    gradients(step.loss, step.variables, checkpoints="memory")
    made = copies(graph)
    assert made
    for op in made:
        original = graph.get_operation_by_name(op.name.split(COPY)[0])
        assert not op.get_attr("is_training")
        assert [op.inputs[3].name, op.inputs[4].name] == [t.name for t in original.outputs[3:5]]
        assert "CPU" in op.device


def test_what_is_placed_with_another_op_computes_them_again(graph):
    with v1.colocate_with(v1.get_variable("there", initializer=0.0).op):
        x = h = v1.get_variable("x", initializer=np.ones((4, 8, 8, 16), np.float32)) * 2.0
        for _ in range(6):
            h = tf.nn.relu(normalised(tf.sin(h), 16).y)
    gradients(tf.reduce_sum(h), [x], checkpoints="memory")
    assert copies(graph)
    assert all(op.get_attr("is_training") for op in copies(graph))


@pytest.mark.parametrize(
    ("device", "gpus", "reuses"),
    [
        ("", [], True),
        ("/device:CPU:0", ["one"], True),
        ("", ["one"], False),
        ("/device:GPU:0", [], False),
        ("/device:TPU:0", [], False),
    ],
)
def test_it_must_run_on_a_cpu(graph, monkeypatch, device, gpus, reuses):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    with tf.device(device):
        op = normalised(inputs((2, 4, 4, 8)), 8).y.op
    assert Executor(DEVICES["cpu"]).reuses(op) is reuses
    assert not Executor(DEVICES["h100"]).reuses(op)
    assert Xla(DEVICES["h100"]).reuses(op)  # its programs keep the variance on any device


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.float16], ids=lambda d: d.name)
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW", "NDHWC", "NCDHW"])
def test_bits_are_the_same_in_xla(data_format, dtype):
    shape = (16, 8, 8, 8, 8) if "D" in data_format else (16, 8, 8, 8)
    how = {"data_format": data_format}
    x = 100 + inputs(shape, dtype)  # far from 0, where the order of operations matters

    @tf.function(jit_compile=True)
    def first(x):
        made = normalised(x, 8, **how)
        return made.y, made.reserve_space_1, made.reserve_space_2

    @tf.function(jit_compile=True)
    def again(x, mean, variance):
        return computed_alike(normalised(x, 8, False, mean, variance, **how).y.op)

    y, *statistics = first(x)
    np.testing.assert_array_equal(again(x, *statistics), y)


def test_copies_in_compiled_steps_read_the_statistics_of_the_first_run():
    model = CifarResNet(20)
    images, labels = map(tf.constant, model.example(16))

    def made_by(differentiate):
        @tf.function(jit_compile=True, autograph=False)
        def step(*inputs):
            return differentiate(model.loss(*inputs), [*model.variables])

        return step(images, labels), step.get_concrete_function(images, labels).graph

    plain, _ = made_by(tf.gradients)
    ours, graph = made_by(functools.partial(gradients, checkpoints="memory"))
    assert copies(graph)
    assert not any(op.get_attr("is_training") or "CPU" in op.device for op in copies(graph))
    for mine, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-4 * np.abs(other).max())
