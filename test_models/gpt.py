"""A GPT-2 style language model with a tied embedding, whose gradient is an `IndexedSlices` sum."""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf

from test_models.model import Model


def _gelu(x: tf.Tensor) -> tf.Tensor:
    """GELU in its tanh form (Hendrycks & Gimpel 2016), as GPT-2 has it.

    Constants are placed so that no product of a product has one: Grappler reassociates those
    where nothing else reads the inner product, and rounding then depends on who reads what.
    """
    cubed = 0.044715 ** (1 / 3) * x
    inner = x + cubed * tf.square(cubed)
    return 0.5 * (x + x * tf.tanh((2 / np.pi) ** 0.5 * inner))


class GPT(Model):
    """Pre-norm Transformer decoder; the output projection is the embedding transposed.

    Hard: the embedding's gradient is a sum of `IndexedSlices` and a dense tensor.

    Args:
        dropout: rate of dropout after attention and MLP, unseeded as users write it.
    """

    def __init__(
        self,
        layers: int = 6,
        width: int = 256,
        length: int = 256,
        vocabulary: int = 4096,
        heads: int = 4,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        self.layers, self.width, self.length = layers, width, length
        self.vocabulary, self.heads, self.dropout = vocabulary, heads, dropout

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        (tokens,) = inputs
        embedding = self.parameter("embedding", (self.vocabulary, self.width), 0.02)
        positions = self.parameter("positions", (self.length, self.width), 0.02)
        h = tf.gather(embedding, tokens[:, :-1]) + positions
        outputs = []
        for i in range(self.layers):
            h = self.block(functools.partial(self._layer, i), h)
            outputs.append(h)
        h = tf.reshape(self.layer_norm(self._head(outputs), "final_norm"), [-1, self.width])
        logits = tf.matmul(h, embedding, transpose_b=True)
        targets = tf.reshape(tokens[:, 1:], [-1])
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits))

    def _layer(self, i: int, h: tf.Tensor) -> tf.Tensor:
        h += self._drop(self._attention(self.layer_norm(h, f"norm{i}a"), f"attention{i}"))
        return h + self._drop(self._mlp(self.layer_norm(h, f"norm{i}b"), f"mlp{i}"))

    def _head(self, outputs: list[tf.Tensor]) -> tf.Tensor:
        """What the logits are made of, from the outputs of all layers."""
        return outputs[-1]

    def _drop(self, x: tf.Tensor) -> tf.Tensor:
        return tf.nn.dropout(x, self.dropout) if self.dropout else x

    def _attention(self, x: tf.Tensor, name: str) -> tf.Tensor:
        head_width = self.width // self.heads
        qkv = self.dense(x, 3 * self.width, f"{name}_qkv")
        qkv = tf.reshape(qkv, [-1, self.length, 3, self.heads, head_width])
        q, k, v = tf.unstack(tf.transpose(qkv, [2, 0, 3, 1, 4]), num=3)
        scores = tf.matmul(q * head_width**-0.5, k, transpose_b=True)
        causal = tf.linalg.band_part(tf.ones((self.length, self.length)), -1, 0)
        weights = tf.nn.softmax(scores + (1.0 - causal) * -1e9)
        mixed = tf.transpose(tf.matmul(weights, v), [0, 2, 1, 3])
        return self.dense(
            tf.reshape(mixed, [-1, self.length, self.width]), self.width, f"{name}_out"
        )

    def _mlp(self, x: tf.Tensor, name: str) -> tf.Tensor:
        h = self.dense(x, 4 * self.width, f"{name}_in")
        return self.dense(_gelu(h), self.width, f"{name}_out")

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        return [rng.integers(0, self.vocabulary, (batch, self.length + 1), dtype=np.int32)]


class CollectingGPT(GPT):
    """GPT that predicts from a learnt mean of all layers (as ELMo, Peters et al. 2018).

    Hard: the output of every layer is read again at the end, so every cut holds all of them.
    """

    def _head(self, outputs: list[tf.Tensor]) -> tf.Tensor:
        weights = tf.nn.softmax(self.parameter("mixture", (self.layers,)))
        return self.tick(tf.einsum("l,lbtw->btw", weights, tf.stack(outputs)))
