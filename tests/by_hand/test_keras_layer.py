"""`keras.Checkpoint`: a layer of which only the inputs are kept."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import memory_saving_gradients as msg
from memory_saving_gradients.keras import Checkpoint
from memory_saving_gradients.measure import function_peak

pytestmark = pytest.mark.measured


def block(width, policy=None, inside=True):
    body = keras.Sequential(
        [
            layers.Dense(width, activity_regularizer="l2", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Activation("swish"),
            layers.Dropout(0.2),
            layers.Dense(width),
        ]
    )
    return Checkpoint(body, policy=policy) if inside else body


class Subclassed(keras.Model):
    def __init__(self, inside, policy):
        super().__init__()
        self.blocks = [block(16, policy, inside) for _ in range(3)]
        self.head = layers.Dense(1)

    def call(self, x, training=None):
        for one in self.blocks:
            x = x + one(x, training=training)
        return self.head(x)


def functional(inside, policy):
    x = inputs = keras.Input((16,))
    for _ in range(3):
        x = layers.add([x, block(16, policy, inside)(x)])
    return keras.Model(inputs, layers.Dense(1)(x))


def sequential(inside, policy):
    return keras.Sequential([block(16, policy, inside), block(16, policy, inside), layers.Dense(1)])


def trained(make, inside, policy=None, saving=False, **compiled):
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    model = make(inside, policy)
    model.compile("adam", "mse", **compiled)
    if saving:
        msg.keras.save_memory(model)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 16), dtype=np.float32)
    history = model.fit(x, x[:, :1], batch_size=16, epochs=2, shuffle=False, verbose=0)
    return model, history.history["loss"], [*model.get_weights(), model.predict(x, verbose=0)]


@pytest.mark.parametrize(
    ("make", "how"),
    [
        *((functional, how) for how in ("function", "eager", "xla", "saving")),
        (sequential, "eager"),
        (Subclassed, "function"),
        pytest.param(sequential, "function", marks=pytest.mark.slow),
        pytest.param(Subclassed, "eager", marks=pytest.mark.slow),
    ],
)
def test_it_trains_the_same(make, how):
    options = {"run_eagerly": how == "eager", "jit_compile": how == "xla"}
    plain_model, plain, state = trained(make, False, **options)
    model, ours, our_state = trained(make, True, saving=how == "saving", **options)
    np.testing.assert_allclose(ours, plain, rtol=1e-4)
    for a, b in zip(our_state, state, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    assert len(model.losses) == len(plain_model.losses)


@pytest.mark.parametrize("policy", ["speed", None])
@pytest.mark.sweep(2)
def test_it_is_saved_with_its_model(policy, tmp_path):
    model, _, _ = trained(functional, True, policy)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    x = np.ones((4, 16), np.float32)
    np.testing.assert_array_equal(loaded(x), model(x))
    found = [layer for layer in loaded.layers if isinstance(layer, Checkpoint)]
    assert [layer.policy for layer in found] == [policy] * 3
    loaded.fit(x, x[:, :1], verbose=0)


@keras.saving.register_keras_serializable("tests")
def keep_products(op):
    return op.type == "MatMul"


def test_a_registered_policy_is_saved():
    layer = Checkpoint(layers.Dense(4), policy=keep_products)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert again.policy is keep_products
    assert isinstance(keras.models.clone_model(keras.Sequential([layer])).layers[0], Checkpoint)


def assert_told_whether_it_trains(layer):
    """Of a layer that is dropout at a half."""
    x = tf.ones((64, 8))
    for training in (True, False, True):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=training)
        assert ((y.numpy() == 0).any()) == training
        np.testing.assert_array_equal(tape.gradient(y, x), y)


def test_the_layer_is_told_whether_it_trains():
    assert_told_whether_it_trains(Checkpoint(layers.Dropout(0.5)))


def test_called_by_hand_a_layer_is_told_by_its_model():
    """`checkpoint(layer, x)` within a model's call."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dropout = layers.Dropout(0.5)

        def call(self, x):
            return msg.checkpoint(self.dropout, x)

    assert_told_whether_it_trains(Model())


def test_masks_pass():
    def model(around):
        keras.utils.set_random_seed(2)
        return keras.Sequential(
            [
                around(keras.Sequential([layers.Embedding(8, 4, mask_zero=True), layers.Dense(4)])),
                around(layers.LSTM(4)),
            ]
        )

    tokens = np.array([[1, 2, 0, 0], [3, 0, 0, 0]])
    plain, ours = model(lambda layer: layer), model(Checkpoint)
    np.testing.assert_allclose(ours(tokens), plain(tokens), rtol=1e-6)
    with tf.GradientTape():
        watched = ours(tokens)
    np.testing.assert_allclose(watched, plain(tokens), rtol=1e-6)


@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.sweep(2)
def test_mixed_precision(precision):
    keras.config.set_dtype_policy(precision)
    try:
        _, plain, _ = trained(functional, False)
        _, ours, _ = trained(functional, True)
    finally:
        keras.config.set_dtype_policy("float32")
    np.testing.assert_allclose(ours, plain, rtol=2e-2)


def make_step(inside):
    body = [layers.Dense(128, "tanh") for _ in range(4)]
    bodies = [keras.Sequential([layers.Dense(128, "tanh") for _ in body]) for _ in range(8)]
    model = keras.Sequential([Checkpoint(one) if inside else one for one in bodies])
    model.compile("sgd", "mse", run_eagerly=True)
    x = np.ones((8192, 128), np.float32)
    return lambda: model.train_on_batch(x, x)


def test_an_eager_fit_takes_less_memory():
    ours, plain = (function_peak(make_step, inside) for inside in (True, False))
    assert ours < 0.6 * plain
