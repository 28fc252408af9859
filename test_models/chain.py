"""A chain of equal layers: the textbook case, where √n checkpoints are natural."""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf

from test_models.model import Model


class Chain(Model):
    """`layers` times h = tanh(h·W) × sigmoid(h·W), then the mean square."""

    def __init__(self, layers: int = 64, width: int = 256, seed: int = 0) -> None:
        super().__init__(seed)
        self.layers, self.width = layers, width

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        (h,) = inputs
        for i in range(self.layers):
            h = self.block(functools.partial(self._layer, i), h)
        return tf.reduce_mean(tf.square(h))

    def _layer(self, i: int, h: tf.Tensor) -> tf.Tensor:
        h = self.dense(h, self.width, f"layer{i}", bias=False)
        return tf.tanh(h) * tf.sigmoid(h)

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        return [rng.standard_normal((batch, self.width), dtype=np.float32)]
