"""GoogLeNet (Szegedy et al. 2014): modules of four parallel branches that are concatenated."""

from __future__ import annotations

import tensorflow as tf

from test_models.model import ImageClassifier

#: Of each module: channels of the 1×1 branch, the 3×3 branch (reduction, then convolution), the
#: 5×5 branch (the same) and the pooling branch; None is a max-pool between modules.
_MODULES: tuple[tuple[int, ...] | None, ...] = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    None,
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    None,
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)


class Inception(ImageClassifier):
    """Inception v1 with batch normalisation, without the auxiliary classifiers.

    Hard: four branches side by side, all of them alive at each concatenation.

    Args:
        shrink: divides all channels, for small tests.
    """

    def __init__(
        self, size: int = 224, classes: int = 1000, shrink: int = 1, seed: int = 0
    ) -> None:
        super().__init__(seed)
        self.size, self.classes, self.shrink = size, classes, shrink

    def logits(self, images: tf.Tensor) -> tf.Tensor:
        h = self._layer(images, 64, 7, "stem0", stride=2)
        h = tf.nn.max_pool2d(h, 3, 2, "SAME")
        h = self._layer(self._layer(h, 64, 1, "stem1"), 192, 3, "stem2")
        h = tf.nn.max_pool2d(h, 3, 2, "SAME")
        for i, channels in enumerate(_MODULES):
            if channels is None:
                h = tf.nn.max_pool2d(h, 3, 2, "SAME")
            else:
                h = self._module(h, channels, f"module{i}")
        return self.dense(tf.reduce_mean(h, axis=[1, 2]), self.classes, "classifier")

    def _module(self, x: tf.Tensor, channels: tuple[int, ...], name: str) -> tf.Tensor:
        one, reduce3, three, reduce5, five, pool = channels
        branches = (
            self._layer(x, one, 1, f"{name}_one"),
            self._layer(self._layer(x, reduce3, 1, f"{name}_reduce3"), three, 3, f"{name}_three"),
            self._layer(self._layer(x, reduce5, 1, f"{name}_reduce5"), five, 5, f"{name}_five"),
            self._layer(tf.nn.max_pool2d(x, 3, 1, "SAME"), pool, 1, f"{name}_pool"),
        )
        return tf.concat(branches, -1)

    def _layer(
        self, x: tf.Tensor, filters: int, size: int, name: str, stride: int = 1
    ) -> tf.Tensor:
        return self.conv_norm_relu(x, filters // self.shrink, size, name, stride)
