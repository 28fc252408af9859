"""Ways of training that others wrote down and the corpus lacks, each as a small program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

Program = tuple[Callable[..., Any], list[Any], list[Any]]


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape, "float32")


def _weights(*shapes: tuple[int, ...]) -> list[tf.Variable]:
    return [tf.Variable(_normal(*shape) / shape[0] ** 0.5) for shape in shapes]


def _mlp(x: tf.Tensor, weights: list[Any]) -> tf.Tensor:
    for w in weights[:-1]:
        x = tf.tanh(x @ w)
    return x @ weights[-1]


def _neural_ode() -> Program:
    """dx/dt = f(x), by the classical Runge-Kutta steps, in a loop."""
    weights = _weights((32, 64), (64, 32))

    def step(time: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        h = 0.1
        a = _mlp(x, weights)
        b = _mlp(x + h / 2 * a, weights)
        c = _mlp(x + h / 2 * b, weights)
        d = _mlp(x + h * c, weights)
        return time + h, x + h / 6 * (a + 2 * b + 2 * c + d)

    def forward(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda time, _: time < 1.0, step, (0.0, x), maximum_iterations=20)[1]

    return forward, [_normal(2048, 32)], weights


def _conditional_random_field() -> Program:
    """The likelihood of labels in a row: sums over all rows of labels, by a scan."""
    labels, moves = 16, tf.Variable(_normal(16, 16))
    weights = _weights((32, 128), (128, 128), (128, labels))

    def forward(words: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        scores = tf.transpose(_mlp(words, weights), [1, 0, 2])

        def forwards(alpha: tf.Tensor, score: tf.Tensor) -> tf.Tensor:
            return tf.reduce_logsumexp(alpha[:, :, None] + moves, 1) + score

        alphas = tf.scan(forwards, scores[1:], scores[0])
        hot = tf.one_hot(y, labels)
        path = tf.reduce_sum(tf.transpose(scores, [1, 0, 2]) * hot, [1, 2])
        path += tf.reduce_sum(tf.gather_nd(moves, tf.stack([y[:, :-1], y[:, 1:]], -1)), 1)
        return tf.reduce_mean(tf.reduce_logsumexp(alphas[-1], 1) - path) / 32

    y = np.random.default_rng(0).integers(0, labels, (256, 32), "int32")
    return forward, [_normal(256, 32, 32), y], [moves, *weights]


def _transducer() -> Program:
    """RNN-T: all ways to spread symbols over frames, diagonal by diagonal."""
    frames, symbols, vocabulary, width = 32, 12, 24, 64
    heard, said, out = _weights((16, width), (vocabulary, width), (width, vocabulary))

    def forward(sound: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        before = tf.pad(tf.gather(said, y), [[0, 0], [1, 0], [0, 0]])
        joint = tf.tanh((sound @ heard)[:, :, None] + before[:, None])
        scores = tf.nn.log_softmax(tf.einsum("btuw,wv->btuv", joint, out))
        blank = scores[..., 0]
        hot = tf.one_hot(y, vocabulary)[:, None]
        emit = tf.reduce_sum(scores[:, :, :-1] * hot, -1)

        def next_frame(alpha: tf.Tensor, at: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
            stay, symbol = at
            row = [alpha[:, 0] + stay[:, 0]]
            for u in range(1, symbols + 1):
                row.append(
                    tf.reduce_logsumexp(
                        tf.stack([alpha[:, u] + stay[:, u], row[-1] + symbol[:, u - 1]]), 0
                    )
                )
            return tf.stack(row, 1)

        start = tf.pad(tf.cumsum(emit[:, 0], 1), [[0, 0], [1, 0]])
        by_frame = [tf.transpose(x, [1, 0, 2]) for x in (blank[:, :-1], emit[:, 1:])]
        alphas = tf.scan(next_frame, tuple(by_frame), start)
        return -tf.reduce_mean(alphas[-1][:, -1] + blank[:, -1, -1]) / frames

    y = np.random.default_rng(0).integers(1, vocabulary, (64, symbols), "int32")
    return forward, [_normal(64, frames, 16), y], [heard, said, out]


def _differentially_private() -> Program:
    """DP-SGD: each example's gradient is clipped; first their norms, then a weighted loss."""
    weights = _weights((32, 128), (128, 128), (128, 1))

    def forward(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        def norm(example: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((_mlp(example[0][None], weights) - example[1]) ** 2)
            return tf.linalg.global_norm(tape.gradient(loss, weights))

        norms = tf.stop_gradient(tf.vectorized_map(norm, (x, y)))
        losses = tf.reduce_sum((_mlp(x, weights) - y) ** 2, 1)
        noise = tf.add_n([tf.reduce_sum(w * tf.random.normal(w.shape, seed=1)) for w in weights])
        return tf.reduce_mean(losses / tf.maximum(norms, 1.0)) + 1e-3 * noise

    return forward, [_normal(512, 32), _normal(512, 1)], weights


def _sharpness_aware() -> Program:
    """SAM: the gradient at the worst point nearby."""
    weights = _weights((64, 256), *[(256, 256)] * 6, (256, 1))

    def loss(weights: list[Any], x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean((_mlp(x, weights) - y) ** 2)

    def forward(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            here = loss(weights, x, y)
        grads = tape.gradient(here, weights)
        scale = 0.05 / tf.linalg.global_norm(grads)
        up = [w + tf.stop_gradient(scale * g) for w, g in zip(weights, grads, strict=True)]
        return loss(up, x, y)

    return forward, [_normal(4096, 64), _normal(4096, 1)], weights


#: name: makes what is differentiated, the arrays that it takes, and its variables
STRANGERS: dict[str, Callable[[], Program]] = {
    "CRF": _conditional_random_field,
    "DP-SGD": _differentially_private,
    "RNN-T": _transducer,
    "SAM": _sharpness_aware,
    "neural ODE": _neural_ode,
}

#: name: why it takes another peak today than what was predicted
KNOWN: dict[str, str] = {
    "RNN-T": "what the loop of a scan keeps, many small tensors, is not all predicted",
    "SAM": "saves 2 MB as predicted; some processes take 4 MB more, for no known reason",
}
