"""Training steps as SavedModels: saved here, trained in a process that has not the package."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import memory_saving_gradients as msg
from memory_saving_gradients import measure

v1 = tf.compat.v1
WIDTH, LAYERS, BATCH = 64, 8, 4096
X = tf.TensorSpec((BATCH, WIDTH))


def block(x, w):
    return tf.tanh(tf.sin(x @ w))


class Trained(tf.Module):
    """What trains itself: `step` is a step, `slope` the gradient by its input."""

    def __init__(self, make_tape, layer=block):
        rng = np.random.default_rng(0)
        values = rng.standard_normal((LAYERS, WIDTH, WIDTH)).astype(np.float32) / 8
        self.weights = [tf.Variable(v) for v in values]

        def loss_of(x):
            for w in self.weights:
                x = layer(x, w)
            return tf.reduce_mean(x**2)

        @tf.function(input_signature=[X])
        def step(x):
            with make_tape() as tape:
                loss = loss_of(x)
            grads = tape.gradient(loss, self.weights)
            for w, grad in zip(self.weights, grads, strict=True):
                w.assign_sub(grad)
            return loss

        @tf.function(input_signature=[X])
        def slope(x):
            with make_tape() as tape:
                tape.watch(x)
                loss = loss_of(x)
            return tape.gradient(loss, x)

        self.step, self.slope = step, slope


def by_default(path, make_tape):
    tf.saved_model.save(Trained(make_tape), path)


def without_gradients(path, make_tape):
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    tf.saved_model.save(Trained(make_tape), path, options=options)


def by_keras(path, make_tape):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH, "tanh") for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile("sgd", "mse")
    if make_tape is msg.GradientTape:
        msg.keras.save_memory(model)
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("step", lambda x: model.train_step((x, x))["loss"], input_signature=[X])
    archive.write_out(path, verbose=False)


def of_parts(path, make_tape):
    """Parts by hand, under TensorFlow's own tape."""
    checkpointed = block if make_tape is tf.GradientTape else msg.checkpoint(block)
    tf.saved_model.save(Trained(tf.GradientTape, checkpointed), path)


#: Trains what the folders hold: by folder, the losses and the peak.
ELSEWHERE = """
import json, sys
import tensorflow as tf
x = tf.random.stateless_normal((4096, 64), (1, 2))
loaded = {path: tf.saved_model.load(path) for path in sys.argv[1:]}
losses = {path: [float(one.step(x)) for _ in range(3)] for path, one in loaded.items()}
assert "memory_saving_gradients" not in sys.modules
from memory_saving_gradients import measure
found = {}
for path, one in loaded.items():
    peak = measure.StepPeak()
    one.step(x)
    found[path] = losses[path], peak.bytes()
print(json.dumps(found))
"""


def trained_elsewhere(folder, way):
    """By tape: the losses and the peak of what is saved in that way."""
    paths = {tape: str(folder / tape.__module__) for tape in (tf.GradientTape, msg.GradientTape)}
    for tape, path in paths.items():
        way(path, tape)
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    ran = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *paths.values()],
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout)
    return {tape: found[path] for tape, path in paths.items()}


@pytest.mark.parametrize(
    "way",
    [
        by_default,
        without_gradients,
        pytest.param(by_keras, marks=pytest.mark.slow),
        pytest.param(of_parts, marks=pytest.mark.slow),
    ],
)
@pytest.mark.measured
def test_a_saved_step_trains_elsewhere_in_less_memory(way, tmp_path):
    found = trained_elsewhere(tmp_path, way)
    (plain, plain_peak), (ours, peak) = found[tf.GradientTape], found[msg.GradientTape]
    assert ours == plain
    assert ours[0] > ours[-1]
    assert peak < 0.6 * plain_peak


def test_a_session_runs_it_in_less_memory(tmp_path):
    """So do C++ and Java, by the signature."""
    found = {}
    for tape in (tf.GradientTape, msg.GradientTape):
        trained, path = Trained(tape), str(tmp_path / tape.__module__)
        tf.saved_model.save(trained, path, signatures=trained.step)
        with v1.Session(graph=tf.Graph()) as session:
            signature = v1.saved_model.load(session, ["serve"], path).signature_def
            step = signature["serving_default"]
            x = np.random.default_rng(1).standard_normal(X.shape).astype(np.float32)
            feed = {step.inputs["x"].name: x}
            loss = step.outputs["output_0"].name
            losses = [session.run(loss, feed) for _ in range(3)]
            found[tape] = losses, measure.session_peak(session, loss, feed)
    (plain, plain_peak), (ours, peak) = found[tf.GradientTape], found[msg.GradientTape]
    assert ours == plain
    assert ours[0] > ours[-1]
    assert peak < 0.6 * plain_peak


def test_what_is_loaded_is_not_differentiated_wrongly(tmp_path):
    tf.saved_model.save(Trained(msg.GradientTape), str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    x = tf.ones(X.shape)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with pytest.raises(NotImplementedError, match="recomputed"):
            tape.gradient(loaded.slope(x), x)
