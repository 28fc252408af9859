"""The tables of what XLA's compilers allocate, from xla.json."""

from __future__ import annotations

from scripts.benchmarks.tables import markdown


def temporaries_table(results: dict, device: str) -> str:
    """What XLA's compiler for a device allocates for each step, ours and others'."""
    budgets = ("budget 0.7", "budget 0.5", "budget 0.35")
    others = ("tf.recompute_grad by block", "XLA's own rematerialisation")
    shown = [
        way
        for way in others
        if any(device in rows.get(way, {}) for rows in results["networks"].values())
    ]
    rows = []
    for label, ways in results["networks"].items():
        if device not in ways["tf.gradients"]:
            continue
        plain = ways["tf.gradients"][device]["bytes"]
        row = [label, f"{plain / 1e6:,.0f}"]
        for way in ("memory", "speed", *budgets):
            ours = ways[way][device]
            if "bytes" not in ours:
                row.append("not met")
                continue
            against = ours["budget_bytes"]
            ratio = f"{plain / ours['bytes']:.1f}×"
            if against:
                ratio = f"{ours['bytes'] / against:.2f} of it"
            row.append(f"{ours['bytes'] / 1e6:,.0f} ({ratio}) +{ours['overhead']:.0%}")
        for way in shown:
            row.append(f"{ways[way][device]['bytes'] / 1e6:,.0f}" if way in ways else "")
        rows.append(row)
    ours = ["step", "plain", "`memory`", "`speed`", "0.7 of plain", "0.5", "0.35"]
    named = {others[0]: "`tf.recompute_grad`", others[1]: "XLA's own"}
    return markdown([*ours, *(named[way] for way in shown)], rows)


def jax_table(results: dict) -> str:
    """The same networks written in JAX, by the same compiler."""
    rows = []
    for label, ways in results["networks"].items():
        found = {way: by["h100"]["bytes"] for way, by in ways.items() if "JAX" in way.upper()}
        if found:
            plans = (ways[way]["h100"]["bytes"] for way in ("memory", "speed"))
            row = [f"{size / 1e6:,.0f}" for size in (*found.values(), *plans)]
            rows.append([label, *row])
    header = ["step", "JAX", "every block", "dots saveable", "dots without batch"]
    return markdown([*header, "ours, `memory`", "ours, `speed`"], rows)


def work_table(results: dict) -> str:
    """What the plans for the described GPU compute, against the plain step, and with what gates."""
    others = "tf.recompute_grad by block"
    rows = []
    for label, ways in results["work"].items():
        row = [f"{ways[way]['work']:.2f}× ({ways[way]['gates']})" for way in ("memory", "speed")]
        row.append(f"{ways[others]['work']:.2f}×" if others in ways else "")
        rows.append([label, *row])
    return markdown(["step", "`memory`", "`speed`", "`tf.recompute_grad`"], rows)


def gate_cost(results: dict) -> str:
    return f"A gate adds {results['gate_seconds'] * 1e6:.1f} µs to a program for this CPU."
