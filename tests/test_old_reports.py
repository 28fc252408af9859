"""What users reported of other tools, each with its number: it works here.

Three more have their place elsewhere: a tensor passed twice (tensorflow#36999) is `shared_layers`
in keras_training.py, a functional model through `fit` (keras#18116) `functional` there, and a model
split over devices (gradient-checkpointing#38) is in test_distribution.py.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import memory_saving_gradients as msg
from memory_saving_gradients.measure import function_peak
from tests.keras_training import BATCH, SIZE, assert_same_training, compile_, data, plain_fit, train

WIDTH, LAYERS, ROWS = 256, 24, 4096


def chain_step(how):
    """A step of a chain of dense layers: plain, in `tf.recompute_grad`, or ours."""
    tf.config.threading.set_inter_op_parallelism_threads(1)
    rng = np.random.default_rng(0)
    values = rng.standard_normal((LAYERS, WIDTH, WIDTH)).astype(np.float32) / 16
    weights = [tf.Variable(v) for v in values]
    x = tf.constant(rng.standard_normal((ROWS, WIDTH)).astype(np.float32))

    def part(of):
        def run(h):
            for w in of:
                h = tf.tanh(h @ w)
            return h

        return tf.recompute_grad(run) if how == "recompute_grad" else run

    @tf.function(autograph=False)
    def step():
        with msg.GradientTape() if how == "ours" else tf.GradientTape() as tape:
            h = x
            for start in range(0, LAYERS, 4):
                h = part(weights[start : start + 4])(h)
            loss = tf.reduce_sum(h)
        return tape.gradient(loss, weights)

    return step


@pytest.mark.measured
def test_memory_falls_where_recompute_grad_saves_little():
    """tensorflow#36981 and #57205: memory did not fall with `tf.recompute_grad`."""
    plain, theirs, ours = (
        function_peak(chain_step, how) for how in ("plain", "recompute_grad", "ours")
    )
    assert ours < 0.5 * plain
    assert ours < theirs


def with_keyword_arguments():
    inputs = keras.Input((SIZE, SIZE, 3))
    x = inputs
    for _ in range(5):
        x = layers.Conv2D(8, 3, padding="same", activation="tanh")(inputs=x)
        x = layers.BatchNormalization()(inputs=x, training=True, mask=None)
    x = layers.Reshape((-1, 8))(x[:, ::4, ::4])
    x = layers.MultiHeadAttention(2, 4)(query=x, value=x, use_causal_mask=True)
    model = keras.Model(inputs, layers.Dense(5)(layers.GlobalAveragePooling1D()(x)))
    return compile_(model), plain_fit(model)


def densenet121():
    model = keras.applications.DenseNet121(input_shape=(32, 32, 3), weights=None, classes=5)
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    x = np.random.default_rng(0).standard_normal((2 * BATCH, 32, 32, 3), dtype=np.float32)
    return model, {"x": x, "y": data(2 * BATCH)[1], "batch_size": BATCH}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "build", [with_keyword_arguments, pytest.param(densenet121, marks=pytest.mark.slow)]
)
def test_layers_called_with_keyword_arguments(build):
    """keras#21207: DenseNet121 with keyword arguments raised in graph mode under remat."""
    plain, ours = train(build, False), train(build, True)
    assert_same_training(ours, plain)
    assert ours[2]


@pytest.mark.usefixtures("deterministic")
def test_dropout_is_recomputed_with_its_mask():
    """gradient-checkpointing and `tf.recompute_grad`: gradients were wrong with dropout."""
    rng = np.random.default_rng(0)
    weights = [tf.Variable(rng.standard_normal((64, 64)).astype(np.float32) / 8) for _ in range(8)]
    x = tf.constant(rng.standard_normal((512, 64)).astype(np.float32))

    def run(make_tape):
        tf.random.set_seed(4)

        @tf.function
        def step():
            with make_tape() as tape:
                h = x
                for w in weights:
                    h = tf.nn.dropout(tf.tanh(h @ w), 0.5)
                loss = tf.reduce_sum(h)
            return loss, tape.gradient(loss, weights)

        return step(), msg.get_plans(step.get_concrete_function().graph)

    (plain, _), (ours, plans) = run(tf.GradientTape), run(msg.GradientTape)
    assert plans
    for a, b in zip(tf.nest.flatten(ours), tf.nest.flatten(plain), strict=True):
        np.testing.assert_array_equal(a, b)
