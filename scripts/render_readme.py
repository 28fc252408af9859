"""Fills the tables of README.md from docs/*.json and draws the picture of how it works."""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import tensorflow as tf

from memory_saving_gradients import get_plans, gradients_memory
from memory_saving_gradients.planning.problem import baseline
from memory_saving_gradients.planning.simulate import simulate
from test_models import CifarResNet, build_v1

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def models_table(results: dict) -> str:
    """Measured peaks and step times of the test models."""
    rows = []
    for label, found in results["models"].items():
        plain = found["tf.gradients"]
        row = [label, f"{plain['peak_bytes'] / 1e6:.0f}"]
        for method in ("memory", "speed"):
            ours = found[method]
            row += [
                f"{ours['peak_bytes'] / 1e6:.0f} ({plain['peak_bytes'] / ours['peak_bytes']:.1f}×)",
                f"{ours['seconds'] / plain['seconds']:.2f}×",
            ]
        equal = all(ours["bit_equal"] for ours in found.values())
        rows.append([*row, "yes" if equal else "no"])
    header = ["model", "`tf.gradients` MB", "`memory` MB", "time", "`speed` MB", "time"]
    return markdown([*header, "bit-equal"], rows)


def predictions_table(results: dict) -> str:
    """Predicted against measured peaks."""
    rows = []
    for label, found in results["models"].items():
        row = [label]
        for method in ("tf.gradients", "memory", "speed"):
            ours = found[method]
            error = ours["predicted_bytes"] / ours["peak_bytes"] - 1
            row += [f"{ours['predicted_bytes'] / 1e6:.0f} / {ours['peak_bytes'] / 1e6:.0f}"]
            row[-1] += f" ({error:+.1%})"
        rows.append(row)
    return markdown(["model", "`tf.gradients`", "`memory`", "`speed`"], rows)


def rewriting_table(results: dict) -> str:
    """Time to differentiate and to rewrite."""
    rows = [
        [
            f"{r['ops']:,}",
            f"{r['tf_gradients']:.2f} s",
            f"{r['ours']:.2f} s",
            f"{r['ours'] / r['tf_gradients']:.2f}",
        ]
        for r in results["rewriting"]
    ]
    header = ["ops in the forward graph", "`tf.gradients`", "read, plan and rewrite", "ratio"]
    return markdown(header, rows)


def demo_table(results: dict) -> str:
    """The demo's rows."""
    rows = []
    for r in results["rows"]:
        plain = next(other for other in results["rows"] if other["depth"] == r["depth"])
        rows.append(
            [
                f"ResNet-{r['depth']}, {r['method']}",
                f"{r['peak_bytes'] / 1e6:.0f}",
                f"{plain['peak_bytes'] / r['peak_bytes']:.2f}×",
                f"{r['seconds'] / plain['seconds']:.2f}×",
                f"{r['gradient_difference']:g}",
                f"{r['losses'][-1]:.6f}",
            ]
        )
    steps = len(results["rows"][0]["losses"])
    header = ["network and method", "peak MB", "ratio", "step time"]
    return markdown([*header, "largest gradient difference", f"loss after {steps} steps"], rows)


def draw_timeline(path: Path) -> None:
    """Bytes alive through a training step of ResNet-56, plain and with recomputation."""
    with tf.Graph().as_default():
        step = build_v1(CifarResNet(56), 128)
        gradients_memory(step.loss, step.variables)
        plan = get_plans()[-1]
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for label, schedule, color in (
        ("tf.gradients", baseline(plan.problem), "#444444"),
        ("memory", plan.schedule, "#0a7d4f"),
    ):
        timeline = simulate(plan.problem, schedule).timeline
        axes.plot([b / 1e6 for b in timeline], color=color, label=label)
    axes.axvline(plan.problem.forward_count, color="#999999", linestyle=":")
    axes.annotate(
        "forward pass ends",
        (plan.problem.forward_count, 0.5 * plan.baseline_peak_bytes / 1e6),
        xytext=(6, 0),
        textcoords="offset points",
        ha="left",
        color="#666666",
        fontsize=9,
    )
    axes.set_xlabel("ops run so far in the step")
    axes.set_title("ResNet-56, batch 128: MB alive through one training step", loc="left")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    benchmark = json.loads((DOCS / "benchmark.json").read_text())
    demo = json.loads((DOCS / "results.json").read_text())
    tables = {
        "models": models_table(benchmark),
        "predictions": predictions_table(benchmark),
        "rewriting": rewriting_table(benchmark),
        "demo": demo_table(demo),
        "machine": f"Measured on {benchmark['machine']}, one inter-op thread, oneDNN off.",
    }
    readme = ROOT / "README.md"
    text = readme.read_text()
    for name, content in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{content}\n{end}{rest.split(end)[1]}"
    readme.write_text(text)
    draw_timeline(DOCS / "timeline.png")


if __name__ == "__main__":
    main()
