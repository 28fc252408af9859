"""SegNet (Badrinarayanan et al. 2015): the decoder unpools with the encoder's maxima's places."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from test_models.model import Model

#: Convolutions and channels, as multiples of the width, of each encoder stage of VGG16.
_STAGES = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))


class SegNet(Model):
    """Encoder of VGG16's convolutions and its mirror image, all with batch normalisation."""

    def __init__(self, size: int = 64, classes: int = 12, width: int = 64, seed: int = 0) -> None:
        super().__init__(seed)
        self.size, self.classes, self.width = size, classes, width

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        h, labels = inputs
        places = []
        for stage, (convs, factor) in enumerate(_STAGES):
            for i in range(convs):
                h = self.conv_norm_relu(h, factor * self.width, 3, f"encoder{stage}_{i}")
            h, place = tf.nn.max_pool_with_argmax(h, 2, 2, "SAME", include_batch_in_index=True)
            places.append(place)
        for stage, (convs, factor) in reversed(list(enumerate(_STAGES))):
            h = self._unpool(h, places[stage])
            narrower = _STAGES[stage - 1][1] if stage else 1
            for i in range(convs):
                filters = (factor if i < convs - 1 else narrower) * self.width
                h = self.conv_norm_relu(h, filters, 3, f"decoder{stage}_{i}")
        logits = self.conv(h, self.classes, 3, "head", bias=True)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))

    def _unpool(self, x: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
        """Puts each value where its maximum was, zeros elsewhere."""
        _, height, width, channels = x.shape
        shape = tf.stack([tf.shape(x)[0], 2 * height, 2 * width, channels])
        elements = tf.cast(tf.reduce_prod(shape), tf.int64)
        flat = tf.scatter_nd(
            tf.reshape(places, [-1, 1]), tf.reshape(x, [-1]), tf.reshape(elements, [1])
        )
        return tf.ensure_shape(
            tf.reshape(flat, shape), (x.shape[0], 2 * height, 2 * width, channels)
        )

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        images = rng.standard_normal((batch, self.size, self.size, 3), dtype=np.float32)
        labels = rng.integers(0, self.classes, (batch, self.size, self.size), dtype=np.int32)
        return [images, labels]
