"""Glow (Kingma & Dhariwal 2018): an invertible network that is trained on likelihood."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from test_models.model import Model


class Glow(Model):
    """`levels` of `steps` flow steps: normalisation, 1×1 convolution, affine coupling.

    Hard: every cut holds two tensors, the image z and the log-determinant so far.
    """

    def __init__(
        self, size: int = 32, width: int = 32, levels: int = 2, steps: int = 4, seed: int = 0
    ) -> None:
        super().__init__(seed)
        self.size, self.width, self.levels, self.steps = size, width, levels, steps

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        (z,) = inputs
        logdet = tf.zeros(tf.shape(z)[:1])
        likelihood = tf.zeros(tf.shape(z)[:1])
        for level in range(self.levels):
            z = tf.nn.space_to_depth(z, 2)
            for step in range(self.steps):
                z, logdet = self._step(z, logdet, f"level{level}_step{step}")
            if level < self.levels - 1:
                z, out = tf.split(self.tick(z), 2, axis=-1)
                likelihood -= 0.5 * tf.reduce_sum(out**2, axis=[1, 2, 3])
        likelihood -= 0.5 * tf.reduce_sum(z**2, axis=[1, 2, 3])
        return -tf.reduce_mean(likelihood + logdet) / self.size**2

    def _step(self, z: tf.Tensor, logdet: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        height, width, channels = (int(side) for side in z.shape[1:])
        log_scale = self.parameter(f"{name}/log_scale", (channels,), 0.05)
        z = (z + self.parameter(f"{name}/offset", (channels,))) * tf.exp(log_scale)
        mixing = tf.eye(channels) + self.parameter(f"{name}/mixing", (channels, channels), 0.05)
        z = tf.nn.conv2d(z, mixing[None, None], 1, "SAME")
        flat = tf.reduce_sum(log_scale) + tf.linalg.slogdet(mixing)[1]
        logdet += height * width * flat
        kept, changed = tf.split(z, 2, axis=-1)
        h = tf.nn.relu(self.conv(kept, self.width, 3, f"{name}_in", bias=True))
        h = tf.nn.relu(self.conv(h, self.width, 1, f"{name}_middle", bias=True))
        shift, scale = tf.split(self.conv(h, channels, 3, f"{name}_out", bias=True), 2, axis=-1)
        scale = tf.sigmoid(scale + 2.0)
        logdet += tf.reduce_sum(tf.math.log(scale), axis=[1, 2, 3])
        return tf.concat([kept, (changed + shift) * scale], -1), logdet

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        return [rng.standard_normal((batch, self.size, self.size, 3), dtype=np.float32)]
