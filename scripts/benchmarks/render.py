"""Fills the tables of README.md and docs/ from the JSON beside this file, and draws the figures."""

from __future__ import annotations

import json
import os
import re
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import tensorflow as tf

from memory_saving_gradients import Plan, get_plans, gradients_memory
from memory_saving_gradients.report.figures import COLOURS
from scripts.benchmarks.compare import COMPARED, Row, verdict
from test_models import CifarResNet, Model, UNet, build_v1

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent
DOCS = ROOT / "docs"
FIGURES = DOCS / "figures"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def times(found: dict) -> str:
    """The step time against plain, and the quartiles."""
    low, median, high = found["time_ratio"]
    return f"{median:.2f}× ({low:.2f}–{high:.2f})"


def models_table(results: dict, laboratory: dict) -> str:
    """Measured peaks and step times of the test models."""
    rows = []
    for label, found in results["models"].items():
        plain = found["tf.gradients"]
        row = [label, f"{plain['peak_bytes'] / 1e6:.0f}"]
        for method in ("memory", "speed"):
            ours = found[method]
            row += [
                f"{ours['peak_bytes'] / 1e6:.0f} ({plain['peak_bytes'] / ours['peak_bytes']:.1f}×)",
                times(ours),
            ]
        equal = all(one["bit_equal"] for one in laboratory["models"][label].values())
        rows.append([*row, "yes" if equal else "no"])
    header = ["model", "`tf.gradients` MB", "`memory` MB", "time", "`speed` MB", "time"]
    return markdown([*header, "bit-equal without oneDNN"], rows)


def gradients_table(results: dict) -> str:
    """Measured peaks of the steps whose memory is that of gradients."""
    rows = []
    for label, found in results["rows"].items():
        (plain, *others), cells = found.items(), [label]
        cells.append(f"{plain[1]['peak_bytes'] / 1e6:.0f}")
        for method, ours in others:
            budget = "" if method == "memory" else f"{method}: "
            if "unreachable" in ours:
                cells += [f"{budget}not found", ""]
            else:
                ratio = plain[1]["peak_bytes"] / ours["peak_bytes"]
                cells += [f"{budget}{ours['peak_bytes'] / 1e6:.0f} ({ratio:.1f}×)", times(ours)]
        rows.append(cells)
    return markdown(["step", "plain MB", "`memory` MB", "time", "budget: MB", "time"], rows)


KERAS_METHODS = {
    "plain": "`fit` MB",
    "recompute_grad": "`tf.recompute_grad`",
    "RematScope": '`RematScope("full")`',
    "memory": "ours, `memory`",
    "speed": "ours, `speed`",
    "budget 0.4": "ours, 0.4 of plain",
}


def keras_table(rows: dict) -> str:
    """Measured peaks and step times of Keras models by every way to recompute."""
    lines = []
    for label, found in rows.items():
        plain = found["plain"]
        line = [label, f"{plain['peak_bytes'] / 1e6:.0f}"]
        for method in list(KERAS_METHODS)[1:]:
            one = found[method]
            if "error" in one:
                line.append("cannot be met" if "BudgetError" in one["error"] else "raises")
                continue
            line.append(
                f"{one['peak_bytes'] / 1e6:.0f} ({plain['peak_bytes'] / one['peak_bytes']:.1f}×) "
                f"at {one['seconds'] / plain['seconds']:.2f}×"
            )
        lines.append(line)
    return markdown(["model", *KERAS_METHODS.values()], lines)


def keras_notes(results: dict) -> str:
    """What the tables do not say: equality, where another way has the lower peak, errors."""
    unequal, better = [], []
    for mode in ("graph", "compiled"):
        for label, found in results.get(mode, {}).items():
            ours = [found[m] for m in ("memory", "speed", "budget 0.4") if "error" not in found[m]]
            if not all(one.get("equal_losses", True) for one in ours):
                unequal.append(label)
            lowest = min(ours, key=lambda one: one["peak_bytes"])
            theirs = found["recompute_grad"]
            if "error" in theirs:
                continue
            where = f"{label}{' compiled' if mode == 'compiled' else ''}"
            if theirs["peak_bytes"] < lowest["peak_bytes"]:
                better.append(f"{where} (lower peak)")
            elif theirs["seconds"] < lowest["seconds"]:
                ratio = lowest["seconds"] / theirs["seconds"]
                better.append(f"{where} (our lowest peak takes {ratio:.2f}× its time)")
    text = (
        "Without `jit_compile` and oneDNN, the losses of the first 5 steps with ours are those of "
        "plain `fit`, bit for bit"
    )
    text += f", but for rounding on {', '.join(unequal)} (see Limits)." if unequal else "."
    if better:
        text += f" `tf.recompute_grad` is better in: {', '.join(better)}."
    if missing := [label for label in results["graph"] if label not in results["compiled"]]:
        text += f" Not measured compiled: {', '.join(missing)}."
    errors = {
        found["RematScope"].get("error", "")
        for m in ("graph", "compiled")
        for found in results[m].values()
    }
    said = re.search(r"The custom_gradient decorator[^.]*\.", " ".join(errors))
    if said:
        text += f' `RematScope` raises: "{said[0]}"'
    return f"{text} Keras {results['machine'].rpartition(' ')[2]}."


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
            label,
            f"{r['ops']:,}",
            f"{r['tf_gradients']:.2f} s",
            f"{r['ours']:.2f} s",
            f"{r['ours'] / r['tf_gradients']:.2f}",
        ]
        for label, r in results["rewriting"].items()
    ]
    header = [
        "model",
        "ops in the forward graph",
        "`tf.gradients`",
        "read, plan and rewrite",
        "ratio",
    ]
    return markdown(header, rows)


def budgets_table(results: dict) -> str:
    """Every budget of every model: what was planned, what was measured, what is proven."""
    rows = []
    for label, found in results["models"].items():
        for method, ours in found.items():
            if not method.startswith("budget"):
                continue
            row = [label, method.removeprefix("budget ")]
            if "unreachable" in ours:
                lowest = re.search(r"the lowest peak found is ([\d.]+ \w+)", ours["unreachable"])
                floor = f"cannot be met: {lowest[1]} is the lowest" if lowest else "cannot be met"
                rows.append([*row, floor, *[""] * 6])
                continue
            bound = ours["lower_bound"]
            gap = None if bound is None else max(0.0, ours["overhead"] - bound)
            rows.append(
                [
                    *row,
                    f"{ours['predicted_bytes'] / 1e6:.0f}",
                    f"{ours['peak_bytes'] / 1e6:.0f}",
                    f"{ours['peak_bytes'] / ours['budget_bytes']:.3f}",
                    f"{ours['overhead']:.1%}",
                    f"{ours['time_ratio'][1] - 1.0:+.0%}",
                    "unproven" if bound is None else f"{bound:.1%} (gap {gap:.1%})",
                    f"{ours['planning_seconds']:.2f}",
                ]
            )
    header = ["model", "budget", "predicted MB", "measured MB", "measured / budget"]
    header += ["overhead", "time measured", "lower bound", "planning s"]
    return markdown(header, rows)


#: How many times lower the measured peak is to be, at no more than a fifth more step time.
GOALS = {
    "chain, 64 layers, 2048 × 256": 7.5,
    "ResNet-110, CIFAR, batch 128": 6.5,
    "ResNet-56, CIFAR, batch 128": 4.5,
    "GPT, 6 layers, batch 8": 6.5,
    "U-Net, 128 px, batch 4": 2.5,
    "ResNet-50, 96 px, batch 32": 2.5,
}


def corpus_table(results: dict) -> str:
    """Measured peaks of the hard graphs as shares of their budgets, over all settings."""
    rows = []
    for name, settings in results.items():
        row = [name]
        for share in ("0.7", "0.5", "0.3", "lowest"):
            cells = [found[share] for found in settings.values() if found.get(share)]
            kept = [c["measured"] / c["budget"] for c in cells if "measured" in c]
            span = f"{min(kept):.3f} to {max(kept):.3f}" if kept else ""
            row.append(span or ("cannot be met" if cells else "nothing to save"))
        rows.append(row)
    return markdown(["graph", "0.7", "0.5", "0.3", "the lowest that can be met"], rows)


def goals_table(results: dict) -> str:
    """Of each model with a goal: the lowest measured peak at no more than a fifth more time."""
    rows = []
    for label, goal in GOALS.items():
        found = results["models"][label]
        plain = found["tf.gradients"]
        ran = {m: r for m, r in found.items() if "seconds" in r and m != "tf.gradients"}
        fast = {m: r for m, r in ran.items() if r["time_ratio"][1] <= 1.2}
        method, best = min((fast or ran).items(), key=lambda item: item[1]["peak_bytes"])
        lowest_method, lowest = min(ran.items(), key=lambda item: item[1]["peak_bytes"])
        ratio = plain["peak_bytes"] / best["peak_bytes"]
        rows.append(
            [
                label,
                f"{goal:g}×",
                f"{ratio:.1f}× ({method})",
                times(best),
                f"{plain['peak_bytes'] / lowest['peak_bytes']:.1f}× ({lowest_method}), "
                f"{times(lowest)}",
            ]
        )
    return markdown(["model", "goal", "reached", "step time", "lowest measured, its time"], rows)


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
                f"{1000 * r['seconds'] / r['depth']:.0f}",
                f"{r['gradient_difference']:g}",
                f"{r['losses'][-1]:.6f}",
            ]
        )
    steps = len(results["rows"][0]["losses"])
    header = ["network and method", "peak MB", "ratio", "step time", "ms a layer"]
    loss = "loss after one step" if steps == 1 else f"loss after {steps} steps"
    return markdown([*header, "largest gradient difference", loss], rows)


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
    ops = [found["ops"] for found in planning["scaling"]]
    for axes, values, title in (
        (left, [r["seconds"] for r in planning["scaling"]], "Planning time (s)"),
        (
            right,
            [r["peak_rss_bytes"] / 1e9 for r in planning["scaling"]],
            "Peak of the process (GB)",
        ),
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


def published_table(planning: dict) -> str:
    """Our predicted plans at the memory that others report for the same architecture."""
    rows = []
    for label, found in planning["published"].items():
        theirs = found["published_overhead"]
        rows.append(
            [
                f"{label} ({found['source']})",
                f"{found['share']:.0%} of plain",
                "one more forward pass" if theirs is None else f"{theirs:.0%}",
                f"{found['reached']:.0%} at {found['overhead']:.1%}",
                f"{found['lowest']:.0%} at {found['lowest_overhead']:.1%}",
            ]
        )
    header = ["architecture", "published peak", "its overhead", "ours at that peak"]
    return markdown([*header, "ours, `memory`"], rows)


def over_optimal_table(planning: dict) -> str:
    """Cost of our plans over the lower bound, the geometric mean over all budgets that were met."""
    rows = []
    for label, (name, theirs) in {
        "MobileNet, 128 px, batch 32": ("MobileNet", 1.06),
        "VGG16, half width, 128 px, batch 16": ("VGG16", 1.01),
        "U-Net, 128 px, batch 4": ("U-Net", 1.03),
        "ResNet-50, 224 px, batch 8": ("ResNet-50", 1.05),
    }.items():
        found = planning["models"][label]
        ratios = [
            (1 + ours) / (1 + bound)
            for (_, ours), (_, bound) in zip(found["budgets"], found["bound"], strict=True)
        ]
        mean = statistics.geometric_mean(ratios)
        rows.append([name, f"{theirs:.2f}", f"{mean:.3f}", f"{max(ratios):.3f}"])
    header = ["architecture", "Checkmate's rounding over the optimum"]
    return markdown([*header, "our plans over the lower bound", "worst budget"], rows)


def few_table(results: dict) -> str:
    """One row for each kind of network: what README shows."""
    rows = []
    for label in (
        "ResNet-50, 224 px, batch 8",
        "ResNet-110, CIFAR, batch 128",
        "DenseNet, 2 × 12 layers, batch 64",
        "U-Net, 128 px, batch 4",
        "GPT, 6 layers, batch 8",
        "Transformer, 4 + 4 layers, batch 32",
    ):
        found = results["models"][label]
        plain = found["tf.gradients"]["peak_bytes"]
        row = [label, f"{plain / 1e6:,.0f} MB"]
        for method in ("memory", "speed"):
            ours = found[method]
            ratio = plain / ours["peak_bytes"]
            row.append(
                f"{ours['peak_bytes'] / 1e6:,.0f} MB ({ratio:.1f}×) at {ours['time_ratio'][1]:.2f}×"
            )
        rows.append(row)
    return markdown(["model", "`tf.gradients`", "`memory`", "`speed`"], rows)


def compare_table(results: dict) -> str:
    """Every way to recompute, on every model of the comparison."""
    lines = []
    for label, rows in results["models"].items():
        peaks = {row["peer"]: row["peak_bytes"] for row in rows}
        for row in rows:
            line = [label if row is rows[0] else "", row["peer"]]
            if row["peak_bytes"] is None:
                lines.append([*line, "", "", "", "fails"])
                continue
            plain = peaks[row["plain"]]
            time = row["time_ratio"]
            line += [f"{row['peak_bytes'] / 1e6:,.0f}", f"{plain / row['peak_bytes']:.1f}×"]
            line.append("" if time is None else f"{time:.2f}×")
            lines.append([*line, verdict(Row(**row))])
    return markdown(["model", "way", "peak MB", "ratio", "step time", "gradients"], lines)


def compare_notes(results: dict) -> str:
    """What a user sees where a way fails."""
    said: dict[str, list[str]] = {}
    for label, rows in results["models"].items():
        for row in rows:
            if row["error"]:
                said.setdefault(f"{row['peer']}: {row['error']}", []).append(label)
    lines = [f"- {error} ({'; '.join(labels)})" for error, labels in said.items()]
    twins = "; ".join(twin for _, twin, _ in COMPARED.values() if twin)
    return "\n".join(
        [
            f"Measured on {results['machine']}, nothing else running.",
            "JAX and PyTorch run on the processor, too. There XLA merges what `jax.checkpoint`",
            "copies with the original unless it is in a loop, so equal layers were scanned, too.",
            f"Rows of Keras are of networks of the same kind: {twins}.",
            "",
            *(["What fails says:", "", *lines] if lines else []),
        ]
    )


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


def plan_of(model: Model, batch: int) -> Plan:
    with tf.Graph().as_default():
        step = build_v1(model, batch)
        gradients_memory(step.loss, step.variables)
        return get_plans()[-1]


def main() -> None:
    def read(name: str) -> dict:
        return json.loads((RESULTS / f"{name}.json").read_text())

    benchmark, planning, fit, compare = map(read, ("models", "planning", "keras_fit", "compare"))
    machine = (
        f"Measured on {benchmark['machine']}, in a default session: oneDNN on, all threads, "
        "nothing else running; times against plain in the same process, in turns, with quartiles."
    )
    tables = {
        "few": few_table(benchmark),
        "compare": compare_table(compare),
        "compare notes": compare_notes(compare),
        "models": models_table(benchmark, read("laboratory")),
        "gradients": gradients_table(read("gradients")),
        "keras": keras_table(fit["graph"]),
        "keras compiled": keras_table(fit["compiled"]),
        "keras notes": keras_notes(fit),
        "goals": goals_table(benchmark),
        "predictions": predictions_table(benchmark),
        "rewriting": rewriting_table(benchmark),
        "demo": demo_table(read("demo")),
        "deep": demo_table(read("deep_resnet")),
        "published": published_table(planning),
        "over optimal": over_optimal_table(planning),
        "machine": machine,
    }
    for page in (ROOT / "README.md", DOCS / "results.md"):
        text = page.read_text()
        for name, content in tables.items():
            begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
            if begin in text:
                before, rest = text.split(begin)
                text = f"{before}{begin}\n\n{content}\n\n{end}{rest.split(end)[1]}"
        page.write_text(text)
    (DOCS / "budgets.md").write_text(
        f"# Plans within budgets\n\n{machine} A budget is a share of the predicted plain peak.\n\n"
        f"{budgets_table(benchmark)}\n"
    )
    (DOCS / "corpus.md").write_text(
        "# Budgets on the hard graphs\n\nMeasured peaks as shares of the budget, the lowest and "
        "the highest of four settings: oneDNN on and off, one inter-op thread and all. A budget is "
        "a share of the predicted plain peak.\n\n"
        f"{corpus_table(read('corpus'))}\n"
    )
    resnet = plan_of(CifarResNet(56), 128)
    resnet.plot(FIGURES / "timeline.png")
    resnet.plot_frontier(FIGURES / "frontier.png")
    plan_of(UNet(), 4).plot_graph(FIGURES / "network.png")
    draw_compare(compare, FIGURES / "compare.png")
    draw_frontiers(planning, FIGURES / "frontiers.png")
    draw_scaling(planning, FIGURES / "scaling.png")


if __name__ == "__main__":
    main()
