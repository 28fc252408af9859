"""Adversarial networks: CycleGAN (Zhu et al. 2017) and WGAN-GP (Gulrajani et al. 2017)."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from test_models.model import Model


class CycleGAN(Model):
    """The loss of both generators: adversarial, cycle and identity.

    Hard: each generator runs three times on one set of weights, and six losses meet at the end.
    """

    def __init__(self, size: int = 32, width: int = 8, blocks: int = 2, seed: int = 0) -> None:
        super().__init__(seed)
        self.size, self.width, self.blocks = size, width, blocks

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        a, b = inputs
        fake_b = self.tick(self._generator(a, "to_b"))
        fake_a = self._generator(b, "to_a")
        adversarial = tf.reduce_mean((self._critic(fake_b, "critic_b") - 1.0) ** 2)
        adversarial += tf.reduce_mean((self._critic(fake_a, "critic_a") - 1.0) ** 2)
        cycle = tf.reduce_mean(tf.abs(self._generator(fake_b, "to_a") - a))
        cycle += tf.reduce_mean(tf.abs(self._generator(fake_a, "to_b") - b))
        same = tf.reduce_mean(tf.abs(self._generator(b, "to_b") - b))
        same += tf.reduce_mean(tf.abs(self._generator(a, "to_a") - a))
        return adversarial + 10.0 * cycle + 5.0 * same

    def _generator(self, x: tf.Tensor, name: str) -> tf.Tensor:
        h = tf.nn.relu(self._normalized(self.conv(x, self.width, 7, f"{name}_stem")))
        h = tf.nn.relu(self._normalized(self.conv(h, 2 * self.width, 3, f"{name}_down", 2)))
        for block in range(self.blocks):
            r = tf.pad(h, [[0, 0], [1, 1], [1, 1], [0, 0]], "REFLECT")
            r = tf.nn.relu(self._normalized(self.conv(r, 2 * self.width, 3, f"{name}_{block}a")))
            h += self._normalized(self.conv(r, 2 * self.width, 3, f"{name}_{block}b"))[
                :, 1:-1, 1:-1
            ]
        h = tf.nn.depth_to_space(self.conv(h, 4 * self.width, 3, f"{name}_up"), 2)
        return tf.tanh(self.conv(tf.nn.relu(self._normalized(h)), 3, 7, f"{name}_out"))

    def _normalized(self, x: tf.Tensor) -> tf.Tensor:
        """Instance normalisation."""
        mean, variance = tf.nn.moments(x, axes=[1, 2], keepdims=True)
        return (x - mean) * tf.math.rsqrt(variance + 1e-5)

    def _critic(self, x: tf.Tensor, name: str) -> tf.Tensor:
        h = tf.nn.leaky_relu(self.conv(x, self.width, 4, f"{name}_0", 2))
        h = tf.nn.leaky_relu(self._normalized(self.conv(h, 2 * self.width, 4, f"{name}_1", 2)))
        return self.conv(h, 1, 4, f"{name}_2")

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        shape = (batch, self.size, self.size, 3)
        return [rng.standard_normal(shape, dtype=np.float32) for _ in range(2)]


class WGANGP(Model):
    """The critic's loss with its penalty on the norm of a gradient.

    Hard: the loss holds a backward pass of its own, through which the gradient goes.
    """

    def __init__(self, size: int = 32, width: int = 16, layers: int = 6, seed: int = 0) -> None:
        super().__init__(seed)
        self.size, self.width, self.layers = size, width, layers

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        real, fake, share = inputs
        between = share * real + (1.0 - share) * fake
        (slope,) = tf.gradients(tf.reduce_sum(self._critic(between)), between)
        norm = tf.sqrt(tf.reduce_sum(slope**2, axis=[1, 2, 3]) + 1e-8)
        difference = tf.reduce_mean(self._critic(fake)) - tf.reduce_mean(self._critic(real))
        return difference + 10.0 * tf.reduce_mean((norm - 1.0) ** 2)

    def _critic(self, x: tf.Tensor) -> tf.Tensor:
        for layer in range(self.layers):
            stride = 2 if layer in (1, 3) else 1
            x = tf.tanh(self.conv(x, self.width, 3, f"conv{layer}", stride, bias=True))
        return self.dense(tf.reduce_mean(x, axis=[1, 2]), 1, "score")

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        shape = (batch, self.size, self.size, 3)
        images = [rng.standard_normal(shape, dtype=np.float32) for _ in range(2)]
        return [*images, rng.random((batch, 1, 1, 1), dtype=np.float32)]
