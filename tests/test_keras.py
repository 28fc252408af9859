"""`keras.save_memory()` and what Keras offers: losses and weights as without it, less memory."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import memory_saving_gradients as msg

SIZE, CLASSES, BATCH, STEPS = 24, 5, 8, 5


def body(x, dropout=0.0):
    for filters in (8, 8, 16, 16):
        shortcut = layers.Conv2D(filters, 1)(x)
        x = layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same")(x))
        x = layers.add([layers.Activation("swish")(x), shortcut])
        x = layers.Dropout(dropout)(x) if dropout else x
    return x


def classifier(dropout=0.0, **compiled):
    inputs = keras.Input((SIZE, SIZE, 3))
    pooled = layers.GlobalAveragePooling2D()(body(inputs, dropout))
    model = keras.Model(inputs, layers.Dense(CLASSES)(pooled))
    return compile_(model, **compiled)


def compile_(model, **compiled):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**{"optimizer": "sgd", "loss": loss, "jit_compile": False, **compiled})
    return model


def data(count=BATCH * STEPS):
    rng = np.random.default_rng(0)
    images = rng.standard_normal((count, SIZE, SIZE, 3), dtype=np.float32)
    return images, rng.integers(0, CLASSES, count)


def plain_fit(model, **options):
    x, y = data()
    return {"x": x, "y": y, "batch_size": BATCH, **options}


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.convolutions = [layers.Conv2D(8, 3, padding="same") for _ in range(6)]
        self.norm = layers.BatchNormalization()
        self.head = layers.Dense(CLASSES)

    def call(self, x, training=False):
        for convolution in self.convolutions:
            x = keras.ops.tanh(convolution(x))
        return self.head(keras.ops.mean(self.norm(x, training=training), axis=(1, 2)))


class CustomStep(Subclassed):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss}


def sequential():
    convolutions = [layers.Conv2D(8, 3, padding="same", activation="tanh") for _ in range(6)]
    ends = [layers.GlobalAveragePooling2D(), layers.Dense(CLASSES)]
    model = keras.Sequential([keras.Input((SIZE, SIZE, 3)), *convolutions, *ends])
    return compile_(model), plain_fit(model)


def functional():
    model = classifier()
    return model, plain_fit(model)


def subclassed():
    model = compile_(Subclassed())
    return model, plain_fit(model)


def custom_train_step():
    model = compile_(CustomStep())
    return model, plain_fit(model)


def metrics():
    model = classifier(metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)])
    return model, plain_fit(model)


def regularisation():
    inputs = keras.Input((SIZE, SIZE, 3))
    x = inputs
    for _ in range(10):
        x = layers.Conv2D(8, 3, padding="same", activation="tanh", kernel_regularizer="l2")(x)
        x = layers.ActivityRegularization(l2=1e-4)(x)
    outputs = layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x))
    model = compile_(keras.Model(inputs, outputs))
    return model, plain_fit(model)


def class_weights():
    model = classifier()
    return model, plain_fit(model, class_weight={i: 1.0 + i for i in range(CLASSES)})


def sample_weights():
    model = classifier()
    return model, plain_fit(model, sample_weight=np.linspace(0, 1, BATCH * STEPS))


def several_outputs():
    inputs = keras.Input((SIZE, SIZE, 3), name="image")
    x = body(inputs)
    pooled = layers.GlobalAveragePooling2D()(x)
    outputs = {"kind": layers.Dense(CLASSES)(pooled), "image": layers.Conv2D(3, 1)(x)}
    model = keras.Model({"image": inputs}, outputs)
    losses = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "image": "mse"}
    model.compile("sgd", losses, loss_weights={"kind": 1.0, "image": 0.3}, jit_compile=False)
    x, y = data()
    return model, {"x": {"image": x}, "y": {"kind": y, "image": x}, "batch_size": BATCH}


def frozen_layers():
    model = classifier()
    for layer in model.layers[:6]:
        layer.trainable = False
    return compile_(model), plain_fit(model)


def mixed(policy):
    def build():
        keras.mixed_precision.set_global_policy(policy)
        try:
            model = classifier()
        finally:
            keras.mixed_precision.set_global_policy("float32")
        return model, plain_fit(model)

    build.__name__ = policy
    return build


def optimizer(name, **options):
    def build():
        model = classifier(optimizer=keras.optimizers.Adam(1e-3, **options))
        return model, plain_fit(model)

    build.__name__ = name
    return build


def several_steps_per_execution():
    model = classifier(steps_per_execution=2)
    return model, plain_fit(model)


def dropout():
    model = classifier(dropout=0.3)
    return model, plain_fit(model)


def last_batch_smaller():
    model = classifier()
    x, y = data(BATCH * STEPS - 3)
    return model, {"x": x, "y": y, "batch_size": BATCH}


def dataset_of_unknown_batch():
    model = classifier()
    pairs = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH)
    return model, {"x": pairs}


def models_inside_models():
    inner_in = keras.Input((SIZE, SIZE, 8))
    inner = keras.Model(inner_in, body(inner_in))
    inputs = keras.Input((SIZE, SIZE, 3))
    x = inner(layers.Conv2D(8, 3, padding="same")(inputs))
    model = keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))
    return compile_(model), plain_fit(model)


def shared_layers():
    inputs = keras.Input((SIZE, SIZE, 3))
    shared = layers.Conv2D(8, 3, padding="same", activation="tanh")
    x = layers.Conv2D(8, 3, padding="same")(inputs)
    for _ in range(5):
        x = shared(x)
    same_twice = layers.multiply([x, x])  # tensorflow#36999: one tensor passed twice
    outputs = layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(same_twice))
    return compile_(keras.Model(inputs, outputs)), plain_fit(None)


def recurrent():
    inputs = keras.Input((12, 16))
    x = inputs
    for _ in range(4):
        x = layers.Dense(64, activation="tanh")(x)
    x = layers.LSTM(16, return_sequences=True)(x)
    for _ in range(4):
        x = layers.Dense(64, activation="tanh")(x)
    model = compile_(keras.Model(inputs, layers.Dense(CLASSES)(layers.GRU(16)(x))))
    x = np.random.default_rng(0).standard_normal((BATCH * STEPS, 12, 16), dtype=np.float32)
    return model, {"x": x, "y": data()[1], "batch_size": BATCH}


def transformer():
    inputs = keras.Input((16,), dtype="int32")
    x = layers.Embedding(32, 32)(inputs)
    for _ in range(3):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(2, 16, dropout=0.1)(y, y)
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(32)(layers.Dense(64, activation="gelu")(y))
    model = compile_(keras.Model(inputs, layers.Dense(CLASSES)(layers.Flatten()(x))))
    x = np.random.default_rng(0).integers(0, 32, (BATCH * STEPS, 16))
    return model, {"x": x, "y": data()[1], "batch_size": BATCH}


USES = {
    build.__name__: build
    for build in [
        functional,
        sequential,
        subclassed,
        custom_train_step,
        metrics,
        regularisation,
        class_weights,
        sample_weights,
        several_outputs,
        frozen_layers,
        mixed("mixed_float16"),
        mixed("mixed_bfloat16"),
        optimizer("gradient_accumulation", gradient_accumulation_steps=2),
        optimizer("gradient_clipping", global_clipnorm=0.1),
        optimizer("moving_average", use_ema=True, ema_momentum=0.9),
        several_steps_per_execution,
        dropout,
        last_batch_smaller,
        dataset_of_unknown_batch,
        models_inside_models,
        shared_layers,
        recurrent,
        transformer,
    ]
}


class Losses(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(dict(logs))


def train(build, saving, **compiled):
    """(losses and metrics of each batch, weights, plans)"""
    keras.backend.clear_session()
    keras.utils.set_random_seed(11)
    model, fit = build()
    if compiled:
        compile_(model, **compiled)
    if saving:
        assert msg.keras.save_memory(model) is model
    losses = Losses()
    model.fit(**fit, shuffle=False, verbose=0, callbacks=[losses])
    plans = msg.keras.get_plans(model) if saving else []
    return losses.losses, [v.numpy() for v in model.variables], plans


def assert_same_training(ours, plain):
    assert ours[0] == plain[0]
    for a, b in zip(ours[1], plain[1], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", USES)
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
    monkeypatch.setattr("memory_saving_gradients.tape._warned", False)
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
    msg.keras.save_memory(model).fit(**fit, verbose=0, callbacks=[report])
    printed = capsys.readouterr().out
    assert "memory: predicted peak" in printed
    assert "kept for the backward pass: " in printed
    assert f"measured peak {report.measured_bytes / 1e6:.1f} MB" in printed
    (file,) = tmp_path.glob("events*")
    tags = {
        value.tag
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    }
    assert {"memory/predicted_mb", "memory/baseline_mb"} <= tags


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
