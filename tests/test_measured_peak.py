"""The proof: measured peaks of real runs are lower, and what was predicted."""

import contextlib
import functools

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import get_plans, gradients, measure, patch
from memory_saving_gradients.rewriting.run import COPY
from scripts.benchmarks.models import METHODS, MODELS
from test_models import Chain, CifarResNet, build_v1, build_v2

v1 = tf.compat.v1

#: The least ratio of the peaks of `tf.gradients` and `memory`.
RATIOS = {
    "chain, 64 layers, 2048 × 256": 6.7,
    "ResNet-56, CIFAR, batch 128": 4.3,
    "ResNet-50, 96 px, batch 32": 1.8,
    "U-Net, 128 px, batch 4": 2.0,
    "DenseNet, 2 × 12 layers, batch 64": 3.0,
    "GPT, 6 layers, batch 8": 5.5,
}


def measured(make, batch, differentiate, threads=0):
    """Measured peak and plan of one step in a session."""
    model = make()
    with tf.Graph().as_default() as graph:
        step = build_v1(model, batch)
        fetches = tf.nest.flatten(differentiate(step.loss, step.variables), expand_composites=True)
        config = v1.ConfigProto(inter_op_parallelism_threads=threads)
        with v1.Session(config=config) as session:
            session.run(v1.global_variables_initializer())
            feed = step.feed(model.example(batch))
            session.run(fetches, feed)
            peak = measure.session_peak(session, fetches, feed)
    plans = get_plans(graph)
    return peak, plans[-1] if plans else None


LARGE = ("DenseNet, 2 × 12 layers, batch 64", "ResNet-50, 96 px, batch 32")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in LARGE else []) for n in RATIOS]
)
@pytest.mark.measured
def test_predicted_peak_is_the_measured_one_and_memory_drops(name, record_property):
    peaks, plans = {}, {}
    for method, differentiate in METHODS.items():
        peaks[method], plans[method] = measured(*MODELS[name], differentiate)
    predicted = {
        "tf.gradients": plans["memory"].baseline_peak_bytes,
        "memory": plans["memory"].peak_bytes,
        "speed": plans["speed"].peak_bytes,
    }
    for method, peak in peaks.items():
        print(f"{name:35} {method:13} {peak / 1e6:8.1f} MB, {predicted[method] / 1e6:8.1f} said")
        assert predicted[method] == pytest.approx(peak, rel=0.1), method
    assert peaks["tf.gradients"] / peaks["memory"] >= RATIOS[name]
    assert peaks["speed"] < peaks["tf.gradients"]


@pytest.mark.parametrize("share", [0.7, 0.4, 0.2])
@pytest.mark.parametrize(
    "name", ["chain, 64 layers, 2048 × 256", "DenseNet, 2 × 12 layers, batch 64"]
)
@pytest.mark.sweep(3)
@pytest.mark.measured
def test_measured_peak_keeps_the_budget(name, share):
    peak, plan = measured(*MODELS[name], functools.partial(gradients, memory_budget=share))
    assert peak <= 1.02 * plan.budget_bytes


@pytest.mark.slow
def test_resnet_110():
    make, batch = MODELS["ResNet-110, CIFAR, batch 128"]
    plain, _ = measured(make, batch, METHODS["tf.gradients"])
    ours, plan = measured(make, batch, METHODS["memory"])
    assert plain / ours >= 6
    assert plan.peak_bytes == pytest.approx(ours, rel=0.1)


def test_saving_survives_a_parallel_executor():
    make = functools.partial(CifarResNet, 32)
    plain, _ = measured(make, 64, METHODS["tf.gradients"], threads=4)
    ours, plan = measured(make, 64, METHODS["memory"], threads=4)
    assert ours == pytest.approx(plan.peak_bytes, rel=0.15)
    assert ours < 0.55 * plain


def test_unknown_batch_saves_as_much():
    def run(differentiate):
        model = Chain(32, width=64)
        with tf.Graph().as_default():
            step = build_v1(model, None)
            fetches = differentiate(step.loss, step.variables)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                feed = step.feed(model.example(2048))
                return measure.session_peak(session, fetches, feed)

    assert run(METHODS["memory"]) < 0.35 * run(tf.gradients)


def test_small_batches_of_images():
    """Scratch space that nothing writes to was counted: 55 MB, where the process took 6.6."""
    make = functools.partial(CifarResNet, 20)
    plain, _ = measured(make, 2, METHODS["tf.gradients"])
    ours, plan = measured(make, 2, METHODS["memory"])
    assert plan.baseline_peak_bytes == pytest.approx(plain, rel=0.2)
    assert plan.baseline_peak_bytes < 8e6
    assert plan.peak_bytes == pytest.approx(ours, rel=0.2)
    assert ours < 0.6 * plain


def test_what_grappler_takes_out_is_not_predicted():
    """A swish multiplies by one, in the forward pass and for the gradient."""

    def run(differentiate):
        with tf.Graph().as_default() as graph:
            h = x = v1.placeholder(tf.float32, (1024, 128))
            ws = [v1.get_variable(f"w{i}", (128, 128), use_resource=True) for i in range(6)]
            for w in ws:
                h = tf.nn.swish(h @ w)
            fetches = differentiate(tf.reduce_mean(h**2), ws)
            with v1.Session(config=v1.ConfigProto(inter_op_parallelism_threads=1)) as session:
                session.run(v1.global_variables_initializer())
                feed = {x: np.ones((1024, 128))}
                session.run(fetches, feed)
                return measure.session_peak(session, fetches, feed), get_plans(graph)

    plain, _ = run(tf.gradients)
    ours, (plan,) = run(functools.partial(gradients, checkpoints="memory"))
    assert plan.baseline_peak_bytes == pytest.approx(plain, rel=0.05)
    assert plan.peak_bytes == pytest.approx(ours, rel=0.05)


def test_what_an_optimizer_has_wait_and_nothing_reads_is_not_predicted():
    """`minimize` waits for the gradient of a constant factor, too, which Grappler leaves out."""

    def run(checkpoints):
        with tf.Graph().as_default() as graph:
            h = x = v1.placeholder(tf.float32, (1024, 128))
            ws = [v1.get_variable(f"w{i}", (128, 128), use_resource=True) for i in range(8)]
            for w in ws:
                h = tf.nn.swish(h @ w)
            with patch(checkpoints) if checkpoints else contextlib.nullcontext():
                step = v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(h**2))
            with v1.Session(config=v1.ConfigProto(inter_op_parallelism_threads=1)) as session:
                session.run(v1.global_variables_initializer())
                feed = {x: np.ones((1024, 128))}
                session.run(step, feed)
                return measure.session_peak(session, step, feed), [*get_plans(graph)][-1:]

    plain, _ = run(None)
    ours, (plan,) = run("memory")
    assert plan.baseline_peak_bytes == pytest.approx(plain, rel=0.1)
    assert plan.peak_bytes == pytest.approx(ours, rel=0.2)
    assert not [op.name for op in plan.problem.ops if COPY in op.name]


def function_step(strategy):
    """A step for `measure.function_peak`; a process of its own runs it."""
    model = Chain(32, width=256)
    differentiate = tf.gradients
    if strategy:
        differentiate = functools.partial(gradients, checkpoints=strategy)
    step = build_v2(model, differentiate, 2048)
    inputs = [tf.constant(a) for a in model.example(2048)]
    return functools.partial(step, *inputs)


@pytest.mark.measured
def test_function_in_a_fresh_process_saves_as_a_session_does():
    plain = measure.function_peak(function_step, None)
    ours = measure.function_peak(function_step, "memory")
    make = functools.partial(Chain, 32, 256)
    in_session, _ = measured(make, 2048, METHODS["memory"])
    assert ours < 0.3 * plain
    assert ours == pytest.approx(in_session, rel=0.25)


def failing_step():
    raise ValueError("no such model")


@pytest.mark.measured
def test_function_peak_passes_on_what_went_wrong():
    with pytest.raises(RuntimeError, match="no such model"):
        measure.function_peak(failing_step)


def test_session_events_add_up():
    with tf.Graph().as_default():
        y = tf.reduce_sum(tf.tanh(tf.random.uniform((1000, 100))))
        with v1.Session() as session:
            session.run(y)
            events = measure.session_events(session, y)
            assert measure.session_peak(session, y) == pytest.approx(400_000, rel=0.01)
    assert sum(event.bytes for event in events) == pytest.approx(4, abs=64)
    assert np.all(np.diff([event.micros for event in events]) >= 0)


def windows(x):
    """Attention within windows of images, padded and rolled, as the size of the images asks."""
    batch, height, width, channels = tf.unstack(tf.shape(x))
    size = tf.cond(height <= 7, lambda: height, lambda: tf.constant(7))
    over = (-height % size, -width % size)
    padded = tf.pad(x, [(0, 0), (0, over[0]), (0, over[1]), (0, 0)])
    turned = tf.cond(size < height, lambda: tf.roll(padded, (-3, -3), (1, 2)), lambda: padded)
    down, right = (height + over[0]) // size, (width + over[1]) // size
    cut = tf.reshape(turned, (batch, down, size, right, size, channels))
    cut = tf.reshape(tf.transpose(cut, (0, 1, 3, 2, 4, 5)), (-1, size * size, channels))
    mixed = tf.nn.softmax(cut @ tf.transpose(cut, (0, 2, 1))) @ cut
    joined = tf.reshape(mixed, (batch, down, right, size, size, channels))
    joined = tf.transpose(joined, (0, 1, 3, 2, 4, 5))
    whole = tf.reshape(joined, (batch, down * size, right * size, channels))
    return tf.tanh(x + whole[:, :height, :width])


def experts(x):
    """Four networks, each for the rows whose largest number is at its place."""
    rows = tf.reshape(x, (-1, x.shape[-1]))
    kind = tf.argmax(rows[:, :4], 1, tf.int32)
    parts = tf.dynamic_partition(rows, kind, 4)
    places = tf.dynamic_partition(tf.range(tf.shape(rows)[0]), kind, 4)
    wide = [tf.tanh(part @ tf.ones((x.shape[-1], 4 * x.shape[-1]))) for part in parts]
    made = [tf.tanh(one @ tf.ones((4 * x.shape[-1], x.shape[-1]))) for one in wide]
    return x + tf.reshape(tf.dynamic_stitch(places, made), tf.shape(x))


@pytest.mark.parametrize("layer", [windows, experts])
@pytest.mark.parametrize("batch", [8, None])
def test_sizes_that_come_from_tensors_are_predicted(layer, batch):
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, (batch, 32, 32, 16))
        w = v1.get_variable("w", (16, 16))
        y = x @ w
        for _ in range(4):
            y = layer(y)
        said = None if batch else 8
        fetches = gradients(tf.reduce_mean(y), [w], checkpoints="memory", batch_size=said)
        plain = tf.gradients(tf.reduce_mean(y), [w])
        with v1.Session(config=v1.ConfigProto(inter_op_parallelism_threads=1)) as session:
            session.run(v1.global_variables_initializer())
            feed = {x: np.random.default_rng(0).standard_normal((8, 32, 32, 16))}
            session.run([fetches, plain], feed)
            peaks = [measure.session_peak(session, one, feed) for one in (plain, fetches)]
        # As written: of windows Grappler leaves transposes of which the shapes alone are read, and
        # those run late, so with it the plan takes a quarter more (docs/supported.md).
        as_written = v1.ConfigProto(inter_op_parallelism_threads=1)
        as_written.graph_options.rewrite_options.disable_meta_optimizer = True
        with v1.Session(config=as_written) as session:
            session.run(v1.global_variables_initializer())
            session.run(fetches, feed)
            written = measure.session_peak(session, fetches, feed)
    (plan,) = get_plans(graph)
    # Of windows of which the graph knows all sizes 15 % too much is predicted, too.
    assert plan.baseline_peak_bytes == pytest.approx(peaks[0], rel=0.2)
    assert plan.peak_bytes == pytest.approx(written, rel=0.04 if layer is windows else 0.15)
    assert plan.peak_bytes == pytest.approx(peaks[1], rel=0.15 if layer is experts else 0.25)
    assert peaks[1] < 0.7 * peaks[0]
