"""Dense layers with weight decay in the loss, as tutorials have it."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from test_models.model import Model


class WeightDecay(Model):
    """Dense layers whose weights are in the loss, by `tf.nn.l2_loss`.

    Hard: the gradient of each weight is a sum, one term of which is there from the beginning.
    """

    def __init__(self, layers: int = 8, width: int = 1024, seed: int = 0) -> None:
        super().__init__(seed)
        self.layers, self.width = layers, width

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        (h,) = inputs
        for i in range(self.layers):
            h = tf.nn.relu(self.dense(h, self.width, f"dense{i}"))
        decay = tf.add_n([tf.nn.l2_loss(weight) for weight in self.variables])
        return tf.reduce_mean(tf.square(h)) + 1e-4 * decay

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        return [rng.standard_normal((batch, self.width), dtype=np.float32)]
