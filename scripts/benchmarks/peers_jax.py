"""Networks of the benchmarks in JAX, by `jax.checkpoint`: run, or as programs for a GPU.

`python -m scripts.benchmarks.peers_jax gpt|gpt12|gpt2|lstm|resnet50 FOLDER` writes the steps there,
one for each way, and prints the ways. Without a folder it runs them, and prints what they take.
Nothing here needs TensorFlow.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Way:
    """What is put around each block, the chunks of the loss, and the steps of a segment."""

    around: Callable[[Callable], Callable] = lambda part: part
    chunks: int = 1
    every: int = 1

    def __call__(self, part: Callable, weights: Sequence[Any], h: Any) -> Any:
        """Equal blocks, one after the other."""
        part = self.around(part)
        for one in weights:
            h = part(one, h)
        return h


def normal(random: np.random.Generator, *shape: int, scale: float) -> jnp.ndarray:
    return jnp.asarray(random.standard_normal(shape, dtype=np.float32) * scale)


def cross_entropy(scores: Any, labels: Any) -> Any:
    right = jnp.take_along_axis(scores, labels[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(scores, -1) - right).mean()


def conv(x: Any, kernel: Any, stride: int = 1) -> Any:
    kind = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=kind)


def normalised(random: np.random.Generator, size: int, channels: int, filters: int) -> tuple:
    """The weights of a convolution and its batch normalisation."""
    scale = (2 / (size * size * channels)) ** 0.5
    kernel = normal(random, size, size, channels, filters, scale=scale)
    return kernel, jnp.zeros(filters), jnp.zeros(filters)


def in_stages(way: Way, block: Callable, stages: Any, h: Any) -> Any:
    """Stages of blocks; the first block of each but the first halves the image."""
    for stage, (first, *others) in enumerate(stages):
        h = way.around(functools.partial(block, 2 if stage else 1))(first, h)
        h = way(functools.partial(block, 1), others, h)
    return h


def batch_norm(x: Any, scale: Any, offset: Any) -> Any:
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(variance + 1e-3) * (scale + 1) + offset


# ResNet-50, 224 px, batch 64, as test_models.ResNet50 has it.


def bottleneck(stride: int, weights: Any, x: Any) -> Any:
    *layers, shortcut = weights
    h = x
    for i, (kernel, scale, offset) in enumerate(layers):
        h = batch_norm(conv(h, kernel, stride if i == 1 else 1), scale, offset)
        h = jax.nn.relu(h) if i < 2 else h
    if shortcut:
        kernel, scale, offset = shortcut
        x = batch_norm(conv(x, kernel, stride), scale, offset)
    return jax.nn.relu(x + h)


def max_pool(x: Any) -> Any:
    window, strides = (1, 3, 3, 1), (1, 2, 2, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, "SAME")


def resnet50(way: Way) -> tuple[Callable, Any, tuple]:
    random = np.random.default_rng(0)

    layer = functools.partial(normalised, random)
    stages, channels = [], 64
    for count, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        blocks = []
        for block in range(count):
            shortcut = () if block else layer(1, channels, 4 * width)
            ends = (layer(1, channels, width), layer(3, width, width), layer(1, width, 4 * width))
            blocks.append((*ends, shortcut))
            channels = 4 * width
        stages.append(blocks)
    weights = layer(7, 3, 64), stages, normal(random, 2048, 1000, scale=0.02)

    def loss(weights: Any, images: Any, labels: Any) -> Any:
        (kernel, scale, offset), stages, head = weights
        h = max_pool(jax.nn.relu(batch_norm(conv(images, kernel, 2), scale, offset)))
        h = in_stages(way, bottleneck, stages, h)
        return cross_entropy(h.mean((1, 2)) @ head, labels)

    images = normal(random, 64, 224, 224, 3, scale=1.0)
    return loss, weights, (images, jnp.asarray(random.integers(0, 1000, 64)))


# GPT, batch 8, as test_models.GPT has it.


@dataclasses.dataclass(frozen=True)
class Sizes:
    width: int = 256
    length: int = 256
    words: int = 4096
    heads: int = 4
    layers: int = 6


def layer_norm(x: Any, scale: Any, offset: Any) -> Any:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * (scale + 1) + offset


def decoder(sizes: Sizes, weights: Any, h: Any) -> Any:
    width = sizes.width // sizes.heads
    norm0, norm1, qkv, out, wide, narrow = weights
    x = layer_norm(h, *norm0) @ qkv[0] + qkv[1]
    q, k, v = jnp.moveaxis(x.reshape(-1, sizes.length, 3, sizes.heads, width), (2, 3), (0, 2))
    scores = q * width**-0.5 @ jnp.swapaxes(k, -1, -2)
    causal = jnp.tril(jnp.ones((sizes.length, sizes.length)))
    mixed = jax.nn.softmax(scores + (1 - causal) * -1e9) @ v
    h += jnp.swapaxes(mixed, 1, 2).reshape(-1, sizes.length, sizes.width) @ out[0] + out[1]
    return h + jax.nn.gelu(layer_norm(h, *norm1) @ wide[0] + wide[1]) @ narrow[0] + narrow[1]


def gpt(way: Way, sizes: Sizes = Sizes()) -> tuple[Callable, Any, tuple]:
    random = np.random.default_rng(0)
    width, length, words = sizes.width, sizes.length, sizes.words

    def dense(before: int, after: int) -> tuple:
        return normal(random, before, after, scale=before**-0.5), jnp.zeros(after)

    def norm() -> tuple:
        return jnp.zeros(width), jnp.zeros(width)

    ends_of_dense = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    layers = [
        (norm(), norm(), *(dense(*ends) for ends in ends_of_dense)) for _ in range(sizes.layers)
    ]
    embedding = normal(random, words, width, scale=0.02)
    weights = embedding, normal(random, length, width, scale=0.02), layers, norm()

    def loss(weights: Any, tokens: Any) -> Any:
        embedding, positions, layers, last = weights
        part = functools.partial(decoder, sizes)
        h = way(part, layers, embedding[tokens[:, :-1]] + positions)
        h = layer_norm(h, *last).reshape(way.chunks, -1, width)
        labels = tokens[:, 1:].reshape(way.chunks, -1)

        def chunk(rows: tuple) -> Any:
            return cross_entropy(rows[0] @ embedding.T, rows[1])

        if way.chunks == 1:
            return chunk((h[0], labels[0]))
        return jax.lax.map(jax.checkpoint(chunk), (h, labels)).mean()

    return loss, weights, (jnp.asarray(random.integers(0, words, (8, length + 1))),)


# LSTM, as test_models.LoopLSTM has it.


def cells(kernels: Any, states: Any, x: Any) -> Any:
    made = []
    for kernel, (h, c) in zip(kernels, states, strict=True):
        a, b, d, o = jnp.split(jnp.concatenate([x, h], 1) @ kernel, 4, 1)
        c = jax.nn.sigmoid(b) * c + jax.nn.sigmoid(a) * jnp.tanh(d)
        x = jax.nn.sigmoid(o) * jnp.tanh(c)
        made.append((x, c))
    return made


def lstm(way: Way, width: int = 512, steps: int = 512, layers: int = 2) -> tuple:
    random = np.random.default_rng(0)
    scale = width**-0.5
    kernels = [normal(random, 2 * width, 4 * width, scale=scale) for _ in range(layers)]

    def loss(kernels: Any, x: Any) -> Any:
        def segment(states: Any, xs: Any) -> tuple:
            return jax.lax.scan(lambda states, x: (cells(kernels, states, x), None), states, xs)

        begin = jnp.zeros_like(x[:, 0])
        xs = jnp.moveaxis(x, 1, 0).reshape(-1, way.every, *begin.shape)
        states, _ = jax.lax.scan(way.around(segment), [(begin, begin)] * layers, xs)
        return (states[-1][0] ** 2).mean()

    return loss, kernels, (normal(random, 32, steps, width, scale=1.0),)


WAYS = {
    "JAX": Way(),
    "jax.checkpoint by block": Way(jax.checkpoint),
    "jax.checkpoint, dots saveable": Way(
        functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    ),
    "jax.checkpoint, dots without batch saveable": Way(
        functools.partial(
            jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        )
    ),
}

#: Beside two of these, a loss in chunks by hand.
CHUNKED = {name: WAYS[name] for name in ("JAX", "jax.checkpoint by block")} | {
    "jax.checkpoint by block, loss in 16 chunks": Way(jax.checkpoint, chunks=16)
}

#: A loop by itself, and by hand in segments of about the square root of its steps.
SEGMENTS = {
    "JAX": Way(every=512),
    "jax.checkpoint around the body": Way(jax.checkpoint),
    "jax.checkpoint around 16 steps": Way(jax.checkpoint, every=16),
}

GPT_2 = functools.partial(gpt, sizes=Sizes(768, 1024, 50_257, 12))

NETWORKS: dict[str, Callable[[Way], tuple]] = {
    "resnet50": resnet50,
    "gpt": gpt,
    "gpt12": functools.partial(gpt, sizes=Sizes(768, 1024, 8192, 12, layers=12)),
    "gpt2": GPT_2,
    "lstm": lstm,
}


def ways_of(network: Callable[[Way], tuple]) -> dict[str, Way]:
    return {GPT_2: CHUNKED, lstm: SEGMENTS}.get(network, WAYS)


def write(network: Callable[[Way], tuple], folder: Path) -> None:
    """Writes the network's steps as StableHLO, and prints the ways by the names of the files."""
    files: dict[str, str] = {}
    for name, way in ways_of(network).items():
        loss, weights, inputs = network(way)
        lowered = (
            jax.jit(jax.grad(loss)).trace(weights, *inputs).lower(lowering_platforms=("cuda",))
        )
        files[name] = f"{len(files)}.mlir"
        (folder / files[name]).write_text(lowered.as_text())
    print(json.dumps(files))


def run(network: Callable[[Way], tuple], rounds: int = 5) -> None:
    """Trains by each way on the device that is there, and prints peaks and times.

    A peak is what the compiled step allocates: its temporaries and its results.
    """
    steps: dict[str, Callable[[], Any]] = {}
    found: dict[str, dict] = {}
    for name, way in ways_of(network).items():
        loss, weights, inputs = network(way)
        step = jax.jit(jax.value_and_grad(loss)).lower(weights, *inputs).compile()
        sizes = step.memory_analysis()
        found[name] = {"peak_bytes": sizes.temp_size_in_bytes + sizes.output_size_in_bytes}
        steps[name] = functools.partial(step, weights, *inputs)
        jax.block_until_ready(steps[name]())
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            began = time.perf_counter()
            jax.block_until_ready(step())
            times[name].append(time.perf_counter() - began)
    for name, row in found.items():
        row["seconds"] = statistics.median(times[name])
    print(json.dumps(found))


def main() -> None:
    network, *folder = sys.argv[1:]
    if folder:
        write(NETWORKS[network], Path(folder[0]))
    else:
        run(NETWORKS[network])


if __name__ == "__main__":
    main()
