"""DenseNet (Huang et al. 2016): every layer reads the concatenation of all before it."""

from __future__ import annotations

import functools

import tensorflow as tf

from test_models.model import ImageClassifier


class DenseNet(ImageClassifier):
    """`blocks` dense blocks of `layers` layers that add `growth` channels each."""

    def __init__(
        self, blocks: int = 2, layers: int = 12, growth: int = 12, size: int = 32, seed: int = 0
    ) -> None:
        super().__init__(seed)
        self.blocks, self.layers, self.growth = blocks, layers, growth
        self.size, self.classes = size, 10

    def logits(self, images: tf.Tensor) -> tf.Tensor:
        h = self.conv(images, 2 * self.growth, 3, "stem")
        for block in range(self.blocks):
            if block > 0:
                h = self._norm_relu_conv(h, int(h.shape[-1]), 1, f"transition{block}")
                h = tf.nn.avg_pool2d(h, 2, 2, "SAME")
            for layer in range(self.layers):
                name = f"block{block}_layer{layer}"
                new = self.block(functools.partial(self._layer, name), h)
                h = tf.concat([h, new], -1)
        h = tf.nn.relu(self.batch_norm(h, "final_norm"))
        return self.dense(tf.reduce_mean(h, axis=[1, 2]), self.classes, "classifier")

    def _layer(self, name: str, x: tf.Tensor) -> tf.Tensor:
        return self._norm_relu_conv(x, self.growth, 3, name)

    def _norm_relu_conv(self, x: tf.Tensor, filters: int, size: int, name: str) -> tf.Tensor:
        x = tf.nn.relu(self.batch_norm(x, f"{name}_norm"))
        return self.conv(x, filters, size, f"{name}_conv")


class DenseNet121(DenseNet):
    """The ImageNet network: bottleneck layers, 6-12-24-16, transitions that halve the channels.

    Hard: 58 concatenations, each of which is read by all that come later in its block.
    """

    def __init__(
        self, size: int = 224, classes: int = 1000, growth: int = 32, seed: int = 0
    ) -> None:
        super().__init__(growth=growth, size=size, seed=seed)
        self.classes = classes

    def logits(self, images: tf.Tensor) -> tf.Tensor:
        h = self.conv_norm_relu(images, 2 * self.growth, 7, "stem", stride=2)
        h = tf.nn.max_pool2d(h, 3, 2, "SAME")
        for block, layers in enumerate((6, 12, 24, 16)):
            if block > 0:
                h = self._norm_relu_conv(self.tick(h), int(h.shape[-1]) // 2, 1, f"shrink{block}")
                h = tf.nn.avg_pool2d(h, 2, 2, "SAME")
            for layer in range(layers):
                name = f"block{block}_layer{layer}"
                new = self._norm_relu_conv(h, 4 * self.growth, 1, f"{name}_0")
                new = self._norm_relu_conv(new, self.growth, 3, f"{name}_1")
                h = tf.concat([h, new], -1)
        h = tf.nn.relu(self.batch_norm(h, "final_norm"))
        return self.dense(tf.reduce_mean(h, axis=[1, 2]), self.classes, "classifier")
