"""The figures of docs/, drawn from the JSON beside this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from memory_saving_gradients.report.figures import COLOURS, TEXT, WIDTH
from scripts.benchmarks.peers_tensorflow import Row, verdict


def draw_compare(results: dict, path: Path) -> None:
    """Peak against time of each way, as shares of plain: one panel a model."""
    columns = 2
    models = results["models"]
    rows = -(-len(models) // columns)
    size = (WIDTH, 2.3 * rows)
    figure, grid = plt.subplots(rows, columns, figsize=size, dpi=144, layout="constrained")
    styles = {
        "tf.gradients": ("D", COLOURS["plain"]),
        "Grappler heuristics": ("s", COLOURS["again"]),
        "√n articulation points": ("P", COLOURS["kept"]),
        "tf.recompute_grad by block": ("v", COLOURS["budget"]),
        "ours, speed": ("^", COLOURS["plan"]),
        "ours, memory": ("o", COLOURS["plan"]),
        "ours, budget 0.3": ("*", COLOURS["plan"]),
    }
    for axes, (label, found) in zip(grid.flat, models.items(), strict=False):
        peaks = {row["peer"]: row["peak_bytes"] for row in found}
        for row in found:
            if row["peer"] in styles and row["time_ratio"]:
                marker, colour = styles[row["peer"]]
                share = 100 * row["peak_bytes"] / peaks[row["plain"]]
                wrong = "wrong" in verdict(Row(**row))
                fill = {"mfc": "none"} if wrong else {}
                axes.plot(
                    share, row["time_ratio"], marker, ms=8, color=colour, label=row["peer"], **fill
                )
        title = label.replace(", ", "\n", 1)
        axes.set_title(title, loc="left", fontsize=TEXT, color=COLOURS["text"])
        axes.set_xlim(0, 115)
        axes.set_ylim(0.9, 1.6)
        styled(axes)
    for axes in grid.flat[len(models) :]:
        axes.set_axis_off()
    for axes in grid[-1]:
        axes.set_xlabel("measured peak, % of plain", fontsize=TEXT, color=COLOURS["text"])
    for axes in grid[:, 0]:
        axes.set_ylabel("step time, ratio", fontsize=TEXT, color=COLOURS["text"])
    handles, names = grid.flat[0].get_legend_handles_labels()
    figure.legend(
        handles,
        names,
        loc="outside lower left",
        ncols=2,
        frameon=False,
        fontsize=TEXT,
        labelcolor=COLOURS["text"],
    )
    figure.patch.set_alpha(0)
    figure.savefig(path)
    plt.close(figure)


def draw_rounds(rounds: dict[str, dict[str, int]], path: Path) -> None:
    """The peak of a loop against its rounds, with the exponents that fit."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3), dpi=144, layout="constrained")
    counts = [int(label) for label in rounds]
    names = {
        "tf.gradients": ("D", COLOURS["plain"], 0),
        "memory": ("o", COLOURS["plan"], 0),
        "max_overhead=1.25": ("*", COLOURS["plan"], 1000),  # three levels from there on
    }
    for way, (marker, colour, first) in names.items():
        peaks = [row[way] / 1e6 for row in rounds.values()]
        fitted = {label: row for label, row in rounds.items() if int(label) >= first}
        grows = f"$n^{{{exponent(fitted, way):.2f}}}$"
        named = f"{way}: grows as {grows}" + (f" from {first:,} on" if first else "")
        axes.loglog(counts, peaks, f"{marker}-", color=colour, label=named)
    axes.set_xticks(counts, [f"{count:,}" for count in counts], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("rounds, n", fontsize=TEXT, color=COLOURS["text"])
    axes.set_ylabel("measured peak, MB", fontsize=TEXT, color=COLOURS["text"])
    axes.set_ylim(top=30 * axes.get_ylim()[1])  # room for the legend
    axes.legend(loc="upper left", frameon=False, fontsize=TEXT, labelcolor=COLOURS["text"])
    styled(axes)
    figure.patch.set_alpha(0)
    figure.savefig(path)
    plt.close(figure)


def exponent(rounds: dict[str, dict[str, int]], way: str) -> float:
    """The power of the number of rounds that peaks grow with, by least squares."""
    counts = np.log([int(label) for label in rounds])
    return float(np.polyfit(counts, np.log([row[way] for row in rounds.values()]), 1)[0])


def styled(axes: Any) -> None:
    """Readable on white and on black."""
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[:].set_color(COLOURS["text"])
    axes.tick_params(colors=COLOURS["text"], labelsize=TEXT)
