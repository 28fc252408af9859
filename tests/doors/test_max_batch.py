"""`max_batch`: its answers hold in runs, and are the largest that do."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import max_batch, measure, patch
from memory_saving_gradients.doors.max_batch import Largest, MaxBatch
from memory_saving_gradients.doors.traced_step import Step, traced_step
from memory_saving_gradients.options.options import Options
from memory_saving_gradients.planning.simulate import plain_peak
from memory_saving_gradients.runtimes.xla import Xla

WIDTH, LAYERS = 256, 16
MEMORY = 64_000_000


def make_function(compiled=False):
    weights = [tf.Variable(tf.eye(WIDTH)) for _ in range(LAYERS)]

    @tf.function(input_signature=[tf.TensorSpec((None, WIDTH))], jit_compile=compiled)
    def step(x):
        h = x
        with tf.GradientTape() as tape:
            for w in weights:
                h = tf.tanh(h @ w)
            loss = tf.reduce_mean(h**2)
        return tape.gradient(loss, weights)

    return step


def make_run(batch, strategy):
    """A run of the step with one batch, for a fresh process."""
    step, x = make_function(), tf.ones((batch, WIDTH))
    with patch(strategy, batch_size=batch) if strategy else contextlib.nullcontext():
        step(x)
    return lambda: step(x)


@pytest.fixture(scope="module")
def found():
    return max_batch(make_function(), MEMORY)


def test_the_ways_are_in_order(found):
    sizes = {name: way.batch_size for name, way in found.ways.items()}
    assert 0 < sizes["plain"] <= sizes["speed"] < sizes["memory"]
    shares = [sizes[f"{share}% extra cost"] for share in (10, 20, 33)]
    assert [sizes["plain"], *shares] == sorted([sizes["plain"], *shares])
    for name, way in found.ways.items():
        assert way.bytes <= MEMORY
        if "%" in name:
            most = float(name.partition("%")[0]) / 100
            assert way.overhead <= most
            allowed = [other for other in found.ways.values() if other.overhead <= most]
            assert way.batch_size == max(other.batch_size for other in allowed)
    assert found.variables_bytes == LAYERS * WIDTH * WIDTH * 4
    seconds = found.ways["plain"].seconds_per_example
    for way in found.ways.values():
        assert way.seconds_per_example == pytest.approx((1 + way.overhead) * seconds, rel=0.1)


@pytest.mark.parametrize("name", ["plain", "speed", "memory"])
@pytest.mark.measured
def test_it_fits_in_a_run_and_little_more_does(found, name):
    way = found.ways[name]
    activation = way.batch_size * WIDTH * 4
    fixed = found.variables_bytes + activation  # of the same size as the input
    run = measure.function_peak(make_run, way.batch_size, None if name == "plain" else name)
    # The ends of the forward pass that nothing orders may overlap: one activation more.
    assert fixed + run <= 1.01 * MEMORY + activation
    assert fixed + run >= 0.9 * MEMORY


def test_an_answer_was_planned_at_that_size(found):
    way = found.ways["memory"]
    (plan,) = traced_step(make_function()).plans(way.batch_size)
    fixed = found.variables_bytes + way.batch_size * WIDTH * 4
    # It was found on a line through other batches: its costs differ a little, and so does the plan.
    assert way.bytes == pytest.approx(plan.peak_bytes + fixed, rel=0.05)
    assert way.overhead == pytest.approx(plan.overhead, abs=0.05)


def test_a_step_that_grows_faster_than_its_batch_is_read_at_every_answer():
    """All examples are compared with one another."""
    weights = [tf.Variable(tf.eye(WIDTH)) for _ in range(4)]

    @tf.function(input_signature=[tf.TensorSpec((None, WIDTH))])
    def step(x):
        h = x
        with tf.GradientTape() as tape:
            for w in weights:
                h = tf.tanh(h @ w)
            loss = tf.reduce_mean(tf.nn.softmax(h @ tf.transpose(h)) ** 2)
        return tape.gradient(loss, weights)

    found = max_batch(step, MEMORY)
    for name in ("plain", "memory"):
        way = found.ways[name]
        (plan,) = traced_step(step).plans(way.batch_size)
        peak = plan.baseline_peak_bytes if name == "plain" else plan.peak_bytes
        needed = peak + found.variables_bytes + way.batch_size * WIDTH * 4
        assert way.bytes == pytest.approx(needed, rel=0.01)  # on a line of two readings near it
        assert 0.9 * MEMORY < way.bytes <= MEMORY


def test_a_batch_between_two_that_were_read_is_on_their_line():
    """But for scratch space, which grows in steps."""
    images, layers = keras.Input((32, 32, 3)), keras.layers
    x = layers.Conv2D(8, 3, activation="relu")(images)
    x = layers.BatchNormalization()(layers.Conv2D(8, 3, strides=2)(x))
    model = keras.Model(images, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    step = traced_step(model)
    small, between, large = (step.readings(batch)[0].problem for batch in (64, 100, 128))
    found = small.toward(large, (100 - 64) / (128 - 64))
    size = {t.name: t.bytes for t in between.tensors}  # without those that hardly matter then
    assert len(size) > 10
    assert size.items() <= {t.name: t.bytes for t in found.tensors}.items()
    ours = {op.name: op for op in found.ops}
    for op in between.ops:
        assert ours[op.name].cost == pytest.approx(op.cost, abs=2e-6)
    assert plain_peak(found) == pytest.approx(plain_peak(between), rel=0.1)


def make_rounds():
    weight = tf.Variable(tf.eye(WIDTH))

    @tf.function(input_signature=[tf.TensorSpec((None, WIDTH))])
    def step(h):
        with tf.GradientTape() as tape:
            for _ in tf.range(100):
                h = tf.tanh(h @ weight)
            loss = tf.reduce_mean(h**2)
        return tape.gradient(loss, weight)

    return step


def run_rounds(batch):
    step, x = make_rounds(), tf.ones((batch, WIDTH))
    with patch("memory", batch_size=batch):
        step(x)
    return lambda: step(x)


@pytest.mark.measured
def test_loops_run_in_segments():
    found = max_batch(make_rounds(), MEMORY)
    plain, way = found.ways["plain"], found.ways["memory"]
    assert found.ways["speed"].batch_size == pytest.approx(plain.batch_size, rel=0.02)
    assert way.batch_size > 4 * plain.batch_size
    fixed = found.variables_bytes + way.batch_size * WIDTH * 4
    run = measure.function_peak(run_rounds, way.batch_size)
    assert 0.8 * MEMORY < fixed + run <= 1.1 * MEMORY


def test_it_prints_as_a_table(found):
    lines = str(found).splitlines()
    assert "0.06 GB" in lines[0]
    for name, way in found.ways.items():
        (line,) = (line for line in lines if line.strip().startswith(name))
        assert f"{way.batch_size:,}" in line
    assert str(found) in found._repr_html_()


def dense(compiled, inputs=True):
    layers = [keras.Input((64,))] if inputs else []
    layers += [keras.layers.Dense(64, "tanh") for _ in range(8)]
    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    if compiled:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    return model


def test_a_compiled_model_brings_its_optimizer():
    plain, compiled = (max_batch(dense(how), "32MB") for how in (False, True))
    weights = dense(False).count_params() * 4
    assert plain.variables_bytes == weights
    assert compiled.variables_bytes > 3 * weights  # of Adam two more for each
    assert compiled.ways["plain"].batch_size < plain.ways["plain"].batch_size


def test_several_outputs_with_losses_of_their_own():
    x = keras.Input((32,))
    h = keras.layers.Dense(32, "tanh")(keras.layers.Dense(32, "tanh")(x))
    heads = {"kind": keras.layers.Dense(5)(h), "size": keras.layers.Dense(1)(h)}
    model = keras.Model(x, heads)
    model.compile("sgd", {"kind": "sparse_categorical_crossentropy", "size": "mse"})
    assert max_batch(model, "8MB").ways["memory"].batch_size > 0


@pytest.mark.measured
def test_an_example_tells_what_the_step_does_not():
    model = dense(True, inputs=False)
    with pytest.raises(ValueError, match="does not tell its inputs: give example="):
        max_batch(model, "8MB")
    example = np.zeros((2, 64), np.float32), np.zeros((2,), np.int32)
    found = max_batch(model, "8MB", example).ways["plain"]
    assert found.batch_size > 0
    assert max_batch(model, "8MB", example[0]).ways["plain"] == found
    step = make_function()
    unsigned = tf.function(step.python_function)
    with pytest.raises(ValueError, match="no input_signature"):
        max_batch(unsigned, MEMORY)
    found = max_batch(unsigned, MEMORY, tf.zeros((3, WIDTH)))
    assert found.ways == max_batch(step, MEMORY).ways


def test_nothing_of_a_model_changes():
    model = dense(True)
    before = model.get_weights()
    max_batch(model, "8MB")
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    x, y = np.zeros((8, 64), np.float32), np.zeros((8,), np.int32)
    assert np.isfinite(model.fit(x, y, verbose=0).history["loss"][0])


def fixed_batch():
    w = tf.Variable(tf.eye(8))

    @tf.function(input_signature=[tf.TensorSpec((4, 8))])
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(tf.tanh(x @ w)))
        return tape.gradient(loss, w)

    return step


@pytest.mark.parametrize(
    ("step", "memory", "error", "said"),
    [
        (make_function, 0.5, ValueError, "got the share 0.5"),
        (make_function, "4 apples", ValueError, "4 apples"),
        (make_function, None, TypeError, "None"),
        (make_function, "2MB", ValueError, "does not hold the variables alone: they take 4.2 MB"),
        (fixed_batch, "2MB", ValueError, "leave their first dimension None"),
        (lambda: len, "2MB", TypeError, "a Keras model or a tf.function"),
        (
            lambda: tf.function(lambda x: x, input_signature=[tf.TensorSpec((None, 2))]),
            "2MB",
            ValueError,
            "computes no gradients",
        ),
    ],
)
def test_wrong_calls_say_what_to_do(step, memory, error, said):
    with pytest.raises(error, match=said):
        max_batch(step(), memory)


def test_only_what_xla_compiles_can_be_verified():
    with pytest.raises(ValueError, match=r'jit_compile=True, or name .* device="h100"'):
        max_batch(make_function(), MEMORY, verify=True)


def test_not_even_one():
    found = max_batch(make_function(), 4_200_000)
    assert found.ways["plain"].batch_size == 0
    assert "not even 1" in str(found)


def test_a_gpu_that_is_not_there():
    step = make_function()
    found = max_batch(step, "device", device="t4")
    assert found.memory_bytes == 0.9 * 16 * 10**9
    assert found.ways["plain"].batch_size > 100_000
    cpu = max_batch(step, "14.4GB").ways["plain"].seconds_per_example
    assert found.ways["plain"].seconds_per_example < 0.1 * cpu


def test_a_compiled_step_is_planned_for_xla():
    found = max_batch(make_function(compiled=True), MEMORY)
    assert found.compiled
    assert "compiled by XLA" in " ".join(str(found).split())
    batch = found.ways["plain"].batch_size
    fixed = found.variables_bytes + batch * WIDTH * 4
    predicted = found.ways["plain"].bytes - fixed
    step = tf.function(make_function().python_function, jit_compile=True)
    allocated = measure.compiled_temporaries(step, tf.TensorSpec((batch, WIDTH)))
    assert predicted == pytest.approx(allocated, rel=0.1)


@pytest.mark.measured
def test_answers_are_those_that_xla_allocates():
    found = max_batch(make_function(compiled=True), MEMORY, verify=True)
    assert "by XLA's compiler for this machine" in " ".join(str(found).split())
    sizes = {name: way.batch_size for name, way in found.ways.items()}
    assert 0 < sizes["plain"] < sizes["memory"]
    batch = sizes["plain"]
    step = tf.function(make_function().python_function, jit_compile=True)
    allocated = measure.compiled_temporaries(step, tf.TensorSpec((batch, WIDTH)))
    needed = found.variables_bytes + batch * WIDTH * 4 + allocated
    assert 0.9 * MEMORY < needed <= MEMORY
    assert found.ways["plain"].bytes <= MEMORY


@pytest.mark.parametrize("times", [0.5, 2.0])
def test_a_wrong_prediction_is_corrected_by_few_compilations(monkeypatch, times):
    step = make_function(compiled=True)
    compiled = []

    def allocated(self, batch, strategy, most):
        compiled.append(strategy)
        return int(times * batch * WIDTH * 4 * LAYERS) + 10**6, 0.05

    predicted = max_batch(step, MEMORY)
    monkeypatch.setattr(Step, "allocated", allocated)
    found = max_batch(step, MEMORY, verify=True)
    for way in found.ways.values():
        assert 0.95 * MEMORY < way.bytes <= MEMORY
    assert max(map(compiled.count, ("plain", "speed", "memory"))) <= 4
    plain = found.ways["plain"].batch_size / predicted.ways["plain"].batch_size
    assert plain == pytest.approx(1 / times, rel=0.2)


@pytest.mark.parametrize(
    ("layer", "device", "expected"),
    [
        (keras.layers.Dense(8), "h100", True),
        (keras.layers.Dense(8), "cpu", False),
        (keras.layers.RandomZoom(0.1), "h100", False),  # Keras says that it cannot be compiled
    ],
)
def test_keras_compiles_on_a_gpu_where_it_can(layer, device, expected):
    model = keras.Sequential([keras.Input((4, 4, 8)), keras.layers.Dense(8, "tanh"), layer])
    model.compile("adam", "mse")
    step = traced_step(model, options=Options("memory", device=device))
    assert step.compiled == expected
    ((backward, _),) = step.passes
    assert isinstance(backward.runtime, Xla) == expected


def test_a_notebook_gets_the_table_as_text(monkeypatch):
    """Where rich finds IPython it shows a table itself, and gives no text."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    found = MaxBatch(10**9, 10**6, {"plain": Largest(32, 10**8, -1e-16, 0.1)})
    assert "plain" in str(found)
    assert " 0.0%" in str(found)
    assert "plain" in found._repr_html_()
