"""U-Nets (Ronneberger et al. 2015; Çiçek et al. 2016): long skips, so no one-tensor bottleneck."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from test_models.model import Model


class UNet(Model):
    """`levels` times two convolutions and a max-pool down, and the same up with skips.

    Hard: every cut holds all the skips; unseeded dropout between them.

    Args:
        dropout: rate of dropout after every pair of convolutions.
    """

    def __init__(
        self,
        size: int = 128,
        width: int = 32,
        levels: int = 4,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        self.size, self.width, self.levels, self.dropout = size, width, levels, dropout

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        h, masks = inputs
        skips = []
        for level in range(self.levels):
            h = self._pair(self.width * 2**level, f"down{level}", h)
            skips.append(h)
            h = self._pool(h)
        h = self._pair(self.width * 2**self.levels, "bottom", h)
        for level in reversed(range(self.levels)):
            filters = self.width * 2**level
            h = self._upsample(h, filters, f"up{level}_transpose")
            h = self._pair(filters, f"up{level}", tf.concat([skips[level], h], -1))
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(masks, self._head(h))
        return tf.reduce_mean(losses)

    def _pair(self, filters: int, name: str, x: tf.Tensor) -> tf.Tensor:
        return self.block(lambda x: self._two_convs(x, filters, name), x)

    def _pool(self, x: tf.Tensor) -> tf.Tensor:
        return tf.nn.max_pool2d(x, 2, 2, "SAME")

    def _head(self, x: tf.Tensor) -> tf.Tensor:
        return self.conv(x, 2, 1, "head", bias=True)

    def _two_convs(self, x: tf.Tensor, filters: int, name: str) -> tf.Tensor:
        for i in range(2):
            x = self.conv_norm_relu(x, filters, 3, f"{name}_{i}")
        return tf.nn.dropout(x, self.dropout) if self.dropout else x

    def _upsample(self, x: tf.Tensor, filters: int, name: str) -> tf.Tensor:
        channels = int(x.shape[-1])
        kernel = self.parameter(f"{name}/kernel", (2, 2, filters, channels), channels**-0.5)
        height, width = int(x.shape[1]) * 2, int(x.shape[2]) * 2
        shape = tf.stack([tf.shape(x)[0], height, width, filters])
        y = tf.nn.conv2d_transpose(x, kernel, shape, strides=2, padding="SAME")
        return tf.ensure_shape(y, (x.shape[0], height, width, filters))

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        images = rng.standard_normal((batch, self.size, self.size, 3), dtype=np.float32)
        return [images, rng.integers(0, 2, (batch, self.size, self.size), dtype=np.int32)]


class UNet3D(UNet):
    """The same on volumes.

    Hard: three-dimensional kernels, of which other tools know neither cost nor scratch space.
    """

    def _pool(self, x: tf.Tensor) -> tf.Tensor:
        return tf.nn.max_pool3d(x, 2, 2, "SAME")

    def _upsample(self, x: tf.Tensor, filters: int, name: str) -> tf.Tensor:
        channels, sides = int(x.shape[-1]), [2 * int(side) for side in x.shape[1:4]]
        kernel = self.parameter(f"{name}/kernel", (2, 2, 2, filters, channels), 0.1)
        shape = tf.stack([tf.shape(x)[0], *sides, filters])
        return tf.nn.conv3d_transpose(x, kernel, shape, strides=2)

    def _head(self, x: tf.Tensor) -> tf.Tensor:
        return self.tick(x) @ self.parameter("head", (self.width, 2), 0.1)

    def _two_convs(self, x: tf.Tensor, filters: int, name: str) -> tf.Tensor:
        for i in range(2):
            channels = int(x.shape[-1])
            scale = (2 / (27 * channels)) ** 0.5
            kernel = self.parameter(f"{name}_{i}/kernel", (3, 3, 3, channels, filters), scale)
            x = tf.nn.conv3d(x, kernel, strides=[1] * 5, padding="SAME")
            mean, variance = tf.nn.moments(x, [0, 1, 2, 3])
            offset = self.parameter(f"{name}_{i}/offset", (filters,))
            gain = self.parameter(f"{name}_{i}/log_scale", (filters,)) + 1.0
            x = tf.nn.relu(tf.nn.batch_normalization(x, mean, variance, offset, gain, 1e-3))
        return tf.nn.dropout(x, self.dropout) if self.dropout else x

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        shape = (batch, self.size, self.size, self.size)
        volumes = rng.standard_normal((*shape, 1), dtype=np.float32)
        return [volumes, rng.integers(0, 2, shape, dtype=np.int32)]
