"""Networks of other number types: half precision and complex."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from test_models.model import ImageClassifier, Model


class MixedPrecision(ImageClassifier):
    """Residual convolutions in float16 with float32 weights and a scaled loss.

    Hard: casts everywhere; every weight is cast where it is read; sums in half precision show any
    change of order.
    """

    def __init__(self, size: int = 32, width: int = 16, blocks: int = 6, seed: int = 0) -> None:
        super().__init__(seed)
        self.size, self.width, self.blocks, self.classes = size, width, blocks, 10

    def logits(self, images: tf.Tensor) -> tf.Tensor:
        h = self._conv(tf.cast(images, tf.float16), "stem")
        for block in range(self.blocks):
            r = tf.nn.relu(self._conv(tf.nn.relu(self.layer_norm(h, f"norm{block}")), f"{block}a"))
            h += self._conv(r, f"{block}b") * 0.25
            h = self.tick(h) if block == 2 else h
        return self.dense(tf.cast(tf.reduce_mean(h, axis=[1, 2]), tf.float32), 10, "classifier")

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        return 1024.0 * super().loss(*inputs)

    def layer_norm(self, x: tf.Tensor, name: str) -> tf.Tensor:
        return tf.cast(super().layer_norm(tf.cast(x, tf.float32), name), x.dtype)

    def _conv(self, x: tf.Tensor, name: str) -> tf.Tensor:
        channels = int(x.shape[-1])
        kernel = self.parameter(name, (3, 3, channels, self.width), (9 * channels) ** -0.5)
        return tf.nn.conv2d(x, tf.cast(kernel, tf.float16), 1, "SAME")


class FourierNet(Model):
    """Global filters (Rao et al. 2021): transforms, a complex product, the inverse transform.

    Hard: complex tensors, whose gradients are conjugated.
    """

    def __init__(self, size: int = 32, width: int = 8, layers: int = 4, seed: int = 0) -> None:
        super().__init__(seed)
        self.size, self.width, self.layers = size, width, layers

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        images, targets = inputs
        h = self.dense(images, self.width, "stem")
        for layer in range(self.layers):
            h += self.dense(
                tf.nn.swish(self._filter(h, f"filter{layer}")), self.width, f"mix{layer}"
            )
            h = self.tick(h) if layer == 1 else h
        return tf.reduce_mean((self.dense(h, 3, "head") - targets) ** 2)

    def _filter(self, x: tf.Tensor, name: str) -> tf.Tensor:
        planes = tf.transpose(x, [0, 3, 1, 2])
        shape = (self.width, self.size, self.size // 2 + 1)
        real, imaginary = (self.parameter(f"{name}/{part}", shape, 0.1) for part in ("re", "im"))
        filtered = tf.signal.rfft2d(planes) * tf.complex(
            real + 1.0, tf.convert_to_tensor(imaginary)
        )
        magnitude = tf.abs(filtered)[..., : self.size // 2]
        planes = tf.signal.irfft2d(filtered, [self.size, self.size])
        planes += tf.concat([magnitude, magnitude], -1) / self.size
        return tf.ensure_shape(
            tf.transpose(planes, [0, 2, 3, 1]), (None, self.size, self.size, self.width)
        )

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        shape = (batch, self.size, self.size, 3)
        return [rng.standard_normal(shape, dtype=np.float32) for _ in range(2)]
