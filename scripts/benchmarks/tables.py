"""The tables of README.md and docs/, made of the JSON beside this file."""

from __future__ import annotations

import re
import statistics

from scripts.benchmarks.peers_tensorflow import COMPARED, Row, verdict


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


#: What the planners of 1.1 and of today are compared at: budgets that are hard to meet.
HARD = {
    "U-Net, 128 px, batch 4": "0.3",
    "ResNet-50, 96 px, batch 32": "0.25",
    "ResNet-56, CIFAR, batch 128": "0.15",
    "DenseNet, 2 × 12 layers, batch 64": "0.2",
    "PixelCNN++, batch 8": "0.25",
    "GPT, 6 layers, batch 8": "0.2",
    "Transformer, 4 + 4 layers, batch 32": "0.2",
    "chain, 64 layers, 2048 × 256": "0.1",
    "SegNet, 64 px, batch 16": "0.35",
}


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


def eager_table(results: dict) -> str:
    """Parts by hand, eagerly and in a function."""
    lines = []
    for network, ways in results.items():
        for way, row in ways.items():
            plain = ways["plain, tf.function" if "function" in way else "plain"]["peak_bytes"]
            lines.append(
                [
                    network if way == "plain" else "",
                    way,
                    f"{row['peak_bytes'] / 1e6:,.0f}",
                    f"{plain / row['peak_bytes']:.1f}×",
                    f"{row['time_ratio']:.2f}×",
                    _off(row["differs"]),
                ]
            )
    header = ["network", "blocks in", "peak MB", "of its plain", "time of plain eager", "gradients"]
    return markdown(header, lines)


def _off(differs: float | None) -> str:
    """How far gradients are from those of the plain eager step."""
    if differs is None:
        return ""
    return "equal" if differs == 0 else f"to {differs:.0e}"
