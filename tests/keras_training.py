"""Uses of Keras that are tested, each a compiled model and what `fit` is called with; training."""

import keras
import numpy as np
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
