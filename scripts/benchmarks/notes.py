"""The sentences of docs/ that have figures in them, made of the JSON beside this file."""

from __future__ import annotations

from collections.abc import Callable

from scripts.benchmarks.peers_tensorflow import COMPARED, PLAIN, Row, verdict

#: A measured peak above so much of its budget is a miss.
KEPT = 1.02


def taken(files: dict[str, dict], mixed: bool) -> str:
    """What the results are of.

    Raises:
        SystemExit: they are of several commits, and are not to be mixed.
    """
    commits: dict[str, list[str]] = {}
    for name, file in files.items():
        commits.setdefault(file["commit"], []).append(f"{name}.json")
    if len(commits) == 1:
        return f"All of it is of commit {next(iter(commits))}."
    told = "; ".join(f"{commit}: {', '.join(names)}" for commit, names in commits.items())
    if not mixed:
        raise SystemExit(
            f"These results are not of one commit ({told}). Take them anew by `python -m "
            "scripts.benchmarks.run`, or render them with --mixed."
        )
    return f"The results are of several commits ({told})."


def machine(file: dict) -> str:
    on = f"{file['machine']}, TensorFlow {file['versions']['tensorflow']}"
    return (
        f"Measured on {on}, in a default session: oneDNN on, all threads, nothing else running. "
        "Times are relative to plain, measured alternately in the same process; the JSON has the "
        "quartiles."
    )


def compare(results: dict) -> str:
    """Gradients that are wrong, and ways that fail."""
    wrong = []
    fail: dict[str, list[str]] = {}
    for label, ways in results["models"].items():
        rows = {found["peer"]: Row(**found) for found in ways}
        for way, row in rows.items():
            if verdict(row).startswith("wrong"):
                wrong.append(f"{way} on {label} ({row.gradient_error:.0%} off)")
            if row.error:
                fail.setdefault(f'{way} ("{row.error}")', []).append(label)
    twins = "; ".join(twin for _, twin in COMPARED.values() if twin)
    lines = [
        f"- Wrong gradients: {'; '.join(wrong) or 'none'}.",
        *(f"- Fails: {way} on {'; '.join(labels)}." for way, labels in fail.items()),
        f"- `RematScope` ran on similar networks in `fit`: {twins}.",
    ]
    return "\n".join(lines)


def models(results: dict) -> str:
    """How budgets were kept on the test models, and how far plans may be from the optimum."""
    budgets = {
        f"{label} at {way.removeprefix('budget ')}": found
        for label, ways in results["models"].items()
        for way, found in ways.items()
        if way.startswith("budget")
    }
    met = {where: found for where, found in budgets.items() if "error" not in found}
    missed = [
        f"{where} ({found['peak_bytes'] / found['budget_bytes']:.3f})"
        for where, found in met.items()
        if found["peak_bytes"] > KEPT * found["budget_bytes"]
    ]
    gaps = {
        where: 100 * (found["overhead"] - found["lower_bound"])
        for where, found in met.items()
        if found["lower_bound"] is not None
    }
    widest = max(gaps, key=lambda where: gaps[where])
    return "\n".join(
        [
            f"- Of {len(budgets)} budgets, {len(met)} can be met. Measured above {KEPT} of the "
            f"budget: {'; '.join(missed) or 'none'}.",
            f"- For {sum(gap <= 1 for gap in gaps.values())} of {len(gaps)} plans, the overhead is "
            "at most one percentage point above a proven lower bound, by TensorFlow's estimates. "
            f"The widest gap is {gaps[widest]:.1f} % ({widest}).",
        ]
    )


def corpus(results: dict) -> str:
    """How budgets were kept on the hard graphs: the extremes, with misses named."""
    kept: dict[str, dict[str, float]] = {}
    for setting, graphs in results.items():
        for graph, budgets in graphs.items():
            for budget, found in budgets.items():
                if found and "measured" in found:
                    share = found["measured"] / found["budget"]
                    kept.setdefault(graph, {})[f"{budget}, {setting}"] = share
    every = [(share, graph) for graph, shares in kept.items() for share in shares.values()]
    worst = {graph: max(shares, key=lambda at: shares[at]) for graph, shares in kept.items()}
    missed = [(kept[graph][at], graph, at.split(",")[0]) for graph, at in worst.items()]
    names = [
        f"{graph} {share:.3f} ({'the ' * (budget == 'lowest')}{budget})"
        for share, graph, budget in sorted(missed, reverse=True)
        if share > KEPT
    ]
    (low, least), (high, most) = min(every), max(every)
    return (
        f"Of the {len(every)} budgets that can be met on {len(kept)} graphs, "
        f"{sum(share <= KEPT for share, _ in every)} are kept to {KEPT} of the budget. Measured "
        f"peaks are {low:.3f} ({least}) to {high:.3f} ({most}) of it. The worst miss of each "
        f"graph that misses a budget, with the budget in brackets: {'; '.join(names) or 'none'}."
    )


def keras(file: dict) -> str:
    """Where another way is better in `fit`."""
    better = []
    for label, found in file["results"]["models"].items():
        ours = [found[way] for way in ("memory", "speed", "budget 0.4")]
        lowest = min((one for one in ours if "error" not in one), key=lambda one: one["peak_bytes"])
        theirs = found["recompute_grad"]
        if theirs["peak_bytes"] < lowest["peak_bytes"]:
            better.append(f"{label} (lower peak)")
        elif theirs["time_ratio"] < lowest["time_ratio"]:
            better.append(f"{label} (less time than our lowest peak)")
    return (
        f"`tf.recompute_grad` is better on: {'; '.join(better) or 'none'}. "
        f"Keras {file['versions']['keras']}."
    )


def xla(results: dict) -> str:
    """How far predictions are off, what the programs compute, what gates cost."""
    errors = {
        f"{label}, {way}": found["predicted_bytes"] / found["bytes"] - 1
        for label, ways in results["networks"].items()
        for way, by in ways.items()
        for found in by.values()
        if "predicted_bytes" in found
    }
    low, high = (choose(errors, key=lambda at: errors[at]) for choose in (min, max))

    def work(way: str, what: str = "work") -> str:
        counts = [found[way][what] for found in results["work"].values() if way in found]
        return f"{min(counts):.2f} to {max(counts):.2f}"

    def by_jax() -> str:
        """The estimated time of `jax.checkpoint` by block, against plain JAX."""
        times = (
            (label, ways["jax.checkpoint by block"]["h100"], ways["JAX"]["h100"])
            for label, ways in results["networks"].items()
            if "JAX" in ways
        )
        return ", ".join(f"{a['seconds'] / b['seconds']:.2f} ({label})" for label, a, b in times)

    gate = results["gate_seconds"]["cpu"] * 1e6
    adds = f"{gate:.1f} µs" if gate >= 0.05 else "less than 0.1 µs"
    return "\n".join(
        [
            f"- Predicted peaks differ from allocated ones by {errors[low]:+.0%} ({low}) to "
            f"{errors[high]:+.0%} ({high}).",
            "- Multiplications of products and convolutions relative to the plain step, in the GPU "
            f"programs: {work('memory')} with `memory`, {work('speed')} with `speed`, "
            f"{work('tf.recompute_grad by block')} with `tf.recompute_grad`.",
            "- Bytes that the kernels read and write relative to the plain step, by XLA's count of "
            f"what it compiled: {work('memory', 'traffic')} with `memory`, "
            f"{work('speed', 'traffic')} with `speed`.",
            "- Estimated time relative to the plain step, if every kernel met the roofline "
            f"of an H100 (`scripts/benchmarks/roofline.py`): {work('memory', 'time_ratio')} with "
            f"`memory`, {work('speed', 'time_ratio')} with `speed`, "
            f"{work('budget 0.5', 'time_ratio')} with a budget of a half; `jax.checkpoint` by "
            f"block, against plain JAX: {by_jax()}.",
            f"- A gate adds {adds} on this CPU.",
        ]
    )


def gpu(file: dict) -> str:
    """What ran on which GPU, and a batch that does not fit plainly."""
    lines = [
        f"Measured on an {file['device']}, TensorFlow {file['versions']['tensorflow']}, at commit "
        f"{file['commit']}. A peak is what TensorFlow's allocator counts, results included."
    ]
    for part, ways in file["results"].items():
        if [*ways] == ["plain", "memory"]:
            plain, ours = (
                found.get("error")
                or f"{found['peak_bytes'] / 1e6:,.0f} MB and {found['seconds']:.2f} s a step"
                for found in (ways["plain"], ways["memory"])
            )
            lines.append(f"{part}, without XLA: {plain} plainly, {ours} with `memory`.")
    for network, ways in file["results"].get("unequal gradients", {}).items():
        said = ", ".join(f"{count} with `{way}`" for way, count in ways.items() if way != "plain")
        lines.append(
            f"{network}, without XLA, deterministic: gradients that differ in a bit: {said}."
        )
    return "\n\n".join(lines)


def depth(results: dict) -> str:
    """The deepest network, in the memory that the shallowest takes plainly."""
    rows = results["sweeps"]["deep"]["rows"]
    of = {(row["depth"], row["method"]): row for row in rows}
    shallow, deep = min(row["depth"] for row in rows), max(row["depth"] for row in rows)

    def took(depth: int, method: str) -> str:
        ratio = of[depth, method]["seconds"] / of[depth, PLAIN]["seconds"]
        return f"{of[depth, method]['peak_bytes'] / 1e6:,.0f} MB at {ratio:.2f}×"

    off = max(row["gradient_difference"] for row in rows)
    budget = f"{of[shallow, PLAIN]['peak_bytes'] / 1e6:,.0f} MB"
    return (
        f"A ResNet of {deep:,} layers needs {took(deep, PLAIN)} with `tf.gradients` and "
        f"{took(deep, 'memory')} with `memory`. With the plain peak of a ResNet of {shallow} "
        f"layers as budget ({budget}), it needs {took(deep, 'budget')}. "
        + (f"Gradients differ by {off:g} at most." if off else "Gradients are equal bit for bit.")
    )


def planning(models: dict, planning: dict) -> str:
    """How long rewriting takes, and planning of large steps."""
    rows = models["rewriting"]

    def took(choose: Callable) -> str:
        label = choose(rows, key=lambda at: rows[at]["ours"])
        return f"{rows[label]['ours']:.1f} s ({label}: {rows[label]['ops']:,} ops before gradients)"

    ops, largest = list(planning["scaling"].items())[-1]
    return (
        f"Reading, planning and rewriting a step takes {took(min)} to {took(max)}. Planning a step "
        f"of {int(ops):,} ops for a fifth of its memory takes {largest['seconds']:.0f} s on one "
        "core."
    )
