"""Reinforcement learning: a policy gradient (Williams 1992) through a rollout in the graph."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from test_models.model import Model


class Rollout(Model):
    """An agent that sees a board through a convolutional network, in a `tf.while_loop`.

    Hard: convolutions and random choices in a loop; rewards are collected in TensorArrays.
    """

    def __init__(self, size: int = 16, width: int = 8, rounds: int = 4, seed: int = 0) -> None:
        super().__init__(seed)
        self.size, self.width, self.rounds = size, width, rounds

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        (board,) = inputs
        for layer in range(4):  # what the agent knows of the board before it acts
            board = tf.nn.elu(self.conv(board, self.width, 3, f"known{layer}"))
        board = self.tick(board)
        self._policy(board)  # variables are made outside the loop

        def act(
            i: tf.Tensor, board: tf.Tensor, gains: tf.TensorArray
        ) -> tuple[tf.Tensor, tf.Tensor, tf.TensorArray]:
            logits = self._policy(board)
            choice = tf.random.categorical(logits, 1, dtype=tf.int32)[:, 0]
            logs = -tf.nn.sparse_softmax_cross_entropy_with_logits(choice, logits)
            reward = tf.stop_gradient(
                tf.reduce_mean(board, [1, 2, 3]) + tf.cast(choice, tf.float32)
            )
            board = tf.sin(board + tf.cast(choice, tf.float32)[:, None, None, None])
            return i + 1, board, gains.write(i, logs * reward)

        gains = tf.TensorArray(tf.float32, self.rounds)
        state = (tf.constant(0), board, gains)
        _, board, gains = tf.while_loop(lambda i, *_: i < self.rounds, act, state)
        return -tf.reduce_mean(gains.stack()) + tf.reduce_mean(board**2)

    def _policy(self, board: tf.Tensor) -> tf.Tensor:
        h = tf.nn.relu(self.conv(board, self.width, 3, "policy0"))
        h = tf.nn.relu(self.conv(h, self.width, 3, "policy1", stride=2))
        return self.dense(tf.reduce_mean(h, axis=[1, 2]), 4, "policy_out")

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        return [rng.standard_normal((batch, self.size, self.size, 3), dtype=np.float32)]
