"""BERT (Devlin et al. 2018) with a pointer head that refines its answer in a loop."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from test_models.model import Model


class BERT(Model):
    """Encoder layers, then a `tf.while_loop` that moves a span by what it reads there.

    Hard: a loop behind the layers, whose accumulators are handles (variants) of unknown size.
    """

    def __init__(
        self,
        layers: int = 4,
        width: int = 64,
        length: int = 64,
        vocabulary: int = 256,
        rounds: int = 3,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        self.layers, self.width, self.length = layers, width, length
        self.vocabulary, self.rounds = vocabulary, rounds

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        tokens, spans = inputs
        embedding = self.parameter("embedding", (self.vocabulary, self.width), 0.05)
        h = tf.gather(embedding, tokens) + self.parameter("places", (self.length, self.width), 0.05)
        for i in range(self.layers):
            h = self.layer_norm(h + self._attention(h, f"attention{i}"), f"norm{i}a")
            mlp = tf.nn.gelu(self.dense(h, 4 * self.width, f"mlp{i}_in"))
            h = self.layer_norm(h + self.dense(mlp, self.width, f"mlp{i}_out"), f"norm{i}b")
        h = self.tick(h)
        query = self.parameter("query", (self.width, self.width), 0.1)

        def refine(i: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            scores = tf.einsum("blw,bw->bl", h, tf.matmul(state, query))
            read = tf.einsum("bl,blw->bw", tf.nn.softmax(scores), h)
            return i + 1, tf.tanh(state + read)

        _, state = tf.while_loop(lambda i, _: i < self.rounds, refine, [0, h[:, 0]])
        scores = tf.einsum("blw,bw->bl", h, tf.matmul(state, query))
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(spans, scores)
        return tf.reduce_mean(losses)

    def _attention(self, x: tf.Tensor, name: str) -> tf.Tensor:
        q, k, v = (self.dense(x, self.width, f"{name}_{part}") for part in "qkv")
        weights = tf.nn.softmax(tf.matmul(q * self.width**-0.5, k, transpose_b=True))
        return self.dense(tf.matmul(weights, v), self.width, f"{name}_out")

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, self.vocabulary, (batch, self.length), dtype=np.int32)
        return [tokens, rng.integers(0, self.length, batch, dtype=np.int32)]
