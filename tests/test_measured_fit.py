"""What doors of TensorFlow 2 save, measured: the resident memory of fresh processes."""

import functools

import keras
import pytest
import tensorflow as tf
from keras import layers

import memory_saving_gradients as msg
from memory_saving_gradients.measure import function_peak
from test_models.keras_models import example

pytestmark = pytest.mark.measured

BATCH = 32


def convolutional():
    x = inputs = keras.Input((64, 64, 3))
    for _ in range(6):
        x = layers.Conv2D(32, 3, padding="same", use_bias=False)(x)
        x = layers.Dropout(0.1)(layers.Activation("tanh")(x))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(x))


def attention():
    x = inputs = keras.Input((128,), dtype="int32")
    x = layers.Embedding(512, 128)(x)
    for _ in range(3):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 32)(y, y)
        y = layers.Dense(512, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dropout(0.1)(layers.Dense(128)(y))
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(x))


def trained(make, door, options):
    """A step of a Keras model through a door, and its plans."""
    keras.utils.set_random_seed(0)
    model = make()
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    x, y = example(model, BATCH)
    plans = []
    if door == "fit":
        if options is not None:
            msg.keras.save_memory(model, **options)
        step = functools.partial(model.fit, x, y, batch_size=BATCH, verbose=0)
        return step, lambda: msg.keras.get_plans(model)
    inputs = tf.constant(x), tf.constant(y)
    make_tape = (
        tf.GradientTape if options is None else functools.partial(msg.GradientTape, **options)
    )

    @tf.function(autograph=False)
    def step(x, y):
        with make_tape() as tape:
            loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(grads, model.trainable_variables)
        return loss

    model.optimizer.build(model.trainable_variables)
    plans = msg.get_plans(step.get_concrete_function(*inputs).graph)
    return functools.partial(step, *inputs), lambda: plans


def make_step(make, door, options):
    return trained(make, door, options)[0]


@pytest.mark.parametrize(
    ("make", "door"),
    [
        (attention, "fit"),
        (convolutional, "tape"),
        pytest.param(attention, "tape", marks=pytest.mark.slow),
        pytest.param(convolutional, "fit", marks=pytest.mark.slow),
    ],
)
def test_the_measured_peak_falls_as_planned(make, door):
    options = {"checkpoints": "memory"}
    step, plans = trained(make, door, options)
    step()
    plan = plans()[-1]
    keras.backend.clear_session()
    plain = function_peak(make_step, make, door, None)
    ours = function_peak(make_step, make, door, options)
    planned = plan.baseline_peak_bytes - plan.peak_bytes
    assert plain - ours == pytest.approx(planned, rel=0.15)
    assert ours < 0.5 * plain


@pytest.mark.slow
def test_with_onednn_the_allocator_is_asked(monkeypatch):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "1")
    plain = function_peak(make_step, attention, "fit", None)
    ours = function_peak(make_step, attention, "fit", {"checkpoints": "memory"})
    assert 0 < ours < 0.3 * plain
