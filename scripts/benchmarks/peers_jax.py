"""The networks of the comparison on JAX, by `jax.checkpoint`.

`python -m scripts.benchmarks.peers_jax resnet|gpt ROUNDS` prints rows of the table as JSON. A peak
is what XLA reports of the compiled step: temporaries and outputs. `python -m
scripts.benchmarks.peers_jax gpt|gpt2|resnet50 FOLDER` writes the steps there as programs for a GPU,
one for each way, and prints the ways. Nothing here needs TensorFlow.

On a CPU, XLA merges what `jax.checkpoint` copies with the original, unless the copies are in a
loop. So equal layers are run by `jax.lax.scan` as well, as JAX's authors advise for deep networks.
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
    """What is put around each block, whether equal ones are scanned, and the chunks of the loss."""

    around: Callable[[Callable], Callable] = lambda part: part
    scanned: bool = False
    chunks: int = 1

    def __call__(self, part: Callable, weights: Sequence[Any], h: Any) -> Any:
        """Equal blocks, one after the other."""
        part = self.around(part)
        if self.scanned:
            stacked = jax.tree.map(lambda *one: jnp.stack(one), *weights)
            return jax.lax.scan(lambda h, one: (part(one, h), None), h, stacked)[0]
        for one in weights:
            h = part(one, h)
        return h


def normal(random: np.random.Generator, *shape: int, scale: float) -> jnp.ndarray:
    return jnp.asarray(random.standard_normal(shape, dtype=np.float32) * scale)


def cross_entropy(scores: Any, labels: Any) -> Any:
    right = jnp.take_along_axis(scores, labels[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(scores, -1) - right).mean()


# CIFAR ResNet-56, as test_models.CifarResNet has it.


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


def residual(stride: int, weights: Any, x: Any) -> Any:
    (k0, s0, o0), (k1, s1, o1) = weights
    h = jax.nn.relu(batch_norm(conv(x, k0, stride), s0, o0))
    h = batch_norm(conv(h, k1), s1, o1)
    if stride != 1:
        padding = h.shape[-1] - x.shape[-1]
        x = jnp.pad(x[:, ::2, ::2], ((0, 0), (0, 0), (0, 0), (0, padding)))
    return jax.nn.relu(x + h)


def resnet(way: Way) -> tuple[Callable, Any, tuple]:
    random = np.random.default_rng(0)

    layer = functools.partial(normalised, random)
    stages, channels = [], 16
    for filters in (16, 32, 64):
        blocks = []
        for _ in range(9):
            blocks.append((layer(3, channels, filters), layer(3, filters, filters)))
            channels = filters
        stages.append(blocks)
    weights = layer(3, 3, 16), stages, normal(random, 64, 10, scale=0.1)

    def loss(weights: Any, images: Any, labels: Any) -> Any:
        (kernel, scale, offset), stages, head = weights
        h = jax.nn.relu(batch_norm(conv(images, kernel), scale, offset))
        h = in_stages(way, residual, stages, h)
        return cross_entropy(h.mean((1, 2)) @ head, labels)

    images = normal(random, 128, 32, 32, 3, scale=1.0)
    return loss, weights, (images, jnp.asarray(random.integers(0, 10, 128)))


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


# GPT: 6 layers, as test_models.GPT has it.


@dataclasses.dataclass(frozen=True)
class Sizes:
    width: int = 256
    length: int = 256
    words: int = 4096
    heads: int = 4


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
    layers = [(norm(), norm(), *(dense(*ends) for ends in ends_of_dense)) for _ in range(6)]
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


WAYS = {
    "JAX": Way(),
    "jax.checkpoint by block": Way(jax.checkpoint),
    "jax.checkpoint, dots saveable": Way(
        functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    ),
    "jax.checkpoint, layers scanned": Way(jax.checkpoint, scanned=True),
}


GPT_2 = functools.partial(gpt, sizes=Sizes(768, 1024, 50_257, 12))

NETWORKS: dict[str, Callable[[Way], tuple]] = {
    "resnet": resnet,
    "resnet50": resnet50,
    "gpt": gpt,
    "gpt2": GPT_2,
}

#: The ways as programs for a GPU; there no copies are merged, so nothing need be scanned.
FOR_GPUS = {name: way for name, way in WAYS.items() if not way.scanned} | {
    "jax.checkpoint, dots without batch saveable": Way(
        functools.partial(
            jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        )
    )
}


#: Beside these, a loss in chunks by hand.
CHUNKED = {name: FOR_GPUS[name] for name in ("JAX", "jax.checkpoint by block")} | {
    "jax.checkpoint by block, loss in 16 chunks": Way(jax.checkpoint, chunks=16)
}


def write(network: Callable[[Way], tuple], folder: Path) -> None:
    """Writes the network's steps as StableHLO, and prints the ways by the names of the files."""
    files: dict[str, str] = {}
    for name, way in (CHUNKED if network is GPT_2 else FOR_GPUS).items():
        loss, weights, inputs = network(way)
        lowered = (
            jax.jit(jax.grad(loss)).trace(weights, *inputs).lower(lowering_platforms=("cuda",))
        )
        files[name] = f"{len(files)}.mlir"
        (folder / files[name]).write_text(lowered.as_text())
    print(json.dumps(files))


def main() -> None:
    network, where = NETWORKS[sys.argv[1]], sys.argv[2]
    if not where.isdigit():
        write(network, Path(where))
        return
    rounds = int(where)
    rows, steps, plain = [], {}, None
    for name, way in WAYS.items():
        loss, weights, inputs = network(way)
        step = jax.jit(jax.grad(loss)).lower(weights, *inputs).compile()
        report: Any = step.memory_analysis()
        grads = jax.tree.leaves(step(weights, *inputs))
        plain = plain or grads
        away = sum(float(jnp.sum((a - b) ** 2)) for a, b in zip(grads, plain, strict=True))
        size = sum(float(jnp.sum(a**2)) for a in plain)
        steps[name] = functools.partial(step, weights, *inputs)
        rows.append(
            {
                "peer": name,
                "plain": "JAX",
                "peak_bytes": report.temp_size_in_bytes + report.output_size_in_bytes,
                "gradient_error": (away / size) ** 0.5,
            }
        )
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, run in steps.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - began)
    for row in rows:
        pairs = zip(times[row["peer"]], times["JAX"], strict=True)
        row["time_ratio"] = statistics.median(a / b for a, b in pairs)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
