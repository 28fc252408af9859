"""Many small networks side by side, as in ensembles and multi-task heads."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from test_models.model import Model


class Towers(Model):
    """`towers` dense networks on one input, whose outputs are concatenated.

    Hard: wide and shallow; no cut is narrow, and no order of the towers is given.
    """

    def __init__(self, towers: int = 200, width: int = 16, layers: int = 3, seed: int = 0) -> None:
        super().__init__(seed)
        self.towers, self.width, self.layers = towers, width, layers

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        (x,) = inputs
        outputs = []
        for tower in range(self.towers):
            h = x
            for layer in range(self.layers):
                h = tf.tanh(self.dense(h, self.width, f"tower{tower}_{layer}"))
            outputs.append(tf.reduce_mean(h, axis=1))
        return tf.reduce_mean(self.tick(tf.stack(outputs)) ** 2)

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        return [rng.standard_normal((batch, self.width), dtype=np.float32)]
