"""The figures of docs/, drawn from the JSON beside this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from memory_saving_gradients.report.figures import COLOURS
from scripts.benchmarks.peers_tensorflow import Row, verdict


def draw_frontiers(planning: dict, path: Path) -> None:
    """Peak against overhead: one panel a model, all methods in each."""
    models = planning["models"]
    columns = 3
    rows = -(-len(models) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(12, 3 * rows), layout="constrained")
    for axes, (label, found) in zip(grid.flat, models.items(), strict=False):
        plain = found["tf.gradients"][0]
        curve = [found["tf.gradients"], *found["budgets"]]
        for name, points, style in (
            ("lower bound", found["bound"], {"color": "#999999", "linestyle": "--"}),
            ("budgets", curve, {"color": "#2457a6", "marker": ".", "markersize": 5}),
            ("memory", [found["memory"]], {"color": "#0a7d4f", "marker": "o"}),
            ("auto", [found["auto"]], {"color": "#b0227a", "marker": "*", "markersize": 9}),
            ("speed", [found["speed"]], {"color": "#c2571a", "marker": "s"}),
            ("√n", [found["√n"]], {"color": "#7a4fa3", "marker": "^"}),
            ("tf.gradients", [found["tf.gradients"]], {"color": "#444444", "marker": "D"}),
        ):
            shown = [(100 * peak / plain, 100 * overhead) for peak, overhead in points]
            if len(points) == 1:
                style = style | {"linestyle": "none"}
            axes.plot(*zip(*shown, strict=True), label=name, **style)
        axes.set_title(label, loc="left", fontsize=9)
        axes.set_xlim(0, 108)
        axes.set_ylim(-2, max(45, 105 * found["budgets"][-1][1]))
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("predicted peak, % of tf.gradients")
    for axes in grid[:, 0]:
        axes.set_ylabel("overhead, %")
    grid[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def draw_scaling(planning: dict, path: Path) -> None:
    """Planning time and memory against the ops of a step."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    ops, rows = [*map(int, planning["scaling"])], planning["scaling"].values()
    for axes, values, title in (
        (left, [row["seconds"] for row in rows], "Planning time (s)"),
        (right, [row["peak_rss_bytes"] / 1e9 for row in rows], "Peak of the process (GB)"),
    ):
        axes.plot(ops, values, marker="o", color="#2457a6")
        axes.set_xscale("log")
        axes.set_xlabel("ops of the step")
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_ylim(0, 1.08 * max(values))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_compare(results: dict, path: Path) -> None:
    """Peak against time of each way, as shares of plain: one panel a model."""
    columns = 3
    models = results["models"]
    rows = -(-len(models) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(11, 3.2 * rows), layout="constrained")
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
        axes.set_title(label, loc="left", fontsize=9, color=COLOURS["text"])
        axes.set_xlim(0, 115)
        axes.set_ylim(0.9, 1.6)
        styled(axes)
    for axes in grid.flat[len(models) :]:
        axes.set_axis_off()
    for axes in grid[-1]:
        axes.set_xlabel("measured peak, % of plain", color=COLOURS["text"])
    for axes in grid[:, 0]:
        axes.set_ylabel("step time, ratio", color=COLOURS["text"])
    handles, names = grid.flat[0].get_legend_handles_labels()
    figure.legend(
        handles,
        names,
        loc="outside lower left",
        ncols=4,
        frameon=False,
        fontsize=8,
        labelcolor=COLOURS["text"],
    )
    figure.patch.set_alpha(0)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def styled(axes: Any) -> None:
    """Readable on white and on black."""
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[:].set_color(COLOURS["text"])
    axes.tick_params(colors=COLOURS["text"])
