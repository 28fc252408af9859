"""MAML (Finn et al. 2017): the loss after steps of gradient descent."""

from __future__ import annotations

import itertools

import numpy as np
import tensorflow as tf

from test_models.model import Model


class MAML(Model):
    """A small network that learns each of `tasks` tasks in `steps` steps before it is judged.

    Hard: the gradient goes through updates, and so through backward passes, one after the other.
    """

    def __init__(self, tasks: int = 2, steps: int = 3, width: int = 64, seed: int = 0) -> None:
        super().__init__(seed)
        self.tasks, self.steps, self.width = tasks, steps, width

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        x, y = inputs
        widths = (8, self.width, self.width, self.width, 1)
        first = [
            tf.convert_to_tensor(self.parameter(f"layer{i}", pair, pair[0] ** -0.5))
            for i, pair in enumerate(itertools.pairwise(widths))
        ]
        losses = []
        for task in range(self.tasks):
            weights = first
            phase = 2.0 * task
            for _ in range(self.steps):
                slopes = tf.gradients(self._error(x, tf.sin(y + phase), weights), weights)
                weights = [w - 0.1 * slope for w, slope in zip(weights, slopes, strict=True)]
            losses.append(self._error(x[::-1], tf.sin(y[::-1] + phase), weights))
        return tf.add_n(losses)

    def _error(self, x: tf.Tensor, y: tf.Tensor, weights: list[tf.Tensor]) -> tf.Tensor:
        for w in weights[:-1]:
            x = tf.tanh(tf.matmul(x, w))
        return tf.reduce_mean((tf.matmul(x, weights[-1]) - y) ** 2)

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((batch, 8), dtype=np.float32)
        return [x, x.sum(1, keepdims=True)]
