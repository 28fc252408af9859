"""Keras models in segments, for the benchmark of `fit` against other ways to recompute."""

from __future__ import annotations

import re
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers

#: Makes a layer of a part of a model: `tf.identity`-like, or one that recomputes it.
Wrap = Callable[[keras.Model], Callable]


class Recomputed(keras.layers.Layer):
    """A part of a model under `tf.recompute_grad`, as a user would place it by hand."""

    def __init__(self, part: keras.Model) -> None:
        super().__init__()
        self.part = part

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        return tf.recompute_grad(lambda x: self.part(x, training=training))(x)


def _segmented(model: keras.Model, ends: str, wrap: Wrap) -> keras.Model:
    """`model` with each part up to a layer whose name matches `ends` wrapped."""
    names = [layer.name for layer in model.layers if re.fullmatch(ends, layer.name)]
    cuts = [model.get_layer(name).output for name in names]
    x = inputs = keras.Input(model.input.shape[1:])
    for start, end in zip([model.input, *cuts], [*cuts, model.output], strict=True):
        x = wrap(keras.Model(start, end))(x)
    return keras.Model(inputs, x)


def resnet50(wrap: Wrap) -> keras.Model:
    model = keras.applications.ResNet50(input_shape=(96, 96, 3), weights=None, classes=10)
    return _segmented(model, r"conv\d_block\d_out", wrap)


def efficientnet_b0(wrap: Wrap) -> keras.Model:
    model = keras.applications.EfficientNetB0(input_shape=(96, 96, 3), weights=None, classes=10)
    return _segmented(model, r"block\d[a-d]_add|block[1-7]a_project_bn", wrap)


def mobilenet_v3(wrap: Wrap) -> keras.Model:
    model = keras.applications.MobileNetV3Large(
        input_shape=(96, 96, 3), weights=None, classes=10, include_preprocessing=False
    )
    ends = r"expanded_conv(_\d+)?_add|expanded_conv_(1|3|6|10|12)_project_bn"
    return _segmented(model, ends, wrap)


def transformer(wrap: Wrap) -> keras.Model:
    """8 blocks of width 256 on 256 tokens, with dropout."""
    x = inputs = keras.Input((256,), dtype="int32")
    x = layers.Embedding(512, 256)(x)
    for _ in range(8):
        y = start = keras.Input((256, 256))
        z = layers.LayerNormalization()(y)
        y = y + layers.Dropout(0.1)(layers.MultiHeadAttention(4, 64)(z, z))
        z = layers.Dense(1024, activation="gelu")(layers.LayerNormalization()(y))
        y = y + layers.Dropout(0.1)(layers.Dense(256)(z))
        x = wrap(keras.Model(start, y))(x)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(x))


def unet(wrap: Wrap) -> keras.Model:
    """Three levels on 128 pixels, batch-normalised; as output a class for each pixel."""

    def block(x: tf.Tensor, filters: int) -> tf.Tensor:
        y = start = keras.Input(x.shape[1:])
        for _ in range(2):
            y = layers.Conv2D(filters, 3, padding="same", use_bias=False)(y)
            y = layers.ReLU()(layers.BatchNormalization()(y))
        return wrap(keras.Model(start, y))(x)

    x = inputs = keras.Input((128, 128, 3))
    skips = []
    for filters in (32, 64, 128):
        skips.append(x := block(x, filters))
        x = layers.MaxPooling2D()(x)
    x = block(x, 256)
    for filters in (128, 64, 32):
        x = layers.Conv2DTranspose(filters, 2, strides=2)(x)
        x = block(layers.concatenate([x, skips.pop()]), filters)
    return keras.Model(inputs, layers.Conv2D(10, 1, activation="softmax")(x))


def lstm(wrap: Wrap) -> keras.Model:
    """Two layers of 512 cells over 512 steps; as output a class for each step."""
    x = inputs = keras.Input((512, 128))
    for _ in range(2):
        start = keras.Input(x.shape[1:])
        x = wrap(keras.Model(start, layers.LSTM(512, return_sequences=True)(start)))(x)
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(x))


#: label: (builder, batch)
KERAS_MODELS: dict[str, tuple[Callable[[Wrap], keras.Model], int]] = {
    "ResNet-50, 96 px, batch 32": (resnet50, 32),
    "Transformer, 8 blocks, batch 32": (transformer, 32),
    "U-Net, 128 px, batch 8": (unet, 8),
    "EfficientNet-B0, 96 px, batch 32": (efficientnet_b0, 32),
    "MobileNetV3, 96 px, batch 32": (mobilenet_v3, 32),
    "LSTM, 2 × 512 cells, 512 steps, batch 32": (lstm, 32),
}


def example(model: keras.Model, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch of random inputs and labels."""
    rng = np.random.default_rng(0)
    shape = (batch, *model.input.shape[1:])
    images = model.input.dtype != "int32"
    x = rng.standard_normal(shape).astype("float32") if images else rng.integers(0, 512, shape)
    return x, rng.integers(0, 10, (batch, *model.output.shape[1:-1]))
