"""EfficientDet (Tan et al. 2019): an inverted-bottleneck backbone and a two-way feature pyramid."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from test_models.model import Model


class BiFPN(Model):
    """Squeeze-and-excite blocks with swish, repeated fusions over four scales, two heads.

    Hard: features of all scales are read up and down the pyramid, small gates scale large maps, and
    swish has a gradient function of its own.
    """

    def __init__(self, size: int = 64, width: int = 16, repeats: int = 3, seed: int = 0) -> None:
        super().__init__(seed)
        self.size, self.width, self.repeats = size, width, repeats

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        images, labels = inputs
        h = tf.nn.swish(self.batch_norm(self.conv(images, self.width, 3, "stem", 2), "stem_norm"))
        features = []
        for level in range(4):
            h = self._inverted(h, self.width * 2 ** min(level, 2), f"block{level}_0", 2)
            h = self._inverted(h, int(h.shape[-1]), f"block{level}_1", 1)
            features.append(self.conv(h, self.width, 1, f"lateral{level}"))
        features[1] = self.tick(features[1])
        for repeat in range(self.repeats):
            features = self._fuse(features, f"fpn{repeat}")
        pooled = [tf.reduce_mean(feature, axis=[1, 2]) for feature in features]
        scores = self.dense(tf.concat(pooled, -1), 10, "classes")
        boxes = sum(tf.reduce_mean(self.conv(f, 4, 3, "boxes") ** 2) for f in features)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
        return tf.reduce_mean(losses) + boxes

    def _inverted(self, x: tf.Tensor, filters: int, name: str, stride: int) -> tf.Tensor:
        wide = 4 * int(x.shape[-1])
        h = tf.nn.swish(self.batch_norm(self.conv(x, wide, 1, f"{name}_wide"), f"{name}_norm0"))
        kernel = self.parameter(f"{name}/depthwise", (3, 3, wide, 1), 0.3)
        h = tf.nn.depthwise_conv2d(h, kernel, [1, stride, stride, 1], "SAME")
        h = tf.nn.swish(self.batch_norm(h, f"{name}_norm1"))
        squeezed = tf.nn.swish(self.dense(tf.reduce_mean(h, axis=[1, 2]), wide // 4, f"{name}_se0"))
        h *= tf.sigmoid(self.dense(squeezed, wide, f"{name}_se1"))[:, None, None, :]
        h = self.batch_norm(self.conv(h, filters, 1, f"{name}_narrow"), f"{name}_norm2")
        return x + h if h.shape == x.shape else h

    def _fuse(self, features: list[tf.Tensor], name: str) -> list[tf.Tensor]:
        down = [features[-1]]
        for level in reversed(range(len(features) - 1)):
            height, width = features[level].shape[1:3]
            larger = tf.image.resize(down[0], (height, width), "nearest")
            down.insert(0, self._weighted([features[level], larger], f"{name}_down{level}"))
        up = [down[0]]
        for level in range(1, len(features)):
            smaller = tf.nn.max_pool2d(up[-1], 3, 2, "SAME")
            inputs = [features[level], down[level], smaller]
            up.append(self._weighted(inputs, f"{name}_up{level}"))
        return up

    def _weighted(self, inputs: list[tf.Tensor], name: str) -> tf.Tensor:
        """The fast normalised fusion of the paper, then a separable convolution."""
        weights = tf.nn.relu(self.parameter(f"{name}/weights", (len(inputs),)) + 1.0)
        parts = tf.unstack(weights / (tf.reduce_sum(weights) + 1e-4), num=len(inputs))
        h = tf.nn.swish(tf.add_n([part * x for part, x in zip(parts, inputs, strict=True)]))
        kernel = self.parameter(f"{name}/depthwise", (3, 3, self.width, 1), 0.3)
        h = tf.nn.depthwise_conv2d(h, kernel, [1, 1, 1, 1], "SAME")
        return self.batch_norm(self.conv(h, self.width, 1, f"{name}_point"), f"{name}_norm")

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        images = rng.standard_normal((batch, self.size, self.size, 3), dtype=np.float32)
        return [images, rng.integers(0, 10, batch, dtype=np.int32)]
