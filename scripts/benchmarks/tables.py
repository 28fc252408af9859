"""The tables of README.md and docs/, made of the JSON beside this file.

A table is declared: its rows, and a column for each heading. All are printed by `table`.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from scripts.benchmarks.peers_tensorflow import COMPARED, Row, verdict


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        heading: its heading.
        get: the cell's value, from a row; None leaves the cell empty.
        form: how a value is printed.
    """

    heading: str
    get: Callable[[Any], Any]
    form: str = "{}"


def table(rows: Iterable[Any], columns: Sequence[Column]) -> str:
    """A table in Markdown."""

    def cell(column: Column, row: Any) -> str:
        value = column.get(row)
        return "" if value is None else column.form.format(value)

    lines = [[column.heading for column in columns], ["---", *["---:"] * (len(columns) - 1)]]
    lines += [[cell(column, row) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def labelled(found: dict[str, dict]) -> list[dict]:
    """Rows that know their names."""
    return [{"label": label} | row for label, row in found.items()]


def label(row: dict) -> str:
    return row["label"]


def megabytes(way: str, field: str = "peak_bytes") -> Callable[[dict], float | None]:
    """The megabytes that a way takes; None where it has no row."""
    return lambda row: row[way][field] / 1e6 if way in row else None


def times(found: dict) -> str:
    """The step time against plain, and the quartiles."""
    low, high = found["quartiles"]
    return f"{found['time_ratio']:.2f}× ({low:.2f}–{high:.2f})"


def against(plain: str, way: str, digits: str = ".0f") -> Callable[[dict], str]:
    """The megabytes of a way, and how many times less that is than plain."""

    def shown(row: dict) -> str:
        peak = row[way]["peak_bytes"]
        return f"{peak / 1e6:{digits}} ({row[plain]['peak_bytes'] / peak:.1f}×)"

    return shown


def models_table(results: dict, laboratory: dict) -> str:
    """Measured peaks and step times of the test models."""

    def equal(row: dict) -> str:
        ways = laboratory["models"][row["label"]].values()
        return "yes" if all(ways) else "no"

    columns = [
        Column("model", label),
        Column("`tf.gradients` MB", megabytes("tf.gradients"), "{:.0f}"),
        Column("`memory` MB", against("tf.gradients", "memory")),
        Column("time", lambda row: times(row["memory"])),
        Column("`speed` MB", against("tf.gradients", "speed")),
        Column("time", lambda row: times(row["speed"])),
        Column("bit-equal without oneDNN", equal),
    ]
    return table(labelled(results["models"]), columns)


def gradients_table(results: dict) -> str:
    """Measured peaks of the steps whose memory is that of gradients."""

    def budget(row: dict) -> str:
        return [*row][-1]

    def within(row: dict) -> str:
        met = "error" not in row[budget(row)]
        return f"{budget(row)}: " + (against("plain", budget(row))(row) if met else "not found")

    def taken(row: dict) -> str | None:
        return times(row[budget(row)]) if "quartiles" in row[budget(row)] else None

    columns = [
        Column("step", label),
        Column("plain MB", megabytes("plain"), "{:.0f}"),
        Column("`memory` MB", against("plain", "memory")),
        Column("time", lambda row: times(row["memory"])),
        Column("budget: MB", within),
        Column("time", taken),
    ]
    return table(labelled(results["rows"]), columns)


KERAS_METHODS = {
    "recompute_grad": "`tf.recompute_grad`",
    "RematScope": '`RematScope("full")`',
    "memory": "ours, `memory`",
    "speed": "ours, `speed`",
    "budget 0.4": "ours, 0.4 of plain",
}


def keras_table(rows: dict) -> str:
    """Measured peaks and step times of Keras models by every way to recompute."""

    def shown(method: str) -> Callable[[dict], str]:
        def of(row: dict) -> str:
            if "error" in row[method]:
                return "cannot be met" if "BudgetError" in row[method]["error"] else "raises"
            return f"{against('plain', method)(row)} at {row[method]['time_ratio']:.2f}×"

        return of

    columns = [Column("model", label), Column("`fit` MB", megabytes("plain"), "{:.0f}")]
    columns += [Column(heading, shown(method)) for method, heading in KERAS_METHODS.items()]
    return table(labelled(rows), columns)


def keras_notes(results: dict, version: str) -> str:
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
    return f"{text} Keras {version}."


def predictions_table(results: dict) -> str:
    """Predicted against measured peaks."""

    def both(way: str) -> Callable[[dict], str]:
        def shown(row: dict) -> str:
            predicted, peak = row[way]["predicted_bytes"], row[way]["peak_bytes"]
            return f"{predicted / 1e6:.0f} / {peak / 1e6:.0f} ({predicted / peak - 1:+.1%})"

        return shown

    ways = ("tf.gradients", "memory", "speed")
    columns = [Column("model", label), *(Column(f"`{way}`", both(way)) for way in ways)]
    return table(labelled(results["models"]), columns)


def rewriting_table(results: dict) -> str:
    """Time to differentiate and to rewrite."""
    columns = [
        Column("model", label),
        Column("ops in the forward graph", lambda row: row["ops"], "{:,}"),
        Column("`tf.gradients`", lambda row: row["tf_gradients"], "{:.2f} s"),
        Column("read, plan and rewrite", lambda row: row["ours"], "{:.2f} s"),
        Column("ratio", lambda row: row["ours"] / row["tf_gradients"], "{:.2f}"),
    ]
    return table(labelled(results["rewriting"]), columns)


def budgets_table(results: dict) -> str:
    """Every budget of every model: what was planned, what was measured, what is proven."""
    rows = [
        {"label": model, "budget": method.removeprefix("budget ")} | ours
        for model, found in results["models"].items()
        for method, ours in found.items()
        if method.startswith("budget")
    ]

    def met(get: Callable[[dict], Any]) -> Callable[[dict], Any]:
        return lambda row: None if "error" in row else get(row)

    def predicted(row: dict) -> str:
        if "error" not in row:
            return f"{row['predicted_bytes'] / 1e6:.0f}"
        lowest = re.search(r"the lowest peak found is ([\d.]+ \w+)", row["error"])
        return f"cannot be met: {lowest[1]} is the lowest" if lowest else "cannot be met"

    def bound(row: dict) -> str:
        bound = row["lower_bound"]
        if bound is None:
            return "unproven"
        return f"{bound:.1%} (gap {max(0.0, row['overhead'] - bound):.1%})"

    columns = [
        Column("model", label),
        Column("budget", lambda row: row["budget"]),
        Column("predicted MB", predicted),
        Column("measured MB", met(lambda row: row["peak_bytes"] / 1e6), "{:.0f}"),
        Column(
            "measured / budget", met(lambda row: row["peak_bytes"] / row["budget_bytes"]), "{:.3f}"
        ),
        Column("overhead", met(lambda row: row["overhead"]), "{:.1%}"),
        Column("time measured", met(lambda row: row["time_ratio"] - 1.0), "{:+.0%}"),
        Column("lower bound", met(bound)),
        Column("planning s", met(lambda row: row["planning_seconds"]), "{:.2f}"),
    ]
    return table(rows, columns)


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

    def span(share: str) -> Callable[[dict], str]:
        def shown(row: dict) -> str:
            cells = [found[share] for found in row["settings"].values() if found.get(share)]
            kept = [c["measured"] / c["budget"] for c in cells if "measured" in c]
            if kept:
                return f"{min(kept):.3f} to {max(kept):.3f}"
            return "cannot be met" if cells else "nothing to save"

        return shown

    graphs = dict.fromkeys(graph for found in results.values() for graph in found)
    rows = [
        {"label": graph, "settings": {setting: found[graph] for setting, found in results.items()}}
        for graph in graphs
    ]
    shares = {"0.7": "0.7", "0.5": "0.5", "0.3": "0.3", "lowest": "the lowest that can be met"}
    columns = [Column(heading, span(share)) for share, heading in shares.items()]
    return table(rows, [Column("graph", label), *columns])


def goals_table(results: dict) -> str:
    """Of each model with a goal: the lowest measured peak at no more than a fifth more time."""

    def lowest(row: dict, most: float) -> str:
        ways = {way: one for way, one in row.items() if "time_ratio" in one}
        del ways["tf.gradients"]
        fast = {way: one for way, one in ways.items() if one["time_ratio"] <= most}
        return min(fast or ways, key=lambda way: ways[way]["peak_bytes"])

    def ratio(row: dict, way: str) -> str:
        return f"{row['tf.gradients']['peak_bytes'] / row[way]['peak_bytes']:.1f}× ({way})"

    def any_time(row: dict) -> str:
        way = lowest(row, float("inf"))
        return f"{ratio(row, way)}, {times(row[way])}"

    columns = [
        Column("model", label),
        Column("goal", lambda row: GOALS[row["label"]], "{:g}×"),
        Column("reached", lambda row: ratio(row, lowest(row, 1.2))),
        Column("step time", lambda row: times(row[lowest(row, 1.2)])),
        Column("lowest measured, its time", any_time),
    ]
    return table(labelled({goal: results["models"][goal] for goal in GOALS}), columns)


def demo_table(results: dict) -> str:
    """The demo's rows."""
    plain: dict[int, dict] = {}
    for row in results["rows"]:
        plain.setdefault(row["depth"], row)

    def compared(field: str, row: dict) -> float:
        return row[field] / plain[row["depth"]][field]

    steps = len(results["rows"][0]["losses"])
    loss = "loss after one step" if steps == 1 else f"loss after {steps} steps"
    columns = [
        Column("network and method", lambda row: f"ResNet-{row['depth']}, {row['method']}"),
        Column("peak MB", lambda row: row["peak_bytes"] / 1e6, "{:.0f}"),
        Column("ratio", lambda row: 1 / compared("peak_bytes", row), "{:.2f}×"),
        Column("step time", lambda row: compared("seconds", row), "{:.2f}×"),
        Column("ms a layer", lambda row: 1000 * row["seconds"] / row["depth"], "{:.0f}"),
        Column("largest gradient difference", lambda row: row["gradient_difference"], "{:g}"),
        Column(loss, lambda row: row["losses"][-1], "{:.6f}"),
    ]
    return table(results["rows"], columns)


def published_table(planning: dict) -> str:
    """Our predicted plans at the memory that others report for the same architecture."""

    def their_overhead(row: dict) -> str:
        theirs = row["published_overhead"]
        return "one more forward pass" if theirs is None else f"{theirs:.0%}"

    columns = [
        Column("architecture", lambda row: f"{row['label']} ({row['source']})"),
        Column("published peak", lambda row: row["share"], "{:.0%} of plain"),
        Column("its overhead", their_overhead),
        Column("ours at that peak", lambda r: f"{r['reached']:.0%} at {r['overhead']:.1%}"),
        Column("ours, `memory`", lambda r: f"{r['lowest']:.0%} at {r['lowest_overhead']:.1%}"),
    ]
    return table(labelled(planning["published"]), columns)


#: model: its name, and the cost of Checkmate's rounding over the optimum.
CHECKMATE = {
    "MobileNet, 128 px, batch 32": ("MobileNet", 1.06),
    "VGG16, half width, 128 px, batch 16": ("VGG16", 1.01),
    "U-Net, 128 px, batch 4": ("U-Net", 1.03),
    "ResNet-50, 224 px, batch 8": ("ResNet-50", 1.05),
}


def over_optimal_table(planning: dict) -> str:
    """Cost of our plans over the lower bound, the geometric mean over all budgets that were met."""

    def ratios(model: str) -> list[float]:
        found = planning["models"][model]
        pairs = zip(found["budgets"], found["bound"], strict=True)
        return [(1 + ours) / (1 + bound) for (_, ours), (_, bound) in pairs]

    columns = [
        Column("architecture", lambda model: CHECKMATE[model][0]),
        Column(
            "Checkmate's rounding over the optimum", lambda model: CHECKMATE[model][1], "{:.2f}"
        ),
        Column(
            "our plans over the lower bound",
            lambda model: statistics.geometric_mean(ratios(model)),
            "{:.3f}",
        ),
        Column("worst budget", lambda model: max(ratios(model)), "{:.3f}"),
    ]
    return table(CHECKMATE, columns)


#: One model for each kind of network: what README shows.
FEW = (
    "ResNet-50, 224 px, batch 8",
    "ResNet-110, CIFAR, batch 128",
    "DenseNet, 2 × 12 layers, batch 64",
    "U-Net, 128 px, batch 4",
    "GPT, 6 layers, batch 8",
    "Transformer, 4 + 4 layers, batch 32",
)


def few_table(results: dict) -> str:
    def shown(way: str) -> Callable[[dict], str]:
        def of(row: dict) -> str:
            peak, ratio = against("tf.gradients", way, ",.0f")(row).split()
            return f"{peak} MB {ratio} at {row[way]['time_ratio']:.2f}×"

        return of

    columns = [
        Column("model", label),
        Column("`tf.gradients`", megabytes("tf.gradients"), "{:,.0f} MB"),
        *(Column(f"`{way}`", shown(way)) for way in ("memory", "speed")),
    ]
    return table(labelled({model: results["models"][model] for model in FEW}), columns)


def compare_table(results: dict) -> str:
    """Every way to recompute, on every model of the comparison."""

    def rows() -> Iterator[dict]:
        for model, found in results["models"].items():
            peaks = {row["peer"]: row["peak_bytes"] for row in found}
            for row in found:
                plain, peak = peaks[row["plain"]], row["peak_bytes"]
                yield row | {
                    "label": model if row is found[0] else "",
                    "ratio": plain / peak if peak else None,
                    "gradients": verdict(Row(**row)) if peak else "fails",
                }

    columns = [
        Column("model", label),
        Column("way", lambda row: row["peer"]),
        Column("peak MB", lambda r: r["peak_bytes"] and r["peak_bytes"] / 1e6, "{:,.0f}"),
        Column("ratio", lambda row: row["ratio"], "{:.1f}×"),
        Column("step time", lambda row: row["time_ratio"], "{:.2f}×"),
        Column("gradients", lambda row: row["gradients"]),
    ]
    return table(rows(), columns)


def compare_notes(results: dict, machine: str) -> str:
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
            f"Measured on {machine}, nothing else running.",
            "JAX and PyTorch run on the processor, too. There XLA merges what `jax.checkpoint`",
            "copies with the original unless it is in a loop, so equal layers were scanned, too.",
            f"Rows of Keras are of networks of the same kind: {twins}.",
            "",
            *(["What fails says:", "", *lines] if lines else []),
        ]
    )


def eager_table(results: dict) -> str:
    """Parts by hand, eagerly and in a function."""

    def rows() -> Iterator[dict]:
        for network, ways in results["networks"].items():
            for way, row in ways.items():
                plain = ways["plain, tf.function" if "function" in way else "plain"]
                yield row | {
                    "network": network if way == "plain" else "",
                    "way": way,
                    "ratio": plain["peak_bytes"] / row["peak_bytes"],
                }

    def off(row: dict) -> str | None:
        if row["differs"] is None:
            return None
        return "equal" if row["differs"] == 0 else f"to {row['differs']:.0e}"

    columns = [
        Column("network", lambda row: row["network"]),
        Column("blocks in", lambda row: row["way"]),
        Column("peak MB", lambda row: row["peak_bytes"] / 1e6, "{:,.0f}"),
        Column("of its plain", lambda row: row["ratio"], "{:.1f}×"),
        Column("time of plain eager", lambda row: row["time_ratio"], "{:.2f}×"),
        Column("gradients", off),
    ]
    return table(rows(), columns)


def xla_table(results: dict, device: str) -> str:
    """What XLA's compiler for a device allocates for each step, ours and others'."""
    networks = {
        name: {way: by[device] for way, by in ways.items() if device in by}
        for name, ways in results["networks"].items()
        if device in ways["tf.gradients"]
    }

    def ours(way: str) -> Callable[[dict], str]:
        def shown(row: dict) -> str:
            found = row[way]
            if "bytes" not in found:
                return "not met"
            ratio = f"{row['tf.gradients']['bytes'] / found['bytes']:.1f}×"
            if found["budget_bytes"]:
                ratio = f"{found['bytes'] / found['budget_bytes']:.2f} of it"
            return f"{found['bytes'] / 1e6:,.0f} ({ratio}) +{found['overhead']:.0%}"

        return shown

    headings = {
        "memory": "`memory`",
        "speed": "`speed`",
        "budget 0.7": "0.7 of plain",
        "budget 0.5": "0.5",
        "budget 0.35": "0.35",
    }
    others = {
        "tf.recompute_grad by block": "`tf.recompute_grad`",
        "XLA's own rematerialisation": "XLA's own",
    }
    columns = [
        Column("step", label),
        Column("plain", megabytes("tf.gradients", "bytes"), "{:,.0f}"),
        *(Column(heading, ours(way)) for way, heading in headings.items()),
        *(
            Column(heading, megabytes(way, "bytes"), "{:,.0f}")
            for way, heading in others.items()
            if any(way in row for row in networks.values())
        ),
    ]
    return table(labelled(networks), columns)


def jax_table(results: dict) -> str:
    """The same networks written in JAX, by the same compiler."""
    networks = {
        name: {way: by["h100"] for way, by in ways.items()}
        for name, ways in results["networks"].items()
        if "JAX" in ways
    }
    headings = {
        "JAX": "JAX",
        "jax.checkpoint by block": "every block",
        "jax.checkpoint, dots saveable": "dots saveable",
        "jax.checkpoint, dots without batch saveable": "dots without batch",
        "memory": "ours, `memory`",
        "speed": "ours, `speed`",
    }
    columns = [
        Column(heading, megabytes(way, "bytes"), "{:,.0f}") for way, heading in headings.items()
    ]
    return table(labelled(networks), [Column("step", label), *columns])


def work_table(results: dict) -> str:
    """What the plans for the described GPU compute, against the plain step, and with what gates."""

    def ours(way: str) -> Callable[[dict], str]:
        return lambda row: f"{row[way]['work']:.2f}× ({row[way]['gates']})"

    others = "tf.recompute_grad by block"
    columns = [
        Column("step", label),
        *(Column(f"`{way}`", ours(way)) for way in ("memory", "speed")),
        Column("`tf.recompute_grad`", lambda row: row.get(others, {}).get("work"), "{:.2f}×"),
    ]
    return table(labelled(results["work"]), columns)


def gate_cost(results: dict) -> str:
    return f"A gate adds {results['gate_seconds']['cpu'] * 1e6:.1f} µs to a program for this CPU."
