"""A mixture of experts (Shazeer et al. 2017): each token goes to one of several networks."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from test_models.model import Model


class MixtureOfExperts(Model):
    """Residual layers of `experts` two-layer networks with top-1 routing.

    Hard: how many tokens an expert gets is known when the step runs; gathers and scatters by
    position, whose gradients are `IndexedSlices`.
    """

    def __init__(
        self, layers: int = 4, width: int = 32, length: int = 32, experts: int = 4, seed: int = 0
    ) -> None:
        super().__init__(seed)
        self.layers, self.width, self.length, self.experts = layers, width, length, experts

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        tokens, targets = inputs
        h = tf.reshape(tokens, [-1, self.width])
        for layer in range(self.layers):
            h = h + self._experts(self.layer_norm(h, f"norm{layer}"), f"layer{layer}")
            h = self.tick(h) if layer == 1 else h
        return tf.reduce_mean((h - tf.reshape(targets, [-1, self.width])) ** 2)

    def _experts(self, x: tf.Tensor, name: str) -> tf.Tensor:
        gates = tf.nn.softmax(self.dense(x, self.experts, f"{name}_gate"))
        chosen = tf.argmax(gates, axis=-1, output_type=tf.int32)
        where = tf.dynamic_partition(tf.range(tf.shape(x)[0]), chosen, self.experts)
        results = []
        for expert, rows in enumerate(where):
            h = self.dense(tf.gather(x, rows), 4 * self.width, f"{name}_expert{expert}_in")
            h = self.dense(tf.nn.relu(h), self.width, f"{name}_expert{expert}_out")
            results.append(h * tf.gather(gates[:, expert], rows)[:, None])
        places = tf.concat(where, 0)[:, None]
        return tf.scatter_nd(places, tf.concat(results, 0), tf.shape(x))

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        shape = (batch, self.length, self.width)
        return [rng.standard_normal(shape, dtype=np.float32) for _ in range(2)]
