"""Deep networks written as one loop of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from test_models.model import Model

#: What stands around the body of a loop: nothing, or `tf.recompute_grad`.
Around = Callable[[Callable], Callable]


def plainly(body: Callable) -> Callable:
    return body


class LoopLSTM(Model):
    """Layers of LSTM cells (Hochreiter and Schmidhuber 1997) over a sequence, in one loop."""

    def __init__(
        self,
        steps: int = 512,
        width: int = 512,
        layers: int = 2,
        seed: int = 0,
        around: Around = plainly,
        unrolled: bool = False,
    ) -> None:
        super().__init__(seed)
        self.steps, self.width, self.layers = steps, width, layers
        self._around, self._unrolled = around, unrolled

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        (x,) = inputs
        begin = tf.zeros_like(x[:, 0])
        sequence = tf.TensorArray(tf.float32, self.steps).unstack(tf.transpose(x, (1, 0, 2)))
        scale = self.width**-0.5
        kernels = [
            tf.convert_to_tensor(
                self.parameter(f"kernel{i}", (2 * self.width, 4 * self.width), scale)
            )
            for i in range(self.layers)
        ]

        def cells(x: tf.Tensor, *rest: tf.Tensor) -> list[tf.Tensor]:
            kernels, states = rest[: self.layers], rest[self.layers :]
            made = []
            for kernel, h, c in zip(kernels, states[::2], states[1::2], strict=True):
                a, b, d, o = tf.split(tf.concat([x, h], 1) @ kernel, 4, axis=1)
                c = tf.sigmoid(b) * c + tf.sigmoid(a) * tf.tanh(d)
                x = tf.sigmoid(o) * tf.tanh(c)
                made += [x, c]
            return made

        cells = self._around(cells)

        def body(i: tf.Tensor, *states: tf.Tensor) -> Any:
            return i + 1, *cells(sequence.read(i), *kernels, *states)

        states = [begin] * (2 * self.layers)
        last = _loop(self.steps, body, states, self._unrolled)
        return tf.reduce_mean(last[-2] ** 2)

    def example(self, batch: int) -> list[np.ndarray]:
        random = np.random.default_rng(0)
        return [random.standard_normal((batch, self.steps, self.width), dtype=np.float32)]


class NeuralODE(Model):
    """A neural ODE (Chen et al. 2018), solved by Euler's method in steps of equal length."""

    def __init__(
        self,
        steps: int = 1000,
        width: int = 64,
        seed: int = 0,
        around: Around = plainly,
        unrolled: bool = False,
    ) -> None:
        super().__init__(seed)
        self.steps, self.width = steps, width
        self._around, self._unrolled = around, unrolled

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        (x,) = inputs
        wide = 4 * self.width
        first = tf.convert_to_tensor(self.parameter("first", (self.width, wide), 0.1))
        second = tf.convert_to_tensor(self.parameter("second", (wide, self.width), 0.1))

        def step(h: tf.Tensor, first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
            return h + tf.tanh(tf.nn.softplus(h @ first) @ second) / self.steps

        step = self._around(step)
        (h,) = _loop(self.steps, lambda i, h: (i + 1, step(h, first, second)), [x], self._unrolled)
        return tf.reduce_mean(h**2)

    def example(self, batch: int) -> list[np.ndarray]:
        return [np.random.default_rng(0).standard_normal((batch, self.width), dtype=np.float32)]


class LoopResNet(Model):
    """Equal residual blocks (He et al. 2016) as a loop over their stacked weights."""

    def __init__(
        self,
        blocks: int = 200,
        size: int = 16,
        width: int = 16,
        seed: int = 0,
        around: Around = plainly,
        unrolled: bool = False,
    ) -> None:
        super().__init__(seed)
        self.blocks, self.size, self.width = blocks, size, width
        self._around, self._unrolled = around, unrolled

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        (x,) = inputs
        shape = (self.blocks, 3, 3, self.width, self.width)
        stacks = [
            tf.TensorArray(tf.float32, self.blocks).unstack(self.parameter(name, shape, 0.05))
            for name in ("first", "second")
        ]

        def block(h: tf.Tensor, first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
            inner = tf.nn.relu(tf.nn.conv2d(h, first, 1, "SAME"))
            return tf.nn.relu(h + 0.1 * tf.nn.conv2d(inner, second, 1, "SAME"))

        block = self._around(block)

        def body(i: tf.Tensor, h: tf.Tensor) -> Any:
            return i + 1, block(h, *(stack.read(i) for stack in stacks))

        (h,) = _loop(self.blocks, body, [x], self._unrolled)
        return tf.reduce_mean(h**2)

    def example(self, batch: int) -> list[np.ndarray]:
        shape = (batch, self.size, self.size, self.width)
        return [np.random.default_rng(0).standard_normal(shape, dtype=np.float32)]


def _loop(rounds: int, body: Callable, begin: list[tf.Tensor], unrolled: bool) -> list[tf.Tensor]:
    """What the loop variables are after so many rounds."""
    if unrolled:
        state = begin
        for i in range(rounds):
            state = body(i, *state)[1:]
        return [*state]
    made = tf.while_loop(lambda i, *_: i < rounds, body, (0, *begin), maximum_iterations=rounds)
    return list(made[1:])
