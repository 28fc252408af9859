"""MobileNet (Howard et al. 2017): depthwise separable convolutions, cheap and memory-bound."""

from __future__ import annotations

import tensorflow as tf

from test_models.model import ImageClassifier

#: Output channels, as multiples of the width, and stride of each separable convolution.
_LAYERS = ((2, 1), (4, 2), (4, 1), (8, 2), (8, 1), (16, 2), *((16, 1),) * 5, (32, 2), (32, 1))


class MobileNet(ImageClassifier):
    """MobileNet v1; `width` is the channels of the first convolution."""

    def __init__(
        self, size: int = 224, classes: int = 1000, width: int = 32, seed: int = 0
    ) -> None:
        super().__init__(seed)
        self.size, self.classes, self.width = size, classes, width

    def logits(self, images: tf.Tensor) -> tf.Tensor:
        h = self.conv_norm_relu(images, self.width, 3, "stem", stride=2)
        for i, (factor, stride) in enumerate(_LAYERS):
            h = self._depthwise(h, f"separable{i}", stride)
            h = self.conv_norm_relu(h, factor * self.width, 1, f"separable{i}_point")
        return self.dense(tf.reduce_mean(h, axis=[1, 2]), self.classes, "classifier")

    def _depthwise(self, x: tf.Tensor, name: str, stride: int) -> tf.Tensor:
        kernel = self.parameter(f"{name}/kernel", (3, 3, int(x.shape[-1]), 1), (2.0 / 9) ** 0.5)
        y = tf.nn.depthwise_conv2d(x, kernel, (1, stride, stride, 1), "SAME")
        return tf.nn.relu(self.batch_norm(y, f"{name}_norm"))
