"""Networks on inputs that are no dense arrays of numbers: ragged, sparse, text."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from test_models.model import Model


class RaggedSparse(Model):
    """Bags of words as ragged rows, and counts as a sparse matrix, into one dense tower.

    Hard: tensors of unknown size; segment sums; a product with a sparse matrix.
    """

    def __init__(self, width: int = 64, layers: int = 16, vocabulary: int = 200, seed: int = 0):
        super().__init__(seed)
        self.width, self.layers, self.vocabulary = width, layers, vocabulary

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        words, lengths, counts = inputs
        embedding = self.parameter("embedding", (self.vocabulary, self.width), 0.3)
        rows = tf.RaggedTensor.from_row_lengths(tf.boolean_mask(words, words >= 0), lengths)
        vectors = rows.with_values(tf.tanh(tf.nn.embedding_lookup(embedding, rows.values)))
        h = tf.reduce_mean(vectors, axis=1) + tf.reduce_max(vectors.to_tensor(), axis=1)
        kernel = self.parameter("counts", (self.vocabulary, self.width), 0.3)
        h += tf.sparse.sparse_dense_matmul(tf.sparse.from_dense(counts), kernel)
        h = tf.ensure_shape(h, (counts.shape[0], self.width))
        for layer in range(self.layers):
            h = tf.tanh(self.dense(h, self.width, f"layer{layer}"))
            h = self.tick(h) if layer == 3 else h
        return tf.reduce_mean(h**2)

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        lengths = rng.integers(1, 9, batch, dtype=np.int32)
        words = rng.integers(0, self.vocabulary, (batch, 8), dtype=np.int32)
        words[np.arange(8) >= lengths[:, None]] = -1
        counts = rng.poisson(0.05, (batch, self.vocabulary)).astype(np.float32)
        return [words, lengths, counts]


class TextClassifier(Model):
    """Sentences as strings: split, looked up, embedded, classified.

    Hard: string and lookup ops in the same graph, which can neither run twice nor be measured.
    """

    words = ("graph", "memory", "peak", "budget", "plan", "step")

    def __init__(self, width: int = 64, layers: int = 8, seed: int = 0) -> None:
        super().__init__(seed)
        self.width, self.layers = width, layers

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        sentences, labels = inputs
        with tf.init_scope():
            pairs = tf.lookup.KeyValueTensorInitializer(
                tf.constant(self.words), tf.range(1, len(self.words) + 1)
            )
            self.table = tf.lookup.StaticHashTable(pairs, default_value=0)
        tokens = tf.strings.split(tf.strings.lower(sentences)).to_tensor("")
        embedding = self.parameter("embedding", (len(self.words) + 1, self.width), 0.5)
        h = tf.reduce_sum(tf.gather(embedding, self.table.lookup(tokens)), axis=1)
        h = tf.ensure_shape(h, (sentences.shape[0], self.width))
        for layer in range(self.layers):
            h = tf.tanh(self.dense(h, self.width, f"layer{layer}"))
            h = self.tick(h) if layer == 3 else h
        scores = self.dense(h, 2, "classifier")
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores))

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        words = [*self.words, "Memory", "unknown"]
        sentences = [" ".join(rng.choice(words, rng.integers(1, 7))) for _ in range(batch)]
        return [np.array(sentences, object), rng.integers(0, 2, batch, dtype=np.int32)]
