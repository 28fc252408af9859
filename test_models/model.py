"""What every test model is: variables, example inputs and a loss.

The same forward code builds a `tf.compat.v1` graph and traces a `tf.function`;
the layers below are plain TensorFlow ops, so that the graphs have the shape a
user's own code would give them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf


class Model:
    """A network with its variables, which are made on first use.

    Subclasses implement `loss` and `example`. Initial values come from
    stateless random ops, so that two models of one seed are equal.
    """

    def __init__(self, seed: int = 0) -> None:
        self.variables: list[tf.Variable] = []
        self.moving: list[tf.Variable] = []
        self.updates: list[tf.Operation] = []
        self._by_name: dict[str, tf.Variable] = {}
        self._seed = seed

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        """The scalar loss of one batch."""
        raise NotImplementedError

    def example(self, batch: int) -> list[np.ndarray]:
        """A batch of inputs for `loss`; the first axis of each is the batch."""
        raise NotImplementedError

    def parameter(self, name: str, shape: Sequence[int], scale: float | None = None) -> tf.Variable:
        """A trainable variable: normal with standard deviation `scale`, or zeros for None."""
        if name not in self._by_name:
            with tf.init_scope():
                value = tf.zeros(shape)
                if scale is not None:
                    seed = (self._seed, len(self._by_name))
                    value = tf.random.stateless_normal(shape, seed, stddev=scale)
                self._by_name[name] = tf.Variable(value, name=name.replace("/", "_"))
            self.variables.append(self._by_name[name])
        return self._by_name[name]

    def statistic(self, name: str, shape: Sequence[int], value: float) -> tf.Variable:
        """A variable that the forward pass updates and no gradient reaches."""
        if name not in self._by_name:
            with tf.init_scope():
                initial = tf.fill(shape, value)
                variable = tf.Variable(initial, trainable=False, name=name.replace("/", "_"))
            self._by_name[name] = variable
            self.moving.append(variable)
        return self._by_name[name]

    def tick(self, x: tf.Tensor) -> tf.Tensor:
        """`x`, by way of an op whose runs the statistic "ticks" counts."""
        ticks = self.statistic("ticks", (), 0.0).assign_add(1.0, read_value=True)
        return x * tf.cast(tf.fill(tf.shape(x), ticks) > 0.0, x.dtype)

    def block(self, part: Callable[..., tf.Tensor], *inputs: tf.Tensor) -> tf.Tensor:
        """A natural block of the network: what a user would recompute by hand."""
        return part(*inputs)

    # Layers.

    def conv(
        self, x: tf.Tensor, filters: int, size: int, name: str, stride: int = 1, bias: bool = False
    ) -> tf.Tensor:
        """Two-dimensional convolution, He initialisation, padding SAME."""
        channels = int(x.shape[-1])
        scale = (2.0 / (size * size * channels)) ** 0.5
        kernel = self.parameter(f"{name}/kernel", (size, size, channels, filters), scale)
        y = tf.nn.conv2d(x, kernel, strides=stride, padding="SAME")
        return tf.nn.bias_add(y, self.parameter(f"{name}/bias", (filters,))) if bias else y

    def dense(self, x: tf.Tensor, units: int, name: str, bias: bool = True) -> tf.Tensor:
        """A matrix product over the last axis, with a bias."""
        width = int(x.shape[-1])
        kernel = self.parameter(f"{name}/kernel", (width, units), width**-0.5)
        rank = x.shape.rank
        y = tf.matmul(x if rank == 2 else tf.reshape(x, [-1, width]), kernel)
        if bias:
            y = tf.nn.bias_add(y, self.parameter(f"{name}/bias", (units,)))
        if rank == 2:
            return y
        return tf.reshape(y, tf.concat([tf.shape(x)[:-1], [units]], 0))

    def batch_norm(self, x: tf.Tensor, name: str, momentum: float = 0.9) -> tf.Tensor:
        """Batch normalisation in training mode; moving averages are updated."""
        channels = int(x.shape[-1])
        scale = self.parameter(f"{name}/log_scale", (channels,)) + 1.0
        offset = self.parameter(f"{name}/offset", (channels,))
        y, mean, variance = tf.compat.v1.nn.fused_batch_norm(x, scale, offset, is_training=True)
        for value, initial, label in ((mean, 0.0, "mean"), (variance, 1.0, "variance")):
            moving = self.statistic(f"{name}/moving_{label}", (channels,), initial)
            update = moving.assign_sub((1.0 - momentum) * (moving - value), read_value=False)
            if not tf.executing_eagerly():
                self.updates.append(update)
        return y

    def conv_norm_relu(
        self, x: tf.Tensor, filters: int, size: int, name: str, stride: int = 1
    ) -> tf.Tensor:
        """A convolution, its batch normalisation and a ReLU."""
        y = self.conv(x, filters, size, f"{name}_conv", stride)
        return tf.nn.relu(self.batch_norm(y, f"{name}_norm"))

    def layer_norm(self, x: tf.Tensor, name: str) -> tf.Tensor:
        """Normalisation over the last axis, from elementary ops."""
        width = int(x.shape[-1])
        mean, variance = tf.nn.moments(x, axes=[-1], keepdims=True)
        scale = self.parameter(f"{name}/log_scale", (width,)) + 1.0
        offset = self.parameter(f"{name}/offset", (width,))
        return (x - mean) * tf.math.rsqrt(variance + 1e-5) * scale + offset


class ImageClassifier(Model):
    """Images in, mean cross-entropy of `logits` out."""

    size: int
    classes: int

    def logits(self, images: tf.Tensor) -> tf.Tensor:
        """The scores of the classes for each image."""
        raise NotImplementedError

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        images, labels = inputs
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, self.logits(images))
        return tf.reduce_mean(losses)

    def example(self, batch: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        images = rng.standard_normal((batch, self.size, self.size, 3), dtype=np.float32)
        return [images, rng.integers(0, self.classes, batch, dtype=np.int32)]


@dataclasses.dataclass
class V1Step:
    """A model's loss in a `tf.compat.v1` graph.

    Attributes:
        graph: the graph that was default when the step was built.
        placeholders: the inputs, in the order of `Model.example`.
        loss: the scalar loss.
        variables: the trainable variables.
        updates: ops that a training step runs besides (moving averages).
    """

    graph: tf.Graph
    placeholders: list[tf.Tensor]
    loss: tf.Tensor
    variables: list[tf.Variable]
    updates: list[tf.Operation]

    def feed(self, arrays: Sequence[np.ndarray]) -> dict[tf.Tensor, np.ndarray]:
        """The feed dictionary of a batch."""
        return dict(zip(self.placeholders, arrays, strict=True))


def build_v1(model: Model, batch: int | None) -> V1Step:
    """Builds `model`'s loss in the default graph; `batch=None` leaves it unknown."""
    arrays = model.example(batch or 2)
    placeholders = [
        tf.compat.v1.placeholder(a.dtype, (batch, *a.shape[1:]), f"input_{i}")
        for i, a in enumerate(arrays)
    ]
    loss = model.loss(*placeholders)
    graph = tf.compat.v1.get_default_graph()
    return V1Step(graph, placeholders, loss, model.variables, model.updates)


def build_v2(
    model: Model, gradients: Callable[[tf.Tensor, list[tf.Variable]], list], batch: int | None
) -> tf.types.experimental.PolymorphicFunction:
    """A `tf.function` from a batch to (loss, gradients of the trainable variables)."""
    arrays = model.example(batch or 2)
    signature = [tf.TensorSpec((batch, *a.shape[1:]), a.dtype) for a in arrays]

    @tf.function(input_signature=signature, autograph=False)
    def step(*inputs: tf.Tensor) -> tuple[tf.Tensor, list]:
        loss = model.loss(*inputs)
        return loss, gradients(loss, [v for v in model.variables])

    return step
