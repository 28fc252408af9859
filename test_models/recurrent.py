"""Recurrent networks whose steps run in a loop of the graph."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from test_models.model import Model


class _Cell:
    """A GRU cell (Cho et al. 2014) of one matrix, as `tf.compat.v1.nn.dynamic_rnn` wants it."""

    def __init__(self, model: Model, inputs: int, width: int) -> None:
        self.output_size = self.state_size = width
        self._gates = model.parameter("gates", (inputs + width, 2 * width), 0.1)
        self._candidate = model.parameter("candidate", (inputs + width, width), 0.1)

    def zero_state(self, batch: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        return tf.zeros([batch, self.state_size], dtype)

    def __call__(
        self, x: tf.Tensor, state: tf.Tensor, scope: object = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        gates = tf.sigmoid(tf.matmul(tf.concat([x, state], 1), self._gates))
        reset, update = tf.split(gates, 2, axis=1)
        new = tf.tanh(tf.matmul(tf.concat([x, reset * state], 1), self._candidate))
        state = update * state + (1.0 - update) * new
        return state, state


class DynamicRNN(Model):
    """`tf.compat.v1.nn.dynamic_rnn` over sequences of several lengths, between dense layers.

    Hard: a loop with TensorArrays; other tools find no bottleneck in its graph.
    """

    def __init__(self, length: int = 24, width: int = 32, layers: int = 4, seed: int = 0) -> None:
        super().__init__(seed)
        self.length, self.width, self.layers = length, width, layers

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        x, lengths = inputs
        for layer in range(self.layers):
            x = tf.nn.elu(self.dense(x, self.width, f"before{layer}"))
        x = tf.ensure_shape(x, (None, self.length, self.width))
        cell = _Cell(self, self.width, self.width)
        outputs, _ = tf.compat.v1.nn.dynamic_rnn(cell, self.tick(x), lengths, dtype=tf.float32)
        for layer in range(self.layers):
            outputs = tf.nn.elu(self.dense(outputs, self.width, f"after{layer}"))
        return tf.reduce_mean(outputs**2)

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((batch, self.length, self.width), dtype=np.float32)
        return [x, rng.integers(1, self.length + 1, batch, dtype=np.int32)]


class KerasRNN(Model):
    """Recurrent layers of Keras between dense layers.

    Hard: loops, TensorLists, masks, and (with `recurrent_dropout`) random masks whose seed is a
    variable.

    Args:
        layer: the layer to put there, given the width.
    """

    def __init__(self, layer: str = "lstm", length: int = 16, width: int = 32, seed: int = 0):
        super().__init__(seed)
        self.length, self.width = length, width
        keras = tf.keras.layers
        with tf.init_scope():
            tf.keras.utils.set_random_seed(seed + 1)
            if layer == "lstm":
                recurrent = keras.LSTM(width, return_sequences=True)
            else:
                recurrent = keras.Bidirectional(
                    keras.GRU(width // 2, return_sequences=True, recurrent_dropout=0.3, dropout=0.3)
                )
            dense = [keras.Dense(width, activation="elu") for _ in range(12)]
            self._layers = [*dense[:6], recurrent, *dense[6:]]
            for one in self._layers:
                one.build((None, length, width))

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        (x,) = inputs
        for i, layer in enumerate(self._layers):
            x = self.tick(layer(x, training=True)) if i == 2 else layer(x, training=True)
        self.variables = [v.value for layer in self._layers for v in layer.trainable_variables]
        return tf.reduce_mean(x**2)

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        return [rng.standard_normal((batch, self.length, self.width), dtype=np.float32)]
