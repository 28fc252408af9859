"""`keras.save_memory()` and what Keras offers: losses and weights as without it, less memory."""

import copy
import pickle
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf

import memory_saving_gradients as msg
from memory_saving_gradients.report import summary
from tests.keras_training import (
    BATCH,
    CLASSES,
    SIZE,
    USES,
    assert_same_training,
    compile_,
    data,
    functional,
    plain_fit,
    train,
    transformer,
)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", USES)
@pytest.mark.sweep(2)
def test_training_is_the_same_bit_for_bit(name):
    plain, ours = train(USES[name], False), train(USES[name], True)
    assert_same_training(ours, plain)
    assert ours[2], "nothing was recomputed, so the test shows nothing"
    assert all(plan.peak_bytes < plan.baseline_peak_bytes for plan in ours[2])


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("checkpoints", ["speed", [r"activation.*/Sigmoid:0"]])
def test_every_strategy_trains_the_same(checkpoints):
    def build():
        model, fit = functional()
        return msg.keras.save_memory(model, checkpoints), fit

    plain, ours = train(functional, False), train(build, False)
    assert_same_training(ours, plain)


def test_a_budget_is_met():
    model, fit = transformer()
    msg.keras.save_memory(model, memory_budget=0.7).fit(**fit, verbose=0)
    plan = msg.keras.get_plans(model)[-1]
    assert plan.peak_bytes <= 0.7 * plan.baseline_peak_bytes


def test_before_compile_after_fit_and_undone():
    model, fit = functional()
    model.fit(**fit, verbose=0)
    msg.keras.save_memory(model).fit(**fit, verbose=0)
    assert len(msg.keras.get_plans(model)) > 0
    compile_(model).fit(**fit, verbose=0)
    saved = len(msg.keras.get_plans(model))
    assert saved > 1
    msg.keras.save_memory(model, None).fit(**fit, verbose=0)
    with pytest.raises(ValueError, match="not given"):
        msg.keras.get_plans(model)
    assert model.train_step.__func__ is type(model).train_step


def test_train_on_batch_saves_memory():
    model, fit = functional()
    msg.keras.save_memory(model).train_on_batch(fit["x"][:BATCH], fit["y"][:BATCH])
    assert msg.keras.get_plans(model)


@pytest.mark.parametrize("strategy", [False, True])
def test_a_step_is_traced_once(strategy):
    """By itself Keras makes the variables of optimizer and metrics in the step: two traces."""
    traces = []

    class Counting(keras.Model):
        def train_step(self, data):
            traces.append(data)
            return super().train_step(data)

    def trained(saving):
        keras.utils.set_random_seed(0)
        x = inputs = keras.Input((256,))
        for _ in range(8):
            x = keras.layers.Dense(256, "tanh")(x)
        model = Counting(inputs, x)
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
        if saving:
            msg.keras.save_memory(model)
        traces.clear()
        examples = np.random.default_rng(0).normal(size=(200, 256)).astype(np.float32)
        return model, model.fit(examples, examples, batch_size=128, epochs=2, verbose=0).history

    with tf.distribute.MirroredStrategy(["CPU:0"]).scope() if strategy else nullcontext():
        _, plain = trained(False)
        assert len(traces) == 2 - strategy  # a strategy makes them before
        model, ours = trained(True)
    assert len(traces) == 1
    assert len(msg.keras.get_plans(model)) == 1
    assert ours == plain
    assert "build" not in vars(model.optimizer)


def test_one_model_only():
    model, fit = functional()
    other, _ = functional()
    msg.keras.save_memory(model)
    before = tf.GradientTape
    other.fit(**fit, verbose=0)
    assert not msg.keras.get_plans(model)
    model.fit(**fit, verbose=0)
    assert tf.GradientTape is before


def test_evaluate_predict_and_saving_are_untouched(tmp_path):
    model, fit = functional()
    msg.keras.save_memory(model).fit(**fit, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    x, y = data()
    np.testing.assert_array_equal(model.predict(x, verbose=0), loaded.predict(x, verbose=0))
    assert model.evaluate(x, y, verbose=0) == loaded.evaluate(x, y, verbose=0)
    loaded.fit(**fit, verbose=0)
    with pytest.raises(ValueError, match="not given"):
        msg.keras.get_plans(loaded)


def test_run_eagerly_is_plain_and_says_so(monkeypatch):
    monkeypatch.setattr("memory_saving_gradients.doors.tape._warned", False)
    model, fit = functional()
    compile_(model, run_eagerly=True)
    with pytest.warns(UserWarning, match="run_eagerly"):
        msg.keras.save_memory(model).fit(**fit, steps_per_epoch=1, verbose=0)
    assert not msg.keras.get_plans(model)


@pytest.mark.parametrize("wrong", [None, "model", keras.layers.Dense(3)])
def test_what_is_no_model_is_refused(wrong):
    with pytest.raises(TypeError, match=r"keras\.Model"):
        msg.keras.save_memory(wrong)


def test_wrong_options_leave_the_model_alone():
    model, _ = functional()
    with pytest.raises(ValueError, match="unknown strategy"):
        msg.keras.save_memory(model, "fast")
    assert "train_step" not in vars(model)


def test_the_report_is_printed_and_written(tmp_path, capsys):
    model, fit = functional()
    report = msg.keras.MemoryReport(tmp_path)
    fit |= {"epochs": 3}
    msg.keras.save_memory(model).fit(**fit, verbose=0, callbacks=[report])
    printed = capsys.readouterr().out
    (plan,) = msg.keras.get_plans(model)
    assert summary.short(plan) in printed
    assert printed.count("measured peak") == 1
    (file,) = tmp_path.glob("events*")
    written = [
        (value.tag, event.step, value)
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    ]
    told = {tag: value for tag, _, value in written}
    assert {"memory/predicted_mb", "memory/baseline_mb", "memory/plan"} <= told.keys()
    text = tf.make_ndarray(told["memory/summary"].tensor).item().decode()
    assert "Kept for the backward pass" in text
    _, _, image = tf.make_ndarray(told["memory/timeline"].tensor)
    assert image.startswith(b"\x89PNG")
    peaks = [
        (step, float(tf.make_ndarray(value.tensor)))
        for tag, step, value in written
        if tag == "memory/measured_mb"
    ]
    assert [step for step, _ in peaks][-2:] == [1, 2]
    assert peaks[-1][1] == pytest.approx(report.measured_bytes / 1e6)


def test_the_report_of_a_plain_model_warns_and_measures():
    model, fit = functional()
    report = msg.keras.MemoryReport()
    with pytest.warns(UserWarning, match="trains plain"):
        model.fit(**fit, verbose=0, callbacks=[report])
    assert report.measured_bytes > 0


COPIES = {
    "clone_model": lambda model: keras.models.clone_model(model),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_saves_memory_too(how):
    model, fit = functional()
    msg.keras.save_memory(model, "speed").fit(**fit, verbose=0)
    copied = COPIES[how](model)
    compile_(copied).fit(**fit, verbose=0)
    assert {plan.strategy for plan in msg.keras.get_plans(copied)} == {"speed"}
    plain = COPIES[how](msg.keras.save_memory(model, None))
    compile_(plain).fit(**fit, verbose=0)
    with pytest.raises(ValueError, match="not given"):
        msg.keras.get_plans(plain)


def test_a_copy_that_cannot_carry_its_options_is_plain_and_says_so():
    model, _ = functional()
    msg.keras.save_memory(model, lambda op: op.type == "Conv2D")
    with pytest.warns(UserWarning, match="call save_memory on the copy"):
        copied = pickle.loads(pickle.dumps(model))
    with pytest.raises(ValueError, match="not given"):
        msg.keras.get_plans(copied)


@pytest.mark.usefixtures("deterministic")
def test_keras_2_works_through_patch():
    import tf_keras

    def run(patched):
        tf_keras.backend.clear_session()
        tf_keras.utils.set_random_seed(11)
        x = inputs = tf_keras.Input((SIZE, SIZE, 3))
        for _ in range(5):
            x = tf_keras.layers.Conv2D(8, 3, padding="same", activation="tanh")(x)
            x = tf_keras.layers.Dropout(0.2)(tf_keras.layers.BatchNormalization()(x))
        outputs = tf_keras.layers.Dense(CLASSES)(tf_keras.layers.GlobalAveragePooling2D()(x))
        model = tf_keras.Model(inputs, outputs)
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, jit_compile=False)
        fit = {**plain_fit(model), "shuffle": False, "verbose": 0}
        if not patched:
            return model.fit(**fit).history, model.get_weights(), []
        with msg.patch() as patch:
            return model.fit(**fit).history, model.get_weights(), patch.plans

    plain, ours = run(False), run(True)
    assert_same_training(ours, plain)
    assert ours[2]


def test_a_budget_in_the_place_of_a_strategy_is_pointed_out():
    with pytest.raises(ValueError, match=r'Did you mean memory_budget="4GB"\?'):
        msg.keras.save_memory(keras.Sequential([keras.layers.Dense(4)]), "4GB")
