"""Trains CIFAR-shape ResNets with `tf.gradients` and with recomputation, and shows the difference.

The images are scikit-learn's handwritten digits (8 × 8, from the UCI repository), enlarged to
32 × 32 × 3. Every method starts from the same weights and sees the same batches.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # its fusions change rounding

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits

from memory_saving_gradients import gradients, gradients_memory, gradients_speed, measure
from scripts.benchmarks.stamp import stamp
from test_models import CifarResNet, build_v1

METHODS: dict[str, Callable[..., list]] = {
    "tf.gradients": tf.gradients,
    "memory": gradients_memory,
    "speed": gradients_speed,
}
COLORS = {"tf.gradients": "#444444", "memory": "#0a7d4f", "speed": "#c2571a", "budget": "#2457a6"}
PLAIN = "tf.gradients"

#: "budget" plans for this share of the shallowest network's measured peak, as a measured peak may
#: lie a little above the planned one.
BUDGET = 0.97


@dataclasses.dataclass
class Row:
    """What one method took at one depth.

    Attributes:
        depth: layers of the network.
        method: "tf.gradients", a strategy, or "budget" (the shallowest network's plain peak).
        peak_bytes: measured peak of a training step, variables not counted.
        seconds: median time of a training step.
        gradient_difference: largest difference of any gradient from `tf.gradients`.
        losses: the loss after each training step.
    """

    depth: int
    method: str
    peak_bytes: int
    seconds: float
    gradient_difference: float
    losses: list[float]


class Trainer:
    """One network in a session of its own, trained by momentum descent."""

    def __init__(self, depth: int, differentiate: Callable, batch: int, threads: int) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.model = CifarResNet(depth)
            self.step = build_v1(self.model, batch)
            self.gradients = differentiate(self.step.loss, self.step.variables)
            optimizer = tf.compat.v1.train.MomentumOptimizer(0.002, 0.9)
            pairs = zip(self.gradients, self.step.variables, strict=True)
            self.train = tf.group(optimizer.apply_gradients(pairs), *self.step.updates)
            config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=threads)
            self.session = tf.compat.v1.Session(config=config)
            self.session.run(tf.compat.v1.global_variables_initializer())

    def run(self, fetches: Any, arrays: Sequence[np.ndarray]) -> Any:
        return self.session.run(fetches, self.step.feed(arrays))

    def peak(self, arrays: Sequence[np.ndarray]) -> int:
        return measure.session_peak(
            self.session, [self.step.loss, self.train], self.step.feed(arrays)
        )


def batches(size: int, count: int) -> list[list[np.ndarray]]:
    """`count` batches of enlarged digits and their labels."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    chosen = np.resize(order, (count, size))
    images = digits.images.astype(np.float32)[chosen] / 8.0 - 1.0
    images = images.repeat(4, axis=2).repeat(4, axis=3)[..., None].repeat(3, axis=-1)
    labels = digits.target[chosen].astype(np.int32)
    return [[images[i], labels[i]] for i in range(count)]


def compare(
    depth: int,
    methods: dict[str, Callable[..., list]],
    options: argparse.Namespace,
    tick: Callable[[str], None],
) -> list[Row]:
    """Trains one depth with every method; `tick` is told of each piece of work done."""
    data = batches(options.batch, options.steps + 1)
    trainers = {}
    for method, differentiate in methods.items():
        tick(f"ResNet-{depth}: {method}, building the graph")
        trainers[method] = Trainer(depth, differentiate, options.batch, options.threads)
    differences, plain = {}, None
    for method, trainer in trainers.items():
        tick(f"ResNet-{depth}: {method}, gradients")
        values = trainer.run(trainer.gradients, data[-1])
        plain = plain or values
        pairs = zip(values, plain, strict=True)
        differences[method] = float(max(np.abs(a - b).max() for a, b in pairs))
    losses: dict[str, list[float]] = {method: [] for method in methods}
    for method, trainer in trainers.items():
        tick(f"ResNet-{depth}: {method}, training")
        for arrays in data[:-1]:
            loss, _ = trainer.run([trainer.step.loss, trainer.train], arrays)
            losses[method].append(float(loss))
    steps: dict[str, Callable[[], Any]] = {
        method: functools.partial(trainer.run, trainer.train, data[-1])
        for method, trainer in trainers.items()
    }
    tick(f"ResNet-{depth}: measuring time")
    seconds = measure.step_times(steps, options.rounds)
    peaks = {}
    for method, trainer in trainers.items():
        tick(f"ResNet-{depth}: {method}, measuring memory")
        peaks[method] = trainer.peak(data[-1])
    for trainer in trainers.values():
        trainer.session.close()
    return [
        Row(depth, m, peaks[m], statistics.median(seconds[m]), differences[m], losses[m])
        for m in methods
    ]


def table(rows: Sequence[Row]) -> Table:
    """The rows as a table; ratios are to `tf.gradients` of the same depth, where it ran."""
    steps = len(rows[0].losses)
    shown = Table(title="Measured: one training step, variables not counted", box=SIMPLE_HEAD)
    for heading in (
        "depth",
        "method",
        "peak MB",
        "peak ratio",
        "step time ratio",
        "largest gradient difference",
        f"loss after {steps} steps",
    ):
        left = heading == "method"
        shown.add_column(heading, justify="left" if left else "right", no_wrap=left)
    for row in rows:
        plain = next((r for r in rows if r.depth == row.depth and r.method == PLAIN), None)
        shown.add_row(
            str(row.depth),
            row.method,
            f"{row.peak_bytes / 1e6:.1f}",
            f"{plain.peak_bytes / row.peak_bytes:.2f}x" if plain else "-",
            f"{row.seconds / plain.seconds:.2f}x" if plain else "-",
            f"{row.gradient_difference:g}" if plain else "-",
            f"{row.losses[-1]:.6f}",
            end_section=row is rows[-1] or rows[rows.index(row) + 1].depth != row.depth,
        )
    return shown


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes the two figures, peak memory and step time against depth."""
    quantities = {
        "peak_memory": ("Measured peak memory of a training step (MB)", "peak_bytes", 1e6),
        "step_time": ("Time of a training step (s)", "seconds", 1.0),
    }
    paths = []
    for name, (label, field, unit) in quantities.items():
        figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
        for method in dict.fromkeys(row.method for row in rows):
            ours = [row for row in rows if row.method == method]
            axes.plot(
                [row.depth for row in ours],
                [getattr(row, field) / unit for row in ours],
                marker="o",
                color=COLORS[method],
                label=method,
            )
        axes.set_xlabel("Depth of the ResNet (layers)")
        axes.set_title(label, loc="left", fontsize=11)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(frameon=False)
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=130)
        plt.close(figure)
    return paths


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=[20, 32, 56, 80])
    parser.add_argument("--batch", type=int, default=64, help="images in a batch")
    parser.add_argument(
        "--strategy",
        nargs="+",
        choices=["memory", "speed", "budget"],
        default=["memory", "speed"],
        help="budget: whatever the depth, the peak of the shallowest network with tf.gradients",
    )
    parser.add_argument("--steps", type=int, default=8, help="training steps")
    parser.add_argument("--rounds", type=int, default=3, help="steps timed, in turns")
    parser.add_argument("--threads", type=int, default=1, help="inter-op threads")
    parser.add_argument("--output", type=Path, default=Path("demo_output"))
    options = parser.parse_args(arguments)
    for depth in options.depths:
        if depth < 8 or depth % 6 != 2:
            parser.error(f"--depths: {depth} is not of the form 6k+2 (8, 14, 20, ..., 1004)")
    if min(options.batch, options.steps, options.rounds, options.threads) < 1:
        parser.error("--batch, --steps, --rounds and --threads must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    tf.config.experimental.enable_op_determinism()
    tf.keras.utils.set_random_seed(0)
    console = Console()
    options.output.mkdir(parents=True, exist_ok=True)
    methods = {name: METHODS[name] for name in (PLAIN, *options.strategy) if name in METHODS}
    rows: list[Row] = []
    with Progress(console=console) as progress:
        work = len(options.depths) * (4 * (1 + len(options.strategy)) + 1)
        task = progress.add_task("starting", total=work)
        for depth in sorted(options.depths):
            rows += compare(
                depth,
                methods,
                options,
                lambda what: progress.update(task, advance=1, description=what),
            )
            if "budget" in options.strategy:
                budget = int(BUDGET * rows[0].peak_bytes)
                methods["budget"] = functools.partial(gradients, memory_budget=budget)
        progress.update(task, completed=work, description="done")
    console.print(table(rows))
    paths = draw(rows, options.output)
    results = options.output / "results.json"
    content = stamp() | {
        "settings": {"batch": options.batch, "threads": options.threads},
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    results.write_text(json.dumps(content, indent=1) + "\n")
    console.print("Written: " + ", ".join(str(path) for path in [*paths, results]))


if __name__ == "__main__":
    main()
