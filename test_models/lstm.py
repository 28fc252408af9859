"""An LSTM language model (Hochreiter & Schmidhuber 1997), unrolled: one weight, many readers."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from test_models.model import Model


class LSTM(Model):
    """`layers` stacked LSTM cells, unrolled over `length` tokens in Python.

    Hard: no bottleneck, as each step hands on the states of all layers; sums of many gradients.
    """

    def __init__(
        self,
        layers: int = 2,
        width: int = 256,
        length: int = 96,
        vocabulary: int = 1024,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        self.layers, self.width, self.length, self.vocabulary = layers, width, length, vocabulary

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        (tokens,) = inputs
        embedding = self.parameter("embedding", (self.vocabulary, self.width), 0.1)
        weights = [
            self.parameter(f"cell{i}/kernel", (2 * self.width, 4 * self.width), 0.05)
            for i in range(self.layers)
        ]
        biases = [self.parameter(f"cell{i}/bias", (4 * self.width,)) for i in range(self.layers)]
        zeros = tf.zeros((tf.shape(tokens)[0], self.width))
        states = [(zeros, zeros)] * self.layers
        outputs = []
        for step, x in enumerate(tf.unstack(tf.gather(embedding, tokens[:, :-1]), axis=1)):
            for i in range(self.layers):
                with tf.name_scope(f"step{step}_cell{i}"):
                    states[i] = _cell(x, *states[i], weights[i], biases[i])
                x = states[i][0]
            outputs.append(x)
        logits = self.dense(tf.stack(outputs, 1), self.vocabulary, "head")
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tokens[:, 1:], logits)
        return tf.reduce_mean(losses)

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        return [rng.integers(0, self.vocabulary, (batch, self.length + 1), dtype=np.int32)]


def _cell(
    x: tf.Tensor, hidden: tf.Tensor, memory: tf.Tensor, weights: tf.Tensor, bias: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    gates = tf.nn.bias_add(tf.matmul(tf.concat([x, hidden], 1), weights), bias)
    enter, candidate, forget, leave = tf.split(gates, 4, axis=1)
    memory = tf.sigmoid(forget) * memory + tf.sigmoid(enter) * tf.tanh(candidate)
    return tf.sigmoid(leave) * tf.tanh(memory), memory
