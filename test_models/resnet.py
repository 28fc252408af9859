"""Residual networks (He et al. 2015): CIFAR of any depth 6k+2, and ImageNet ResNet-50."""

from __future__ import annotations

import functools

import tensorflow as tf

from test_models.model import ImageClassifier


class CifarResNet(ImageClassifier):
    """The CIFAR network of `depth` = 6k+2 layers: 3 stages of k blocks of 2 convolutions.

    Hard: with 1,000 layers, whatever takes time by the square of the number of ops.
    """

    def __init__(self, depth: int = 56, size: int = 32, width: int = 16, seed: int = 0) -> None:
        super().__init__(seed)
        if depth < 8 or depth % 6 != 2:
            raise ValueError(f"depth must be 6k+2 (8, 14, 20, ...), got {depth}")
        self.depth, self.size, self.width, self.classes = depth, size, width, 10

    def logits(self, images: tf.Tensor) -> tf.Tensor:
        h = self.conv_norm_relu(images, self.width, 3, "stem")
        for stage in range(3):
            for block in range((self.depth - 2) // 6):
                h = self.block(functools.partial(self._block, stage, block), h)
        return self.dense(tf.reduce_mean(h, axis=[1, 2]), self.classes, "classifier")

    def _block(self, stage: int, block: int, x: tf.Tensor) -> tf.Tensor:
        name = f"stage{stage}_block{block}"
        filters = self.width * 2**stage
        stride = 2 if stage > 0 and block == 0 else 1
        h = self.conv_norm_relu(x, filters, 3, f"{name}_0", stride)
        h = self.batch_norm(self.conv(h, filters, 3, f"{name}_conv1"), f"{name}_norm1")
        if stride != 1:
            # Option A of the paper: subsample and pad with zero channels, no parameters.
            padding = filters - int(x.shape[-1])
            x = tf.pad(x[:, ::2, ::2, :], [[0, 0], [0, 0], [0, 0], [0, padding]])
        return tf.nn.relu(x + h)


class ResNet50(ImageClassifier):
    """ImageNet ResNet-50: bottleneck blocks, 3-4-6-3, projection shortcuts."""

    blocks: tuple[int, ...] = (3, 4, 6, 3)

    def __init__(self, size: int = 96, classes: int = 1000, width: int = 64, seed: int = 0) -> None:
        super().__init__(seed)
        self.size, self.classes, self.width = size, classes, width

    def logits(self, images: tf.Tensor) -> tf.Tensor:
        h = self.conv_norm_relu(images, self.width, 7, "stem", stride=2)
        h = tf.nn.max_pool2d(h, 3, 2, "SAME")
        for stage in range(len(self.blocks)):
            h = self._stage(h, stage)
        return self.dense(tf.reduce_mean(h, axis=[1, 2]), self.classes, "classifier")

    def _stage(self, x: tf.Tensor, stage: int) -> tf.Tensor:
        for block in range(self.blocks[stage]):
            x = self.block(functools.partial(self._bottleneck, stage, block), x)
        return x

    def _bottleneck(self, stage: int, block: int, x: tf.Tensor) -> tf.Tensor:
        name = f"stage{stage}_block{block}"
        filters = self.width * 2**stage
        stride = 2 if stage > 0 and block == 0 else 1
        h = self.conv_norm_relu(x, filters, 1, f"{name}_0")
        h = self.conv_norm_relu(h, filters, 3, f"{name}_1", stride)
        h = self.batch_norm(self.conv(h, 4 * filters, 1, f"{name}_conv2"), f"{name}_norm2")
        if block == 0:
            x = self.conv(x, 4 * filters, 1, f"{name}_shortcut", stride)
            x = self.batch_norm(x, f"{name}_shortcut_norm")
        return tf.nn.relu(x + h)


class ResNet101(ResNet50):
    """ResNet-101, 3-4-23-3, with a second loss on the third stage (as PSPNet has it).

    Hard: two losses at different depths, so two gradients meet in the middle of the network.
    """

    blocks = (3, 4, 23, 3)

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        images, labels = inputs
        main = super().loss(images, labels)
        pooled = tf.reduce_mean(self.conv_norm_relu(self._third, 32, 3, "auxiliary"), axis=[1, 2])
        scores = self.dense(pooled, self.classes, "auxiliary_classifier")
        auxiliary = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
        return main + 0.4 * tf.reduce_mean(auxiliary)

    def _stage(self, x: tf.Tensor, stage: int) -> tf.Tensor:
        x = super()._stage(x, stage)
        if stage == 2:
            self._third = x = self.tick(x)
        return x
