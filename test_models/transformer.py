"""The Transformer (Vaswani et al. 2017): every decoder layer reads the encoder's last output."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from test_models.model import Model


class Transformer(Model):
    """Encoder and decoder of `layers` layers each, normalised after each sum as in the paper.

    Hard: every layer of the decoder reads the encoder's output, so every cut there holds it.
    """

    def __init__(
        self,
        layers: int = 4,
        width: int = 256,
        length: int = 128,
        vocabulary: int = 2048,
        heads: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        self.layers, self.width, self.length = layers, width, length
        self.vocabulary, self.heads = vocabulary, heads

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        source, target = inputs
        embedding = self.parameter("embedding", (self.vocabulary, self.width), 0.02)
        positions = self.parameter("positions", (self.length, self.width), 0.02)
        memory = tf.gather(embedding, source) + positions
        for i in range(self.layers):
            memory += self._attention(memory, memory, f"encoder{i}_self")
            memory = self.layer_norm(memory, f"encoder{i}_self_norm")
            memory += self._mlp(memory, f"encoder{i}_mlp")
            memory = self.layer_norm(memory, f"encoder{i}_mlp_norm")
        h = tf.gather(embedding, target[:, :-1]) + positions
        for i in range(self.layers):
            h += self._attention(h, h, f"decoder{i}_self", causal=True)
            h = self.layer_norm(h, f"decoder{i}_self_norm")
            h += self._attention(h, memory, f"decoder{i}_cross")
            h = self.layer_norm(h, f"decoder{i}_cross_norm")
            h += self._mlp(h, f"decoder{i}_mlp")
            h = self.layer_norm(h, f"decoder{i}_mlp_norm")
        logits = tf.matmul(tf.reshape(h, [-1, self.width]), embedding, transpose_b=True)
        targets = tf.reshape(target[:, 1:], [-1])
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits))

    def _attention(
        self, x: tf.Tensor, memory: tf.Tensor, name: str, causal: bool = False
    ) -> tf.Tensor:
        queries = self._split(self.dense(x, self.width, f"{name}_queries"))
        keys = self._split(self.dense(memory, self.width, f"{name}_keys"))
        values = self._split(self.dense(memory, self.width, f"{name}_values"))
        queries *= (self.width // self.heads) ** -0.5
        scores = tf.matmul(queries, keys, transpose_b=True)
        if causal:
            past = tf.linalg.band_part(tf.ones((self.length, self.length)), -1, 0)
            scores += (1.0 - past) * -1e9
        mixed = tf.transpose(tf.matmul(tf.nn.softmax(scores), values), [0, 2, 1, 3])
        mixed = tf.reshape(mixed, [-1, self.length, self.width])
        return self.dense(mixed, self.width, f"{name}_out")

    def _split(self, x: tf.Tensor) -> tf.Tensor:
        """(batch, length, width) to (batch, heads, length, width of a head)."""
        shape = [-1, self.length, self.heads, self.width // self.heads]
        return tf.transpose(tf.reshape(x, shape), [0, 2, 1, 3])

    def _mlp(self, x: tf.Tensor, name: str) -> tf.Tensor:
        h = tf.nn.relu(self.dense(x, 4 * self.width, f"{name}_in"))
        return self.dense(h, self.width, f"{name}_out")

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        return [
            rng.integers(0, self.vocabulary, (batch, length), dtype=np.int32)
            for length in (self.length, self.length + 1)
        ]
