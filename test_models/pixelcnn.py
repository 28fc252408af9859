"""PixelCNN++ (Salimans et al. 2017): two streams of gated blocks with long and short skips."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from test_models.model import Model

#: Kernels of the two streams: pixels above; pixels above and to the left.
_ABOVE, _LEFT = (2, 3), (2, 2)


class PixelCNN(Model):
    """The network and loss of PixelCNN++, without weight normalisation and dropout.

    Hard: two streams, whose tensors wait in lists until the way up reads them in reverse.

    Args:
        blocks: gated blocks of each stream at each of the three resolutions.
        mixtures: logistic distributions that a pixel's colour is a mixture of.
    """

    def __init__(
        self, size: int = 32, width: int = 32, blocks: int = 2, mixtures: int = 5, seed: int = 0
    ) -> None:
        super().__init__(seed)
        self.size, self.width, self.blocks, self.mixtures = size, width, blocks, mixtures

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        (images,) = inputs
        # A channel of ones tells the image from its padding.
        x = tf.pad(images, [[0, 0], [0, 0], [0, 0], [0, 1]], constant_values=1.0)
        above = [_down(self._conv(x, self.width, _ABOVE, "above_stem"))]
        left = [
            _down(self._conv(x, self.width, (1, 3), "row_stem"))
            + _right(self._conv(x, self.width, (2, 1), "left_stem"))
        ]
        for level in range(3):
            for i in range(self.blocks):
                name = f"down{level}_{i}"
                above.append(self._gated(above[-1], None, _ABOVE, f"{name}_above"))
                left.append(self._gated(left[-1], above[-1], _LEFT, f"{name}_left"))
            if level < 2:
                name = f"down{level}"
                above.append(self._conv(above[-1], self.width, _ABOVE, f"{name}_above", 2))
                left.append(self._conv(left[-1], self.width, _LEFT, f"{name}_left", 2))
        u, ul = above.pop(), left.pop()
        for level in range(3):
            for i in range(self.blocks + (level > 0)):
                name = f"up{level}_{i}"
                u = self._gated(u, above.pop(), _ABOVE, f"{name}_above")
                ul = self._gated(ul, tf.concat([u, left.pop()], -1), _LEFT, f"{name}_left")
            if level < 2:
                u = self._enlarge(u, _ABOVE, f"up{level}_above")[:, :, 1:]
                ul = self._enlarge(ul, _LEFT, f"up{level}_left")
        assert not above
        assert not left
        parameters = self.conv(tf.nn.elu(ul), 10 * self.mixtures, 1, "head", bias=True)
        return _mixture_loss(images, parameters, self.mixtures)

    def _conv(
        self, x: tf.Tensor, filters: int, kernel: tuple[int, int], name: str, stride: int = 1
    ) -> tf.Tensor:
        """A convolution that sees only rows above; of width 2, also only columns to the left."""
        height, width = kernel
        channels = int(x.shape[-1])
        scale = (height * width * channels) ** -0.5
        weights = self.parameter(f"{name}/kernel", (height, width, channels, filters), scale)
        left, right = (1, 1) if width == 3 else (width - 1, 0)
        x = tf.pad(x, [[0, 0], [height - 1, 0], [left, right], [0, 0]])
        y = tf.nn.conv2d(x, weights, stride, "VALID")
        return tf.nn.bias_add(y, self.parameter(f"{name}/bias", (filters,)))

    def _enlarge(self, x: tf.Tensor, kernel: tuple[int, int], name: str) -> tf.Tensor:
        """A transposed convolution of stride 2."""
        _, rows, columns, channels = x.shape
        weights = self.parameter(f"{name}/kernel", (*kernel, channels, channels), channels**-0.5)
        height, width = 2 * rows, 2 * columns + kernel[1] - 2
        shape = tf.stack([tf.shape(x)[0], height, width, channels])
        y = tf.nn.conv2d_transpose(x, weights, shape, 2, "VALID")
        return tf.ensure_shape(y, (x.shape[0], height, width, channels))

    def _gated(
        self, x: tf.Tensor, skip: tf.Tensor | None, kernel: tuple[int, int], name: str
    ) -> tf.Tensor:
        h = self._conv(_concat_elu(x), self.width, kernel, f"{name}_in")
        if skip is not None:
            h += self.conv(_concat_elu(skip), self.width, 1, f"{name}_skip", bias=True)
        value, gate = tf.split(
            self._conv(_concat_elu(h), 2 * self.width, kernel, f"{name}_out"), 2, axis=-1
        )
        return x + value * tf.sigmoid(gate)

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        shape = (batch, self.size, self.size, 3)
        return [(rng.integers(0, 256, shape) / 127.5 - 1.0).astype(np.float32)]


def _concat_elu(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.elu(tf.concat([x, -x], -1))


def _down(x: tf.Tensor) -> tf.Tensor:
    return tf.pad(x[:, :-1], [[0, 0], [1, 0], [0, 0], [0, 0]])


def _right(x: tf.Tensor) -> tf.Tensor:
    return tf.pad(x[:, :, :-1], [[0, 0], [0, 0], [1, 0], [0, 0]])


def _mixture_loss(images: tf.Tensor, parameters: tf.Tensor, mixtures: int) -> tf.Tensor:
    """Bits per colour value of a mixture of discretised logistics; equation 2 of the paper."""
    weights, rest = tf.split(parameters, [mixtures, 9 * mixtures], axis=-1)
    size = int(images.shape[1])
    means, log_scales, factors = tf.split(
        tf.reshape(rest, [-1, size, size, 3, 3 * mixtures]), 3, axis=-1
    )
    log_scales = tf.maximum(log_scales, -7.0)
    factors = tf.tanh(factors)
    x = tf.repeat(images[..., None], mixtures, axis=-1)
    red, green, blue = tf.unstack(means, axis=3)
    green += factors[..., 0, :] * x[..., 0, :]
    blue += factors[..., 1, :] * x[..., 0, :] + factors[..., 2, :] * x[..., 1, :]
    centred = x - tf.stack([red, green, blue], axis=3)
    sharpness = tf.exp(-log_scales)
    upper = sharpness * (centred + 1 / 255)
    lower = sharpness * (centred - 1 / 255)
    middle = sharpness * centred
    inside = tf.sigmoid(upper) - tf.sigmoid(lower)
    density = middle - log_scales - 2.0 * tf.nn.softplus(middle) - np.float32(np.log(127.5))
    log_inside = tf.where(inside > 1e-5, tf.math.log(tf.maximum(inside, 1e-12)), density)
    darkest, brightest = upper - tf.nn.softplus(upper), -tf.nn.softplus(lower)
    log_values = tf.where(x < -0.999, darkest, tf.where(x > 0.999, brightest, log_inside))
    log_pixels = tf.reduce_sum(log_values, axis=3) + tf.nn.log_softmax(weights)
    return -tf.reduce_mean(tf.reduce_logsumexp(log_pixels, axis=-1)) / np.float32(3 * np.log(2.0))
