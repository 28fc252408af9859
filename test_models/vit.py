"""ViT (Dosovitskiy et al. 2021): a Transformer's encoder over the patches of an image."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from test_models.model import ImageClassifier
from test_models.transformer import Transformer


class ViT(Transformer, ImageClassifier):
    """Pre-norm encoder layers over patches and a class token; by default ViT-B/16."""

    def __init__(
        self,
        size: int = 224,
        patch: int = 16,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        classes: int = 1000,
        seed: int = 0,
    ) -> None:
        length = (size // patch) ** 2 + 1
        super().__init__(layers, width, length, vocabulary=0, heads=heads, seed=seed)
        self.size, self.patch, self.classes = size, patch, classes

    def logits(self, images: tf.Tensor) -> tf.Tensor:
        patches = self.conv(images, self.width, self.patch, "patches", self.patch, bias=True)
        patches = tf.reshape(patches, [-1, self.length - 1, self.width])
        token = self.parameter("class_token", (1, 1, self.width), 0.02)
        token = tf.tile(token, [tf.shape(images)[0], 1, 1])
        h = tf.concat([token, patches], 1)
        h += self.parameter("positions", (self.length, self.width), 0.02)
        for i in range(self.layers):
            x = self.layer_norm(h, f"norm{i}a")
            h += self._attention(x, x, f"attention{i}")
            h += self._mlp(self.layer_norm(h, f"norm{i}b"), f"mlp{i}")
        return self.dense(self.layer_norm(h, "final_norm")[:, 0], self.classes, "head")

    def _mlp(self, x: tf.Tensor, name: str) -> tf.Tensor:
        h = tf.nn.gelu(self.dense(x, 4 * self.width, f"{name}_in"))
        return self.dense(h, self.width, f"{name}_out")

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        return ImageClassifier.loss(self, *inputs)

    def example(self, batch: int) -> list[np.ndarray]:
        return ImageClassifier.example(self, batch)
