"""The ResNet and the GPT of the comparison on PyTorch, by `torch.utils.checkpoint`.

`python -m scripts.benchmarks.peers_torch resnet|gpt ROUNDS` prints rows of the table as JSON. A
peak is the highest sum of the allocations that PyTorch's profiler records in a step, on a CPU.
Nothing here needs TensorFlow.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

Block = Callable[..., torch.Tensor]


class Residual(nn.Module):
    """Two convolutions, as in test_models.CifarResNet."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(filters)
        self.second = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(filters)
        self.stride, self.padding = stride, filters - channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.relu(self.first_norm(self.first(x)))
        h = self.second_norm(self.second(h))
        if self.stride != 1:
            x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.padding))
        return functional.relu(x + h)


class ResNet(nn.Module):
    """CIFAR ResNet-56."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16))
        self.blocks, channels = nn.ModuleList(), 16
        for stage in range(3):
            for number in range(9):
                stride = 2 if stage and not number else 1
                self.blocks.append(Residual(channels, 16 * 2**stage, stride))
                channels = 16 * 2**stage
        self.head = nn.Linear(64, 10)

    def forward(self, block: Block, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = functional.relu(self.stem(images))
        for part in self.blocks:
            h = block(part, h)
        return functional.cross_entropy(self.head(h.mean((2, 3))), labels)


WIDTH, LENGTH, VOCABULARY, HEADS = 256, 256, 4096, 4


class Decoder(nn.Module):
    """A pre-norm layer, as in test_models.GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm0, self.norm1 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        x = self.qkv(self.norm0(h)).view(-1, LENGTH, 3, HEADS, WIDTH // HEADS)
        q, k, v = x.permute(2, 0, 3, 1, 4)
        scores = q * (WIDTH // HEADS) ** -0.5 @ k.transpose(-1, -2)
        causal = torch.tril(torch.ones(LENGTH, LENGTH))
        mixed = torch.softmax(scores + (1 - causal) * -1e9, -1) @ v
        h = h + self.out(mixed.transpose(1, 2).reshape(-1, LENGTH, WIDTH))
        return h + self.narrow(functional.gelu(self.wide(self.norm1(h)), approximate="tanh"))


class GPT(nn.Module):
    """6 layers, the output projection is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Decoder() for _ in range(6))
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, block: Block, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens[:, :-1]) + self.positions
        for part in self.layers:
            h = block(part, h)
        logits = self.last(h).view(-1, WIDTH) @ self.embedding.weight.T
        return functional.cross_entropy(logits, tokens[:, 1:].flatten())


def example(network: str) -> tuple[torch.Tensor, ...]:
    random = np.random.default_rng(0)
    if network == "gpt":
        return (torch.from_numpy(random.integers(0, VOCABULARY, (8, LENGTH + 1))),)
    images = random.standard_normal((128, 3, 32, 32), dtype=np.float32)
    return torch.from_numpy(images), torch.from_numpy(random.integers(0, 10, 128))


WAYS: dict[str, Block] = {
    "PyTorch": lambda part, h: part(h),
    "torch.utils.checkpoint by block": lambda part, h: checkpoint(part, h, use_reentrant=False),
}


def peak(run: Callable[[], Any]) -> int:
    """The most bytes allocated at once in a run, above the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    recorded = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(recorded, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def main() -> None:
    network, rounds = sys.argv[1], int(sys.argv[2])
    inputs = example(network)
    rows, steps, plain = [], {}, None
    for name, block in WAYS.items():
        torch.manual_seed(0)
        model = GPT() if network == "gpt" else ResNet()

        def run(model: Any = model, block: Block = block) -> list[torch.Tensor]:
            weights = list(model.parameters())
            return list(torch.autograd.grad(model(block, *inputs), weights))

        grads = run()
        plain = plain or grads
        away = sum(float(((a - b) ** 2).sum()) for a, b in zip(grads, plain, strict=True))
        size = sum(float((a**2).sum()) for a in plain)
        steps[name] = run
        rows.append(
            {
                "peer": name,
                "plain": "PyTorch",
                "peak_bytes": peak(run),
                "gradient_error": (away / size) ** 0.5,
            }
        )
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, run in steps.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    for row in rows:
        pairs = zip(times[row["peer"]], times["PyTorch"], strict=True)
        row["time_ratio"] = statistics.median(a / b for a, b in pairs)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
