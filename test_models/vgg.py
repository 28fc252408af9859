"""VGG16 (Simonyan & Zisserman 2014): a plain chain with wide dense layers at the end."""

from __future__ import annotations

import tensorflow as tf

from test_models.model import ImageClassifier


class VGG16(ImageClassifier):
    """Thirteen convolutions in five blocks, three dense layers."""

    def __init__(
        self, size: int = 224, classes: int = 1000, width: int = 64, seed: int = 0
    ) -> None:
        super().__init__(seed)
        self.size, self.classes, self.width = size, classes, width

    def logits(self, images: tf.Tensor) -> tf.Tensor:
        h = images
        for block, (convs, factor) in enumerate(((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))):
            for i in range(convs):
                h = tf.nn.relu(self.conv(h, factor * self.width, 3, f"conv{block}_{i}", bias=True))
            h = tf.nn.max_pool2d(h, 2, 2, "VALID")
        h = tf.reshape(h, [-1, int(h.shape[1] * h.shape[2] * h.shape[3])])
        for i in range(2):
            h = tf.nn.relu(self.dense(h, 64 * self.width, f"dense{i}"))
        return self.dense(h, self.classes, "classifier")
