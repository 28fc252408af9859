"""Style transfer (Gatys et al. 2015): the image is what is learnt."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from test_models.model import Model


class StyleTransfer(Model):
    """Content and style losses on several taps of a VGG, by the pixels of one image.

    Hard: the only variable is the input, and taps all along the network are read at the end.
    """

    def __init__(self, size: int = 128, width: int = 8, seed: int = 0) -> None:
        super().__init__(seed)
        self.size, self.width = size, width

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        content, style = inputs
        image = self.parameter("image", (1, self.size, self.size, 3), 1.0)
        rng = np.random.default_rng(1)
        kernels: list[np.ndarray] = []
        channels = 3
        for factor in (1, 1, 2, 2, 4, 4, 4, 8, 8, 8):
            scale = (2.0 / (9 * channels)) ** 0.5
            shape = (3, 3, channels, factor * self.width)
            kernels.append(scale * rng.standard_normal(shape, dtype=np.float32))
            channels = shape[-1]
        ours, wanted, styled = (self._taps(x, kernels) for x in (image, content, style))
        ours[1] = self.tick(ours[1])
        loss = tf.reduce_mean((ours[2] - tf.stop_gradient(wanted[2])) ** 2)
        for a, b in zip(ours, styled, strict=True):
            loss += 10.0 * tf.reduce_mean((_gram(a) - tf.stop_gradient(_gram(b))) ** 2)
        return loss + 1e-4 * tf.reduce_mean(tf.image.total_variation(tf.convert_to_tensor(image)))

    def _taps(self, x: tf.Tensor, kernels: list[np.ndarray]) -> list[tf.Tensor]:
        taps = []
        for i, kernel in enumerate(kernels):
            x = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME"))
            if i in (1, 3, 6):
                taps.append(x)
                x = tf.nn.avg_pool2d(x, 2, 2, "SAME")
        return [*taps, x]

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        shape = (batch, self.size, self.size, 3)
        return [rng.standard_normal(shape, dtype=np.float32) for _ in range(2)]


def _gram(x: tf.Tensor) -> tf.Tensor:
    flat = tf.reshape(x, [-1, tf.shape(x)[1] * tf.shape(x)[2], int(x.shape[-1])])
    return tf.matmul(flat, flat, transpose_a=True) / tf.cast(tf.shape(flat)[1], tf.float32)
