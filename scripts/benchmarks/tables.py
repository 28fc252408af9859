"""The tables of README.md and docs/, made of the JSON beside this file.

A table is declared: its rows, and a column for each heading. All are printed by `table`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from scripts.benchmarks.peers_tensorflow import PLAIN, Row, verdict


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        heading: its heading.
        get: the cell's value, from a row; None leaves the cell empty.
        form: how a value is printed.
        words: whether its cells are words, which stand to the left, or numbers.
    """

    heading: str
    get: Callable[[Any], Any]
    form: str = "{}"
    words: bool = False


def table(rows: Iterable[Any], columns: Sequence[Column]) -> str:
    """A table in Markdown; its first column has the names."""

    def cell(column: Column, row: Any) -> str:
        value = column.get(row)
        return "" if value is None else column.form.format(value)

    sides = ["---", *("---" if column.words else "---:" for column in columns[1:])]
    lines = [[column.heading for column in columns], sides]
    lines += [[cell(column, row) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def labelled(found: dict[str, dict]) -> list[dict]:
    """Rows that know their names."""
    return [{"label": label} | row for label, row in found.items()]


def label(row: dict) -> str:
    return row["label"]


def megabytes(way: str, field: str = "peak_bytes") -> Callable[[dict], float]:
    return lambda row: row[way][field] / 1e6


def beside(plain: str, way: str) -> Callable[[dict], str]:
    """A way's peak, how many times less that is than plain, and its time against plain."""

    def shown(row: dict) -> str:
        found = row[way]
        if "error" in found:
            return "cannot be met" if "BudgetError" in found["error"] else "raises"
        ratio = row[plain]["peak_bytes"] / found["peak_bytes"]
        return f"{found['peak_bytes'] / 1e6:,.0f} MB ({ratio:.1f}×) at {found['time_ratio']:.2f}×"

    return shown


def kept(budget: str) -> Callable[[dict], str]:
    """A peak as a share of its budget, and its time against plain."""

    def shown(row: dict) -> str:
        found = row[f"budget {budget}"]
        if "error" in found:
            return "cannot be met"
        share = found["peak_bytes"] / found["budget_bytes"]
        return f"{share:.2f} at {found['time_ratio']:.2f}×"

    return shown


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
    columns = [
        Column("model", label),
        Column("`tf.gradients`", megabytes("tf.gradients"), "{:,.0f} MB"),
        *(Column(f"`{way}`", beside("tf.gradients", way)) for way in ("memory", "speed")),
    ]
    return table(labelled({model: results["models"][model] for model in FEW}), columns)


def models_table(results: dict) -> str:
    """Both strategies and the budgets on every test model."""
    columns = [
        Column("model", label),
        Column("`tf.gradients`", megabytes("tf.gradients"), "{:,.0f} MB"),
        *(Column(f"`{way}`", beside("tf.gradients", way)) for way in ("memory", "speed")),
        *(Column(f"budget {budget}", kept(budget)) for budget in ("0.7", "0.5", "0.3", "0.2")),
    ]
    return table(labelled(results["models"]), columns)


def predicted(way: str) -> Callable[[dict], str]:
    """A predicted peak, and the measured one."""

    def shown(row: dict) -> str:
        said, peak = row[way]["predicted_bytes"], row[way]["peak_bytes"]
        error = round(said / peak - 1, 3) + 0.0  # no -0.0
        return f"{said / 1e6:,.0f} / {peak / 1e6:,.0f} ({error:+.1%})"

    return shown


def predictions_table(results: dict) -> str:
    """Predicted against measured peaks."""
    ways = ("tf.gradients", "memory", "speed")
    columns = [Column("model", label), *(Column(f"`{way}`", predicted(way)) for way in ways)]
    return table(labelled(results["models"]), columns)


#: The best other way may take so much of the time of its plain step.
MOST_TIME = 1.5


def compare_table(results: dict) -> str:
    """Ours beside other ways to recompute: one row a model, each way against its own plain."""
    columns = [
        Column("model", label),
        Column("`tf.gradients`", lambda row: row[PLAIN]["peak_bytes"] / 1e6, "{:,.0f} MB"),
        Column("ours, `memory`", lambda row: _beside_plain(row, "ours, memory")),
        Column("ours, 0.3 of plain", lambda row: _beside_plain(row, "ours, budget 0.3")),
        Column("√n points", lambda row: _beside_plain(row, "√n articulation points")),
        Column("best other way", _best_other, words=True),
    ]
    models = {
        model: {way["peer"]: way | {"verdict": verdict(Row(**way))} for way in ways}
        for model, ways in results["models"].items()
    }
    return table(labelled(models), columns)


def _beside_plain(ways: dict[str, Any], way: str) -> str:
    """How many times less than its plain step a way takes, and in what time."""
    row = ways[way]
    if row["peak_bytes"] is None:
        return "fails"
    ratio = ways[row["plain"]]["peak_bytes"] / row["peak_bytes"]
    wrong = ", wrong gradients" if row["verdict"].startswith("wrong") else ""
    return f"{ratio:.1f}× at {row['time_ratio']:.2f}×{wrong}"


def _best_other(ways: dict[str, Any]) -> str:
    """The lowest share of its own plain, of the ways whose gradients are right."""
    shares = {
        way: row["peak_bytes"] / ways[row["plain"]]["peak_bytes"]
        for way, row in ways.items()
        if way != "label"
        and way != row["plain"]
        and not way.startswith(("ours", "√n"))
        and row["verdict"] == "right"
        and row["time_ratio"] <= MOST_TIME
    }
    if not shares:
        return "none"
    best = min(shares, key=lambda way: shares[way])
    return f"{best}: {_beside_plain(ways, best)}"


#: way: heading.
KERAS = {
    "recompute_grad": "`tf.recompute_grad`",
    "memory": "ours, `memory`",
    "speed": "ours, `speed`",
    "budget 0.4": "ours, 0.4 of plain",
}


def keras_table(rows: dict) -> str:
    """Measured peaks and step times of Keras models by every way to recompute."""
    columns = [
        Column("model", label),
        Column("`fit`", megabytes("plain"), "{:,.0f} MB"),
        *(Column(heading, beside("plain", way)) for way, heading in KERAS.items()),
    ]
    return table(labelled(rows), columns)


def loops_table(rows: dict) -> str:
    """Measured peaks and step times of networks that are a loop."""
    headings = {
        "tf.recompute_grad": "`tf.recompute_grad` around the body",
        "speed": "ours, `speed`",
        "memory": "ours, `memory`",
        "0.5": "ours, 0.5 of plain",
        "unrolled": "unrolled, ours, `memory`",
    }
    columns = [
        Column("network", label),
        Column("`tf.gradients`", megabytes("tf.gradients"), "{:,.0f} MB"),
        *(Column(heading, beside("tf.gradients", way)) for way, heading in headings.items()),
    ]
    return table(labelled(rows), columns)


def loops_beside_jax(results: dict) -> str:
    """Loops in JAX, beside ours."""
    headings = {
        "jax.checkpoint around the body": "around the body",
        "jax.checkpoint around 16 steps": "around 16 steps, by hand",
    }
    rows = {
        label: row | results["networks"][label] for label, row in results.get("jax", {}).items()
    }
    columns = [
        Column("network", label),
        Column("`jax.lax.scan`", megabytes("JAX"), "{:,.0f} MB"),
        *(Column(f"`jax.checkpoint` {text}", beside("JAX", way)) for way, text in headings.items()),
        Column("`tf.while_loop`", megabytes("tf.gradients"), "{:,.0f} MB"),
        Column("ours, `memory`", beside("tf.gradients", "memory")),
    ]
    return table(labelled(rows), columns)


#: A loss in chunks by hand, in JAX.
CHUNKED = "jax.checkpoint by block, loss in 16 chunks"


def pieces_table(results: dict) -> str:
    """Peaks, and times where the step ran, with and without pieces."""

    def shown(way: str) -> Callable[[dict], str | None]:
        def of(row: dict) -> str | None:
            if way not in row:
                return None
            found, plain = row[way], row["JAX" if way == CHUNKED else "tf.gradients"]
            size = found.get("peak_bytes", found.get("bytes"))
            ratio = plain.get("peak_bytes", plain.get("bytes")) / size
            time = f" at {found['time_ratio']:.2f}×" if "time_ratio" in found else ""
            return f"{size / 1e6:,.0f} MB ({ratio:.1f}×){time}"

        return of

    headings = {
        "memory": "`memory`",
        "pieces": "with `pieces=True`",
        "8 pieces": "with `pieces=8`",
        CHUNKED: "`jax.checkpoint`, loss in chunks",
    }
    rows = [
        row | {"tf.gradients": row.get("tf.gradients", row.get("plain"))}
        for section in results.values()
        for row in labelled(section)
    ]

    def plain(row: dict) -> float:
        found = row["tf.gradients"]
        return found.get("peak_bytes", found.get("bytes")) / 1e6

    columns = [
        Column("network", label),
        Column("`tf.gradients`", plain, "{:,.0f} MB"),
        *(Column(heading, shown(way)) for way, heading in headings.items()),
    ]
    return table(rows, columns)


#: way: heading, and the plain step of its framework.
XLA = {
    "memory": ("`memory`", "tf.gradients"),
    "speed": ("`speed`", "tf.gradients"),
    "budget 0.5": ("budget 0.5", ""),
    "tf.recompute_grad by block": ("`tf.recompute_grad`", "tf.gradients"),
    "jax.checkpoint by block": ("`jax.checkpoint`", "JAX"),
    "XLA's own rematerialisation": ("XLA's own", "tf.gradients"),
}


def xla_table(results: dict) -> str:
    """What XLA's compilers allocate for each step, ours and others'."""

    def shown(way: str, plain: str) -> Callable[[dict], str | None]:
        def of(row: dict) -> str | None:
            if way not in row:
                return None
            if "error" in row[way]:
                return "cannot be met"
            size = row[way]["bytes"]
            ratio = f"{row[plain]['bytes'] / size:.1f}×" if plain else ""
            ratio = ratio or f"{size / row[way]['budget_bytes']:.2f}"
            return ratio + (f", +{row[way]['overhead']:.0%}" if "overhead" in row[way] else "")

        return of

    rows = [
        {"label": name + (", on this CPU" if device == "cpu" else "")}
        | {way: by[device] for way, by in ways.items() if device in by}
        for device in ("h100", "cpu")
        for name, ways in results["networks"].items()
        if device in ways["tf.gradients"]
    ]
    columns = [
        Column("step", label),
        Column("plain", megabytes("tf.gradients", "bytes"), "{:,.0f} MB"),
        *(Column(heading, shown(way, plain)) for way, (heading, plain) in XLA.items()),
    ]
    return table(rows, columns)


def gpu_table(results: dict) -> str:
    """Peaks, times and predictions of training steps on a GPU."""
    rows = [
        row
        for row in labelled(results)
        if {"plain", "speed"} <= row.keys() and "peak_bytes" in row["plain"]
    ]
    columns = [
        Column("step", label),
        Column("plain", megabytes("plain"), "{:,.0f} MB"),
        *(Column(f"`{way}`", beside("plain", way)) for way in ("memory", "speed")),
        Column("budget 0.5", kept("0.5")),
        Column("`memory`, predicted / measured", predicted("memory")),
    ]
    return table(rows, columns)


def gpu_beside_jax(results: dict) -> str:
    """Our steps, compiled by XLA, and JAX's of the same networks."""

    def rows() -> Iterator[dict]:
        for part, theirs in results.items():
            network = part.removeprefix("JAX, ")
            if network != part and (ours := results.get(f"{network}, XLA")):
                for way, row in (ours | theirs).items():
                    plain = theirs["JAX"] if way in theirs else ours["plain"]
                    name = way if way in theirs else f"ours, {way}"
                    yield row | {"network": network, "way": name, "plain": plain}

    columns = [
        Column("network", lambda row: row["network"]),
        Column("way", lambda row: row["way"], words=True),
        Column("peak MB", lambda row: row["peak_bytes"] / 1e6, "{:,.0f}"),
        Column(
            "of its plain", lambda row: row["peak_bytes"] / row["plain"]["peak_bytes"], "{:.2f}"
        ),
        Column("ms a step", lambda row: row["seconds"] * 1e3, "{:.1f}"),
        Column("of its plain", lambda row: row["seconds"] / row["plain"]["seconds"], "{:.2f}×"),
    ]
    return table(rows(), columns)


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

    def off(row: dict) -> str:
        return "equal" if row["differs"] == 0 else f"to {row['differs']:.0e}"

    columns = [
        Column("network", lambda row: row["network"]),
        Column("blocks in", lambda row: row["way"], words=True),
        Column("peak MB", lambda row: row["peak_bytes"] / 1e6, "{:,.0f}"),
        Column("of its plain", lambda row: row["ratio"], "{:.1f}×"),
        Column("time of plain eager", lambda row: row["time_ratio"], "{:.2f}×"),
        Column("gradients", off, words=True),
    ]
    return table(rows(), columns)
